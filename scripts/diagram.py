"""Draws the states of a record from the table that rules them, into docs/project/design.md.

The table is `NEXT` in `semel.core.judge`; a test fails when the picture no longer shows it.
"""

from __future__ import annotations

from pathlib import Path

from semel.core.judge import NEXT
from semel.core.records import State

PAGE = Path(__file__).resolve().parent.parent / "docs" / "project" / "design.md"
BEGIN = "<!-- states: drawn by `make diagram` -->\n"
END = "<!-- end of states -->\n"


def diagram() -> str:
    """Draw the table as a Mermaid state diagram, one arrow for each pair of states."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, verbs in NEXT.items():
        for verb, following in verbs.items():
            arrows.setdefault((_shown(state), _shown(following)), []).append(verb)
    lines = [f"    {start} --> {end}: {', '.join(verbs)}" for (start, end), verbs in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```", ""])


def redrawn(page: str) -> str:
    """Return the page with the diagram between its two marks as it should be."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has lost the marks of its diagram")
    return f"{before}{begin}\n{diagram()}\n{end}{after}"


def _shown(state: State | None) -> str:
    return "[*]" if state is None else state.name


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
