"""Results of 100 B, 10 KB and 1 MB: what a call costs one caller as they grow."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress

from benchmarks import backends
from benchmarks.contenders.ours import SEMEL
from benchmarks.contenders.postgres_alternatives import ON_POSTGRES
from benchmarks.contenders.postgres_floors import PSYCOPG
from benchmarks.contenders.redis_alternatives import IDEMKIT, LOCK, POWERTOOLS
from benchmarks.contenders.redis_floors import EVALSHA
from benchmarks.contenders.sqlite_floors import BARE_SQLITE
from benchmarks.figures import OURS, Race, Section, at_least
from benchmarks.measuring import Effort, Place, ThreadContender, Work, present
from benchmarks.racing import race

SIZES = {"100 B": 98, "10 KB": 9_998, "1 MB": 999_998}
"""How long a text is whose JSON has that size."""
ROUNDS = 9


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def run(effort: Effort) -> list[Section]:
    """Race with results of each size, on each kind of store."""
    _keep_freed_memory()
    with backends.redis_server() as server, backends.pinned(server.process.pid):
        contenders = (SEMEL, EVALSHA, LOCK, IDEMKIT, POWERTOOLS)
        on_redis = _section("Redis", contenders, server.url, effort)
        first, replay = on_redis.races[-2:]
        on_redis.checks = [
            at_least(1, "Redis first, 1 MB, to a Lock", first.ratio(OURS, LOCK.title), 0.9),
            at_least(1, "Redis replay, 1 MB, to a Lock", replay.ratio(OURS, LOCK.title), 0.7),
        ]
    with backends.postgres_server(durable=effort.durable) as server:
        url = server.fresh_database()
        on_postgres = _section("PostgreSQL", (SEMEL, PSYCOPG, *ON_POSTGRES), url, effort)
    with backends.sqlite() as url:
        on_sqlite = _section("SQLite", (SEMEL, BARE_SQLITE), url, effort)
    return [on_redis, on_postgres, on_sqlite]


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed.

    It decides by the sizes freed so far whether a megabyte is taken from the system anew each time,
    which costs more than the call; so who ran first would decide who is fast.
    """
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 30)


def _section(
    store: str, contenders: Sequence[ThreadContender], url: str, effort: Effort
) -> Section:
    here, missing = present(contenders)
    races: list[Race] = []
    for size, length in SIZES.items():
        both = race(
            here,
            Place(url, Work("x" * length)),
            callers=1,
            rounds=effort.rounds(ROUNDS),
            effort=effort,
        )
        for kind, one in zip(("first", "replay"), both, strict=True):
            races.append(Race(f"{kind}, {size}", one.unit, one.lanes))
    return Section(f"Results of different sizes, {store}, threads", "", races, missing=missing)
