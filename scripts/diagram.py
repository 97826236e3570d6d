"""Draws the states of a record from the table that rules them, into docs/assets/states.svg.

The table is `NEXT` in `semel.core.judge`; a test fails when the picture no longer shows it. Where a
state stands, and which way an arrow takes, is written here: a new pair of states needs a new way.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

from semel.core.judge import NEXT
from semel.core.records import State

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "states.svg"

WIDTH, HEIGHT = 480, 488
BOX = (124, 40)
"""Width and height of a state."""
PLACES: dict[State | None, tuple[int, int]] = {
    None: (240, 60),
    State.PROCESSING: (240, 215),
    State.SUCCEEDED: (80, 390),
    State.FAILED: (400, 390),
}
"""The middle of each state; None is "no record"."""


class Way(NamedTuple):
    """How an arrow runs, and where the verbs stand that take it."""

    path: str
    x: int
    y: int
    anchor: str = "middle"
    columns: int = 20
    """Letters in a line of verbs."""


WAYS: dict[tuple[State | None, State | None], Way] = {
    (None, State.PROCESSING): Way("M226 80V195", 218, 142, "end"),
    (State.PROCESSING, None): Way("M254 195V80", 262, 142, "start"),
    (None, State.SUCCEEDED): Way("M178 68H64Q52 68 52 80V370", 62, 88, "start"),
    (State.SUCCEEDED, None): Way("M30 370V64Q30 52 42 52H178", 104, 44),
    (State.FAILED, None): Way("M450 370V72Q450 60 438 60H302", 376, 52),
    (State.PROCESSING, State.PROCESSING): Way(
        "M302 205H318Q330 205 330 215T318 225H302", 338, 212, "start", 13
    ),
    (State.PROCESSING, State.SUCCEEDED): Way("M196 235L92 370", 132, 296, "end", 9),
    (State.SUCCEEDED, State.PROCESSING): Way("M124 370L226 235", 188, 308, "start"),
    (State.PROCESSING, State.FAILED): Way("M284 235L388 370", 348, 296, "start", 9),
    (State.FAILED, State.PROCESSING): Way("M356 370L254 235", 292, 308, "end"),
    (State.FAILED, State.SUCCEEDED): Way("M338 390H142", 240, 380),
    (State.SUCCEEDED, State.SUCCEEDED): Way("M68 410V426Q68 438 80 438T92 426V410", 80, 460),
    (State.FAILED, State.FAILED): Way("M388 410V426Q388 438 400 438T412 426V410", 400, 460),
}

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
TIP = (
    '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
    ' orient="auto"><path class="tip" d="M0 0L10 5L0 10z"/></marker>'
)
STYLE = """\
    .card { fill: #ffffff; stroke: #d8dee4 }
    .state { fill: #e6f4f6; stroke: #0b7285 }
    .none { fill: #f6f8fa; stroke: #57606a; stroke-dasharray: 4 3 }
    .text { fill: #1b1f24; font-weight: 600; font-size: 13px }
    .verb { fill: #1b1f24; font-size: 12px; \
font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
    .line { stroke: #57606a; stroke-width: 1.5; fill: none }
    .tip { fill: #57606a }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #30363d }
      .state { fill: #0f2f36; stroke: #3bc9db }
      .none { fill: #1f262e; stroke: #9aa4af }
      .text, .verb { fill: #e6edf3 }
      .line { stroke: #9aa4af }
      .tip { fill: #9aa4af }
    }"""


def arrows() -> dict[tuple[State | None, State | None], list[str]]:
    """Return the verbs that lead from a state to a state, by these two."""
    found: dict[tuple[State | None, State | None], list[str]] = {}
    for state, verbs in NEXT.items():
        for verb, following in verbs.items():
            found.setdefault((state, following), []).append(verb)
    return found


def diagram() -> str:
    """Draw the table, one arrow for each pair of states."""
    drawn = arrows()
    if drawn.keys() != WAYS.keys():
        different = ", ".join(f"{_name(a)} to {_name(b)}" for a, b in drawn.keys() ^ WAYS.keys())
        raise ValueError(f"WAYS in scripts/diagram.py doesn't fit NEXT: {different}")
    told = "; ".join(
        f"{_name(start)} to {_name(end)}: {', '.join(verbs)}"
        for (start, end), verbs in drawn.items()
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"',
        f'     height="{HEIGHT}" role="img" aria-labelledby="title desc"',
        f'     font-family="{FONTS}">',
        '  <title id="title">The states of a record, and the verbs that change them</title>',
        f'  <desc id="desc">{told}.</desc>',
        f"  <style>\n{STYLE}\n  </style>",
        f"  <defs>{TIP}</defs>",
        f'  <rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12"/>',
    ]
    for pair, verbs in drawn.items():
        way = WAYS[pair]
        lines.append(f'  <path class="line" d="{way.path}" marker-end="url(#tip)"/>')
        for number, text in enumerate(textwrap.wrap(", ".join(verbs), way.columns)):
            place = f'x="{way.x}" y="{way.y + 15 * number}"'
            lines.append(f'  <text class="verb" {place} text-anchor="{way.anchor}">{text}</text>')
    for state, (x, y) in PLACES.items():
        kind = "none" if state is None else "state"
        corner = f'x="{x - BOX[0] // 2}" y="{y - BOX[1] // 2}"'
        size = f'width="{BOX[0]}" height="{BOX[1]}" rx="8"'
        lines.append(f'  <rect class="{kind}" {corner} {size}/>')
        middle = f'x="{x}" y="{y + 5}" text-anchor="middle"'
        lines.append(f'  <text class="text" {middle}>{_name(state)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _name(state: State | None) -> str:
    return "no record" if state is None else state.name


if __name__ == "__main__":
    PICTURE.write_text(diagram(), encoding="utf-8")
