"""The shared contract and the law, on tiers: whatever the front says, SQL would have said it."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from hypothesis import given, settings

from proof.model import StoreBesideTheLaw, histories
from semel.stores.registry import open_async_store, open_store
from semel.testing import StoreContract, StoreDriver

SECONDS_A_MACHINE_MAY_STALL = 40.0


@pytest.fixture
def behind_url(sqlite_url):
    return sqlite_url


class TestTiered(StoreContract):
    @pytest.fixture
    def store(self, redis_url, behind_url):
        return open_store(redis_url, behind=behind_url)


class TestAsyncTiered(StoreContract):
    @pytest.fixture
    def store(self, redis_url, behind_url):
        return open_async_store(redis_url, behind=behind_url)


@pytest.mark.parametrize("opener", [open_store, open_async_store])
def test_tiers_obey_the_law(opener, redis_url, sqlite_url):
    with closing(StoreDriver(opener(redis_url, behind=f"{sqlite_url}?synchronous=NORMAL"))) as driver:

        @settings()
        @given(histories)
        def every_history(history):
            StoreBesideTheLaw(driver, time.time, SECONDS_A_MACHINE_MAY_STALL).live(history)

        every_history()
