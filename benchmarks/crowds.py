"""Many threads on one SQL server, beside what teams write by hand with as many connections.

Many rounds of half a second each: a crowd needs a while to get into step, and 16 threads find one
step or another by chance.
"""

from __future__ import annotations

from benchmarks import backends
from benchmarks.contenders.mysql_alternatives import MYSQL_HAND
from benchmarks.contenders.ours import SEMEL
from benchmarks.contenders.postgres_alternatives import HAND
from benchmarks.figures import Check, Race, Section, at_least, at_most
from benchmarks.measuring import Effort, Place, ThreadContender, Work, present
from benchmarks.racing import race_of_a_crowd

CALLERS = (16, 64, 128)

FIRST = {"PostgreSQL": {16: 1.0, 64: 1.8, 128: 1.8}, "MariaDB": {128: 1.3}}
REPLAY = {"PostgreSQL": {16: 3.0, 128: 5.0}}
TAIL = {"PostgreSQL": (128,)}


def run(effort: Effort) -> list[Section]:
    """Race on both servers."""
    with backends.postgres_server(durable=effort.durable) as server:
        on_postgres = _section("PostgreSQL", HAND, server.fresh_database(), effort)
    with backends.mariadb_server(durable=effort.durable) as server:
        on_mariadb = _section("MariaDB", MYSQL_HAND, server.database(), effort)
    return [on_postgres, on_mariadb]


def _section(store: str, hand: ThreadContender, url: str, effort: Effort) -> Section:
    here, missing = present((SEMEL, hand))
    races: list[Race] = []
    checks: list[Check] = []
    for callers in effort.callers(CALLERS):
        first, replay, first_tail, replay_tail = race_of_a_crowd(
            here, Place(url, Work()), callers=callers, effort=effort
        )
        races += first, replay, first_tail, replay_tail
        by_hand = hand.title
        if (limit := FIRST.get(store, {}).get(callers)) is not None:
            what = f"{store} first, {callers} threads, to by hand"
            checks.append(at_least(1, what, first.times_better(by_hand), limit))
        if (limit := REPLAY.get(store, {}).get(callers)) is not None:
            what = f"{store} replay, {callers} threads, to by hand"
            checks.append(at_least(1, what, replay.times_better(by_hand), limit))
        if callers in TAIL.get(store, ()):
            what = f"{store} first, {callers} threads, slowest 1 %, time to by hand's"
            checks.append(at_most(1, what, first_tail.ratio("semel", by_hand), 1.0))
    return Section(f"{store} with fsync, many threads", "", races, checks, missing)
