"""Purging beside the calls: on a connection of its own, which keeps the log short."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from semel.core.records import Encoded, Identity, PutRequest
from semel.errors import StoreFull
from semel.repair import purge
from semel.stores.sql import sqlite
from semel.stores.sql.sqlite import LOG_PAGES, SQLiteStore
from semel.stores.urls import open_async_store, open_store
from semel.testing import StoreDriver

RECORDS = 3000
PAGE = 4096
RESULT = Encoded("json/1", b'"' + b"x" * 500 + b'"')


@pytest.mark.parametrize("opener", [open_store, open_async_store])
def test_a_purge_writes_the_log_back_before_any_call_would_have_to(opener, tmp_path):
    now = [1_000_000.0]
    file = tmp_path / "semel.db"
    with closing(StoreDriver(opener(f"sqlite:///{file}", clock=lambda: now[0]))) as store:
        store.send(
            [
                PutRequest(Identity("s", f"k{n}"), os.urandom(12), RESULT, 60.0)
                for n in range(RECORDS)
            ]
        )
        with closing(sqlite3.connect(file)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        now[0] += 120.0
        log, longest = Path(f"{file}-wal"), 0
        while store.purge(limit=50) == 50:
            longest = max(longest, log.stat().st_size)
        assert store.counts().succeeded == 0
    assert 0 < longest < LOG_PAGES * PAGE


def test_the_log_is_cut_when_a_long_reader_has_left(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "LOG_BYTES", 1 << 20)
    path = tmp_path / "semel.db"
    with closing(SQLiteStore(path)) as store:
        store.counts()
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_master").fetchall()
            large = Encoded("json/1", b"x" * 100_000)
            for number in range(40):
                store.put(Identity("s", str(number)), large, 60, owner=os.urandom(12))
            log = path.with_name("semel.db-wal")
            assert log.stat().st_size > 3 << 20, "the reader has not held the log"
            reader.execute("COMMIT")
        for number in range(40, 60):
            store.put(Identity("s", str(number)), large, 60, owner=os.urandom(12))
        assert log.stat().st_size <= 3 << 20


def test_a_full_disk_is_explained_and_a_purge_makes_room_that_is_used_again(tmp_path):
    """As on a disk: a purge needs room first, and no file becomes smaller by it."""
    now = [1_000_000.0]
    connection = sqlite3.connect(tmp_path / "semel.db", check_same_thread=False)
    with (
        closing(connection),
        closing(SQLiteStore(connection=connection, clock=lambda: now[0])) as store,
    ):

        def fill():
            for number in range(RECORDS):
                store.put(Identity("s", f"{now[0]}-{number}"), RESULT, 60.0, owner=os.urandom(12))

        def room(pages):
            (used,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {used + pages}")

        def fill_trail():
            for _ in range(RECORDS):  # each has an entry in the audit trail
                purge(store)

        store.counts()
        room(50)
        with pytest.raises(StoreFull, match="Make 16 MB of room on its disk first") as caught:
            fill()
        assert "then run semel purge" in str(caught.value)
        kept = store.counts().succeeded
        assert kept > 10
        with pytest.raises(StoreFull, match=r"nothing was done.*Make 16 MB of room"):
            fill_trail()
        now[0] += 120.0
        with pytest.raises(StoreFull, match=r"nothing was done.*Make 16 MB of room"):
            purge(store)
        room(50)
        assert purge(store) == kept
        room(0)
        with pytest.raises(StoreFull):
            fill()
        assert store.counts().succeeded > kept / 2, "in the room of those that are gone"
