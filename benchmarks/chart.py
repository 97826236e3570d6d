"""chart.svg: new operations per second with 128 tasks, store by store, as bars.

This module writes SVG from figures. Bars of one store share a scale; stores have their own. The
picture brings its own card, light or dark, and fits a phone: each name stands above its bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from benchmarks.figures import Group, Lane, Race
from benchmarks.report import figure

SCENARIO = "first, 128 tasks"
MEANINGS = {
    "ours": "semel",
    "alternative": "alternatives",
    "usual": "the usual design",
    "floor": "floor: the same bytes, nothing else",
}
WIDTH, SIDE = 480, 24
ROW, BAR, GAP, TOP = 29, 9, 40, 106

STYLE = """\
    .card { fill: #ffffff; stroke: #d8dee4 }
    .text { fill: #1b1f24 }
    .soft { fill: #57606a }
    .bold { font-weight: 600 }
    .end { text-anchor: end }
    .ours { fill: #0b7285 }
    .alternative { fill: #c2554d }
    .usual { fill: #d99a2b }
    .floor { fill: #adb5bd }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #30363d }
      .text { fill: #e6edf3 }
      .soft { fill: #9aa4af }
      .ours { fill: #22b8cf }
      .alternative { fill: #e5827a }
      .usual { fill: #e8b04a }
      .floor { fill: #57606a }
    }"""


def draw(groups: Sequence[Group]) -> str:
    """The chart; without bars when the scenario was not measured."""
    races = [
        (section.title.partition(",")[0], race)
        for group in groups
        for section in group.sections
        for race in section.races
        if race.what == SCENARIO
    ]
    height = TOP + sum(GAP + ROW * len(race.lanes) for _, race in races) + 8
    body = "\n".join((*_heading(), *_stores(races)))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" \
height="{height}" role="img" aria-labelledby="title desc" font-size="13"
     font-family="system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif">
  <title id="title">New operations per second, 128 asyncio tasks in one process</title>
  <desc id="desc">{escape(" ".join(_told(races)))}</desc>
  <style>
{STYLE}
  </style>
  <rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="12"/>
{body}
</svg>
"""


def _told(races: Sequence[tuple[str, Race]]) -> Iterator[str]:
    """The chart in words."""
    for store, race in races:
        bars = (f"{lane.name} {figure(lane.median)}" for lane in _ordered(race))
        yield f"{store}: {', '.join(bars)}."


def _ordered(race: Race) -> list[Lane]:
    return sorted(race.lanes, key=lambda lane: -lane.median)


def _heading() -> Iterator[str]:
    yield _text(SIDE, 34, "New operations per second", "text bold", size=16)
    yield _text(SIDE, 53, "128 asyncio tasks in one process; higher is better", "soft")
    left, top = SIDE, 70
    for role, meaning in MEANINGS.items():
        if role == "floor":
            left, top = SIDE, top + 18
        yield f'  <rect class="{role}" x="{left}" y="{top - 9}" width="11" height="11" rx="2"/>'
        yield _text(left + 17, top + 1, meaning, "soft")
        left += 36 + 7 * len(meaning)


def _stores(races: Sequence[tuple[str, Race]]) -> Iterator[str]:
    top = TOP
    for store, race in races:
        yield _text(SIDE, top + 22, store, "text bold", size=15)
        top += GAP
        widest = max(lane.median for lane in race.lanes)
        for lane in _ordered(race):
            yield from _bar(lane, top, widest)
            top += ROW


def _bar(lane: Lane, top: int, widest: float) -> Iterator[str]:
    length = (WIDTH - 2 * SIDE) * lane.median / widest
    weight = " bold" if lane.role == "ours" else ""
    yield _text(SIDE, top + 4, lane.name, f"text{weight}")
    yield _text(WIDTH - SIDE, top + 4, figure(lane.median), f"text end{weight}")
    yield (
        f'  <rect class="{lane.role}" x="{SIDE}" y="{top + 9}" width="{length:.1f}" '
        f'height="{BAR}" rx="2"/>'
    )


def _text(left: int, top: int, text: str, classes: str, size: int = 0) -> str:
    large = f' font-size="{size}"' if size else ""
    return f'  <text class="{classes}" x="{left}" y="{top}"{large}>{escape(text)}</text>'
