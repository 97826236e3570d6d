"""A loopback server that answers with the very bytes it is told to, one script after another."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeAlias

from msgspec import Struct

HOST = "127.0.0.1"

Step: TypeAlias = bytes | Callable[[socket.socket], None]


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of an answer; `retry_after="1"` is the header Retry-After."""
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


DROP = b""
"""Read the request, then close without a word."""
CUT = answer(200, b"charged")[:-3]
"""Promise more than is sent."""


def stall(connection: socket.socket) -> None:
    """Say nothing until the client goes away."""
    with contextlib.suppress(OSError):
        connection.recv(1)


class Received(Struct, frozen=True):
    """A request, as it came."""

    method: str
    target: str
    lines: list[tuple[str, str]]
    body: bytes

    @property
    def keys(self) -> list[str]:
        return [value for name, value in self.lines if name == "idempotency-key"]


class ScriptedServer:
    """Takes one request per connection and answers it with the next step of the script."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.script: deque[Step] = deque()
        self.received: list[Received] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def keys(self) -> list[list[str]]:
        """The keys of each request."""
        return [request.keys for request in self.received]

    def says(self, *steps: Step) -> None:
        self.script.extend(steps)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
                request = _read(lines)
                if request is None:
                    continue
                self.received.append(request)
                step = self.script.popleft() if self.script else answer(200, b"done")
                if callable(step):
                    step(connection)
                else:
                    connection.sendall(step)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._thread.join(10)


def _read(stream: BinaryIO) -> Received | None:
    first = stream.readline().decode().split()
    if not first:
        return None
    lines = []
    while line := stream.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        lines.append((name.lower(), value.strip()))
    headers = dict(lines)
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(stream.readline(), 16):
            body += stream.read(size)
            stream.readline()
        stream.readline()
    else:
        body = stream.read(int(headers.get("content-length", "0")))
    return Received(first[0], first[1], lines, body)


@contextlib.contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    try:
        yield server
    finally:
        server.close()
