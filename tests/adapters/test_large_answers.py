"""Large answers are saved a few at a time: each is copied several times on its way to the store."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from semel import AsyncIdempotency, Idempotency
from semel.adapters._sync.integration import Integration
from semel.adapters.integration import LARGE, LARGE_AT_ONCE, AsyncIntegration
from semel.http.requests import Headers, Request
from semel.http.storing import Answer

REQUESTS = 3 * LARGE_AT_ONCE


def a_request(number):
    return Request("POST", "/", b"", Headers([(b"idempotency-key", b"k%d" % number)]), None)


class Watched:
    """Counts who is saving at the same time."""

    def __init__(self):
        self.now = self.most = 0
        self._mutex = threading.Lock()

    def enter(self):
        with self._mutex:
            self.now += 1
            self.most = max(self.most, self.now)

    def leave(self):
        with self._mutex:
            self.now -= 1


@pytest.mark.parametrize(("size", "held_back"), [(LARGE, True), (LARGE - 1, False)])
async def test_tasks_take_turns_with_large_answers(size, held_back, monkeypatch):
    watched = Watched()
    async with AsyncIdempotency("memory://") as engine:
        succeeded = engine.internals.succeeded

        async def slowly(*given):
            watched.enter()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            watched.leave()
            return await succeeded(*given)

        monkeypatch.setattr(engine.internals, "succeeded", slowly)
        integration = AsyncIntegration(engine, {})
        rules = integration.routing.find("POST", "/")

        async def body():
            return b""

        async def one(number):
            exchange = await integration.begin(rules, a_request(number), body)
            exchange.enter()
            assert await exchange.answered(200, [], bytes(size)) is None
            return await integration.begin(rules, a_request(number), body)

        replays = await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    assert all(isinstance(replay, Answer) and len(replay.body) == size for replay in replays)
    assert watched.most == (LARGE_AT_ONCE if held_back else REQUESTS)


@pytest.mark.parametrize(("size", "held_back"), [(LARGE, True), (LARGE - 1, False)])
def test_threads_take_turns_with_large_answers(size, held_back, monkeypatch):
    watched = Watched()
    full = threading.Barrier(LARGE_AT_ONCE if held_back else REQUESTS)
    with Idempotency("memory://") as engine, ThreadPoolExecutor(REQUESTS) as threads:
        succeeded = engine.internals.succeeded

        def slowly(*given):
            watched.enter()
            full.wait(30)  # as many as may save at once are here
            watched.leave()
            return succeeded(*given)

        monkeypatch.setattr(engine.internals, "succeeded", slowly)
        integration = Integration(engine, {})
        rules = integration.routing.find("POST", "/")

        def one(number):
            exchange = integration.begin(rules, a_request(number), lambda: b"")
            exchange.enter()
            assert exchange.answered(200, [], bytes(size)) is None
            return integration.begin(rules, a_request(number), lambda: b"")

        replays = list(threads.map(one, range(REQUESTS)))
    assert all(isinstance(replay, Answer) and len(replay.body) == size for replay in replays)
    assert watched.most == (LARGE_AT_ONCE if held_back else REQUESTS)
