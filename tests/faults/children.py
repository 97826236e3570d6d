"""Child processes that tests can hold, pause and kill, and the effects they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engines.facade import PATIENCE
from semel import current_attempt

WORKERS = Path(__file__).parent / "workers"


class Entry(NamedTuple):
    """One effect."""

    key: str
    pid: int
    number: int
    derived: str
    """The key that a downstream system would see."""


class Ledger:
    """The file where effects are counted, outside the library and outside the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def entries(self) -> list[Entry]:
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [Entry(key, int(pid), int(number), derived) for key, pid, number, derived in lines]

    def effect(self, result: object = "done here") -> Callable[[], Any]:
        """A function for this process that does what a child's `effect` does."""

        def run() -> object:
            attempt = current_attempt()
            line = f"{attempt.key} {os.getpid()} {attempt.number} {attempt.derive('charge')}\n"
            with self.path.open("a") as file:
                file.write(line)
            return result

        return run


class Child:
    """One process of `workers/`, by what it tells and what is done to it."""

    def __init__(self, script: str, orders: dict[str, Any]) -> None:
        command = [sys.executable, str(WORKERS / script), json.dumps(orders)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        url = str(orders.get("url", ""))
        self._file = url.removeprefix("sqlite:///") if url.startswith("sqlite:///") else None
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._news.put(json.loads(line))
        self._news.put({"end": True})

    def hear(self, what: str) -> Any:
        """The next thing the child tells, which must be this."""
        news = self._news.get(timeout=PATIENCE)
        assert what in news, f"expected {what}, heard {news}"
        return news[what]

    def outcome(self) -> dict[str, Any]:
        """How the operation ended: with a `result` or an `error`."""
        return self._news.get(timeout=PATIENCE)

    def go(self) -> None:
        """Let it go on from where it waits."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def pause(self) -> None:
        self._stop()
        while self._file is not None and is_locked(self._file):
            # Stopped in the middle of a renewal, it would keep SQLite's lock: the whole file's.
            self.resume()
            self._stop()

    def _stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it did not stop"

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        assert self.ended() == -signal.SIGKILL

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        # A grandchild may still hold the pipe: only what it says ends the reading.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._reader.join(PATIENCE)
        self.process.stdout.close()


def is_locked(file: str) -> bool:
    """Whether somebody is writing to an SQLite database."""
    with contextlib.closing(sqlite3.connect(file, timeout=0.0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


@contextlib.contextmanager
def child(script: str, **orders: Any) -> Iterator[Child]:
    """Start a process; it is gone when the block ends."""
    started = Child(script, orders)
    try:
        yield started
    finally:
        started.close()
