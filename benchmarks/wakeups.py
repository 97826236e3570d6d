"""Wake-ups: how long after a save returned a waiter in another process has its answer.

The owner saves here, the waiter waits in a process of its own, and both read the same clock. The
measure is a round trip (PING, SELECT 1) of the plain driver, taken in the same round. The message
leaves the server together with the owner's answer, and the waiter then asks the store: one round
trip of its own, and what it does before and after that.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psycopg
import redis

from benchmarks import backends
from benchmarks.figures import OURS, Lane, Race, Section, at_most
from benchmarks.measuring import RESULT, Effort
from semel import AsyncIdempotency, Idempotency

WAITERS, ROUNDS = 13, 25
"""Processes that wait, one after the other, and the rounds of each: no two are equally quick."""
PINGS = 25
LISTENS_AFTER = 0.03
"""Seconds in which a waiter that was told to begin has asked, subscribed and asked again."""
CONNECTS_AFTER = 1.0
READY = 60.0
KINDS = ("threads", "asyncio")
LIMIT = 3
"""Round trips: the message, the question, and what the machine needs to wake a process."""


class Server(NamedTuple):
    """Where owner and waiter meet."""

    name: str
    url: str
    ping: Callable[[], object]
    """One round trip of the plain driver."""


def run(effort: Effort) -> list[Section]:
    """Wake-ups on Redis and PostgreSQL."""
    with ExitStack() as stack:
        on_redis = stack.enter_context(backends.redis_server())
        client = stack.enter_context(closing(redis.Redis.from_url(on_redis.url)))
        url = stack.enter_context(backends.postgres_server()).fresh_database()
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        servers = (
            Server("Redis", on_redis.url, client.ping),
            Server("PostgreSQL", url, lambda: connection.execute("SELECT 1").fetchone()),
        )
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        # In turns, because the machine's speed changes from minute to minute.
        for _ in range(effort.rounds(WAITERS)):
            for server, kind in itertools.product(servers, KINDS):
                samples[server.name, kind] += _samples_of_a_waiter(
                    server.url, kind, server.ping, effort.rounds(ROUNDS)
                )
    return [_section(server, samples) for server in servers]


def _section(server: Server, samples: Mapping[tuple[str, str], list[float]]) -> Section:
    name = server.name
    races = [
        Race(
            f"{kind}, after the save",
            "round trips",
            [Lane(OURS, "ours", samples[name, kind])],
            more_is_better=False,
        )
        for kind in KINDS
    ]
    return Section(
        f"Wake-up in another process, {name}",
        "From the moment the save returned to the owner, until the waiter has its answer; below "
        "zero, the waiter had it first. A round trip is the plain driver's, in the same round.",
        races,
        [
            at_most(5, f"wake-up, {name}, {kind}", race.lanes[0].median, LIMIT, "round trips")
            for kind, race in zip(KINDS, races, strict=True)
        ],
    )


def _samples_of_a_waiter(
    url: str, kind: str, ping: Callable[[], object], rounds: int
) -> list[float]:
    """Take one sample in each round, after one that only connects."""
    samples = []
    label = os.urandom(4).hex()
    with Idempotency(url) as owner, _waiter(url, kind) as line:
        for number in range(rounds + 1):
            key, pause = f"{label}-{number}", LISTENS_AFTER if number else CONNECTS_AFTER

            def work(key: str = key, pause: float = pause) -> str:
                line.send(key)
                time.sleep(pause)
                return RESULT

            owner.execute(key, work)
            saved = time.monotonic()
            answered: float = line.recv()
            samples.append((answered - saved) / _round_trip(ping))
    return samples[1:]


def _round_trip(ping: Callable[[], object]) -> float:
    took = []
    for _ in range(PINGS):
        start = time.monotonic()
        ping()
        took.append(time.monotonic() - start)
    return statistics.median(took)


# --- the waiter --------------------------------------------------------------------------


@contextmanager
def _waiter(url: str, kind: str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait, args=(url, kind, theirs))
    process.start()
    try:
        if not ours.poll(READY):
            raise TimeoutError("the waiter did not start")
        ours.recv()
        yield ours
    finally:
        ours.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()


def _wait(url: str, kind: str, line: Connection) -> None:
    """Serve as the process that waits."""
    if kind == "asyncio":
        asyncio.run(_await(url, line))
        return
    with Idempotency(url) as waiter:
        waiter.peek("connected")
        line.send("ready")
        while (key := line.recv()) is not None:
            waiter.execute(key, _never)
            line.send(time.monotonic())


async def _await(url: str, line: Connection) -> None:
    async with AsyncIdempotency(url) as waiter:
        await waiter.peek("connected")
        line.send("ready")
        while (key := await asyncio.to_thread(line.recv)) is not None:
            await waiter.execute(key, _anever)
            line.send(time.monotonic())


def _never() -> Any:
    raise AssertionError("the waiter ran what it waited for")


async def _anever() -> Any:
    _never()
