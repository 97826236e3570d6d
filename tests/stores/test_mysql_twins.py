"""The store for threads is generated; what its driver needs has the same names for both kinds."""

from __future__ import annotations

import ast
import inspect

from semel.stores.sql.mysql import tasks, threads


def methods(module):
    tree = ast.parse(inspect.getsource(module))
    pool = next(node for node in tree.body if getattr(node, "name", "") == "Pool")
    return [node.name for node in pool.body if hasattr(node, "args")]


def test_the_pools_have_the_same_names_in_the_same_order():
    assert methods(threads) == methods(tasks)
