"""What was measured, as data: lanes of samples, side by side, and what they must show.

This module holds values and does arithmetic. A ratio is the median of the ratios of the same
round, so that a machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib import metadata
from typing import Literal, TypeAlias

from msgspec import Struct, field

Role: TypeAlias = Literal["ours", "floor", "usual", "alternative"]
"""`usual`: the design as it is usually written, without what semel does better."""

OURS = "semel"


class Lane(Struct):
    """The samples of one contender; one for each round."""

    name: str
    role: Role
    samples: list[float]

    @property
    def median(self) -> float:
        """The middle of the samples."""
        return statistics.median(self.samples)


class Race(Struct):
    """Contenders that did the same work in turn."""

    what: str
    unit: str
    lanes: list[Lane]
    more_is_better: bool = True

    def lane(self, name: str) -> Lane | None:
        """The lane of one contender."""
        return next((lane for lane in self.lanes if lane.name == name), None)

    @property
    def floor(self) -> Lane | None:
        """What cannot be undercut."""
        return next((lane for lane in self.lanes if lane.role == "floor"), None)

    def ratio(self, of: str, to: str) -> float | None:
        """How much `of` has of what `to` has; None when one of them did not run."""
        above, below = self.lane(of), self.lane(to)
        if above is None or below is None:
            return None
        pairs = zip(above.samples, below.samples, strict=False)
        return statistics.median(one / other for one, other in pairs)

    def microseconds_more(self, of: str, to: str) -> float | None:
        """How much longer a call of `of` takes than one of `to`, where the unit is calls a second.

        The median of the differences of the same round.
        """
        slower, quicker = self.lane(of), self.lane(to)
        if slower is None or quicker is None:
            return None
        pairs = zip(slower.samples, quicker.samples, strict=False)
        return statistics.median(1e6 / one - 1e6 / other for one, other in pairs)

    def times_better(self, name: str) -> float | None:
        """How many times better semel is than the contender, whatever better means here."""
        return self.ratio(OURS, name) if self.more_is_better else self.ratio(name, OURS)


class Check(Struct):
    """One of the things that must show."""

    line: int
    """Its number in the list of what must show."""
    what: str
    measured: float | None
    """None = it could not be measured here."""
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def is_ratio(self) -> bool:
        """Whether it is a ratio, or a number of something, and not a time."""
        return self.unit in {"", "round trips"}

    @property
    def verdict(self) -> str:
        """Whether it shows."""
        if self.measured is None:
            return "not measured"
        met = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return "yes" if met else "NO"


class Section(Struct):
    """A table of the report: contenders down, scenarios across."""

    title: str
    text: str
    races: list[Race] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Who or what could not take part, and why."""


class Group(Struct):
    """What one group of scenarios measured."""

    name: str
    seconds: float
    sections: list[Section]
    failed: bool = False


def paired(races: Sequence[Race]) -> list[Race]:
    """Name races by the number of their rounds."""
    return [
        Race(f"{len(one.lanes[0].samples)} paired rounds: {one.what}", one.unit, one.lanes)
        for one in races
    ]


def at_least(line: int, what: str, measured: float | None, limit: float, unit: str = "") -> Check:
    """Something of which more is better."""
    return Check(line, what, measured, limit, at_least=True, unit=unit)


def at_most(line: int, what: str, measured: float | None, limit: float, unit: str = "") -> Check:
    """Something of which less is better."""
    return Check(line, what, measured, limit, at_least=False, unit=unit)


def version_of(package: str) -> str | None:
    """The installed version of a package; None when there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
