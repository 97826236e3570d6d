"""Stores whose callers come in crowds of a known size; twins for threads and asyncio.

So many callers wait for each other with a claim, and again when they park their attempts. What they
ask is then one `send`. A renewal that goes on running is sent at once.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from semel.core.records import ClaimRequest, RenewRequest
from semel.errors import StoreError
from semel.testing import AsyncFaultyStore, FaultyStore


def _comes_in_crowds(request: Any) -> bool:
    match request:
        case ClaimRequest() | RenewRequest(lease=0):
            return True
    return False


class BatchedStore(FaultyStore):
    """For threads."""

    def __init__(self, store: Any, size: int) -> None:
        super().__init__(store)
        self.sent: list[int] = []
        """How many requests each batch had."""
        self._adding = threading.Lock()
        self._requests: list[Any] = []
        self._answers: list[Any] = []
        self._everybody = threading.Barrier(size, self._send)

    def _send(self) -> None:
        self._answers = self.store.send(self._requests)
        self.sent.append(len(self._requests))
        self._requests = []

    def ask(self, request: Any) -> Any:
        if not _comes_in_crowds(request):
            return self.store.ask(request)
        with self._adding:
            place = len(self._requests)
            self._requests.append(request)
        self._everybody.wait(60)
        return _answer(self._answers[place])


class AsyncBatchedStore(AsyncFaultyStore):
    """For asyncio."""

    def __init__(self, store: Any, size: int) -> None:
        super().__init__(store)
        self.sent: list[int] = []
        self._size = size
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []

    async def ask(self, request: Any) -> Any:
        if not _comes_in_crowds(request):
            return await self.store.ask(request)
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answered))
        if len(self._waiting) == self._size:
            waiting, self._waiting = self._waiting, []
            answers = await self.store.send([each for each, _ in waiting])
            self.sent.append(len(waiting))
            for (_, future), answer in zip(waiting, answers, strict=True):
                future.set_result(answer)
        return _answer(await asyncio.wait_for(answered, 60))


def _answer(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer
