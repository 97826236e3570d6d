"""Progress bars and tables, in plain text."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Self

WIDEST = 30
LABEL_WIDTH = 18
STEPS_IN_A_LOG = 4
"""Without a terminal, a bar becomes a few lines: one at each quarter."""


class Bar:
    """One line that fills up; where there is no terminal, a few lines."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._terminal = sys.stdout.isatty()
        self._line = ""
        self._step = 0

    def show(self, done: int, total: int, note: str = "") -> None:
        """Say how far it is."""
        label, count = f"{self._label:<{LABEL_WIDTH}}", f"{done:>5}/{total:<5} {note}".rstrip()
        # A line that the terminal wraps could not be written over.
        room = shutil.get_terminal_size().columns - len(f"{label}[] {count}") - 1
        width = min(WIDEST, max(room, 0)) if self._terminal else WIDEST
        filled = width * done // max(total, 1)
        self._line = f"{label}[{'#' * filled}{'.' * (width - filled)}] {count}"
        if self._terminal:
            print(f"\r\033[K{self._line}", end="", flush=True)
        elif (step := STEPS_IN_A_LOG * done // max(total, 1)) > self._step:
            self._step = step
            print(self._line, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._terminal:
            print()


def table(rows: list[tuple[str, int, str]]) -> str:
    """Lay out rows of name, number and explanation."""
    names = max(len(name) for name, _, _ in rows)
    return "\n".join(
        f"  {name:<{names}}  {number:>6,}  {meaning}" for name, number, meaning in rows
    )
