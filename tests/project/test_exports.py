"""The public names: all that users may rely on, no more, and each one documented."""

from __future__ import annotations

import inspect
import json
import re

import pytest

import semel
import semel.http
from semel import errors
from semel.core.policy import DAY, HOUR, MINUTE, POLICY_FIELDS, PRESETS
from semel.http.options import MIB, Choices
from semel.http.problems import PROBLEMS, problem_of

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


def rows(page, heading):
    """The rows of the first table below a heading, as lists of cells."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = re.search(r"^\|.+\n\|[-|]+\n((?:\|.+\n)+)", section, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table[1].splitlines()]


@pytest.fixture
def problems():
    """Each problem's status as a page writes it, and whether it has a Retry-After."""
    return {
        f"`{code}`": ("yes" if problem.retry else "no", str(problem.status))
        for code, problem in PROBLEMS.items()
        if code != "result_omitted"  # it has the status of the response that was too large
    }


def test_the_reference_lists_every_problem_with_its_status_and_error(project, problems):
    page = (project / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    listed = rows(page, "Problems")
    told = {code: (retry, status) for code, status, retry, _ in listed}
    assert told == problems | {"`result_omitted`": ("no", "that of the response")}
    raised = {name: code.strip("`") for code, *_, cell in listed for name in cell.split(", ")}
    del raised["\u2013"]
    for name, code in raised.items():
        kind = getattr(errors, name.strip("`"), None) or getattr(semel.http, name.strip("`"))
        assert problem_of(kind.__new__(kind, "text"))[0] == code, name


def test_what_clients_see_has_every_problem_in_one_table(project, problems):
    page = (project / "docs" / "protect" / "http.md").read_text(encoding="utf-8")
    listed = rows(page, "Statuses, headers, and problem codes")
    found = [(re.fullmatch(r"(\S+) (`\w+`)", answer), retry) for _, answer, retry in listed]
    told = {match[2]: (retry, match[1]) for match, retry in found if match}
    assert told == problems | {"`result_omitted`": ("no", "first's")}


def test_the_options_table_has_every_option_with_its_default(project):
    page = (project / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    told = {name.strip("`"): default for name, default, _ in rows(page, "Options")}
    known = inspect.signature(Choices).parameters
    assert told.keys() == known.keys()
    said = {"tenant": "not set", "policy": "the engine's", "payload": "the whole request"}
    said |= {"stored": "2xx", "never_stored": "none", "problems": "none"}
    for name, default in told.items():
        value = known[name].default
        size = "1 MiB" if value == MIB else str(value) if isinstance(value, float) else None
        expected = said.get(name) or size or f"`{json.dumps(value)}`"
        python = {"null": "None", "false": "False", "[": "(", "]": ")"}
        for word, written in python.items():
            expected = expected.replace(word, written)
        assert default.strip("`") == expected.strip("`").removesuffix(".0"), name
