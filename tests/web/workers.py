"""Worker processes of a test: started on sockets that are bound already, stopped by their id."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from semel import Idempotency, State
from web.client import HOST, Client
from web.handlers import PATIENCE, Folder

TESTS = Path(__file__).resolve().parent.parent


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.01)


def nothing_runs(engine: Idempotency) -> None:
    """Wait until no record is held by anybody; those that are parked are nobody's."""

    def running() -> bool:
        listed = engine.records(scope="http", state=State.PROCESSING)
        return any(not record.abandoned for record in listed)

    eventually(lambda: not running(), "every record to end")


class Worker:
    """One process that serves one stack."""

    def __init__(self, stack: str, folder: Folder, name: str) -> None:
        self.stack, self.folder = stack, folder
        self._log = folder.root / f"log-{name}"
        with socket.create_server((HOST, 0)) as listening, self._log.open("ab") as log:
            self.port: int = listening.getsockname()[1]
            arguments = ["--fd", str(listening.fileno()), "--folder", str(folder.root)]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "web.serve", stack, *arguments],
                cwd=TESTS,
                pass_fds=[listening.fileno()],
                stdout=log,
                stderr=log,
            )

    def client(self, profile: str = "default", store: str = "sqlite") -> Client:
        if self._process.poll() is not None:
            raise RuntimeError(f"the worker has ended: {self.log()[-2000:]}")
        return Client(self.port, profile, store)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def memory(self) -> int:
        """Bytes of memory that the process has in use."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        """Wait until it has ended; one that does not is killed."""
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()


class Workers:
    """The workers of a run: one for each stack, started when first asked for."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._first: dict[str, Worker] = {}
        self._all: list[Worker] = []

    def first(self, stack: str) -> Worker:
        """The worker that all tests of a stack share."""
        if stack not in self._first:
            self._first[stack] = self.another(stack)
        return self._first[stack]

    def another(self, stack: str) -> Worker:
        """One more, which its test may kill."""
        worker = Worker(stack, self.folder, f"{stack}-{len(self._all)}")
        self._all.append(worker)
        return worker

    def stop(self) -> None:
        for worker in self._all:
            worker.terminate()
        for worker in self._all:
            worker.wait()


@contextlib.contextmanager
def working(root: Path) -> Iterator[Workers]:
    """Workers that share one folder and, named `sqlite`, one store in it."""
    folder = Folder(root)
    folder.add_store("sqlite", f"sqlite:///{root / 'semel.db'}")
    workers = Workers(folder)
    try:
        yield workers
    finally:
        workers.stop()
