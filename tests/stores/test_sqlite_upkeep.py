"""Purging beside the calls: on a connection of its own, which keeps the log short."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from semel.core.records import Encoded, Identity, PutRequest
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
