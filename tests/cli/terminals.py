"""The command in a process of its own, at a pseudo-terminal: what a person sees and types."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import TextIO

PATIENCE = 60.0

AT_ONCE = (
    "from semel.cli import main, terminal; "
    "terminal.DELAY = terminal.INTERVAL = 0.0; raise SystemExit(main())"
)
"""The command, which shows progress from the first moment on: the stores of tests are small."""

_CODES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


def plain(text: str) -> str:
    """What is seen of a text: without codes for colours and the cursor."""
    return _CODES.sub("", text).replace("\r\n", "\n")


class Seat:
    """One command, and the terminal before which a person sits."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process, self._master = process, master
        self.seen = ""
        """Everything that was written to the terminal so far."""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def read_until(self, text: str, after: int = 0) -> int:
        """Wait until the terminal shows a text; returns where it ends."""
        end = time.monotonic() + PATIENCE
        while (found := self.seen.find(text, after)) < 0:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            assert self._read(), f"it ended without {text!r}: {self.seen!r}"
        return found + len(text)

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        end = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < end, self.seen
        return self._process.wait(PATIENCE)

    def _read(self) -> bool:
        """Read what is there; False = there is no more, and will be none."""
        ended = self._process.poll() is not None
        ready, _, _ = select.select([self._master], [], [], 0.05)
        if ready:
            self.seen += os.read(self._master, 65536).decode()
        return bool(ready) or not ended


@contextlib.contextmanager
def own_terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A terminal for this very process: a stream to write to, and what it shows by then."""
    master, slave = pty.openpty()
    with open(slave, "w") as stream:  # noqa: PTH123 - a descriptor
        yield stream, lambda: os.read(master, 65536).decode()
    os.close(master)


@contextlib.contextmanager
def sitting(
    url: str,
    *words: str,
    to: str = "",
    at_once: bool = False,
    size: tuple[int, int] = (24, 120),
    **environ: str,
) -> Iterator[Seat]:
    """Start a command at a terminal; `to` sends a part of its output elsewhere, as a shell does."""
    master, slave = pty.openpty()
    try:
        termios.tcsetwinsize(slave, size)
        command = [sys.executable, *(("-c", AT_ONCE) if at_once else ("-m", "semel"))]
        name = os.ttyname(slave)
        # The first terminal that the leader of a session opens is the one whose Ctrl-C it gets.
        shell = ["bash", "-c", f'exec "$@" <{name} >{name} 2>{name} {to}', "-"]
        process = subprocess.Popen(
            [*shell, *command, "--url", url, *words],
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", **environ},
        )
        try:
            yield Seat(process, master)
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(master)
        os.close(slave)
