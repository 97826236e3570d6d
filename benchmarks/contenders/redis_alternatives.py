"""The alternatives on Redis, each used as its documentation says.

An alternative is imported when it is opened: it need not be installed. Clients get connections
enough for all callers (redis-py's pool refuses the 101st by default).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import redis
import redis.asyncio

from benchmarks.measuring import (
    AsyncGo,
    Contender,
    Go,
    Place,
    TaskContender,
    ThreadContender,
    awaiting,
    calling,
)

MOST_CONNECTIONS = 1100
"""A storm has 1,000 callers in one process; a pool that makes them queue would be a handicap."""
TTL = 86_400
LEASE = 30


# --- redis-py's Lock with cache-aside ----------------------------------------------------


@contextmanager
def _lock_threads(place: Place) -> Iterator[Go]:
    with closing(redis.Redis.from_url(place.url, max_connections=MOST_CONNECTIONS)) as client:

        def call(key: str) -> Any:
            name = f"aside:{key}"
            stored: Any = client.get(name)
            if stored is not None:
                return json.loads(stored)
            with client.lock(f"{name}:lock", timeout=LEASE):
                stored = client.get(name)
                if stored is not None:
                    return json.loads(stored)
                value = place.work.run()
                client.set(name, json.dumps(value), ex=TTL)
                return value

        yield calling(call)


@asynccontextmanager
async def _lock_tasks(place: Place) -> AsyncIterator[AsyncGo]:
    opened = redis.asyncio.Redis.from_url(place.url, max_connections=MOST_CONNECTIONS)
    async with opened as client:

        async def call(key: str) -> Any:
            name = f"aside:{key}"
            stored = await client.get(name)
            if stored is not None:
                return json.loads(stored)
            async with client.lock(f"{name}:lock", timeout=LEASE):
                stored = await client.get(name)
                if stored is not None:
                    return json.loads(stored)
                value = await place.work.arun()
                await client.set(name, json.dumps(value), ex=TTL)
                return value

        yield awaiting(call)


LOCK: ThreadContender = Contender(
    "redis-py Lock and cache-aside", "alternative", _lock_threads, "redis"
)
ASYNC_LOCK: TaskContender = Contender(
    "redis-py Lock and cache-aside", "alternative", _lock_tasks, "redis"
)


# --- idemkit -----------------------------------------------------------------------------


@contextmanager
def _idemkit_threads(place: Place) -> Iterator[Go]:
    from idemkit import MethodConfig, RedisBackend, idempotent_sync
    from idemkit.core.sync_bridge import run_sync

    backend = RedisBackend.from_url(place.url, max_connections=MOST_CONNECTIONS)
    config = MethodConfig(key_fields=["order_id"], scope=lambda: "bench", expires_after_seconds=TTL)

    @idempotent_sync(backend=backend, config=config)
    def order(*, order_id: str) -> str:
        del order_id
        return place.work.run()

    yield calling(lambda key: order(order_id=key))
    run_sync(backend.aclose())


@asynccontextmanager
async def _idemkit_tasks(place: Place) -> AsyncIterator[AsyncGo]:
    from idemkit import MethodConfig, RedisBackend, idempotent

    config = MethodConfig(key_fields=["order_id"], scope=lambda: "bench", expires_after_seconds=TTL)
    async with RedisBackend.from_url(place.url, max_connections=MOST_CONNECTIONS) as backend:

        @idempotent(backend=backend, config=config)
        async def order(*, order_id: str) -> str:
            del order_id
            return await place.work.arun()

        yield awaiting(lambda key: order(order_id=key))


IDEMKIT: ThreadContender = Contender("idemkit", "alternative", _idemkit_threads, "idemkit")
ASYNC_IDEMKIT: TaskContender = Contender("idemkit", "alternative", _idemkit_tasks, "idemkit")


# --- idempotency-kit ---------------------------------------------------------------------


@asynccontextmanager
async def _kit_tasks(place: Place) -> AsyncIterator[AsyncGo]:
    from idempotency_kit import (
        AsyncIdempotencyCoordinator,
        IdempotencyDomainService,
        JsonResultAdapter,
        async_idempotent,
    )
    from idempotency_kit.infra.storage.redis.aio import RedisAsyncIdempotencyRepository

    opened = redis.asyncio.Redis.from_url(place.url, max_connections=MOST_CONNECTIONS)
    async with opened as client:
        coordinator = AsyncIdempotencyCoordinator(
            RedisAsyncIdempotencyRepository(client), IdempotencyDomainService()
        )

        @async_idempotent(operation="order.create", adapter=JsonResultAdapter(), ttl_seconds=TTL)
        async def order(given: Any, idempotency_key: str) -> str:
            del given, idempotency_key
            return await place.work.arun()

        yield awaiting(lambda key: order(coordinator, idempotency_key=key))


ASYNC_KIT: TaskContender = Contender(
    "idempotency-kit", "alternative", _kit_tasks, "idempotency-kit"
)


# --- aws-lambda-powertools ---------------------------------------------------------------


class _LambdaContext:
    """What it asks of AWS: how long the invocation may still take."""

    def get_remaining_time_in_millis(self) -> int:
        return LEASE * 1000


@contextmanager
def _powertools_threads(place: Place) -> Iterator[Go]:
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    opened = redis.Redis.from_url(
        place.url, max_connections=MOST_CONNECTIONS, decode_responses=True
    )
    with warnings.catch_warnings(), closing(opened) as client:
        warnings.simplefilter("ignore")  # a class that it uses itself is deprecated
        config: Any = IdempotencyConfig(expires_after_seconds=TTL)
        config.register_lambda_context(_LambdaContext())

        @idempotent_function(
            data_keyword_argument="order",
            config=config,
            persistence_store=CachePersistenceLayer(client=client),
        )
        def handle(*, order: dict[str, str]) -> str:
            del order
            return place.work.run()

        yield calling(lambda key: handle(order={"id": key}))


POWERTOOLS: ThreadContender = Contender(
    "aws-lambda-powertools", "alternative", _powertools_threads, "aws-lambda-powertools"
)


# --- celery-once: the lock step ----------------------------------------------------------


@contextmanager
def _celery_once_threads(place: Place) -> Iterator[Go]:
    from celery_once import AlreadyQueued
    from celery_once.backends import redis as celery_redis
    from celery_once.helpers import queue_once_key

    # It keeps one client for the whole process, and cannot be told how many connections to have.
    celery_redis.redis = redis.Redis.from_url(place.url, max_connections=MOST_CONNECTIONS)
    backend = celery_redis.Redis({"url": place.url})

    def call(key: str) -> Any:
        try:
            backend.raise_or_lock(queue_once_key("orders.create", {"order_id": key}), timeout=TTL)
        except AlreadyQueued:
            return None  # it refuses a duplicate, and keeps no result to answer with
        return place.work.run()

    yield calling(call)
    backend.redis.close()


CELERY_ONCE: ThreadContender = Contender(
    "celery-once, lock step (keeps no result)", "alternative", _celery_once_threads, "celery-once"
)

ON_REDIS: tuple[ThreadContender, ...] = (LOCK, IDEMKIT, POWERTOOLS, CELERY_ONCE)
ASYNC_ON_REDIS: tuple[TaskContender, ...] = (ASYNC_LOCK, ASYNC_IDEMKIT, ASYNC_KIT)
