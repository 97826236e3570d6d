"""Every store against the law: random histories, the same answers, the same records."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial

from hypothesis.stateful import run_state_machine_as_test

from contract.reference_store import DictStore
from proof.model import StoreAgainstTheLaw
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import FakeClock, StoreDriver

SECONDS_A_MACHINE_MAY_STALL = 40.0
"""Less than half of the smallest lease, so that a wrong lease is told from a slow machine."""

EXACTLY = 0.000_002
"""Records may keep microseconds."""


def obeys_the_law(store, clock=time.time, tolerance=SECONDS_A_MACHINE_MAY_STALL):
    with closing(StoreDriver(store)) as driver:
        run_state_machine_as_test(partial(StoreAgainstTheLaw, driver, clock, tolerance))


def test_the_reference_store_obeys_the_law_to_the_very_edges_of_time():
    clock = FakeClock()
    obeys_the_law(DictStore(clock), clock, EXACTLY)


def test_the_memory_store_obeys_the_law_to_the_very_edges_of_time():
    clock = FakeClock()
    obeys_the_law(MemoryStore(clock=clock), clock, EXACTLY)


def test_the_async_memory_store_obeys_the_law():
    obeys_the_law(AsyncMemoryStore())
