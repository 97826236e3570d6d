"""The public names: all that users may rely on, no more, and each one documented."""

from __future__ import annotations

import inspect
import json
import re

import pytest

import semel
from semel import errors
from semel.core.policy import DAY, HOUR, MINUTE, POLICY_FIELDS, PRESETS
from semel.http.problems import PROBLEMS

UNITS = {"days": DAY, "hours": HOUR, "minutes": MINUTE}

RELIED_ON = {
    "AsyncIdempotency",
    "Idempotency",
    "Policy",
    "attempt",
    "configure",
    "consume",
    "current_attempt",
    "derive_key",
    "execute",
    "marks",
    "new_key",
    "once",
    "open_async_store",
    "open_store",
    "require_attempt",
    "run",
}
"""More may be added; none of these may go."""

ERRORS = {
    name
    for name, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, errors.IdempotencyError)
}

DOCUMENTED = re.compile(r"^(?:::: semel\.|## )(\w+)$", re.MULTILINE)
"""How a page of docs/reference shows a name: from the code, or under a heading of its own."""


@pytest.fixture
def public():
    return set(semel.__all__)


def test_the_names_that_users_rely_on_are_public(public):
    assert public >= RELIED_ON | ERRORS


def test_every_public_name_is_there(public):
    assert {name for name in public if not hasattr(semel, name)} == set()


def test_every_public_name_is_in_the_reference(public, project):
    pages = (project / "docs" / "reference").rglob("*.md")
    documented = {
        name for page in pages for name in DOCUMENTED.findall(page.read_text(encoding="utf-8"))
    }
    assert public - documented == {"__version__"}


def test_every_field_of_a_policy_is_explained(project):
    page = (project / "docs" / "reference" / "policy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert explained == set(POLICY_FIELDS)


def test_every_preset_of_a_policy_is_explained(project):
    page = (project / "docs" / "reference" / "policy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `Policy\.(\w+)\(\)` \| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    told = {name: sets for _, name, sets in rows}
    assert told == {name: ", ".join(map(said, preset.items())) for name, preset in PRESETS.items()}
    for method, name, _ in rows:
        assert getattr(semel.Policy, method)() == semel.Policy.preset(name)


def said(field):
    name, value = field
    if name == "ttl":
        longest = next(unit for unit in UNITS if value > UNITS[unit])
        return f"`ttl` {value / UNITS[longest]:g} {longest}"
    return f"`{name}` `{json.dumps(value) if isinstance(value, str) else value}`"


def test_every_problem_is_explained_with_its_status(project):
    page = (project / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    known = {
        code: f"{problem.status}, later" if problem.retry else str(problem.status)
        for code, problem in PROBLEMS.items()
    }
    assert told == known | {"result_omitted": "that of the answer"}
