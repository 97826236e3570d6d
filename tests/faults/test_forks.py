"""A process forks.

| fault | expected |
|---|---|
| 32 fork after connect | fresh connections, fresh owner ids |
| 41 fork with running attempts | the child neither renews nor saves them, and has owner ids of its own |
| 53 fork that Python does not see | as 32 and 41: C code forks, and none of Python's hooks is called |

See also tests/engines/test_forking.py, which looks into the engine of the child.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter

import pytest

from engines.facade import World, never, wait_until
from faults.children import child
from semel.core.records import State

fault = pytest.mark.fault

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(params=["seen", pytest.param("unseen", marks=fault(53))])
def fork(request):
    """How the process forks: by os.fork, or by C code."""
    return request.param


@pytest.fixture(params=["sqlite", "redis", "postgres", "mysql"])
def server_url(request):
    """Every store that several processes share."""
    return request.getfixturevalue(f"{request.param}_url")


@fault(32)
def test_parent_and_child_share_keys_but_neither_connections_nor_owner_ids(
    kind, server_url, redis_of_this_worker, ledger, fork
):
    def connections() -> int:
        with contextlib.closing(redis_of_this_worker.client()) as client:
            return client.info("stats")["total_connections_received"]

    with child(
        "forked.py",
        kind=kind,
        url=server_url,
        ledger=str(ledger.path),
        when="connected",
        fork=fork,
    ) as it:
        it.hear("waiting")
        before = connections()
        it.go()
        first, second = it.outcome(), it.outcome()
        assert it.ended() == 0
    assert first["owners"] == second["owners"]  # every key ran once, for both of them
    effects = Counter(entry.key for entry in ledger.entries())
    assert effects.pop("own") == 2
    assert set(effects.values()) == {1}
    assert len(effects) == 20
    assert first["own"] != second["own"]
    if fork == "seen":
        assert first["inherited"] == second["inherited"] == 0, "SQLite is not open across a fork"
    if server_url.startswith("redis"):
        assert connections() - before >= 2, "our own question and a connection of the child"


@fault(41)
def test_a_child_that_returns_from_an_inherited_function_saves_nothing(shared_url, ledger, fork):
    orders = {
        "kind": "threads",
        "url": shared_url,
        "ledger": str(ledger.path),
        "when": "running",
        "fork": fork,
    }
    with World("threads", shared_url) as world, child("forked.py", **orders) as it:
        engine = world.engine()
        assert it.outcome() == {"error": "LeaseLost"}  # the child's end
        it.hear("waiting")
        assert engine.peek("k").state is State.PROCESSING, "the child touched the record"
        it.go()
        assert it.outcome() == {"result": "the parent's"}
        assert it.ended() == 0
        assert engine.execute("k", never) == "the parent's"
    assert len(ledger.entries()) == 1


@fault(41)
def test_a_child_does_not_keep_the_lease_of_its_dead_parent_alive(kind, shared_url, ledger, fork):
    orders = {
        "kind": kind,
        "url": shared_url,
        "ledger": str(ledger.path),
        "when": "dying",
        "fork": fork,
    }
    with (
        World(kind, shared_url) as world,
        child("forked.py", **orders, policy={"lease": 0.4}) as it,
    ):
        engine = world.engine()
        assert it.ended() == -signal.SIGKILL
        it.hear("waiting")  # the child lives on, with a copy of the running attempt
        wait_until(lambda: engine.peek("k").abandoned)
        assert engine.execute("k", ledger.effect()) == "done here"
        it.go()
        if kind == "threads":
            assert it.outcome() == {"error": "LeaseLost"}
        assert it.hear("end")
        assert engine.execute("k", never) == "done here"
    assert [entry.number for entry in ledger.entries()] == [1, 2]
