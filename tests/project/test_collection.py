"""Every worker finds the same tests, and knows which of them are left to `make test-more`."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from selecting import ALL, left_for_more


def test_no_name_of_a_test_holds_an_address(request):
    """It would keep the workers from sharing them."""
    names = [item.nodeid for item in request.session.items]
    assert not [name for name in names if re.search(r" at 0x[0-9a-f]{3}", name)]


def test_no_target_sets_a_variable_that_settings_reject(project):
    """An engine rejects a SEMEL_ variable that is no setting, and no test would start."""
    targets = (project / "Makefile").read_text(encoding="utf-8")
    assert not re.findall(r"\bSEMEL_\w+=", targets)


class Item(SimpleNamespace):
    """A test as pytest finds it: `more` is its mark, if it has one."""

    __hash__ = object.__hash__

    def get_closest_marker(self, name):
        return self.more


MORE = pytest.mark.more.mark
ONE_OF_FOUR = pytest.mark.more(one_of=4).mark


def items_of(mark, cls=None, count=40):
    nodeid = "tests/test_a.py::test_a" if cls is None else f"tests/test_a.py::{cls.__name__}::test"
    return [Item(nodeid=f"{nodeid}[{number}]", cls=cls, more=mark) for number in range(count)]


def run_with(*arguments, keyword=""):
    return SimpleNamespace(option=SimpleNamespace(keyword=keyword), args=arguments)


@pytest.fixture(autouse=True)
def as_in_make_test(monkeypatch):
    monkeypatch.delenv(ALL, raising=False)


def test_a_part_of_the_tests_is_left_to_make_test_more():
    everywhere, nowhere, sampled = items_of(None), items_of(MORE), items_of(ONE_OF_FOUR)
    left = left_for_more(run_with("tests"), [*everywhere, *nowhere, *sampled])
    assert not left.intersection(everywhere)
    assert left.issuperset(nowhere)
    assert len(left.intersection(sampled)) == 30


def test_another_class_leaves_other_tests_out():
    class Red: ...

    class Green: ...

    red, green = items_of(ONE_OF_FOUR, Red), items_of(ONE_OF_FOUR, Green)
    left = left_for_more(run_with("tests"), [*red, *green])
    assert len(left) == 60
    assert [item in left for item in red] != [item in left for item in green]


def test_nothing_is_left_out_of_make_test_more_and_of_what_somebody_names(monkeypatch):
    marked = items_of(MORE)
    assert not left_for_more(run_with("tests", keyword="lease"), marked)
    assert not left_for_more(run_with("tests/test_a.py::test_a"), marked)
    monkeypatch.setenv(ALL, "yes")
    assert not left_for_more(run_with("tests"), marked)
