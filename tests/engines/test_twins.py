"""The two engines are twins: without `async` and `await`, one reads like the other.

The files of `semel.sync` and `semel.aio` are parsed, the asynchronous ones are turned into their
plain form by the tables below, and each is compared as text with its twin, docstrings included. Comments are free, and so is what each
side imports from `semel._mirror`, the place for what cannot be the same.
"""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import pytest

import semel

RENAMED = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "StopAsyncIteration": "StopIteration",
    "aclosing": "closing",
    "aio": "sync",
    "asynccontextmanager": "contextmanager",
    "open_async_store": "open_store",
}
"""Beside these, AsyncX becomes X."""

PROMISES = {"Awaitable": 0, "Coroutine": 2}
"""Types that wrap what an async call gives, and where in their brackets that stands."""

MAY_DIFFER = "semel._mirror"

WORD = re.compile(r"\w+")


def renamed(word: str) -> str:
    plain = RENAMED.get(word, word)
    return re.sub(r"^(_*)Async(?=[A-Z])", r"\1", plain)


def renamed_text(text: str) -> str:
    return WORD.sub(lambda found: renamed(found[0]), text)


class Plain(ast.NodeTransformer):
    """Takes `async` and `await` out of a module, and puts its imports in order."""

    def visit_AsyncFunctionDef(self, node):
        return self.visit(ast.FunctionDef(**vars(node)))

    def visit_AsyncFor(self, node):
        return self.visit(ast.For(**vars(node)))

    def visit_AsyncWith(self, node):
        return self.visit(ast.With(**vars(node)))

    def visit_Await(self, node):
        return self.visit(node.value)

    def visit_comprehension(self, node):
        node.is_async = 0
        return self.generic_visit(node)

    def visit_Subscript(self, node):
        if isinstance(node.value, ast.Name) and node.value.id in PROMISES:
            inner = node.slice
            if isinstance(inner, ast.Tuple):
                inner = inner.elts[PROMISES[node.value.id]]
            return self.visit(inner)
        return self.generic_visit(node)

    def visit_ImportFrom(self, node):
        if node.module == MAY_DIFFER:
            return None
        names = {renamed(alias.name) for alias in node.names} - PROMISES.keys()
        node.module = renamed_text(node.module)
        node.names = [ast.alias(name) for name in sorted(names)]
        return node if names else None

    def generic_visit(self, node):
        for field, value in ast.iter_fields(node):
            if isinstance(value, str):
                setattr(node, field, renamed_text(value))
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.If):
            node.body = in_order(node.body)
        return node


def in_order(body):
    """Sort the imports, whose order may have changed with their names."""
    imports = [line for line in body if isinstance(line, ast.Import | ast.ImportFrom)]
    others = [line for line in body if line not in imports]
    docstring = others[:1] if ast.get_docstring(ast.Module(others, [])) else []
    return [*docstring, *sorted(imports, key=ast.unparse), *others[len(docstring) :]]


def plain(source: str) -> str:
    return ast.unparse(ast.fix_missing_locations(Plain().visit(ast.parse(source))))


PACKAGE = Path(semel.__file__).parent


def files(side: str) -> set[str]:
    return {path.name for path in (PACKAGE / side).glob("*.py")}


def test_each_file_of_one_engine_has_a_twin_in_the_other():
    assert files("sync") == files("aio")


@pytest.mark.parametrize("name", sorted(files("sync") | files("aio")))
def test_without_async_and_await_one_engine_reads_like_the_other(name):
    sync, aio = (
        plain((PACKAGE / side / name).read_text(encoding="utf-8")).splitlines()
        for side in ("sync", "aio")
    )
    difference = difflib.unified_diff(sync, aio, "sync", "aio without async", lineterm="")
    assert list(difference) == []


def test_the_comparison_sees_through_async_and_await_alone():
    twin = '''"""Law of AsyncX."""
from semel._mirror import shield
from collections.abc import AsyncIterator, Awaitable, Callable
class AsyncX:
    """The AsyncX."""
    async def __aenter__(self, fn: Callable[[], Awaitable[int]]) -> AsyncIterator[int]:
        async with self.lock:
            return [await one async for one in fn()]
'''
    other = '''"""Law of X."""
from collections.abc import Callable, Iterator
class X:
    """The X."""
    def __enter__(self, fn: Callable[[], int]) -> Iterator[int]:
        with self.lock:
            return [one for one in fn()]
'''
    assert plain(twin) == plain(other)
    assert plain(twin) != plain(other.replace("self.lock", "self.other"))
    assert plain(twin) != plain(other.replace("The X", "Another X"))
