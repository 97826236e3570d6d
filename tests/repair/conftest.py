"""Abandoned attempts to repair, for both kinds of reconciler on each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engines.facade import KINDS, World
from semel import Policy, Record
from semel.core.records import ClaimRequest, Identity
from semel.repair import AsyncReconciler, Reconciler, reconcile
from semel.repair._sync import reconcile as sync_reconcile
from semel.repair.reconcile import OpenCases

OWNER = b"\x00the owner\xff\x00"
HELD = Policy(abandoned="hold")


class Repairs:
    """A reconciler of either kind, by plain calls, and the attempts it may find."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.engine = world.engine(policy=HELD, **options)

    def abandon(self, key: str, *, scope: str = "orders", hold: bool = True) -> Identity:
        """Leave an attempt behind, as a killed process does."""
        identity = Identity(scope, key)
        self.store("claim", ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=hold))
        self.store("renew", identity, OWNER, 0.0)
        return identity

    def store(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Ask the store, past the faults."""
        return self.engine.ask_store(verb, *args, **kwargs)

    def record(self, identity: Identity) -> Record:
        return self.store("get", identity)

    def reconciler(self, resolvers: Any, place: Any = None, **options: Any) -> Any:
        kind = Reconciler if self.world.name == "threads" else AsyncReconciler
        options = {"older_than": 0.0} | options
        return kind(self.engine.engine if place is None else place, resolvers, **options)

    def run(self, reconciler: Any, **options: Any) -> Any:
        return self.do(reconciler.run_once, **options)

    def do(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self.world.kind.finish(method, *args, **kwargs)

    def told(self, kind: type) -> list[Any]:
        return self.engine.told(kind)


class Ticking:
    """The clock of the open cases, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    """Threads, then asyncio."""
    return request.param


@pytest.fixture
def repairs(kind: str, store_url: str) -> Iterator[Repairs]:
    """Both kinds in turn, on each store in turn."""
    with World(kind, store_url) as world:
        yield Repairs(world)


@pytest.fixture
def memory_workshop(kind: str) -> Iterator[Repairs]:
    """Both kinds in turn, for what has nothing to do with the kind of store."""
    with World(kind, "memory://") as world:
        yield Repairs(world)


@pytest.fixture
def clock(monkeypatch) -> Ticking:
    """Decides when an open case is tried again."""
    ticking = Ticking()
    patch(monkeypatch, "monotonic", ticking)
    return ticking


def patch(monkeypatch, name: str, value: Any) -> None:
    """Replace a global of both kinds of reconciler."""
    for module in (reconcile, sync_reconcile):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def cases() -> OpenCases:
    return OpenCases(max_tries=3, backoff=10.0)
