"""What may be wrong with the file, the URL or the given connection: one clear error each."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from semel.core.records import Claimed, Encoded
from semel.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from semel.stores import urls
from semel.stores.sql import sqlite
from semel.stores.sql.batch import own_errors
from semel.stores.sql.sqlite import AsyncSQLiteStore, SQLiteStore
from stores.sqlite_helpers import ask, finish, identity, in_a_fork, ordinary_user, write_lock


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture
def open_directory():
    """A directory that every user may enter; pytest's own belong to its user alone."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = urls.open_store("sqlite:///semel%20file.db?synchronous=NORMAL&timeout=1.5&table=t")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    finish(store, 1)
    store.close()
    assert (tmp_path / "semel file.db").exists()


async def test_an_absolute_path_for_asyncio(path):
    store = urls.open_async_store(f"sqlite:///{path}")
    assert isinstance(store, AsyncSQLiteStore)
    assert isinstance(await store.claim(ask(1)), Claimed)
    await store.close()
    assert path.exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://semel.db", "write sqlite:///semel.db"),
        ("sqlite://", "write sqlite:///semel.db"),
        ("sqlite:///", "the path of the SQLite database is missing"),
        ("sqlite:///:memory:", "use memory://"),
        ("sqlite:////no/such/place/semel.db", "the directory of .* does not exist"),
        ("sqlite:////", "/ is a directory"),
        ("sqlite:///x.db?mode=ro", "does not know the option mode"),
        ("sqlite:///x.db?clock=1", "clock is a function: give it by name, not in the URL"),
        ("sqlite:///x.db?trace=1", "trace is a function: give it by name, not in the URL"),
        ("sqlite:///x.db?synchronous=OFF", "synchronous must be FULL or NORMAL, not 'OFF'"),
        ("sqlite:///x.db?table=drop%20table", "a table name is made of"),
        ("sqlite:///x.db?timeout=soon", "timeout must be a number of seconds above 0, not 'soon'"),
        ("sqlite:///x.db?timeout=0", "timeout must be a number of seconds above 0, not '0'"),
        ("sqlite:///x.db?timeout=inf", "timeout must be a number of seconds above 0, not 'inf'"),
    ],
)
def test_a_wrong_url_is_refused_before_anything_is_opened(url, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        urls.open_store(url)
    assert list(tmp_path.iterdir()) == []


def test_a_timeout_of_another_type_is_refused():
    with pytest.raises(ConfigError, match="timeout must be a number"):
        urls.open_store("sqlite:///x.db", timeout=None)


def test_a_store_takes_a_path_or_a_connection(path):
    with pytest.raises(ConfigError, match="a path or a connection, one of them"):
        SQLiteStore()
    with (
        closing(sqlite3.connect(path)) as connection,
        pytest.raises(ConfigError, match="a path or a connection, one of them"),
    ):
        SQLiteStore(path, connection=connection)


def test_a_file_that_is_no_database_is_left_alone(path):
    garbage = b"this is not a database " * 100
    path.write_bytes(garbage)
    with pytest.raises(StoreUnavailable, match=f"{path} is not an SQLite database"):
        SQLiteStore(path).claim(ask(1))
    assert path.read_bytes() == garbage


def test_a_read_only_file(open_directory):
    path = open_directory / "semel.db"
    with closing(SQLiteStore(path)) as store:
        finish(store, 1)
    path.chmod(0o444)
    open_directory.chmod(0o555)
    with ordinary_user(), pytest.raises(StoreUnavailable, match=r"semel\.db cannot be"):
        SQLiteStore(path).claim(ask(2))


def test_a_read_only_directory(open_directory):
    open_directory.chmod(0o555)
    with ordinary_user(), pytest.raises(StoreUnavailable, match="cannot be opened"):
        SQLiteStore(open_directory / "semel.db").claim(ask(1))


def test_a_damaged_file(path):
    with closing(SQLiteStore(path)) as store:
        finish(store, 1)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match="is damaged"):
        SQLiteStore(path).claim(ask(1))


def test_a_file_that_may_not_grow_is_full_and_still_replays(path):
    store = SQLiteStore(path)
    finish(store, 1)
    asks = [ask(key) for key in range(2, 200)]
    connection = store._executor._session._connection
    connection.execute("PRAGMA max_page_count = 1")  # as small as what it holds
    refused = next(one for one in store.send(asks) if not isinstance(one, Claimed))
    assert isinstance(refused, StoreFull)
    assert f"no room is left for the SQLite database {path}" in str(refused)
    assert store.get(identity(1)) is not None
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = SQLiteStore(disk / "semel.db")
        finish(store, 1)
        store.claim(ask(2))
        with pytest.raises(StoreFull, match="no room is left"):
            store.complete(identity(2), ask(2).owner, Encoded("json", b"x" * 1_000_000), 60.0)
        assert store.get(identity(1)) is not None
        store.close()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_file_system_without_wal_is_refused(path, monkeypatch):
    class NoWal(sqlite3.Connection):
        def execute(self, sql, *values):
            return super().execute(sql.replace("= WAL", "= DELETE"), *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=NoWal))
    with pytest.raises(StoreUnavailable, match="cannot use WAL"):
        SQLiteStore(path).claim(ask(1))


def test_a_new_file_that_another_process_keeps_locked(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE t (x)")
    with write_lock(path), pytest.raises(StoreUnavailable, match="is locked by another process"):
        SQLiteStore(path, timeout=0.1).claim(ask(1))
    with closing(SQLiteStore(path)) as store:
        finish(store, 1)


def test_a_new_file_that_another_process_locks_for_a_moment(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE t (x)")
    with write_lock(path) as holder, closing(SQLiteStore(path)) as store:
        threading.Timer(0.1, holder.execute, ("ROLLBACK",)).start()
        finish(store, 1)


def test_a_given_connection_with_an_open_transaction_is_refused(path):
    with closing(sqlite3.connect(path)) as connection:
        store = SQLiteStore(connection=connection)
        finish(store, 1)
        connection.execute("CREATE TABLE mine (x)")
        connection.execute("INSERT INTO mine VALUES (1)")
        with pytest.raises(StoreError, match="has an open transaction"):
            store.claim(ask(2))
        assert connection.in_transaction
        connection.commit()
        assert isinstance(store.claim(ask(2)), Claimed)


def test_a_given_connection_stays_open_when_the_store_closes(path):
    with closing(sqlite3.connect(path)) as connection:
        store = SQLiteStore(connection=connection)
        finish(store, 1)
        store.close()
        assert connection.execute("SELECT count(*) FROM idempotent_record").fetchone() == (1,)


def test_a_given_connection_that_belongs_to_another_thread_is_refused(path):
    with closing(sqlite3.connect(path)) as connection:
        store = SQLiteStore(connection=connection)
        errors = []

        def use():
            with pytest.raises(StoreError, match="same thread") as caught:
                store.claim(ask(1))
            errors.append(caught.value)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert len(errors) == 1


def test_a_given_connection_is_not_used_after_a_fork(path):
    with closing(sqlite3.connect(path)) as connection:
        store = SQLiteStore(connection=connection)
        finish(store, 1)
        assert "cannot be used after a fork" in in_a_fork(lambda: store.get(identity(1)))
        finish(store, 2)


def test_a_given_connection_must_read_text_as_text(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        with pytest.raises(ConfigError, match="text_factory must be str"):
            SQLiteStore(connection=connection)


def test_in_a_batch_only_store_errors_are_a_members_own():
    full = StoreFull("no room")
    assert own_errors([True, full]) == [True, full]
    with pytest.raises(ValueError, match="of the user's own"):
        own_errors([True, ValueError("of the user's own")])
