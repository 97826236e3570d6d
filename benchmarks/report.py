"""results.md: what must show, where semel stands beside the alternatives, and all the tables.

This module writes text from figures. It measures nothing and rounds only what it prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from benchmarks.figures import OURS, Check, Group, Lane, Race, Section

WIDEST = 6
"""Scenarios side by side in one table."""

HEAD = """# What semel costs

Written by `make bench`: {machine}. Contenders took turns, round by round; a figure is the median
of its rounds, a ratio the median of the ratios of the same round. Operations return 100 bytes of
JSON unless a size is named. PostgreSQL and MariaDB flush each commit, SQLite runs at FULL; where
the disk flushes slowly, figures per second are lower for all, and ratios say more. Wake-ups
are measured at real-time priority, where that is allowed.

![Bar chart: new operations per second with 128 tasks, store by store](chart.svg)
"""

LEGEND = """In a table, `12,300 (0.45 / 2.1)` reads: 12,300 of the unit; 0.45 of the floor's figure
of the same rounds; semel is 2.1 times better than this contender (below 1, it is worse).
A floor does not do the whole job: it only moves the same bytes.
"""


STEADY = 0.15
"""Two runs in a row differ by less than this."""


def write(groups: Sequence[Group], machine: str, before: Sequence[Group] = ()) -> str:
    """The whole report; with the checks of a run before, to show what is steady."""
    sections = [section for group in groups for section in group.sections]
    earlier = {check.what: check for group in before for check in _checks(group.sections)}
    return "\n".join(
        (
            HEAD.format(machine=machine),
            *_must_show(sections, earlier),
            *_alternatives(sections),
            *_absent(sections),
            "## All figures\n",
            LEGEND,
            *(line for section in sections for line in _section(section)),
            *_seconds(groups),
        )
    )


# --- what must show ----------------------------------------------------------------------


def _checks(sections: Sequence[Section]) -> list[Check]:
    found = (check for section in sections for check in section.checks)
    return sorted(found, key=lambda check: check.line)


def _must_show(sections: Sequence[Section], earlier: Mapping[str, Check]) -> Iterator[str]:
    checks = _checks(sections)
    failed = sum(check.verdict == "NO" for check in checks)
    yield "## Targets\n"
    yield f"{len(checks) - failed} of {len(checks)} are met.\n"
    if earlier:
        ratios = [check for check in checks if check.is_ratio]
        steady = sum(_is_steady(check, earlier.get(check.what)) for check in ratios)
        yield (
            f"All was measured twice in a row: the second time, {steady} of {len(ratios)} ratios "
            f"and counts differed by less than {STEADY:.0%} from the first. Times (us, ms) are no "
            "ratios: they follow the speed of the machine, which changes from minute to minute.\n"
        )
        yield "| what | measured | the first time | target | met |"
        yield "|---|---|---|---|---|"
    else:
        yield "| what | measured | target | met |"
        yield "|---|---|---|---|"
    yield from (f"| {_check(check, earlier)} |" for check in checks)
    yield ""


def _is_steady(check: Check, before: Check | None) -> bool:
    if before is None or before.measured is None or check.measured is None:
        return False
    return abs(check.measured - before.measured) <= STEADY * abs(before.measured)


def _check(check: Check, earlier: Mapping[str, Check]) -> str:
    bound = "at least" if check.at_least else "at most"
    limit = f"{bound} {check.limit:g} {check.unit}".rstrip()
    measured = [_measured(check)]
    if earlier:
        measured.append(_measured(earlier.get(check.what)))
    return " | ".join((check.what, *measured, limit, check.verdict))


def _measured(check: Check | None) -> str:
    if check is None or check.measured is None:
        return "-"
    return f"{check.measured:.3f}" if 0 < check.measured < 1 else figure(check.measured)


def _alternatives(sections: Sequence[Section]) -> Iterator[str]:
    """In every scenario, the best of the alternatives."""
    rows: list[tuple[float, str]] = []
    for section in sections:
        for race in section.races:
            best = _best_alternative(race)
            if best is not None:
                lane, times = best
                rows.append(
                    (times, f"| {section.title}: {race.what} | {lane.name} | {times:.2f} |")
                )
    behind = [row for times, row in rows if times < 1]
    yield "## Beside the best alternative of each scenario\n"
    if not rows:
        yield "No alternative was measured.\n"
        return
    yield f"semel is ahead in {len(rows) - len(behind)} of {len(rows)}.\n"
    header = ("| scenario | best alternative | semel is so many times better |", "|---|---|---|")
    if behind:
        yield from ("Behind in these:\n", *header, *behind, "")
    yield from ("All of them:\n", *header, *(row for _, row in rows), "")


def _best_alternative(race: Race) -> tuple[Lane, float] | None:
    found = [
        (lane, times)
        for lane in race.lanes
        if lane.role == "alternative" and (times := race.times_better(lane.name)) is not None
    ]
    return min(found, key=lambda pair: pair[1], default=None)


def _absent(sections: Sequence[Section]) -> Iterator[str]:
    missing = sorted({sentence for section in sections for sentence in section.missing})
    if missing:
        yield "## Could not take part\n"
        yield from (f"- {sentence}" for sentence in missing)
        yield ""


# --- tables ------------------------------------------------------------------------------


def _section(section: Section) -> Iterator[str]:
    yield f"### {section.title}\n"
    if section.text:
        yield f"{section.text}\n"
    for _, alike in groupby(section.races, key=_who):
        races = list(alike)
        for begin in range(0, len(races), WIDEST):
            yield from _table(races[begin : begin + WIDEST])


def _who(race: Race) -> frozenset[str]:
    """Replays may have a lane more or less than first executions: one table for both."""
    return frozenset(lane.name for lane in race.lanes if lane.role != "floor")


def _table(races: Sequence[Race]) -> Iterator[str]:
    names = list(dict.fromkeys(lane.name for race in races for lane in race.lanes))
    titles = (f"{race.what} [{race.unit}]" if race.unit else race.what for race in races)
    yield f"| | {' | '.join(titles)} |"
    yield f"|---|{'---|' * len(races)}"
    for name in names:
        cells = " | ".join(_cell(race, name) for race in races)
        yield f"| {_emphasis(name, races)} | {cells} |"
    yield ""


def _emphasis(name: str, races: Sequence[Race]) -> str:
    roles = {lane.role for race in races for lane in race.lanes if lane.name == name}
    marks: Mapping[str, str] = {"floor": " (floor)", "ours": ""}
    bold = f"**{name}**" if name == OURS else name
    return bold + marks.get(roles.pop(), "")


def _cell(race: Race, name: str) -> str:
    lane = race.lane(name)
    if lane is None:
        return "-"
    floor = race.floor
    to_floor = None if floor is None or floor is lane else race.ratio(name, floor.name)
    better = None if name == OURS else race.times_better(name)
    if to_floor is None and better is None:
        return figure(lane.median)
    ratios = " / ".join("-" if one is None else f"{one:.2f}" for one in (to_floor, better))
    return f"{figure(lane.median)} ({ratios})"


def figure(value: float) -> str:
    """A number with three digits that mean something."""
    for least, form in ((100, ",.0f"), (10, ".1f"), (0, ".2f")):
        if abs(value) >= least:
            return f"{value:{form}}"
    return str(value)


def _seconds(groups: Sequence[Group]) -> Iterator[str]:
    total = sum(group.seconds for group in groups)
    each = ", ".join(f"{group.name} {group.seconds:.0f} s" for group in groups)
    yield f"Measured in {total / 60:.1f} minutes: {each}."
    yield ""
