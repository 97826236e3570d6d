"""Tasks of one event loop: first executions and replays per second, on each store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks import backends
from benchmarks.contenders.mysql_floors import UNBATCHED_ASYNCMY
from benchmarks.contenders.ours import ASYNC_SEMEL
from benchmarks.contenders.postgres_alternatives import ASYNC_ON_POSTGRES
from benchmarks.contenders.postgres_floors import PGBENCH, UNBATCHED_PSYCOPG, pgbench_is_here
from benchmarks.contenders.redis_alternatives import ASYNC_ON_REDIS
from benchmarks.contenders.redis_floors import BARE_PROTOCOL, RAW_PIPELINE
from benchmarks.contenders.seed import SEED
from benchmarks.contenders.sqlite_floors import AIOSQLITE, BATCH_LOOP, SHARED_AIOSQLITE
from benchmarks.figures import OURS, Race, Section, at_least, paired
from benchmarks.measuring import Effort, Place, TaskContender, Work, present
from benchmarks.racing import async_race

CALLERS = (1, 16, 128)
MANY = 128
PAIRED, ROUNDS = 21, 9


def run(effort: Effort) -> list[Section]:
    """Race on every store."""
    return [_redis(effort), _postgres(effort), _mariadb(effort), _sqlite(effort)]


def _redis(effort: Effort) -> Section:
    with backends.redis_server() as server:
        # The line that must show is measured without the others, in many paired rounds.
        heart, _ = _races((ASYNC_SEMEL, BARE_PROTOCOL, SEED), server.url, effort, (MANY,), PAIRED)
        races, missing = _races(
            (ASYNC_SEMEL, BARE_PROTOCOL, RAW_PIPELINE, SEED, *ASYNC_ON_REDIS),
            server.url,
            effort,
            CALLERS,
            ROUNDS,
        )
    first, replay = heart
    floor, seed = BARE_PROTOCOL.title, SEED.title
    return Section(
        "Redis, async",
        "",
        paired(heart) + races,
        [
            at_least(1, "Redis first, to a lock and a stored result", first.ratio(OURS, seed), 8),
            at_least(1, "Redis first, to the bare floor", first.ratio(OURS, floor), 0.8),
            at_least(1, "Redis replay, to the bare floor", replay.ratio(OURS, floor), 0.5),
        ],
        missing,
    )


def _postgres(effort: Effort) -> Section:
    floors = (PGBENCH,) if pgbench_is_here() else ()
    with backends.postgres_server(durable=effort.durable) as server:
        url = server.fresh_database()
        heart, _ = _races((ASYNC_SEMEL, UNBATCHED_PSYCOPG), url, effort, (MANY,), PAIRED)
        races, missing = _races(
            (ASYNC_SEMEL, *floors, UNBATCHED_PSYCOPG, *ASYNC_ON_POSTGRES),
            url,
            effort,
            CALLERS,
            ROUNDS,
        )
    if not floors:
        missing.append("pgbench is not on PATH")
    ratio = heart[0].ratio(OURS, UNBATCHED_PSYCOPG.title)
    return Section(
        "PostgreSQL with fsync, async",
        "",
        paired(heart) + races,
        [at_least(1, "PostgreSQL first, to unbatched psycopg", ratio, 4.5)],
        missing,
    )


def _mariadb(effort: Effort) -> Section:
    both = (ASYNC_SEMEL, UNBATCHED_ASYNCMY)
    with backends.mariadb_server(durable=effort.durable) as server:
        url = server.database()
        heart, _ = _races(both, url, effort, (MANY,), PAIRED)
        races, missing = _races(both, url, effort, CALLERS, ROUNDS)
    ratio = heart[0].ratio(OURS, UNBATCHED_ASYNCMY.title)
    return Section(
        "MariaDB with a flush per commit, async",
        "",
        paired(heart) + races,
        [at_least(1, "MariaDB first, to unbatched asyncmy", ratio, 4)],
        missing,
    )


def _sqlite(effort: Effort) -> Section:
    with backends.sqlite() as url:
        races, missing = _races(
            (ASYNC_SEMEL, BATCH_LOOP, AIOSQLITE, SHARED_AIOSQLITE), url, effort, CALLERS, ROUNDS
        )
    first = races[-2]
    return Section(
        "SQLite, WAL with synchronous=FULL, async",
        "Tasks that share an aiosqlite connection without taking turns share commits by accident; "
        "a rollback of one would undo the others. What must show is counted against turns.",
        races,
        [
            at_least(1, "SQLite first, to aiosqlite", first.ratio(OURS, AIOSQLITE.title), 8),
            at_least(1, "SQLite first, to bare batches", first.ratio(OURS, BATCH_LOOP.title), 0.5),
        ],
        missing,
    )


def _races(
    contenders: Sequence[TaskContender],
    url: str,
    effort: Effort,
    numbers_of_callers: Sequence[int],
    rounds: int,
) -> tuple[list[Race], list[str]]:
    """First executions and replays for each number of callers, in this order."""
    here, missing = present(contenders)
    races: list[Race] = []
    for callers in effort.callers(numbers_of_callers):
        # A loop for each: some contenders take the loop's executor with them when they leave.
        races += asyncio.run(
            async_race(
                here,
                Place(url, Work()),
                callers=callers,
                rounds=effort.rounds(rounds),
                effort=effort,
            )
        )
    return races, missing
