"""The event loop that an engine belongs to, wherever that loop runs."""

from __future__ import annotations

import asyncio
import threading

from engines.facade import PATIENCE
from semel import AsyncIdempotency
from semel._mirror.tasks import Home


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


async def test_a_home_may_be_found_though_nobody_has_to_be_told():
    home = Home()
    home.check()
    assert home.loop is asyncio.get_running_loop()
