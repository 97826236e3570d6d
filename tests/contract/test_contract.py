"""The contract on the reference store and on memory; the others run it beside their own tests.

(`tests/stores/test_*_contract.py`, where their servers and files are made.)
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from contract import listing_store, reference_store, versioned_store
from contract.listing_store import ListingStore
from contract.reference_store import DictStore
from contract.versioned_store import Table, VersionedStore
from engines.facade import Effect
from semel import Idempotency, RecordUnreadable, ResultUnavailable, StoreUnavailable
from semel.core.records import Busy, Claimed
from semel.stores.base import AsyncStore
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import FakeClock, StoreContract
from semel.testing.contract.given import ANNA, BERT, CARL, KEY, OTHER, ask


@pytest.mark.parametrize("shown", [reference_store, versioned_store, listing_store])
def test_the_page_about_own_stores_shows_them(project, shown):
    page = (project / "docs" / "extend" / "own-store.md").read_text(encoding="utf-8")
    source = Path(shown.__file__).read_text(encoding="utf-8")
    source = source.replace("from contract.reference_store import DictStore\n", "")  # is above it
    assert source.partition("from __future__ import annotations\n\n")[2] in page


class WithFakeClock(StoreContract):
    """Stores that take a clock do not make anyone wait."""

    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    def sleep(self, clock):
        return clock.advance

    @pytest.fixture
    def set_clock_back(self, clock):
        return lambda: clock.set_back(600)


class TestTheReferenceStore(WithFakeClock):
    @pytest.fixture
    def store(self, clock):
        return DictStore(clock)


class TestTheStoreThatLists(WithFakeClock):
    @pytest.fixture
    def store(self, clock):
        return ListingStore(clock)


class AsyncDictStore(AsyncStore):
    """The same for asyncio: with nothing but `send` and `close`, too."""

    unsupported = DictStore.unsupported

    def __init__(self, clock):
        self._store = DictStore(clock)

    async def send(self, requests):
        return self._store.send(requests)

    async def close(self):
        pass


class TestAnAsyncStoreOfOnesOwn(WithFakeClock):
    @pytest.fixture
    def store(self, clock):
        return AsyncDictStore(clock)


async def test_a_store_of_ones_own_offers_nothing_beside_answers():
    clock = time.time
    for store in (DictStore(), AsyncDictStore(clock)):
        assert store.watch(KEY) is None
        assert store.server_of(KEY) is None
        assert store.path is None
    assert DictStore().diagnose() == await AsyncDictStore(clock).diagnose() == []


class TestTheStoreOnConditionalWrites(WithFakeClock):
    @pytest.fixture
    def table(self):
        return Table()

    @pytest.fixture
    def store(self, table, clock):
        return VersionedStore(table, clock)

    @pytest.fixture
    def make_unreadable(self, table):
        def cut(identity):
            version, item = table.read(identity.digest)
            table.write_if(identity.digest, version, item[:-1])

        return cut


class Raced(Table):
    """Between a read and the next write, somebody else writes."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def write_if(self, key, version, item):
        if self.times > 0:
            self.times -= 1
            super().write_if(key, version, self.others)
        return super().write_if(key, version, item)


def test_a_conditional_write_that_comes_too_late_is_judged_again():
    table = Raced(times=0)
    store = VersionedStore(table)
    store.claim(ask(BERT))
    _, table.others = table.read(KEY.digest)
    store.forget(KEY)
    table.times = 1
    assert isinstance(store.claim(ask(ANNA)), Busy)
    assert store.get(KEY).owner == BERT


def test_a_conditional_write_is_not_made_over_a_record_that_was_made_anew():
    class Reborn(Table):
        """Before the next write, an operator forgets the record and another caller claims it."""

        armed = False

        def write_if(self, key, version, item):
            if self.armed:
                self.armed = False
                store.forget(KEY)
                store.claim(ask(CARL))
            return super().write_if(key, version, item)

    table = Reborn()
    store = VersionedStore(table)
    store.claim(ask(BERT))
    store.renew(KEY, BERT, 0)
    table.armed = True
    assert isinstance(store.claim(ask(ANNA)), Busy)
    assert store.get(KEY).owner == CARL


def test_a_record_that_never_stands_still_is_given_up():
    table = Raced(times=0)
    store = VersionedStore(table, tries=3)
    store.claim(ask(BERT))
    store.renew(KEY, BERT, 0)  # to be taken over
    _, table.others = table.read(KEY.digest)
    table.times = 3
    with pytest.raises(StoreUnavailable, match="changed 3 times"):
        store.claim(ask(ANNA))


def test_a_result_that_the_database_cannot_take_is_done_without_it():
    idem = Idempotency(VersionedStore(Table(), largest_item=1000))
    effect = Effect("x" * 2000)
    assert idem.execute("k", effect) == "x" * 2000
    with pytest.raises(ResultUnavailable):
        idem.execute("k", effect)
    assert effect.runs == 1
    idem.close()


def test_the_error_of_one_request_is_its_answer_and_no_others():
    store = VersionedStore(table := Table())
    table.write_if(KEY.digest, None, b"\x02something new")
    unreadable, claimed = store.send([ask(ANNA), ask(ANNA, identity=OTHER)])
    assert isinstance(unreadable, RecordUnreadable)
    assert isinstance(claimed, Claimed)


def test_a_record_of_an_unknown_format_is_not_guessed_at():
    table = Table()
    table.write_if(KEY.digest, None, b"\x02something new")
    with pytest.raises(RecordUnreadable):
        VersionedStore(table).claim(ask(ANNA))


@pytest.mark.parametrize(
    "item",
    [b"", b"\x81", b"\xa4text", b"\x81\xa6number\xa1\xff"],
    ids=["empty", "cut", "text", "torn"],
)
def test_a_damaged_record_is_told_by_our_own_error(item):
    table = Table()
    table.write_if(KEY.digest, None, VersionedStore.FORMAT + item)
    with pytest.raises(RecordUnreadable, match="damaged"):
        VersionedStore(table).get(KEY)


class TestMemory(WithFakeClock):
    @pytest.fixture
    def store(self, clock):
        return MemoryStore(clock=clock)


class TestMemoryByItsOwnClock(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()


class TestAsyncMemory(WithFakeClock):
    @pytest.fixture
    def store(self, clock):
        return AsyncMemoryStore(clock=clock)
