"""Threads: what a call costs one caller, and how many calls 16 and 128 callers get done.

One caller and its server are pinned to one core, alike for everybody: there a round trip is
steadiest, and nothing hides behind the other core.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import backends
from benchmarks.contenders.mysql_floors import PYMYSQL, SELECT_ONE_MYSQL
from benchmarks.contenders.ours import SEMEL
from benchmarks.contenders.postgres_alternatives import ON_POSTGRES
from benchmarks.contenders.postgres_floors import PSYCOPG, SELECT_ONE
from benchmarks.contenders.redis_alternatives import ON_REDIS
from benchmarks.contenders.redis_floors import EVALSHA, GET, PING
from benchmarks.contenders.sqlite_floors import BARE_SQLITE
from benchmarks.figures import OURS, Race, Section, at_least, at_most, paired
from benchmarks.measuring import Effort, Place, ThreadContender, Work, present
from benchmarks.racing import race

PAIRED, ROUNDS = 31, 9
MANY = (16, 128)


def run(effort: Effort) -> list[Section]:
    """Race on every store."""
    return [_redis(effort), _postgres(effort), _mariadb(effort), _sqlite(effort)]


def _redis(effort: Effort) -> Section:
    with backends.redis_server() as server, backends.pinned(server.process.pid):
        heart, _ = _races((SEMEL, EVALSHA, GET), server.url, effort, (1,), PAIRED)
        alone, missing = _races((SEMEL, EVALSHA, PING, *ON_REDIS), server.url, effort, (1,), ROUNDS)
    with backends.redis_server() as server:
        crowd, _ = _races((SEMEL, *ON_REDIS), server.url, effort, MANY, ROUNDS)
    first, replay = heart
    return Section(
        "Redis, threads",
        "",
        paired(heart) + alone + crowd,
        [
            at_most(2, "Redis first, time to evalsha's", first.ratio(EVALSHA.title, OURS), 1.0),
            at_most(2, "Redis replay, time to evalsha's", replay.ratio(EVALSHA.title, OURS), 1.05),
            at_least(2, "Redis replay, to a bare GET", replay.ratio(OURS, GET.title), 0.8),
        ],
        missing,
    )


def _postgres(effort: Effort) -> Section:
    with backends.postgres_server(durable=effort.durable) as server:
        url = server.fresh_database()
        with backends.pinned(server.process.pid):
            heart, _ = _races((SEMEL, PSYCOPG), url, effort, (1,), PAIRED)
            alone, missing = _races(
                (SEMEL, PSYCOPG, SELECT_ONE, *ON_POSTGRES), url, effort, (1,), ROUNDS
            )
    with backends.postgres_server(durable=effort.durable) as server:
        crowd, _ = _races((SEMEL, *ON_POSTGRES), server.fresh_database(), effort, MANY, ROUNDS)
    first, replay = heart
    floor = PSYCOPG.title
    return Section(
        "PostgreSQL with fsync, threads",
        "",
        paired(heart) + alone + crowd,
        [
            at_most(2, "PostgreSQL first, time to psycopg's", first.ratio(floor, OURS), 1.1),
            at_most(2, "PostgreSQL replay, time to psycopg's", replay.ratio(floor, OURS), 1.15),
        ],
        missing,
    )


def _mariadb(effort: Effort) -> Section:
    with backends.mariadb_server(durable=effort.durable) as server:
        url = server.database()
        alone, missing = _races((SEMEL, PYMYSQL, SELECT_ONE_MYSQL), url, effort, (1,), ROUNDS)
        crowd, _ = _races((SEMEL,), url, effort, MANY, ROUNDS)
    return Section("MariaDB with a flush per commit, threads", "", alone + crowd, missing=missing)


def _sqlite(effort: Effort) -> Section:
    with backends.sqlite() as url:
        alone, missing = _races((SEMEL, BARE_SQLITE), url, effort, (1,), ROUNDS)
        crowd, _ = _races((SEMEL,), url, effort, MANY, ROUNDS)
    return Section("SQLite, WAL with synchronous=FULL, threads", "", alone + crowd, missing=missing)


def _races(
    contenders: Sequence[ThreadContender],
    url: str,
    effort: Effort,
    numbers_of_callers: Sequence[int],
    rounds: int,
) -> tuple[list[Race], list[str]]:
    """First executions and replays for each number of callers, in this order."""
    here, missing = present(contenders)
    races: list[Race] = []
    for callers in effort.callers(numbers_of_callers):
        races += race(
            here,
            Place(url, Work()),
            callers=callers,
            rounds=effort.rounds(rounds),
            effort=effort,
        )
    return races, missing
