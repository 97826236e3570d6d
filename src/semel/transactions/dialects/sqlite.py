"""SQLite: one writer at a time, so that the line is the whole database's."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from semel.core.records import Identity
from semel.errors import ConfigError
from semel.stores.sql.sqlite import AsyncSQLiteStore, FileSource, GivenSource, SQLiteStore
from semel.stores.sql.sqlite_statements import SQLiteTable, SQLiteVerbs
from semel.stores.sql.verbs import Statement, Verb
from semel.transactions.drivers import SQLiteLink
from semel.transactions.links import command, question

_DATABASES: Final = question("PRAGMA database_list")


def records(store: SQLiteStore | AsyncSQLiteStore, table: str | None) -> SQLiteRecords:
    """Give the records of a store, or those in another table of the same prefix."""
    own: SQLiteTable = store._verbs._table  # type: ignore[attr-defined]
    executor: Any = store._executor
    return SQLiteRecords(
        own if table is None else SQLiteTable(table, own.prefix, own.clock),
        _file_of(executor._session._source),
    )


class SQLiteRecords:
    """The records of one table."""

    has_lock = False  # there is one lock for the whole file
    by_key = False
    rolls_back = False

    def __init__(self, table: SQLiteTable, file: str) -> None:
        self.verbs = SQLiteVerbs(table)
        self._table = table
        self._file = file

    def prepare(self, seconds: float, *, wait: bool) -> Verb[int]:  # noqa: ARG002 - who has the lock need not have the record
        """Refuse another file; bound the wait for the write lock."""
        files = yield from self._files()
        if len(files) == 1:
            self._check(files["main"])
        reply = yield question("PRAGMA busy_timeout")
        yield command(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
        before: int = reply.rows[0][0]
        return before

    def restore(self, before: int) -> Verb[None]:
        """Bound it as before."""
        yield command(f"PRAGMA busy_timeout = {before}")

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:  # noqa: ARG002 - one line for all
        """Take the write lock before the first read: a reader that wants to write may not wait."""
        yield command(f"DELETE FROM {self._table.quoted} WHERE 0")  # noqa: S608 - a checked name
        files = yield from self._files()
        if len(files) > 1:  # only now: to look for the table is to read
            self._check((yield from self._found_in(files)))
        return True

    def hold(self, identity: Identity, owner: bytes, *, held: bool) -> Verb[None]:
        """Mark the attempt."""
        yield Statement(
            f"UPDATE {self._table.quoted} SET hold = ? WHERE identity = ? AND owner = ?",  # noqa: S608 - the same
            (held, self._table.digest(identity), owner),
            writes=True,
        )

    def _check(self, found: str) -> None:
        if self._file != _NOWHERE and not _same(found, self._file):
            shown = "a database in memory" if found == _NOWHERE else found
            raise ConfigError(
                f"the table {self._table.name} of the connection is in {shown}, the engine keeps "
                f"its records in {self._file}: they could not be committed together"
            )

    def _files(self) -> Verb[dict[str, str]]:
        """Name the databases of this connection, and the file of each."""
        reply = yield _DATABASES
        files = {name: file for _, name, file in reply.rows}
        if "main" not in files:  # every connection has it
            raise ConfigError("the connection's text_factory must be str")
        return files

    def _found_in(self, files: Mapping[str, str]) -> Verb[str]:
        """Name the file in which this connection has just found the table."""
        # SQLite looks for a name in this order, and takes the first that it finds.
        *others, last = sorted(files, key=lambda name: name != "temp")
        for name in others:
            quoted = name.replace('"', '""')
            there = yield question(
                f'SELECT 1 FROM "{quoted}".sqlite_master '  # noqa: S608 - quoted
                "WHERE type IN ('table', 'view') AND name = ? COLLATE NOCASE",
                self._table.name,
            )
            if there.rows:
                return files[name]
        return files[last]


_NOWHERE: Final = ""
"""What SQLite names as the file of a database in memory."""


def _file_of(source: FileSource | GivenSource) -> str:
    """Name the store's file, if it has one and it is known."""
    if isinstance(source, FileSource):
        return source.place
    try:
        (main, *_) = SQLiteLink(source._connection).execute(_DATABASES).rows
    except sqlite3.ProgrammingError:  # another thread's connection: there is nobody to ask
        return _NOWHERE
    file: str = main[2]
    return file


def _same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:  # one of them has no file
        return False
