"""What only a terminal gets: color, progress, questions, and a table that is drawn again.

A file or a program that reads the output gets plain text, and is never asked. Color is also
switched off by `NO_COLOR` (no-color.org) and by `TERM=dumb`.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from time import monotonic
from typing import ClassVar, Final, Self, TextIO, cast

from semel.core.observers import printable

DELAY: Final = 0.5
"""Seconds that work may take before its progress is shown."""
INTERVAL: Final = 0.2
"""Seconds between two lines of progress."""

_SIZE: Final = os.terminal_size((80, 24))
"""That of a terminal which does not know its own."""

_BEGIN: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""A screen of its own, without a cursor; what does not fit into a line is cut off."""
_END: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_TOP, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person sees what is written here, or types what is read here."""
    return stream is not None and stream.isatty()


def obeys_codes(stream: TextIO | None) -> bool:
    """Return whether a terminal can be expected to understand escape codes."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def coloured(stream: TextIO | None) -> bool:
    """Return whether to write in color."""
    return obeys_codes(stream) and not os.environ.get("NO_COLOR")


def escape_unknown(stream: TextIO) -> None:
    """Let a stream write what its encoding does not have as escapes, which JSON reads, too."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors=_ESCAPE)


_ESCAPE: Final = "semel.escape"


def _escaped(error: UnicodeError) -> tuple[str, int]:
    unknown = cast("UnicodeEncodeError", error)
    return json.dumps(unknown.object[unknown.start : unknown.end])[1:-1], unknown.end


codecs.register_error(_ESCAPE, _escaped)


def size_of(stream: TextIO) -> os.terminal_size:
    """Return the columns and lines of a terminal."""
    size = os.get_terminal_size(stream.fileno())
    return size if all(size) else _SIZE


class Progress:
    """One line of the terminal behind stderr that tells how far the work is; elsewhere nothing.

    It is drawn over again, and gone when the work has ended. Lines of the log go over it, too.
    """

    current: ClassVar[Progress | None] = None

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._shown = is_terminal(self._stream)
        self._began = monotonic()
        self._next = self._began + DELAY
        self._width = 0

    def show(self, text: str) -> None:
        """Show how far it is, unless that was shown just now."""
        now = monotonic()
        if self._shown and now >= self._next:
            whole = f"{text} ({now - self._began:.0f} s)"
            self._draw(whole[: size_of(self._stream).columns - 1])
            self._next = now + INTERVAL

    def _draw(self, text: str) -> None:
        self._stream.write(f"\r{text.ljust(self._width)}")
        self._stream.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Leave an empty line for other output."""
        if self._width:
            self._draw("")
            self._draw("")  # once more, to stand at its beginning

    def __enter__(self) -> Self:
        Progress.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Progress.current = None
        self.clear()


def say(text: str, *, end: str = "\n") -> None:
    """Write to stderr, without what a terminal would obey."""
    print(printable(text, but="\n"), end=end, file=sys.stderr, flush=True)


class LogLines(logging.StreamHandler[TextIO]):
    """Writes the log to stderr, each line on a line of its own also while progress is shown."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as text, with its traceback, without what a terminal would obey."""
        return printable(super().format(record), but="\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        if Progress.current is not None:
            Progress.current.clear()
        super().emit(record)


def can_ask() -> bool:
    """Return whether there is a person who can answer a question."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def confirmed(question: str) -> bool:
    """Ask; anything but a yes is a no."""
    say(f"{question} [y/N] ", end="")
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):  # Ctrl-D
        say("")
    return answer.strip().lower() in {"y", "yes"}


class Screen:
    """Draws a text again and again: in place on a terminal, one below the other elsewhere.

    What was drawn last stays on the terminal when it ends.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._in_place = obeys_codes(self._stream)
        self._last: Sequence[str] = ()

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines instead of those before."""
        self._last = lines
        if self._in_place:
            size = size_of(self._stream)
            shown = list(lines)
            if len(shown) > size.lines:
                left_out = len(shown) - size.lines + 1
                shown[size.lines - 1 :] = [f"... and {left_out} more lines"]
            text = f"{_END_OF_LINE}\n".join(shown)
            self._stream.write(f"{_TOP}{text}{_END_OF_LINE}{_END_OF_SCREEN}")
        else:
            self._stream.write("".join(f"{line}\n" for line in (*lines, "")))
        self._stream.flush()

    def __enter__(self) -> Self:
        if self._in_place:
            self._stream.write(_BEGIN)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place:
            self._stream.write(_END + "".join(f"{line}\n" for line in self._last))
            self._stream.flush()
