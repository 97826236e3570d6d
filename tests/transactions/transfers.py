"""Concurrent transfers between accounts, in processes that are killed at random moments.

A transfer moves one coin, writes a row to the ledger and keeps its record, in one transaction. After
each kill the books must balance: one row in the ledger per record, one record per row, and each
account is what the ledger says. Nothing in the business tables would stop a second effect.

Each thread of a process notes in a shared file where it is, so that it can be told afterwards where
the kill met it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from semel import Idempotency, RetryTransaction
from transactions.kinds import BEGIN, PATIENCE, mysql_login, path_of

ACCOUNTS = 6
COINS = 1000
THREADS = 4
AGAIN = 20
"""How many keys of the process before are tried once more: some were finished, some were not."""

OUTSIDE, BEGUN, CLAIMED, DONE, WRITTEN, COMMITTING = range(6)
PLACES = ("outside", "begun", "claimed", "effect done", "record written", "committing")

processes = multiprocessing.get_context("forkserver")


def start_forkserver() -> None:
    """Let one process import everything, once, and be the parent of those that are killed."""
    # There is one such process: those who kill servers of HTTP want it, too.
    processes.set_forkserver_preload(["transactions.transfers", "adapters.session_kills"])
    before = os.environ.get("PYTHONPATH")
    # Until Python 3.13 the server does not know where its parent found the modules.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def connect(url: str) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(path_of(url), timeout=PATIENCE, isolation_level=None)
    if url.startswith("postgresql"):
        return psycopg.connect(url, autocommit=True)
    return pymysql.connect(**mysql_login(url), autocommit=True)


def query(connection: Any, sql: str) -> list[Any]:
    cursor = connection.cursor()
    cursor.execute(sql)
    return list(cursor.fetchall()) if cursor.description else []


OTHERS = {
    "sqlite": "SELECT 1 WHERE 0",
    "postgresql": "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND backend_type = 'client backend'",
    "mysql": "SELECT 1 FROM information_schema.processlist WHERE id <> connection_id()",
}
"""Finds the other clients of a database."""


# --- a process of transfers ------------------------------------------------------------------


class Places:
    """One byte per thread, in a file that outlives the process."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), THREADS)

    def note(self, thread: int, place: int) -> None:
        self._bytes[thread] = place


def transfer(
    idem: Idempotency, connection: Any, key: str, begin: str, note: Callable[[int], None]
) -> None:
    """One unit of work; what it does follows from its key."""
    chance = random.Random(key)
    source, target = chance.sample(range(ACCOUNTS), 2)
    query(connection, begin)
    try:
        note(BEGUN)
        with idem.transaction(connection, key, payload=key) as attempt:
            note(CLAIMED)
            if not attempt.replayed:
                query(connection, f"INSERT INTO ledger VALUES ('{key}', {source}, {target})")
                for account, change in sorted(((source, -1), (target, 1))):
                    query(
                        connection,
                        f"UPDATE account SET coins = coins + {change} WHERE name = {account}",
                    )
                attempt.result = key
                note(DONE)
        note(WRITTEN)
    except BaseException:
        query(connection, "ROLLBACK")
        raise
    note(COMMITTING)
    query(connection, "COMMIT")
    note(OUTSIDE)


def transferring(url: str, places_path: str, first: int) -> None:
    """Transfer until killed: every key twice, by different threads at about the same time."""
    places = Places(places_path)
    begin = BEGIN[dialect_of(url)]
    numbers = itertools.count(2 * max(0, first - AGAIN))

    def work(thread: int) -> None:
        def note(place: int) -> None:
            places.note(thread, place)

        with contextlib.closing(connect(url)) as connection, Idempotency(url) as idem:
            while True:
                key = f"transfer-{next(numbers) // 2}"
                done = False
                while not done:
                    with contextlib.suppress(RetryTransaction):
                        transfer(idem, connection, key, begin, note)
                        done = True

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def dying(url: str, places_path: str, key: str, place: int) -> None:
    """One transfer that kills its own process at a place."""
    places = Places(places_path)

    def note(reached: int) -> None:
        places.note(0, reached)
        if reached == place == COMMITTING:
            # From beside, a moment later: while the server is being told, or has just been.
            threading.Timer(random.random() / 4000, kill).start()
        elif reached == place:
            kill()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.closing(connect(url)) as connection, Idempotency(url) as idem:
        transfer(idem, connection, key, BEGIN[dialect_of(url)], note)
        note(OUTSIDE)
        time.sleep(PATIENCE)


def dialect_of(url: str) -> str:
    scheme = url.partition(":")[0]
    return {"sqlite": "sqlite", "postgresql": "postgresql"}.get(scheme, "mysql")


# --- the books -------------------------------------------------------------------------------


class Bank:
    """The tables of a database, and the processes that are killed while they work on them."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.met: Counter[str] = Counter()
        """Where the kills met the threads."""
        self.kills = 0
        start_forkserver()
        self._places = folder / "places"
        self._places.write_bytes(bytes(THREADS))
        with Idempotency(url) as idem:
            idem.peek("any")
        self._connection = connection = connect(url)
        query(connection, "CREATE TABLE account (name INTEGER PRIMARY KEY, coins INTEGER)")
        query(connection, "CREATE TABLE ledger (entry VARCHAR(40), source INTEGER, target INTEGER)")
        for name in range(ACCOUNTS):
            query(connection, f"INSERT INTO account VALUES ({name}, {COINS})")

    def close(self) -> None:
        self._connection.close()

    def kill_at_random(self, within: float) -> None:
        """Let a process transfer for a moment, and kill it."""
        first = self._transfers()
        self._run(transferring, first, until=lambda: self._transfers() > first, more=within)
        self.met.update(PLACES[place] for place in self._places.read_bytes())

    def kill_at(self, place: int, key: str) -> bool:
        """Let a process kill itself at a place; tells whether it did so there."""
        self._run(dying, key, place)
        return self._places.read_bytes()[0] == place

    def _run(
        self,
        target: Callable[..., None],
        *args: Any,
        until: Callable[[], bool] | None = None,
        more: float = 0.0,
    ) -> None:
        self._places.write_bytes(bytes(THREADS))
        # A daemon: it ends with us, also when we are interrupted before the kill.
        process = processes.Process(
            target=target, args=(self.url, str(self._places), *args), daemon=True
        )
        process.start()
        if until is not None:
            wait_until(until)
            time.sleep(random.uniform(0, more))
            process.kill()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        process.close()
        self.kills += 1
        wait_until(self._deserted)

    def _deserted(self) -> bool:
        """Whether the server has noticed that its clients are gone; a commit it had is done then."""
        return query(self._connection, OTHERS[dialect_of(self.url)]) == []

    def _transfers(self) -> int:
        ((count,),) = query(self._connection, "SELECT count(*) FROM ledger")
        return int(count)

    def check(self) -> int:
        """Compare effects and records; tells how many transfers there were."""
        connection = self._connection
        ledger = query(connection, "SELECT entry, source, target FROM ledger")
        records = query(connection, "SELECT idem_key, status FROM idempotent_record")
        accounts = dict(query(connection, "SELECT name, coins FROM account"))
        entries = Counter(entry for entry, _, _ in ledger)
        assert [entry for entry, count in entries.items() if count > 1] == []
        assert {key for key, status in records} == set(entries)
        assert {status for _, status in records} <= {1}
        expected = dict.fromkeys(range(ACCOUNTS), COINS)
        for _, source, target in ledger:
            expected[source] -= 1
            expected[target] += 1
        assert accounts == expected
        return len(ledger)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
