"""`semel proxy` as a child process, and upstreams that do exactly what a test says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import semel
from web.client import HOST, PATIENCE, Client, Connection

SEMEL = (sys.executable, "-m", "semel")


class Proxy:
    """One running proxy."""

    def __init__(
        self, folder: Path, upstream: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        self._log = folder / f"proxy-{time.monotonic_ns()}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SEMEL_")}
        environment["PYTHONPATH"] = str(Path(semel.__file__).parent.parent)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*SEMEL, "proxy", "--upstream", upstream, "--port", "0", *arguments],
                cwd=folder,
                env={**environment, **(env or {})},
                stdout=log,
                stderr=log,
            )
        line = self.wait_for("semel proxies ")
        self.port = int(line.split()[2].rpartition(":")[2])
        self.client = Client(self.port, "shop", "example")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str) -> str:
        """The first line of the log that has this text."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in self.log().splitlines():
                if text in line:
                    return line
            if self.process.poll() is not None:
                raise RuntimeError(f"the proxy has ended: {self.log()[-3000:]}")
            time.sleep(0.01)
        raise TimeoutError(f"no line {text!r}: {self.log()[-3000:]}")

    def connect(self) -> Connection:
        return Connection(self.port)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def stop(self) -> None:
        """End it, and insist on its exit code."""
        self.terminate()
        try:
            assert self.wait() == 0, self.log()
        finally:
            self.process.kill()


Talk = Callable[[socket.socket], None]


class Scripted:
    """A server that talks on each of its connections as a test says, in a thread of its own."""

    def __init__(self, talk: Talk, port: int = 0) -> None:
        self._talk = talk
        self._listening = socket.create_server((HOST, port))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listening.accept()
                self.connections += 1
                self._open.append(accepted)
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError), accepted:
            accepted.settimeout(PATIENCE)
            self._talk(accepted)

    def close(self) -> None:
        # Else `accept` goes on in its thread, and takes another connection.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            each.close()


def until(talking: socket.socket, end: bytes = b"\r\n\r\n") -> bytes:
    """Read until these bytes have come, or the connection has ended."""
    got = b""
    while end not in got:
        more = talking.recv(1 << 16)
        if not more:
            break
        got += more
    return got


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def free_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server((HOST, 0)) as found:
        return int(found.getsockname()[1])
