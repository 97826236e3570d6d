"""Purging many expired records while claims go on: how long does the slowest claim wait?

For each SQL store, on a server with its own defaults: a million expired records are put into the
table. One process claims and completes all the time, with a millisecond of its own between two
keys: first alone, which gives the usual times, then while another process purges. Told is

    the slowest claim during the purge / the p99 of the claims before it

and beside it the slowest claim before it, which nothing of ours held up. What the machine does to
everybody is kept out: all processes run before whatever else it does, the files are in memory where
there is room (`--on-disk` leaves them on the disk), and the time in which a core stood still (see
`stalls`) is taken off the claims it fell into. Exits non-zero when a ratio is above LIMIT.

    python benchmarks/purge.py [--records 1000000] [postgresql mariadb sqlite]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import psycopg
import pymysql

from backends import in_memory, postgres, sqlite
from semel import open_store
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.repair import purge
from semel.repair.maintenance import BATCH, PAUSE
from semel.stores.sql.mysql.addresses import parse
from servers.mariadb import mariadb_server
from stalls import Stalls, before_others, watched

LIMIT = 10.0
REST = 0.001
"""What the claiming process does for itself between two keys, in seconds."""
SETTLE = 10.0
"""Seconds for a server to write out what the filling left in memory."""
OLD = Identity("old", "old")
RESULT = Encoded("json/1", b'"done"')


# --- the stores, and a table full of expired records ---------------------------------------


@contextmanager
def mariadb() -> Iterator[str]:
    """The URL of an empty database; the tests' log is too small for so many records."""
    with (
        tempfile.TemporaryDirectory(prefix="semel-bench-") as folder,
        mariadb_server(
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-log-file-size=96M",
            "--innodb-buffer-pool-size=128M",
            f"--tmpdir={folder}",  # a server that starts clears the common one
        ) as server,
    ):
        yield server.database()


def fill_postgresql(url: str, records: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        names = columns(connection.execute("SELECT * FROM idempotent_record LIMIT 0").description)
        made = {
            "digest": "md5(n::text)::uuid",
            "idem_key": "'old-' || n",
            "expire_at": "now() - interval '1 hour'",
        }
        connection.execute(copies(names, made, f"generate_series(1, {records}) n"))
        connection.execute("VACUUM ANALYZE idempotent_record")
        connection.execute("CHECKPOINT")


def fill_mariadb(url: str, records: int) -> None:
    address, _ = parse(url, {})
    connection = pymysql.connect(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        database=address.database,
        autocommit=True,
    )
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT * FROM idempotent_record LIMIT 0")
        made = {
            "digest": "UNHEX(MD5(seq))",
            "idem_key": "CONCAT('old-', seq)",
            "expire_at": "UTC_TIMESTAMP(6) - INTERVAL 1 HOUR",
        }
        cursor.execute(copies(columns(cursor.description), made, f"seq_1_to_{records}"))
        cursor.execute("ANALYZE TABLE idempotent_record")


def fill_sqlite(url: str, records: int) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("PRAGMA cache_size = -1000000")
        cursor = connection.execute("SELECT * FROM idempotent_record LIMIT 0")
        made = {
            "identity": "randomblob(16)",
            "idem_key": "'old-' || n",
            "expire_at": f"{int((time.time() - 3600) * 1e6)}",
        }
        counting = f"WITH c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {records}) "  # noqa: S608 - a number
        connection.execute(counting + copies(columns(cursor.description), made, "c"))
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def copies(names: list[str], made: dict[str, str], numbers: str) -> str:
    """Write the statement that repeats the one row of the table, with some columns made anew."""
    values = ", ".join(made.get(name, f"r.{name}") for name in names)
    return (
        f"INSERT INTO idempotent_record ({', '.join(names)}) "  # noqa: S608 - our own names
        f"SELECT {values} FROM idempotent_record r, {numbers}"
    )


def columns(description: Any) -> list[str]:
    return [column[0] for column in description]


STORES = {
    "postgresql": (postgres, fill_postgresql),
    "mariadb": (mariadb, fill_mariadb),
    "sqlite": (sqlite, fill_sqlite),
}


# --- two processes -------------------------------------------------------------------------


def claim_when_asked(url: str, line: Connection) -> None:
    """Claim for the seconds that were asked for, or until the next word; tell when each was."""
    with closing(open_store(url)) as store:
        while (seconds := line.recv()) is not None:
            end = time.monotonic() + seconds
            line.send(claims(store, lambda end=end: time.monotonic() < end and not line.poll()))


def claims(store: Any, go_on: Callable[[], bool]) -> array[float]:
    """Claim and complete; gives the beginning and the end of each claim, one after the other."""
    taken = array("d")
    while go_on():
        ask = ClaimRequest(Identity("new", os.urandom(8).hex()), os.urandom(12), None, 30.0, 3600.0)
        start = time.perf_counter()
        store.claim(ask)
        taken.extend((start, time.perf_counter()))
        store.complete(ask.identity, ask.owner, RESULT, 3600.0)
        time.sleep(REST)
    return taken


def purge_once(url: str, line: Connection, options: argparse.Namespace) -> None:
    with closing(open_store(url)) as store:
        store.counts()  # connected, like the process that claims
        line.send(None)
        line.recv()
        start = time.monotonic()
        removed = purge(
            store, batch=options.batch, pause=options.pause, max_seconds=options.most_seconds
        )
        line.send((removed, time.monotonic() - start))


# --- the measurement -----------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace) -> float:
    server, fill = STORES[name]
    with nullcontext() if options.on_disk else in_memory(), server() as url:
        with closing(open_store(url)) as store:
            store.put(OLD, RESULT, 3600.0, owner=os.urandom(12))
        fill(url, options.records)
        time.sleep(SETTLE)
        claimer, claiming = beside(claim_when_asked, url)
        purger, purging = beside(purge_once, url, options)
        purging.recv()
        with watched() as stalls:
            claiming.send(options.usual_seconds)
            before = claiming.recv()
            claiming.send(2 * options.most_seconds)
            purging.send(None)
            removed, seconds = purging.recv()
            claiming.send(None)  # it stops claiming, then ends
            during = claiming.recv()
        claimer.join()
        purger.join()
    usual, meanwhile = waits(before, stalls), waits(during, stalls)
    p99 = statistics.quantiles(usual, n=100)[98]
    ratio = max(meanwhile) / p99
    standing = max((end - start for start, end in stalls.intervals), default=0.0)
    print(
        f"{name}: {removed:,} records purged in {seconds:.0f} s; the machine stood still "
        f"{len(stalls.intervals)} times, up to {standing * 1e3:.1f} ms; "
        "without that a claim took, in ms:"
    )
    for label, taken in (("before it", usual), ("during it", meanwhile)):
        print(f"    {label}  {described(taken)}")
    print(
        f"    ratio of the slowest during it to the p99 before it: {ratio:.1f} "
        f"(at most {LIMIT:g}); of the slowest before it: {max(usual) / p99:.1f}",
        flush=True,
    )
    if removed < options.records:
        raise SystemExit(f"{name}: the purge did not finish within {options.most_seconds:g} s")
    return ratio


def beside(work: Callable[..., None], url: str, *args: Any) -> tuple[Any, Connection]:
    """Start the work in a process of its own, with a line to it."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=(url, there, *args), daemon=True
    )
    process.start()
    there.close()  # so that a process that dies is noticed, not waited for
    return process, here


def waits(moments: array[float], stalls: Stalls) -> list[float]:
    """How long each claim waited, without the time in which the machine stood still."""
    ends = iter(moments)
    return [end - start - stalls.within(start, end) for start, end in zip(ends, ends, strict=True)]


def described(taken: list[float]) -> str:
    cuts = statistics.quantiles(taken, n=1000)
    marks = {"p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "slowest": max(taken)}
    told = ", ".join(f"{mark} {value * 1e3:.2f}" for mark, value in marks.items())
    return f"{told} ({len(taken):,} claims)"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stores", nargs="*", default=tuple(STORES), metavar="store")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--pause", type=float, default=PAUSE)
    parser.add_argument("--usual-seconds", type=float, default=60.0)
    parser.add_argument("--most-seconds", type=float, default=900.0, help="for a purge")
    parser.add_argument("--on-disk", action="store_true", help="measure the disk, too")
    options = parser.parse_args()
    if not before_others():
        print("not allowed to run before others: what else this machine does is measured too")
    return int(max([measure(name, options) for name in options.stores]) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
