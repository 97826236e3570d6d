"""The arithmetic of the benchmarks, and what the report says of it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from benchmarks.figures import Group, Lane, Race, Section, at_least, at_most

from benchmarks import chart, report


def race(*, more_is_better: bool = True) -> Race:
    return Race(
        "first, 128 tasks",
        "/s",
        [
            Lane("semel", "ours", [100.0, 10.0, 30.0]),
            Lane("bare <protocol>", "floor", [200.0, 20.0, 40.0]),
            Lane("other 1.0", "alternative", [50.0, 5.0, 60.0]),
        ],
        more_is_better=more_is_better,
    )


def test_a_ratio_is_the_median_of_the_ratios_of_the_same_round():
    assert race().ratio("semel", "bare <protocol>") == 0.5
    assert race().ratio("semel", "other 1.0") == 2.0
    assert race().ratio("semel", "nobody") is None


def test_a_difference_is_the_median_of_the_microseconds_more_in_the_same_round():
    assert race().microseconds_more("semel", "bare <protocol>") == pytest.approx(1e6 / 120)
    assert race().microseconds_more("semel", "nobody") is None


def test_better_means_less_where_less_is_better():
    assert race().times_better("other 1.0") == 2.0
    assert race(more_is_better=False).times_better("other 1.0") == 0.5


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (at_least(1, "rate", 8.0, 8), "yes"),
        (at_least(1, "rate", 7.9, 8), "NO"),
        (at_most(2, "time", 1.0, 1), "yes"),
        (at_most(2, "time", 1.1, 1), "NO"),
        (at_most(2, "time", None, 1), "not measured"),
    ],
)
def test_a_check_says_whether_it_shows(check, verdict):
    assert check.verdict == verdict


def groups(*races: Race) -> list[Group]:
    checks = [at_least(1, "Redis first, to the floor", 0.5, 0.8)]
    missing = ["dbos: dbos is not installed"]
    return [Group("async_rates", 1.0, [Section("Redis, async", "", list(races), checks, missing)])]


def test_the_report_tells_what_fails_where_semel_is_behind_and_who_is_missing():
    text = report.write(groups(race(), race(more_is_better=False)), "a machine")
    assert "| Redis first, to the floor | 0.500 | at least 0.8 | NO |" in text
    assert "semel is ahead in 1 of 2" in text
    assert "Behind in these:" in text
    assert "- dbos: dbos is not installed" in text
    assert "| **semel** | 30.0 (0.50 / -) | 30.0 (0.50 / -) |" in text


def test_the_report_of_two_runs_tells_which_ratios_are_steady():
    def run(steady: float, swings: float | None) -> list[Group]:
        checks = [
            at_least(1, "steady", steady, 1),
            at_least(2, "swings", swings, 1),
            at_most(3, "a time", swings, 1, "us"),
        ]
        return [Group("async_rates", 1.0, [Section("Redis, async", "", [], checks)])]

    text = report.write(run(1.1, 2.0), "a machine", run(1.0, 1.5))
    assert "1 of 2 ratios and counts differed by less than 15%" in text
    assert "| steady | 1.10 | 1.00 | at least 1 | yes |" in text
    assert "| swings | 2.00 | 1.50 | at least 1 | yes |" in text
    assert "| a time | 2.00 | 1.50 | at most 1 us | NO |" in text
    assert "0 of 2" in report.write(run(1.0, 1.0), "a machine", run(2.0, None))


def test_the_report_owns_up_to_having_measured_no_alternative():
    text = report.write(groups(Race("first", "/s", [Lane("semel", "ours", [1.0])])), "a machine")
    assert "No alternative was measured." in text


def test_the_chart_is_xml_and_has_a_bar_for_each_contender():
    drawing = ET.fromstring(chart.draw(groups(race())))  # noqa: S314 - our own text
    bars = [one for one in drawing.iter() if one.get("height") == str(chart.BAR)]
    assert [bar.get("class") for bar in bars] == ["alternative", "floor", "ours"]
    widths = [float(bar.get("width")) for bar in bars]
    assert widths == sorted(widths, reverse=True)
    assert "bare <protocol>" in {one.text for one in drawing.iter()}
