"""Places, engines and child processes for the tests of faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from engines.facade import KINDS, World
from faults.children import Child, Ledger, child
from faults.outages import Outage, cut_off, write_locked
from servers.redis import RedisServer, redis_server


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    """Threads, then asyncio."""
    return request.param


@pytest.fixture
def world(kind: str, store_url: str) -> Iterator[World]:
    """Both engines in turn, on each store in turn."""
    with World(kind, store_url) as opened:
        yield opened


@pytest.fixture
def memory_world(kind: str) -> Iterator[World]:
    """Both engines in turn, for what never reaches a store."""
    with World(kind, "memory://") as opened:
        yield opened


@pytest.fixture(params=["sqlite", "redis"])
def shared_url(request) -> str:
    """A store that several processes share, of each kind in turn."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def shared(kind: str, shared_url: str) -> Iterator[World]:
    """Engines of this process on a store that children use too."""
    with World(kind, shared_url) as opened:
        yield opened


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Where effects are counted."""
    return Ledger(tmp_path / "effects")


@pytest.fixture
def operation(ledger: Ledger) -> Callable[..., AbstractContextManager[Child]]:
    """Start a process that runs one operation; see workers/operation.py."""
    return partial(child, "operation.py", ledger=str(ledger.path), key="k")


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A Redis that the test may stop and kill."""
    with redis_server() as server:
        yield server


@pytest.fixture
def outage(shared: World) -> Iterator[Outage]:
    """A store that one engine cannot reach for a while, for a real reason."""
    shared.engine().peek("k")  # the table exists
    with (write_locked if shared.url.startswith("sqlite") else cut_off)(shared) as made:
        yield made
