"""Bytes per finished record on each store, for results of different sizes.

    python -m benchmarks.sizes [--records 20000]

Unlike the group `memory`, which copies rows, this writes every record by a claim and a complete,
under random keys, as a program does. So the pages are as full as in production. PostgreSQL is
vacuumed after every tenth of the records, because a complete leaves the row of its claim behind.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pymysql

from benchmarks import backends
from benchmarks.contenders.commands import TABLE, TTL
from semel import open_store
from semel.core import run_info
from semel.core.records import ClaimRequest, CompleteRequest, Encoded, Identity
from semel.stores.sql.mysql.addresses import parse

SIZES = (100, 1_000, 10_000)
BATCH = 500


class Place(NamedTuple):
    """An empty store, and how to ask its server for the room that it takes."""

    url: str
    room: Callable[[], int]
    tidy: Callable[[], object] = lambda: None


@contextmanager
def _redis() -> Iterator[Place]:
    with backends.redis_server() as server, closing(server.client()) as client:
        yield Place(server.url, lambda: int(client.info("memory")["used_memory"]))


@contextmanager
def _postgres() -> Iterator[Place]:
    with backends.postgres_server(durable=False) as server:
        url = server.fresh_database()
        with psycopg.connect(url, autocommit=True) as connection:

            def room() -> int:
                asked = "SELECT pg_total_relation_size(to_regclass(%s))"
                found = connection.execute(asked, (TABLE,)).fetchone()
                return (found or (0,))[0] or 0

            yield Place(url, room, lambda: connection.execute(f"VACUUM {TABLE}"))


@contextmanager
def _mariadb() -> Iterator[Place]:
    with backends.mariadb_server(durable=False) as server:
        url = server.database()
        at, _ = parse(url, {})
        connection = pymysql.connect(
            host=at.host, port=at.port, user=at.user, password=at.password, database=at.database
        )
        with closing(connection), connection.cursor() as cursor:
            cursor.execute("SELECT @@datadir")
            found: Any = cursor.fetchone()
            file = Path(found[0]) / str(at.database) / f"{TABLE}.ibd"
            yield Place(url, lambda: file.stat().st_size)


@contextmanager
def _sqlite() -> Iterator[Place]:
    with backends.sqlite() as url:

        def room() -> int:
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                pages, size = (
                    int(connection.execute(f"PRAGMA {name}").fetchone()[0])
                    for name in ("page_count", "page_size")
                )
                return pages * size

        yield Place(url, room)


PLACES = {"Redis": _redis, "PostgreSQL": _postgres, "MariaDB": _mariadb, "SQLite": _sqlite}


def _fill(place: Place, size: int, records: int) -> float:
    """Write so many records with a result of this size, and return the bytes of each."""
    info = run_info.build(run_info.process_name(), TTL, "json")  # as an engine sends it
    store: Any = open_store(place.url)
    with closing(store):
        store.get(Identity("orders.create", "none"))  # makes the table
        before = place.room()
        for number in range(records // BATCH):
            asks = [
                ClaimRequest(
                    Identity("orders.create", str(uuid.uuid4())),
                    os.urandom(12),
                    os.urandom(16),
                    30,
                    TTL,
                    run_info=info,
                )
                for _ in range(BATCH)
            ]
            store.send(asks)
            done = [CompleteRequest(ask.identity, ask.owner, _result(size), TTL) for ask in asks]
            if not all(reply is True for reply in store.send(done)):
                raise AssertionError("a record was not completed")
            if (number + 1) % max(1, records // BATCH // 10) == 0:
                place.tidy()
        return (place.room() - before) / records


def _result(size: int) -> Encoded:
    """A JSON text of so many bytes, which no database can compress by much."""
    return Encoded("json/1", b'"' + os.urandom(size // 2 - 1).hex().encode() + b'"')


def main() -> None:
    parser = argparse.ArgumentParser(description="measure the bytes per finished record")
    parser.add_argument("--records", type=int, default=20_000, metavar="N")
    records = parser.parse_args().records // BATCH * BATCH
    print("| Store | " + " | ".join(f"{size:,} bytes" for size in SIZES) + " |")
    for name, opened in PLACES.items():
        sizes = []
        for size in SIZES:
            with opened() as place:
                sizes.append(_fill(place, size, records))
        print(f"| {name} | " + " | ".join(f"{each:,.0f}" for each in sizes) + " |", flush=True)


if __name__ == "__main__":
    main()
