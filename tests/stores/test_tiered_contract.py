"""The shared contract and the law, on tiers: whatever the front says, SQL would have said it."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from proof.model import StoreBesideTheLaw, histories
from semel.core.records import Busy, ClaimRequest, Finished, Identity
from semel.stores.tiered import front as timing
from semel.stores.tiered.rules import Tier
from semel.stores.urls import open_async_store, open_store
from semel.testing import StoreContract, StoreDriver
from servers.redis import wait_until
from stores.tiered_given import PATIENT

SECONDS_A_MACHINE_MAY_STALL = 40.0
"""Less than half of the smallest lease, so that a wrong lease is told from a slow machine."""


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mariadb"])
def behind(request, tmp_path_factory) -> str:
    """One database for all: a prefix of its own is all that a store needs to be empty."""
    match request.param:
        case "postgres":
            return request.getfixturevalue("postgres_of_this_worker").fresh_database()
        case "mariadb":
            return request.getfixturevalue("mariadb_of_this_worker").database()
    return f"sqlite:///{tmp_path_factory.mktemp('behind') / 'semel.db'}?synchronous=NORMAL"


@pytest.fixture
def options(behind) -> dict[str, Any]:
    return {"behind": behind, "prefix": os.urandom(8).hex(), "front_timeout": PATIENT}


@pytest.mark.more(one_of=3)
class TestTiered(StoreContract):
    @pytest.fixture
    def store(self, redis_url, options):
        return open_store(redis_url, **options)


@pytest.mark.more(one_of=3)
class TestAsyncTiered(StoreContract):
    @pytest.fixture
    def store(self, redis_url, options):
        return open_async_store(redis_url, **options)


@pytest.fixture
def from_the_front(monkeypatch) -> Counter[type]:
    """Counts what the front answers by itself."""
    answers: Counter[type] = Counter()
    answer = Tier.answer

    def counting(tier, ask, look):
        given = answer(tier, ask, look)
        answers[type(given)] += 1
        return given

    monkeypatch.setattr(Tier, "answer", counting)
    return answers


@pytest.fixture(params=[timing.MARK_LIFE, 0.001])
def mark_life(request, monkeypatch) -> float:
    """Nothing is late here: where marks are short the front answers more, and is tried harder."""
    monkeypatch.setattr(timing, "MARK_LIFE", request.param)
    return request.param


@pytest.mark.parametrize("opener", [open_store, open_async_store])
def test_tiers_obey_the_law(opener, redis_url, sqlite_url, from_the_front, mark_life):
    behind = f"{sqlite_url}?synchronous=NORMAL"
    store = opener(redis_url, behind=behind, front_timeout=PATIENT)
    with closing(StoreDriver(store)) as driver:

        @settings()
        @given(histories)
        def every_history(history):
            StoreBesideTheLaw(driver, time.time, SECONDS_A_MACHINE_MAY_STALL).live(history)

        every_history()
        if mark_life < 1:  # a longer mark, which half of these claims leave, keeps hints out
            running = ClaimRequest(Identity("s", "running"), os.urandom(12), None, 60.0, 60.0)
            driver.ask(running)

            def is_busy_by_the_front() -> bool:
                assert isinstance(driver.ask(replace(running, owner=os.urandom(12))), Busy)
                return from_the_front[Busy] > 0

            wait_until(is_busy_by_the_front, "an answer of the front")
    assert from_the_front[Finished] > 0
