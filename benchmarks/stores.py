"""What a call costs on each store, in bare round trips of the same client beside it.

One caller, threads, interleaved rounds, medians. A first execution is two store commands, a
replay one; the floor is the cheapest command of the same client (PING, SELECT 1), for SQLite one
commit of one row. Durable settings: fsync on, WAL with synchronous=FULL.

    python benchmarks/stores.py [redis postgresql mariadb sqlite]
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing

import psycopg
import pymysql
import redis

from backends import BACKENDS
from semel import Idempotency
from semel.stores.sql.mysql.addresses import parse

ROUNDS = 15
CALLS = 100


def floor_redis(url: str) -> tuple[Callable[[], object], Callable[[], object]]:
    client = redis.Redis.from_url(url)
    return client.ping, client.close


def floor_postgresql(url: str) -> tuple[Callable[[], object], Callable[[], object]]:
    connection = psycopg.connect(url, autocommit=True)
    return lambda: connection.execute("SELECT 1").fetchone(), connection.close


def floor_mariadb(url: str) -> tuple[Callable[[], object], Callable[[], object]]:
    address, _ = parse(url, {})
    connection = pymysql.connect(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        database=address.database,
    )
    cursor = connection.cursor()
    return lambda: (cursor.execute("SELECT 1"), cursor.fetchone()), connection.close


def floor_sqlite(url: str) -> tuple[Callable[[], object], Callable[[], object]]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///") + ".floor", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE floor (id INTEGER PRIMARY KEY, text TEXT)")
    return lambda: connection.execute("INSERT INTO floor (text) VALUES ('x')"), connection.close


FLOORS = {
    "redis": floor_redis,
    "postgresql": floor_postgresql,
    "mariadb": floor_mariadb,
    "sqlite": floor_sqlite,
}


def micros(call: Callable[[int], object]) -> float:
    start = time.perf_counter()
    for number in range(CALLS):
        call(number)
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(name: str) -> None:
    with BACKENDS[name]() as url, closing(Idempotency(url)) as idem:
        bare, close = FLOORS[name](url)
        rounds = [
            (
                micros(lambda _: bare()),
                micros(lambda n, turn=turn: idem.execute(f"{turn}-{n}", lambda: "done")),
                micros(lambda n, turn=turn: idem.execute(f"{turn}-{n}", lambda: "done")),
            )
            for turn in range(ROUNDS)
        ]
        close()
    floor, first, replay = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"| {name} | {floor:.0f} us | {first:.0f} us = {first / floor:.1f} | "
        f"{replay:.0f} us = {replay / floor:.1f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stores", nargs="*", default=list(FLOORS))
    print("| store | bare round trip (SQLite: commit) | first execution | replay |")
    print("|---|---|---|---|")
    for name in parser.parse_args().stores:
        measure(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
