"""A lock and a stored result, as it is usually written, with redis.asyncio.

Read the result; else take a lock (SET NX PX with a token); else wait, from 50 ms doubling to
500 ms, and look again. While the function runs, a task of its own refreshes the lock. A script
stores the result and deletes the lock if the token is still the owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from benchmarks.measuring import AsyncGo, Contender, Place, TaskContender, awaiting

LOCK_MS = 30_000
TTL_MS = 86_400_000
MOST_CONNECTIONS = 256

STORE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('DEL', KEYS[1])
return 1
"""
REFRESH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
UNLOCK = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class SeedIdempotency:
    """`Execute` of the seed."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._store = client.register_script(STORE)
        self._refresh = client.register_script(REFRESH)
        self._unlock = client.register_script(UNLOCK)

    async def execute(self, key: str, fn: Callable[[], Awaitable[Any]]) -> Any:
        lock, result = f"idem:{key}:lock", f"idem:{key}:result"
        pause = 0.05
        while True:
            stored = await self._client.get(result)
            if stored is not None:
                return json.loads(stored)
            token = secrets.token_hex(16)
            if await self._client.set(lock, token, nx=True, px=LOCK_MS):
                return await self._run(lock, result, token, fn)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def _run(
        self, lock: str, result: str, token: str, fn: Callable[[], Awaitable[Any]]
    ) -> Any:
        refreshing = asyncio.create_task(self._keep(lock, token))
        try:
            value = await fn()
            stored = json.dumps(value)
            await self._store(keys=[lock, result], args=[token, stored, TTL_MS])
        except BaseException:
            await self._unlock(keys=[lock], args=[token])
            raise
        finally:
            refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refreshing
        return value

    async def _keep(self, lock: str, token: str) -> None:
        while True:
            await asyncio.sleep(LOCK_MS / 2000)
            await self._refresh(keys=[lock], args=[token, LOCK_MS])


@asynccontextmanager
async def _tasks(place: Place) -> AsyncIterator[AsyncGo]:
    async with Redis.from_url(place.url, max_connections=MOST_CONNECTIONS) as client:
        idem = SeedIdempotency(client)
        yield awaiting(lambda key: idem.execute(key, place.work.arun))


SEED: TaskContender = Contender("a lock and a stored result, redis.asyncio", "usual", _tasks)
