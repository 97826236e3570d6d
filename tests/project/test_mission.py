"""The checklist is true: every file and test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSION = (ROOT / "docs" / "mission.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", MISSION)
PLACES = re.findall(r"`(semel/[\w/]+(?:\.py)?)`", MISSION)


def test_the_checklist_names_tests():
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)))
def test_a_test_that_the_checklist_names_exists(file, test):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"def {test}\(" if test else r"\bTest|def test_", text)


@pytest.mark.parametrize("place", sorted(set(PLACES)))
def test_a_place_that_the_checklist_names_exists(place):
    assert (ROOT / "src" / place).exists()


def test_a_line_without_a_test_says_that_it_is_planned():
    rows = [row for row in MISSION.splitlines() if row.startswith("|") and "---" not in row]
    bare = [row for row in rows if "tests/" not in row and not row.startswith("| id ")]
    assert all("planned" in row for row in bare), bare
