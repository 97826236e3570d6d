"""The event loop that an engine belongs to, wherever that loop runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engines.facade import PATIENCE
from semel import AsyncIdempotency, ConfigError
from semel.engine.colours import tasks
from semel.engine.colours.tasks import LoopGuard


def test_a_loop_that_goes_on_in_another_thread_is_still_the_engines_own():
    loop = asyncio.new_event_loop()
    engine, answers = AsyncIdempotency("memory://"), []

    async def work():
        return "done"

    def use():
        answers.append(loop.run_until_complete(engine.execute("k", work)))

    use()
    elsewhere = threading.Thread(target=use)
    elsewhere.start()
    elsewhere.join(PATIENCE)
    loop.run_until_complete(engine.close())
    loop.close()
    assert answers == ["done", "done"]


def test_a_loop_that_went_to_another_thread_is_not_taken_for_the_next_one_in_its_place():
    loop = asyncio.new_event_loop()
    engine = AsyncIdempotency("memory://")

    async def work():
        return "done"

    async def use_elsewhere():
        with pytest.raises(ConfigError, match="another event loop"):
            await engine.execute("k", work)

    loop.run_until_complete(engine.execute("k", work))
    elsewhere = threading.Thread(target=loop.run_forever)
    elsewhere.start()
    asyncio.run(use_elsewhere())
    asyncio.run_coroutine_threadsafe(engine.close(), loop).result(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    elsewhere.join(PATIENCE)
    loop.close()


async def test_a_loop_that_does_not_tell_its_thread_is_known_all_the_same(monkeypatch):
    guard = LoopGuard()
    guard.check()
    monkeypatch.setattr(tasks, "get_ident", lambda: "as if it were uvloop's, which tells nothing")
    guard.check()
    assert guard.loop is asyncio.get_running_loop()


async def test_a_loop_is_known_though_nothing_waits_for_it():
    guard = LoopGuard()
    guard.check()
    assert guard.loop is asyncio.get_running_loop()
