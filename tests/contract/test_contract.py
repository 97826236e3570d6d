"""The contract on the reference store and on memory; the others run it beside their own tests.

(`tests/stores/test_*_contract.py`, where their servers and files are made.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from contract import reference_store
from contract.reference_store import DictStore
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import FakeClock, StoreContract


def test_the_page_about_own_stores_shows_the_reference_store(project):
    page = (project / "docs" / "howto" / "own-store.md").read_text(encoding="utf-8")
    source = Path(reference_store.__file__).read_text(encoding="utf-8")
    assert source.partition("\n\n")[2] in page


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
