"""The store for threads is generated; what its driver needs has the same names for both kinds."""

from __future__ import annotations

from semel.stores.sql.mysql import tasks, threads


def offered(module):
    return {name for name, each in vars(module).items() if is_own(module, each)}


def is_own(module, each):
    return getattr(each, "__module__", "") == module.__name__


def test_the_drivers_offer_the_same_names():
    only_tasks = {"_prepare"}
    assert offered(tasks) - only_tasks == offered(threads)
