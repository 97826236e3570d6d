"""The two engines are twins: without `async` and `await`, one reads like the other.

The files of `semel.sync` and `semel.aio` are parsed, the asynchronous ones are turned into their
plain form by the tables below, and each is compared as text with its twin, docstrings included.

What may differ: comments, the docstrings of modules and classes (they say what each kind is like),
and what is imported from `semel._mirror`, the place for all that cannot be the same.
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
    "AbstractAsyncContextManager": "AbstractContextManager",
    "StopAsyncIteration": "StopIteration",
    "aclosing": "closing",
    "aio": "sync",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "open_async_store": "open_store",
}
"""Beside these, AsyncX becomes X."""

PROMISES = {"Awaitable": 0, "Coroutine": 2}
"""Types that wrap what an async call gives, and where in their brackets that stands."""

KIND = {"asynchronous", "_asynchronous"}
"""Names whose True or False says which of the twins it is."""

ONLY_ASYNC = {"mark_coroutine_function", "heed", "cancellations", "Home"}
"""Calls that have no meaning for plain functions: threads cannot be cancelled, and have no loop."""

AWAITED = "finished"
"""What it is called with has to be awaited; a plain function has given its value already."""

HOME = "_home"
"""The loop of an asynchronous engine."""

MIRROR = "semel._mirror"


def renamed(word: str) -> str:
    plain = RENAMED.get(word, word)
    return re.sub(r"^(_*)Async(?=[A-Z])", r"\1", plain)


def renamed_text(text: str) -> str:
    without = re.sub(r"\b(?:async|await) ", "", text)
    return re.sub(r"\w+", lambda found: renamed(found[0]), without)


class Plain(ast.NodeTransformer):
    """Takes out `async` and `await`, and what may differ."""

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
        if node.module is not None and node.module.startswith(MIRROR):
            return None
        return self.generic_visit(node)

    def visit_Module(self, node):
        return self.generic_visit(without_docstring(node))

    def visit_ClassDef(self, node):
        return self.generic_visit(without_docstring(node))

    def visit_Expr(self, node):
        match node.value:
            case ast.Call(func=ast.Name(id=name)) if name in ONLY_ASYNC:
                return None
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name))) if name == HOME:
                return None
        return self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id == AWAITED:
            return self.visit(node.args[0])
        node.args = [one for one in node.args if getattr(one, "attr", None) != HOME]
        return self.generic_visit(node)

    def visit_keyword(self, node):
        return self.generic_visit(without_kind(node, node.arg))

    def visit_Assign(self, node):
        match node.value:
            case ast.Call(func=ast.Name(id=name)) if name in ONLY_ASYNC:
                return None
        return self.generic_visit(without_kind(node, ast.unparse(node.targets[0])))

    def generic_visit(self, node):
        for field, value in ast.iter_fields(node):
            if isinstance(value, str):
                setattr(node, field, renamed_text(value))
        return super().generic_visit(node)


def without_docstring(node):
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return node


def without_kind(node, name):
    if name in KIND:
        node.value = ast.Constant(value=...)
    return node


def plain(source: str) -> str:
    tree = Plain().visit(ast.parse(source))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}  # in __all__
    for block in ast.walk(tree):
        if isinstance(block, ast.Module | ast.If):
            block.body = with_imports_in_order(block.body, used)
    return ast.unparse(ast.fix_missing_locations(tree))


def with_imports_in_order(body, used):
    """Sort the imports, whose names have changed, and leave out those that only async needed."""
    imports = [line for line in body if isinstance(line, ast.Import | ast.ImportFrom)]
    others = [line for line in body if line not in imports]
    for line in imports:
        kept = {alias.name: alias for alias in line.names if (alias.asname or alias.name) in used}
        line.names = [kept[name] for name in sorted(kept)]
    return [*sorted((line for line in imports if line.names), key=ast.unparse), *others]


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
    assert not (shown := "\n".join(difference)), shown


TWIN = '''"""For tasks."""
from collections.abc import AsyncIterator, Awaitable, Callable
from semel._mirror.tasks import mark_coroutine_function, sleep
class AsyncX:
    """Belongs to a loop."""
    def __init__(self):
        self.plan = Plan(asynchronous=True)
        mark_coroutine_function(self)
    async def __aenter__(self, fn: Callable[[], Awaitable[int]]) -> AsyncIterator[int]:
        """Say `async with AsyncX()`."""
        async with self.lock:
            return [await one async for one in fn()]
'''

OTHER = '''"""For threads."""
from collections.abc import Callable, Iterator
from semel._mirror.threads import sleep
class X:
    """Shared by threads."""
    def __init__(self):
        self.plan = Plan(asynchronous=False)
    def __enter__(self, fn: Callable[[], int]) -> Iterator[int]:
        """Say `with X()`."""
        with self.lock:
            return [one for one in fn()]
'''


def test_the_comparison_sees_through_what_may_differ():
    assert plain(TWIN) == plain(OTHER)


@pytest.mark.parametrize(
    ("one", "another"),
    [("self.lock", "self.other"), ("Say", "Write"), ("collections.abc", "typing"), ("fn", "f")],
)
def test_the_comparison_sees_any_other_difference(one, another):
    assert plain(TWIN) != plain(OTHER.replace(one, another))
