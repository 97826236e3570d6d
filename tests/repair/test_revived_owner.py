"""A reconciler and an owner that comes back: one of them wins, whoever is first.

Owners are processes, stopped with SIGSTOP for longer than their lease; their effects are lines of
a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from engines.facade import World, never, wait_until
from faults.children import Child, Ledger, child
from repair.conftest import Repairs
from semel.repair import Overtaken, Resolved, Succeeded

POLICY = {"lease": 0.3, "abandoned": "hold"}


@pytest.fixture(params=["sqlite", "redis"])
def shared(request, kind: str) -> Iterator[Repairs]:
    """A store that several processes share."""
    with World(kind, request.getfixturevalue(f"{request.param}_url")) as world:
        yield Repairs(world)


@pytest.fixture
def owner(shared: Repairs, tmp_path: Path) -> Callable[[], AbstractContextManager[Child]]:
    """Start a process that has its effect, and waits before it ends."""
    ledger = Ledger(tmp_path / "effects")
    return partial(
        child,
        "operation.py",
        kind=shared.world.name,
        url=shared.world.url,
        ledger=str(ledger.path),
        key="k",
        steps=["effect", "wait"],
        policy=POLICY,
    )


def resolve(shared: Repairs, resolver):
    wait_until(lambda: shared.engine.peek("k").abandoned)
    return shared.run(shared.reconciler({"default": resolver}))


@pytest.mark.fault(35)
def test_an_owner_that_comes_back_after_the_reconciler_loses(shared, owner):
    with owner() as it:
        it.hear("waiting")
        it.pause()
        assert resolve(shared, lambda _: Succeeded("found out")).resolved == 1
        it.resume()
        it.go()
        assert it.outcome() == {"error": "LeaseLost"}
    assert shared.engine.execute("k", never) == "found out"
    assert len(shared.told(Resolved)) == 1


@pytest.mark.fault(35)
def test_an_owner_that_comes_back_while_the_resolver_asks_loses(shared, owner):
    with owner() as it:
        it.hear("waiting")
        it.pause()

        def ask(record):
            it.resume()
            it.go()
            assert it.outcome() == {"error": "LeaseLost"}
            return Succeeded("found out")

        assert resolve(shared, ask).resolved == 1
    assert shared.engine.execute("k", never) == "found out"


@pytest.mark.fault(35)
def test_an_owner_that_comes_back_before_the_reconciler_wins(shared, owner):
    with owner() as it:
        it.hear("waiting")
        it.pause()

        def come_back():
            it.resume()
            it.go()
            results.append(it.hear("result"))

        results: list[str] = []
        shared.engine.store.before["adopt"] = come_back
        report = resolve(shared, never)
    assert (report.resolved, report.moved_on) == (0, 1)
    assert shared.told(Overtaken) == []
    assert [shared.engine.execute("k", never)] == results
