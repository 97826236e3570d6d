"""The runners for threads and for asyncio are twins: without async and await they read alike."""

from __future__ import annotations

import ast
import inspect

import pytest

from semel.stores.base import (
    AsyncBatching,
    AsyncRepairing,
    AsyncScannable,
    Batching,
    Repairing,
    Scannable,
)
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore, aio_many, many, tasks, threads

APART = {"_Line._answer", "_Line._send"}
"""What sleeps or keeps time does so in its own way; so does a pool."""


class Plain(ast.NodeTransformer):
    def visit_AsyncFunctionDef(self, node):
        return self.visit(ast.FunctionDef(**vars(node)))

    def visit_Await(self, node):
        return self.visit(node.value)

    def visit_comprehension(self, node):
        return ast.comprehension(node.target, self.visit(node.iter), node.ifs, 0)


def methods(module, name):
    tree = ast.parse(inspect.getsource(module))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    plain = [Plain().visit(node) for node in found.body]
    return {f"{name}.{each.name}": each for each in plain if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("name", ["_Line", "Executor"])
def test_the_twins_do_the_same(name):
    sync, aio = methods(threads, name), methods(tasks, name)
    for method in [*sync.keys() - APART]:
        assert ast.unparse(sync[method]) == ast.unparse(aio[method])


@pytest.mark.parametrize("name", ["Pool", "_Line", "Executor"])
def test_the_twins_have_the_same_names_in_the_same_order(name):
    assert [*methods(threads, name)] == [*methods(tasks, name)]


def test_the_twins_that_send_batches_do_the_same():
    sync, aio = methods(many, "Together"), methods(aio_many, "AsyncTogether")
    plain = {name.replace("Async", "", 1): method for name, method in aio.items()}
    assert [*sync] == [*plain]
    for name in sync.keys() - {"Together.__init__"}:  # that one names its executors
        assert ast.unparse(sync[name]) == ast.unparse(plain[name])


def test_both_kinds_offer_every_capability_of_a_table(mysql_url):
    store = MySQLStore(mysql_url)
    twin = AsyncMySQLStore(mysql_url)
    assert all(isinstance(store, each) for each in (Batching, Scannable, Repairing))
    assert all(isinstance(twin, each) for each in (AsyncBatching, AsyncScannable, AsyncRepairing))
