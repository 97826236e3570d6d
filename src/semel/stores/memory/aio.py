"""Records in the memory of one process, for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from semel.core.records import Request
from semel.errors import StoreError
from semel.stores.base import AsyncStore
from semel.stores.memory.store import DEFAULT_MAX_RECORDS, Clock, MemoryStore

T = TypeVar("T")


class AsyncMemoryStore(AsyncStore):
    """A store for asyncio: a `MemoryStore` behind it, which never waits for anything.

    Its lock stays for what changes a record: loops in several threads may share one store.
    """

    def __init__(
        self,
        *,
        max_records: int = DEFAULT_MAX_RECORDS,
        evict: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = MemoryStore(max_records=max_records, evict=evict, clock=clock)

    async def ask(self, request: Request[T]) -> T:
        """Answer one request."""
        return self._store.ask(request)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer each request; a member's refusal is its own."""
        return self._store.send(requests)

    async def close(self) -> None:
        """Nothing was opened; the records stay as long as the store object does."""
        self._store.close()
