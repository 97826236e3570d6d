"""The faults that tests have to prove, by their numbers, and that none is left out.

`pytest -m fault` runs those tests; each module has a table of what its faults are and what is
expected. A test says which fault it proves: `@fault(8)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

PROVED = range(1, 62)


def marked(source: str) -> Iterator[int]:
    """The numbers in the `@fault(...)` marks of the tests in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test"
        ):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).split(".")[-1] == "fault":
                    yield from (argument.value for argument in mark.args)


@pytest.fixture(scope="module")
def tests_of() -> dict[int, set[str]]:
    """For each fault, the modules that have a test of it."""
    found: dict[int, set[str]] = {}
    for module in TESTS.rglob("test_*.py"):
        for number in marked(module.read_text()):
            found.setdefault(number, set()).add(module.name)
    return found


@pytest.mark.parametrize("number", PROVED)
def test_every_fault_has_a_test(tests_of, number):
    assert tests_of.get(number), f"no test is marked @fault({number})"


def test_the_table_of_a_module_names_every_fault_that_it_proves():
    for module in Path(__file__).parent.glob("test_*.py"):
        source = module.read_text()
        table = ast.get_docstring(ast.parse(source))
        for number in set(marked(source)):
            assert f"\n| {number} " in table, f"{module.name} has no row for fault {number}"
