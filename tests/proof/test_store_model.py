"""Every store against the law: random histories, the same answers, the same records."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from hypothesis import Phase, given, settings

from contract import broken_stores as broken
from contract.reference_store import DictStore
from proof.model import StoreBesideTheLaw, histories
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.urls import open_async_store, open_store
from semel.testing import FakeClock, StoreDriver
from stores.postgres_given import always_in_batches

pytestmark = pytest.mark.usefixtures("not_measured")

SECONDS_A_MACHINE_MAY_STALL = 40.0
"""Less than half of the smallest lease, so that a wrong lease is told from a slow machine."""

EXACTLY = 0.000_002
"""Records may keep microseconds."""

ALL = tuple(Phase)
WITHOUT_SHRINKING = (Phase.generate,)
"""For failures that are wanted, nobody reads the shortest history."""


def obeys_the_law(store, clock=time.time, tolerance=SECONDS_A_MACHINE_MAY_STALL, phases=ALL):
    with closing(StoreDriver(store)) as driver:

        @settings(phases=phases)
        @given(histories)
        def every_history(history):
            StoreBesideTheLaw(driver, clock, tolerance).live(history)

        every_history()


def test_the_reference_store_obeys_the_law_to_the_very_edges_of_time():
    clock = FakeClock()
    obeys_the_law(DictStore(clock), clock, EXACTLY)


def test_the_memory_store_obeys_the_law_to_the_very_edges_of_time():
    clock = FakeClock()
    obeys_the_law(MemoryStore(clock=clock), clock, EXACTLY)


def test_the_async_memory_store_obeys_the_law():
    obeys_the_law(AsyncMemoryStore())


def test_sqlite_obeys_the_law_to_the_very_edges_of_time(sqlite_url):
    clock = FakeClock()
    obeys_the_law(open_store(sqlite_url, clock=clock, synchronous="NORMAL"), clock, EXACTLY)


def test_async_sqlite_obeys_the_law(sqlite_url):
    obeys_the_law(open_async_store(sqlite_url, synchronous="NORMAL"))


def test_redis_obeys_the_law(redis_url):
    obeys_the_law(open_store(redis_url))


def test_async_redis_obeys_the_law(redis_url):
    obeys_the_law(open_async_store(redis_url))


def test_mysql_obeys_the_law(mysql_url):
    obeys_the_law(open_store(mysql_url))


def test_async_mysql_obeys_the_law(mysql_url):
    obeys_the_law(open_async_store(mysql_url))


def test_postgresql_obeys_the_law(postgres_url):
    obeys_the_law(open_store(postgres_url))


def test_postgresql_in_partitions_obeys_the_law(postgres_url):
    obeys_the_law(open_store(postgres_url, partitions=3))


def test_async_postgresql_obeys_the_law(postgres_url):
    obeys_the_law(open_async_store(postgres_url, batching="off"))


def test_async_postgresql_in_batches_obeys_the_law(postgres_url):
    obeys_the_law(always_in_batches(open_async_store(postgres_url)))


@pytest.mark.parametrize(
    "kind",
    [
        broken.CompleteIgnoresTheOwner,
        broken.AnEndedOwnerIsGivenANewClaim,
        broken.ExpiresOnlyByPurge,
        broken.FenceRestarts,
        broken.TakeoverWeakensHold,
        broken.SupersededIsForgotten,
    ],
)
def test_a_store_that_breaks_the_law_is_found_out(kind):
    clock = FakeClock()
    with pytest.raises(AssertionError):
        obeys_the_law(kind(clock), clock, EXACTLY, phases=WITHOUT_SHRINKING)
