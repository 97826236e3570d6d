"""What type checkers say of `in_memory`; mypy and pyright read this file, nothing runs it."""

from __future__ import annotations

from typing import assert_type

from semel import AsyncIdempotency, Idempotency
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FaultyStore, in_memory


def sync(idem: Idempotency, faulty: FaultyStore) -> None:
    with in_memory(idem) as store:
        assert_type(store, MemoryStore)
    with in_memory() as store:
        assert_type(store, MemoryStore)
    with in_memory(idem, faulty) as own:
        assert_type(own, FaultyStore)
    with in_memory(store=faulty) as own:
        assert_type(own, FaultyStore)


async def asynchronous(idem: AsyncIdempotency, faulty: AsyncFaultyStore) -> None:
    async with in_memory(idem) as store:
        assert_type(store, AsyncMemoryStore)
    with in_memory(idem) as store:
        assert_type(store, AsyncMemoryStore)
    async with in_memory(idem, store=faulty) as own:
        assert_type(own, AsyncFaultyStore)
