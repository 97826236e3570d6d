"""chart.svg: first executions per second with 128 tasks, store by store, as bars.

This module writes SVG from figures. Bars of one store share a scale; stores have their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from benchmarks.figures import Group, Lane, Race
from benchmarks.report import figure

SCENARIO = "first, 128 tasks"
COLOURS = {"ours": "#0b7285", "floor": "#adb5bd", "usual": "#e8a33d", "alternative": "#c2554d"}
MEANINGS = {
    "ours": "semel",
    "floor": "floor: the same bytes, nothing else",
    "usual": "the usual design",
    "alternative": "alternatives",
}
WIDTH, LABELS, NUMBERS = 920, 330, 90
ROW, GAP, TOP = 20, 34, 64


def draw(groups: Sequence[Group]) -> str:
    """The chart; empty when the scenario was not measured."""
    races = [
        (section.title.partition(",")[0], race)
        for group in groups
        for section in group.sections
        for race in section.races
        if race.what == SCENARIO
    ]
    height = TOP + sum(GAP + ROW * len(race.lanes) for _, race in races) + 12
    body = "\n".join((*_heading(), *_stores(races)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _heading() -> Iterator[str]:
    yield _text(12, 24, "First executions per second, one process, 128 tasks", "size")
    left = 12
    for role, meaning in MEANINGS.items():
        yield f'<rect x="{left}" y="38" width="11" height="11" fill="{COLOURS[role]}"/>'
        yield _text(left + 16, 48, meaning)
        left += 40 + 7 * len(meaning)


def _stores(races: Sequence[tuple[str, Race]]) -> Iterator[str]:
    top = TOP
    for store, race in races:
        yield _text(12, top + 20, store, "bold")
        top += GAP - 6
        widest = max(lane.median for lane in race.lanes)
        for lane in sorted(race.lanes, key=lambda lane: -lane.median):
            yield from _bar(lane, top, widest)
            top += ROW
        top += 6


def _bar(lane: Lane, top: int, widest: float) -> Iterator[str]:
    length = (WIDTH - LABELS - NUMBERS) * lane.median / widest
    yield _text(LABELS - 8, top + 13, lane.name, "end")
    yield (
        f'<rect x="{LABELS}" y="{top + 2}" width="{length:.1f}" height="{ROW - 6}" '
        f'fill="{COLOURS[lane.role]}"/>'
    )
    yield _text(int(LABELS + length) + 6, top + 13, figure(lane.median))


STYLES = {
    "": "",
    "size": ' font-size="16" font-weight="bold"',
    "bold": ' font-weight="bold"',
    "end": ' text-anchor="end"',
}


def _text(left: int, top: int, text: str, style: str = "") -> str:
    return f'<text x="{left}" y="{top}" fill="#212529"{STYLES[style]}>{escape(text)}</text>'
