"""The worker processes as seen from outside: hired, given requests, heard, killed, dismissed."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from .place import Place
from .storm import Request
from .worker import Answer, ReadyToDie, Started, work

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Kill:
    """A worker that was killed in the middle of a payment."""

    request: Request
    pid: int | None
    exit_code: int | None

    @property
    def moment(self) -> str:
        """When in the payment it was."""
        return "" if self.request.fault is None else self.request.fault.value

    @property
    def cause(self) -> str:
        """What ended the process: the name of a signal, or its exit code."""
        if self.exit_code is not None and self.exit_code < 0:
            return signal.Signals(-self.exit_code).name
        return f"exit code {self.exit_code}"


class Staff:
    """Keeps a number of workers alive. Each has a pipe of its own: its death blocks no other."""

    def __init__(self, size: int, place: Place, *, sabotage: bool) -> None:
        self._place = place
        self._sabotage = sabotage
        self._processes: dict[Connection, SpawnProcess] = {}
        self._idle: list[Connection] = []
        self._working_on: dict[Connection, Request] = {}
        for _ in range(size):
            self._hire()

    @property
    def idle(self) -> int:
        """How many workers could take a request now."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """How many requests are being served."""
        return len(self._working_on)

    def start(self, deadline: float) -> Iterator[int]:
        """Wait until everyone is there; tells how many are."""
        while self.idle < len(self._processes):
            list(self.hear(deadline))
            yield self.idle

    def give(self, request: Request) -> None:
        """Let an idle worker serve the request."""
        pipe = self._idle.pop()
        pipe.send(request)
        self._working_on[pipe] = request

    def hear(self, deadline: float) -> Iterator[Answer | Kill]:
        """Wait until workers say something; those that stand still to be killed are killed."""
        ready = wait(list(self._processes), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError("the demo took too long and was stopped")
        for pipe in [pipe for pipe in self._processes if pipe in ready]:
            try:
                message = pipe.recv()
            except EOFError:
                raise ChildProcessError("a worker died by itself") from None
            match message:
                case Started():
                    self._idle.append(pipe)
                case Answer():
                    del self._working_on[pipe]
                    self._idle.append(pipe)
                    yield message
                case ReadyToDie():
                    yield self._kill(pipe)

    def dismiss(self) -> None:
        """Hang up, so that idle workers go home; end the others."""
        for pipe, process in self._processes.items():
            pipe.close()
            if pipe not in self._idle:
                process.kill()
        for process in self._processes.values():
            process.join()

    def _hire(self) -> None:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(
            target=work, args=(self._place, theirs), kwargs={"sabotage": self._sabotage}
        )
        process.start()
        theirs.close()
        self._processes[ours] = process

    def _kill(self, pipe: Connection) -> Kill:
        """Kill a worker with SIGKILL and hire another one in its place."""
        process = self._processes.pop(pipe)
        process.kill()
        process.join()
        pipe.close()
        self._hire()
        return Kill(self._working_on.pop(pipe), process.pid, process.exitcode)


@contextmanager
def staff(size: int, place: Place, *, sabotage: bool) -> Iterator[Staff]:
    """Have workers for the length of a with block."""
    hired = Staff(size, place, sabotage=sabotage)
    try:
        yield hired
    finally:
        hired.dismiss()
