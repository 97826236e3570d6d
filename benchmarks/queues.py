"""Messages per second of a consumer with aio-pika on RabbitMQ, beside the bare consumer.

The handler is empty, the prefetch is 100. A lap begins with a queue that is full already and ends
when every message of it is acknowledged. The consumer has a core to itself, and is what limits;
the broker and the store share the other one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue

from benchmarks import backends
from benchmarks.figures import OURS, Lane, Race, Section, at_least, paired
from benchmarks.measuring import Effort
from semel.adapters.aio_pika import once
from semel.aio import AsyncIdempotency

PREFETCH = 100
ROUNDS = 9
LAP = 1.0
"""Seconds that a lap of the bare consumer should take."""
FEWEST = 200
BARE = "bare"
BODY = b'{"account":"ann","amount":500,"currency":"EUR","order":"2024-000017"}'

LIMITS = {"Redis": 0.6, "PostgreSQL": 0.45}


def run(effort: Effort) -> list[Section]:
    """Consume with records on Redis, then with records on PostgreSQL."""
    with backends.rabbitmq_server() as broker:
        with backends.redis_server() as redis:
            on_redis = _section("Redis", broker, redis.process.pid, redis.url, effort)
        with backends.postgres_server(durable=effort.durable) as postgres:
            url = postgres.fresh_database()
            on_postgres = _section("PostgreSQL", broker, postgres.process.pid, url, effort)
    return [on_redis, on_postgres]


def _section(store: str, broker: Any, server: int, url: str, effort: Effort) -> Section:
    with _apart(broker.process.pid, server), broker.virtual_host() as host:
        samples = asyncio.run(_measured(host.url, url, effort))
    race = Race(
        f"messages, prefetch {PREFETCH}",
        "/s",
        [Lane(BARE, "floor", samples[BARE]), Lane(OURS, "ours", samples[OURS])],
    )
    limit = LIMITS[store]
    return Section(
        f"aio-pika on RabbitMQ, records on {store}",
        "",
        paired([race]),
        [at_least(9, f"aio-pika, {store}: to the bare consumer", race.ratio(OURS, BARE), limit)],
    )


@contextmanager
def _apart(*servers: int) -> Iterator[None]:
    """Give the servers one core and this process the other."""
    cores = sorted(os.sched_getaffinity(0))
    for server in servers:
        backends.pin(server, {cores[0]})
    backends.pin(os.getpid(), {cores[-1]})
    try:
        yield
    finally:
        backends.pin(os.getpid(), set(cores))


async def _measured(broker: str, store: str, effort: Effort) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {BARE: [], OURS: []}
    async with AsyncExitStack() as stack:
        idem = await stack.enter_async_context(AsyncIdempotency(store))
        consumers = {
            BARE: await stack.enter_async_context(_consumer(broker, BARE, _Lane())),
            OURS: await stack.enter_async_context(_consumer(broker, OURS, _Protected(idem))),
        }
        count, rate = FEWEST, 0.0
        for number in range(-1, effort.rounds(ROUNDS)):
            for name in (BARE, OURS) if number % 2 else (OURS, BARE):
                rate = await consumers[name].lap(count)
                if number >= 0:
                    samples[name].append(rate)
            if number < 0:
                count = effort.count(int(rate * LAP), FEWEST)
    return samples


class _Consumer:
    """One queue, and who consumes it."""

    def __init__(self, queue: AbstractQueue, publisher: AbstractChannel, lane: _Lane) -> None:
        self._queue, self._publisher, self._lane = queue, publisher, lane

    async def lap(self, count: int) -> float:
        """Fill the queue and consume all of it; returns how many were acknowledged in a second."""
        await self._fill(count)
        self._lane.expect(count)
        start = time.perf_counter()
        tag = await self._queue.consume(self._lane.callback)
        await self._lane.finished()
        seconds = time.perf_counter() - start
        await self._queue.cancel(tag)
        left = await self._depth()
        if left or self._lane.handled != count:
            raise AssertionError(f"{self._lane.handled} of {count} were handled, {left} are left")
        return count / seconds

    async def _fill(self, count: int) -> None:
        run = os.urandom(4).hex()
        for number in range(count):
            message = aio_pika.Message(BODY, message_id=f"{run}-{number:027d}")
            await self._publisher.default_exchange.publish(message, self._queue.name)
        while await self._depth() < count:
            pass  # each look is a round trip to the broker

    async def _depth(self) -> int:
        declared = await self._publisher.declare_queue(self._queue.name, passive=True)
        return declared.declaration_result.message_count or 0


class _Lane:
    """Consumes as one writes it without semel; the handler is empty."""

    def expect(self, count: int) -> None:
        self.handled, self._count, self._all = 0, count, asyncio.Event()

    async def handle(self, _message: object) -> None:
        self.handled += 1
        if self.handled == self._count:
            self._all.set()

    async def callback(self, message: AbstractIncomingMessage) -> None:
        await self.handle(message)
        await message.ack()

    async def finished(self) -> None:
        """Wait until every message is acknowledged."""
        await self._all.wait()


class _Protected(_Lane):
    """The same with semel."""

    def __init__(self, idem: AsyncIdempotency) -> None:
        self._consumer = once(idem, self.handle, consumer="bench")

    async def callback(self, message: AbstractIncomingMessage) -> None:
        await self._consumer(message)

    async def finished(self) -> None:
        await super().finished()
        await self._consumer.drain()


@asynccontextmanager
async def _consumer(broker: str, name: str, lane: _Lane) -> AsyncIterator[_Consumer]:
    async with await aio_pika.connect(broker) as connection:
        publisher = await connection.channel(publisher_confirms=False)
        channel = await connection.channel()
        await channel.set_qos(PREFETCH)
        yield _Consumer(await channel.declare_queue(name), publisher, lane)
