"""How a table comes to be, and grows with new versions of semel: plain SQL files, each run once.

Every dialect keeps its files in a folder `ddl` of its package, named `0001_what_it_does.sql`. They
are written for the table's default name, so that a database administrator can read them and run
them as they are; for another name the word is exchanged. The table `semel_schema` remembers how
far each table has come. This module reads and plans. It touches no database.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Final, NamedTuple

from semel.errors import ConfigError, StoreError

DEFAULT_TABLE: Final = "idempotent_record"
"""The name of the table in the files."""

VERSIONS: Final = "semel_schema"
"""The table with one row for each table of records: its name and its version."""

LONGEST_NAME: Final = 48
"""Databases allow 63 or 64; the names of indexes and partitions are made from the table's."""

RESTORE: Final = (
    "restore it with its records; if they may be forgotten, `semel migrate` makes an empty one"
)
"""What to do about a table that was dropped: a new one has forgotten every record."""

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_COMMENT = re.compile(r"--[^\n]*")


class Migration(NamedTuple):
    """One step from a version of the table to the next."""

    version: int
    statements: tuple[str, ...]


def checked_name(what: str, name: object) -> str:
    """Refuse what cannot stand in a statement as it is; capitals fold differently everywhere."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"the name of a {what} is made of lower-case letters, digits and _ "
            f"(at most {LONGEST_NAME}), not {name!r}"
        )
    return name


def read_migrations(package: str) -> tuple[Migration, ...]:
    """Read the files of a dialect, in their order."""
    found = [file for file in files(package).joinpath("ddl").iterdir() if file.name[:4].isdigit()]
    return tuple(
        Migration(int(file.name[:4]), split(file.read_text("utf-8")))
        for file in sorted(found, key=lambda file: file.name)
    )


def split(script: str) -> tuple[str, ...]:
    """Part a script into its statements; ours hold neither strings nor bodies with a semicolon."""
    statements = (statement.strip() for statement in _COMMENT.sub("", script).split(";"))
    return tuple(statement for statement in statements if statement)


class Found(NamedTuple):
    """What a database knows of a table: the version that was noted, and whether it is there."""

    version: int | None
    exists: bool

    @property
    def gone(self) -> bool:
        """Whether it was there once."""
        return self.version is not None and not self.exists

    def check(self, table: str) -> None:
        """Refuse to recreate a dropped table silently: its records would be lost."""
        if self.gone:
            raise ConfigError(
                f"the table {table} is gone: {VERSIONS} knows it, and it was dropped or renamed; "
                f"{RESTORE}"
            )


def not_created(table: str, found: Found, folder: str) -> ConfigError:
    """Say that a table is missing or old, and that it is not created or changed here."""
    if found.version is None and not found.exists:
        what = f"the table {table} is missing in this database: is the URL right? It"
    else:
        what = f"the table {table} is of an older version, or {VERSIONS} does not know it; it"
    return ConfigError(
        f"{what} is not made here, because autocreate is off: run `semel migrate`, or the SQL "
        f"files in {folder}"
    )


def not_ours(table: str) -> ConfigError:
    """Say that a table of that name is there, and cannot be used."""
    return ConfigError(
        f"there is a table {table} without a row in {VERSIONS}, and it lacks columns of semel's: "
        "take another table name. But if it is an old table of semel's, restore its row: under "
        "another name every record would be forgotten"
    )


def still_to_run(
    migrations: Sequence[Migration], version: int | None, table: str
) -> tuple[Migration, ...]:
    """Plan the steps from the version that was found (None: there is no table) to the newest."""
    newest = migrations[-1].version
    if version is not None and version > newest:
        raise StoreError(
            f"the table {table} was made by a newer version of semel (schema {version}, "
            f"this one knows {newest}): upgrade this program"
        )
    return tuple(step for step in migrations if version is None or step.version > version)
