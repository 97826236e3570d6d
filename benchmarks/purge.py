"""Purging many expired records while claims go on: how long does the slowest claim wait?

For each SQL store: a million expired records are put into the table; the usual p99 of a claim is
measured; then another process purges while claims go on. Told as the ratio of the slowest claim
during the purge to the usual p99. Exits non-zero when a ratio is above LIMIT.

    python benchmarks/purge.py [--records 1000000] [postgresql mariadb sqlite]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sqlite3
import statistics
import subprocess
import sys
import time

import psycopg
import pymysql

from backends import BACKENDS
from semel import open_store
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.repair import purge
from semel.stores.sql.mysql.addresses import parse

LIMIT = 10.0
CLAIMS = 3000
SQL_STORES = ("postgresql", "mariadb", "sqlite")
OLD = Identity("old", "old")
RESULT = Encoded("json/1", b'"done"')


def fill_postgres(url: str, records: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        names = columns(connection.execute("SELECT * FROM idempotent_record LIMIT 1").description)
        made = {
            "digest": "md5(n::text)::uuid",
            "idem_key": "'old-' || n",
            "expire_at": "now() - interval '1 hour'",
        }
        chosen = ", ".join(made.get(name, f"r.{name}") for name in names)
        connection.execute(
            f"INSERT INTO idempotent_record ({', '.join(names)}) "  # noqa: S608 - our own names
            f"SELECT {chosen} FROM idempotent_record r, generate_series(1, {records}) n"
        )
        connection.execute("VACUUM ANALYZE idempotent_record")


def fill_mariadb(url: str, records: int) -> None:
    address, _ = parse(url, {})
    connection = pymysql.connect(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        database=address.database,
        unix_socket=address.unix_socket,
        autocommit=True,
    )
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT * FROM idempotent_record LIMIT 1")
        names = columns(cursor.description)
        made = {
            "digest": "UNHEX(MD5(seq))",
            "idem_key": "CONCAT('old-', seq)",
            "expire_at": "UTC_TIMESTAMP(6) - INTERVAL 1 HOUR",
        }
        chosen = ", ".join(made.get(name, f"r.{name}") for name in names)
        cursor.execute(
            f"INSERT INTO idempotent_record ({', '.join(names)}) "  # noqa: S608 - our own names
            f"SELECT {chosen} FROM idempotent_record r, seq_1_to_{records}"
        )


def fill_sqlite(url: str, records: int) -> None:
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        cursor = connection.execute("SELECT * FROM idempotent_record LIMIT 1")
        names, row = columns(cursor.description), cursor.fetchone()
        past = int((time.time() - 3600) * 1e6)

        def expired(number: int) -> tuple[object, ...]:
            made = {
                "identity": hashlib.md5(str(number).encode()).digest(),  # noqa: S324 - a number
                "idem_key": f"old-{number}",
                "expire_at": past,
            }
            return tuple(made.get(name, value) for name, value in zip(names, row, strict=True))

        marks = ", ".join("?" * len(names))
        connection.executemany(
            f"INSERT INTO idempotent_record ({', '.join(names)}) VALUES ({marks})",  # noqa: S608
            map(expired, range(records)),
        )
    connection.close()


FILL = {"postgresql": fill_postgres, "mariadb": fill_mariadb, "sqlite": fill_sqlite}


def columns(description: object) -> list[str]:
    return [column[0] for column in description]  # type: ignore[attr-defined]


def claims(store, label: str, go_on) -> list[float]:
    """Seconds of each claim, for as long as `go_on` says."""
    taken: list[float] = []
    while go_on(len(taken)):
        ask = ClaimRequest(
            Identity("new", f"{label}-{len(taken)}"), os.urandom(12), None, 30.0, 3600.0
        )
        start = time.perf_counter()
        store.claim(ask)
        taken.append(time.perf_counter() - start)
        store.complete(ask.identity, ask.owner, RESULT, 3600.0)
    return taken


def measure(name: str, records: int) -> float:
    with BACKENDS[name]() as url:
        store = open_store(url)
        store.put(OLD, RESULT, 3600.0, owner=os.urandom(12))
        FILL[name](url, records)
        usual = claims(store, "usual", lambda done: done < CLAIMS)
        purging = subprocess.Popen([sys.executable, __file__, "--purge", url])
        meanwhile = claims(
            store, "meanwhile", lambda done: purging.poll() is None and done < 1_000_000
        )
        left = store.purge(limit=10)
        store.close()
    p99 = statistics.quantiles(usual, n=100)[98]
    ratio = max(meanwhile) / p99
    print(
        f"{name}: {records:,} expired records purged during {len(meanwhile):,} claims "
        f"({sum(meanwhile):.0f} s of claiming); usual p99 {p99 * 1e3:.2f} ms, "
        f"slowest meanwhile {max(meanwhile) * 1e3:.2f} ms: ratio {ratio:.1f} (at most {LIMIT:g})"
    )
    if purging.returncode != 0 or left:
        raise SystemExit(f"{name}: the purge did not finish its work")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stores", nargs="*", default=SQL_STORES)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--purge", metavar="URL", help="purge this store and end")
    options = parser.parse_args()
    if options.purge:
        store = open_store(options.purge)
        purge(store)
        store.close()
        return 0
    return int(max(measure(name, options.records) for name in options.stores) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
