"""Bytes per finished record at 100,000 records: a 100-byte result under a 36-character key.

On Redis all memory counts, on PostgreSQL and SQLite the table with its indexes. Alternatives: one
record is made by the library, the others are copies of it under keys of the same length.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, LiteralString

import psycopg

from benchmarks import backends
from benchmarks.contenders.commands import TABLE, TTL
from benchmarks.contenders.ours import SEMEL
from benchmarks.contenders.postgres_alternatives import DBOS, HAND
from benchmarks.contenders.postgres_alternatives import IDEMKIT as IDEMKIT_ON_POSTGRES
from benchmarks.contenders.redis_alternatives import (
    ASYNC_KIT,
    CELERY_ONCE,
    IDEMKIT,
    LOCK,
    POWERTOOLS,
)
from benchmarks.figures import OURS, Lane, Race, Role, Section, at_most
from benchmarks.filling import SEMEL_ON_POSTGRES, fill_postgres, fill_sqlite
from benchmarks.measuring import (
    RESULT,
    Effort,
    Place,
    TaskContender,
    ThreadContender,
    Work,
    present,
)
from semel import open_store
from semel.core import run_info
from semel.core.records import ClaimRequest, CompleteRequest, Encoded, Identity
from semel.stores.redis.commands import KeyLayout

RECORDS = 100_000
BATCH = 1_000
TARGET = 345
"""What docs/stores/redis.md promises."""
STORED = Encoded("json/1", b'"' + RESULT.encode() + b'"')
KEYS = KeyLayout("idem:")

TABLES: Mapping[str, tuple[str, Mapping[str, LiteralString]]] = {
    OURS: (TABLE, SEMEL_ON_POSTGRES),
    HAND.name: ("by_hand", {"key": "lpad(n::text, 36, '0')"}),
    IDEMKIT_ON_POSTGRES.name: (
        "idemkit_records",
        {"effective_key": "md5(n::text) || md5((-n)::text)"},  # a SHA-256 in hex
    ),
    DBOS.name: ("dbos.workflow_status", {"workflow_uuid": "lpad(n::text, 36, '0')"}),
}
"""Where each keeps its records on PostgreSQL, and what makes its key."""


def run(effort: Effort) -> list[Section]:
    """Count bytes on each store."""
    records = effort.count(RECORDS, 50)
    return [_redis(records), _postgres(records), _sqlite(records)]


# --- Redis -------------------------------------------------------------------------------


def _redis(records: int) -> Section:
    threads, missing = present((LOCK, IDEMKIT, POWERTOOLS, CELERY_ONCE))
    tasks, also_missing = present((ASYNC_KIT,))
    with backends.redis_server() as server, closing(server.client()) as client:
        _semel_records(server.url, records)  # once before: buffers and scripts are not records
        lanes = [
            _lane(OURS, "ours", client, records, lambda: _semel_records(server.url, records)),
            _lane(
                "empty strings under the same keys",
                "floor",
                client,
                records,
                lambda: _empty_strings(client, records),
            ),
        ]
        for one in threads:
            _call_once(one, server.url, client)
            lanes.append(_copies(one.title, client, records))
        for another in tasks:
            asyncio.run(_await_once(another, server.url, client))
            lanes.append(_copies(another.title, client, records))
    return Section(
        "Memory per record, Redis",
        "",
        [Race(f"at {records:,} records", "bytes", lanes, more_is_better=False)],
        [at_most(3, "bytes per record in Redis", lanes[0].median, TARGET)],
        missing + also_missing,
    )


def _lane(name: str, role: Role, client: Any, records: int, write: Callable[[], None]) -> Lane:
    client.flushall()
    before = client.info("memory")["used_memory"]
    write()
    if client.dbsize() != records:
        raise AssertionError(f"{name}: {client.dbsize()} keys for {records} records")
    return Lane(name, role, [(client.info("memory")["used_memory"] - before) / records])


def _identities(records: int) -> Iterator[list[Identity]]:
    for begin in range(0, records, BATCH):
        count = min(BATCH, records - begin)
        yield [Identity("orders.create", str(uuid.uuid4())) for _ in range(count)]


def _semel_records(url: str, records: int) -> None:
    info = run_info.build(run_info.process_name(), TTL, "json")  # as an engine sends it
    store: Any = open_store(url)
    with closing(store):
        for identities in _identities(records):
            asks = [
                ClaimRequest(i, os.urandom(12), os.urandom(16), 30, TTL, run_info=info)
                for i in identities
            ]
            store.send(asks)
            done = [CompleteRequest(ask.identity, ask.owner, STORED, TTL) for ask in asks]
            if not all(answer is True for answer in store.send(done)):
                raise AssertionError("a record was not completed")


def _empty_strings(client: Any, records: int) -> None:
    for identities in _identities(records):
        pipeline = client.pipeline(transaction=False)
        for identity in identities:
            pipeline.set(KEYS.record(identity), b"", ex=int(TTL))
        pipeline.execute()


def _call_once(one: ThreadContender, url: str, client: Any) -> None:
    client.flushall()
    with one.open(Place(url, Work())) as go:
        go([str(uuid.uuid4())], 1, "first")


async def _await_once(one: TaskContender, url: str, client: Any) -> None:
    client.flushall()
    async with one.open(Place(url, Work())) as go:
        await go([str(uuid.uuid4())], 1, "first")


def _copies(name: str, client: Any, records: int) -> Lane:
    """Copy the one record; its key ends with what makes it unique, and so do the copies'."""
    (key,) = client.keys()
    value, ttl = client.dump(key), client.pttl(key)

    def write() -> None:
        for begin in range(0, records, BATCH):
            pipeline = client.pipeline(transaction=False)
            for number in range(begin, min(begin + BATCH, records)):
                pipeline.restore(key[:-8] + f"{number:08d}".encode(), ttl, value)
            pipeline.execute()

    return _lane(name, "alternative", client, records, write)


# --- SQL ---------------------------------------------------------------------------------


def _postgres(records: int) -> Section:
    here, missing = present((SEMEL, HAND, IDEMKIT_ON_POSTGRES, DBOS))
    lanes: list[Lane] = []
    with backends.postgres_server() as server:
        url = server.fresh_database()
        for one in here:
            with one.open(Place(url, Work())) as go:
                go([str(uuid.uuid4())], 1, "first")
            table, keys = TABLES[one.name]
            fill_postgres(url, table, keys, records)
            with psycopg.connect(url) as connection:
                found = connection.execute(
                    "SELECT pg_total_relation_size(%s::regclass)", (table,)
                ).fetchone()
            lanes.append(Lane(one.title, one.role, [(found or (0,))[0] / records]))
    return Section(
        "Disk per record, PostgreSQL",
        "The table with its indexes.",
        [Race(f"at {records:,} records", "bytes", lanes, more_is_better=False)],
        missing=missing,
    )


def _sqlite(records: int) -> Section:
    with backends.sqlite() as url:
        with SEMEL.open(Place(url, Work())) as go:
            go([str(uuid.uuid4())], 1, "first")
        fill_sqlite(url, TABLE, records)
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (size,) = connection.execute("PRAGMA page_size").fetchone()
    lanes = [Lane(OURS, "ours", [pages * size / records])]
    return Section(
        "Disk per record, SQLite",
        "The whole file.",
        [Race(f"at {records:,} records", "bytes", lanes, more_is_better=False)],
    )
