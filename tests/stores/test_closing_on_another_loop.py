"""A store for asyncio is closed on another event loop than its own: no raw error of asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import warnings

import pytest

from engines.facade import PATIENCE, until
from semel import ConfigError, open_async_store
from semel.core.records import Claimed, Identity
from semel.stores.listening import Listening
from stores.redis_given import ask

IDENTITY = Identity("s", "k")
LISTENING = ("redis", "postgresql")
"""Stores that have a connection for wake-ups."""


@pytest.fixture(autouse=True)
def left_behind():
    """What was open on a loop that has ended cannot be closed any more, and says so when it goes."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def use(store) -> None:
    """Let the store open what it ever opens."""
    assert isinstance(await store.claim(ask(IDENTITY)), Claimed)
    await store.renew(IDENTITY, b"o" * 12, 30.0)
    if type(store).__name__.startswith(("AsyncRedis", "AsyncPostgres")):
        with store.watch(IDENTITY) as watch:
            await until(lambda: watch.listening is Listening.YES)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_store_whose_loop_has_ended_can_be_closed(store_url):
    store = open_async_store(store_url)
    asyncio.run(use(store))
    asyncio.run(store.close())


def test_a_store_whose_loop_still_runs_is_closed_or_refuses_to_be(store_url):
    store = open_async_store(store_url)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(step):
        return asyncio.run_coroutine_threadsafe(step, loop).result(PATIENCE)

    there(use(store))
    refuses = store_url.startswith(LISTENING)
    refusal = pytest.raises(ConfigError, match="another event loop; close it there")
    with refusal if refuses else contextlib.nullcontext():
        asyncio.run(store.close())
    if refuses:
        there(store.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    loop.close()
