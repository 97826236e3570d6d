"""An idle engine costs nothing; 10,000 running attempts are kept by one timer.

Threads and connections are counted before the first call. Then 10,000 attempts run at once with a
lease of 30 s, on Redis, and the CPU time of this process is taken over whole renewal periods.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from benchmarks import backends
from benchmarks.figures import OURS, Lane, Race, Section, at_most
from benchmarks.measuring import Effort
from semel import AsyncIdempotency, Idempotency, Policy, open_async_store

ATTEMPTS = 10_000
LEASE = 30.0
PERIODS = 2
"""How many thirds of a lease are watched: each attempt is renewed once in each."""
CHUNK = 256


def run(effort: Effort) -> list[Section]:
    """Look at an idle engine, then at a busy one."""
    return [_idle(), asyncio.run(_renewing(effort))]


def _idle() -> Section:
    with (
        backends.redis_server() as server,
        closing(server.client()) as client,
        backends.postgres_server() as database,
        database.connect() as connection,
    ):
        watched = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"

        def connections() -> int:
            found = connection.execute(watched).fetchone()
            return len(client.client_list()) + int((found or (0,))[0])

        threads, before = threading.active_count(), connections()
        url = database.fresh_database()
        engines: list[Any] = [kind(at) for at in (server.url, url) for kind in _KINDS]
        threads, opened = threading.active_count() - threads, connections() - before
        del engines
    return Section(
        "An idle engine",
        "Four engines, sync and async, on Redis and PostgreSQL, before their first call.",
        checks=[
            at_most(7, "threads of an idle engine", threads, 0),
            at_most(7, "connections of an idle engine", opened, 0),
        ],
    )


_KINDS = (Idempotency, AsyncIdempotency)


async def _renewing(effort: Effort) -> Section:
    attempts = effort.count(ATTEMPTS, 600)
    lease = effort.count(int(LEASE), 1)
    with backends.redis_server() as server:
        store: Any = open_async_store(server.url)
        chunks = _watch_chunks(store)
        async with AsyncIdempotency(store, policy=Policy(lease=lease, concurrent="reject")) as idem:
            crowd = Crowd()
            await crowd.gather(idem, attempts)
            chunks.clear()
            cpu, start = time.process_time(), time.monotonic()
            await asyncio.sleep(PERIODS * lease / 3)
            share = (time.process_time() - cpu) / (time.monotonic() - start)
            renewed = list(chunks)
            await crowd.leave()
        await store.close()
    if not renewed:
        raise AssertionError("nothing was renewed")
    percent = share * 100
    return Section(
        f"{attempts:,} running attempts, lease {lease} s, Redis",
        f"{len(renewed)} commands renewed {sum(renewed):,} leases.",
        [
            Race(
                "share of one core",
                "%",
                [Lane(OURS, "ours", [percent])],
                more_is_better=False,
            )
        ],
        [
            at_most(7, "largest chunk of renewals", max(renewed), CHUNK),
            at_most(7, "CPU for 10,000 running attempts", percent, 5, "% of a core"),
        ],
    )


def _watch_chunks(store: Any) -> list[int]:
    """Note the size of each batch of renewals."""
    chunks: list[int] = []
    send = store.send

    async def watched(asks: Sequence[Any]) -> Any:
        chunks.append(len(asks))
        return await send(asks)

    store.send = watched
    return chunks


class Crowd:
    """Many attempts that run until they are told to end."""

    def __init__(self) -> None:
        self._finish = asyncio.Event()
        self._running = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def gather(self, idem: AsyncIdempotency, attempts: int) -> None:
        """Start them, some at a time: to claim all of them at once is another benchmark."""
        for begin in range(0, attempts, CHUNK):
            numbers = range(begin, min(begin + CHUNK, attempts))
            self._tasks += [
                asyncio.create_task(idem.execute(f"attempt-{number}", self._run))
                for number in numbers
            ]
            while self._running < numbers.stop:
                await asyncio.sleep(0.01)
                for task in self._tasks[begin:]:
                    if task.done():
                        await task  # it can only have failed

    async def leave(self) -> None:
        """Let them end."""
        self._finish.set()
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        self._running += 1
        await self._finish.wait()
