"""The statements of MySQL and MariaDB: every query the verbs send, for one table.

This module writes SQL. It runs none. It keeps to what both servers understand.

Each statement reads the server's clock once: UTC_TIMESTAMP(6) is the moment when it began. Times
are DATETIME(6) in UTC, which no session's time zone touches, and cross the wire as whole
microseconds since the epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from semel.core.records import (
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    State,
)
from semel.errors import ConfigError
from semel.stores.sql.migrations import VERSIONS, checked_name
from semel.stores.sql.rows import COLUMNS, FORMAT, stamp, to_row
from semel.stores.sql.verbs import OwnColumns, Statement, own_values, own_values_of_mark

PREFIX_LENGTH = 128

NOW: Final = "UTC_TIMESTAMP(6)"
_LATER: Final = f"{NOW} + INTERVAL %s MICROSECOND"
_EPOCH: Final = "'1970-01-01'"
_TIMES: Final = frozenset({"expire_at", "created_at", "updated_at", "lease_until"})


def _microseconds(time: str) -> str:
    return f"TIMESTAMPDIFF(MICROSECOND, {_EPOCH}, {time})"


READ_COLUMNS: Final = ", ".join(_microseconds(name) if name in _TIMES else name for name in COLUMNS)
READ_NOW: Final = _microseconds(NOW)

_SWAPPED: Final = tuple(name for name in COLUMNS if name not in {"idem_key", "biz_type"})
_SWAP: Final = ", ".join(
    f"{name} = {_EPOCH} + INTERVAL %s MICROSECOND" if name in _TIMES else f"{name} = %s"
    for name in _SWAPPED
)


class MySQLTable:
    """One table of records, seen by the store of one prefix."""

    new_fence = f"LAST_INSERT_ID({READ_NOW})"
    made_here = "fence = LAST_INSERT_ID()"
    """The fence is told to the read that follows an insert, which so knows whether this very insert
    made the row, whatever the connection counts as "affected"."""

    def __init__(self, name: str, prefix: str, own: OwnColumns) -> None:
        if checked_name("table", name) == VERSIONS:
            raise ConfigError(f"{VERSIONS} is the table that remembers versions; take another name")
        if len(prefix) > PREFIX_LENGTH:
            raise ConfigError(f"the prefix has {len(prefix)} characters, at most {PREFIX_LENGTH}")
        self.name = name
        self.quoted = quoted(name)
        """The name as it stands in statements."""
        self.prefix = prefix
        self._own = _checked(own)
        self.own_names = tuple(map(quoted, self._own))
        """The application's own columns, as they stand in statements."""
        self._salt = f"{len(prefix)}:{prefix}:".encode()
        self._read = (
            f"SELECT {READ_COLUMNS}, {READ_NOW}, {self.made_here} "  # noqa: S608 - checked above
            f"FROM {self.quoted} WHERE digest = %s"
        )
        self._insert = _insert(self.quoted, self.new_fence, self.own_names)
        self._insert_plain = _insert(self.quoted, self.new_fence, ())

    # --- one record ----------------------------------------------------------------------

    def read(self, identity: Identity) -> Statement:
        """Read the row, the server's time, and whether the last insert here made it."""
        return Statement(self._read, (self.digest(identity),), writes=False)

    def claim(self, ask: ClaimRequest) -> Statement:
        """Insert the first claim unless there is a row; either way, read what is there."""
        return Statement(
            self._insert,
            (
                *self._names(ask.identity),
                *(ask.fingerprint, int(State.PROCESSING), None, None),
                *(None, ask.owner, ask.hold, stamp(ask.lease)),
                *self.filled(ask).values(),
            ),
            writes=True,
            then=self.read(ask.identity),
        )

    def put(self, ask: PutRequest) -> Statement:
        """Insert the mark unless there is a row; either way, read what is there."""
        own = self.filled_by_mark(ask)
        return Statement(
            self._insert if own else self._insert_plain,
            (
                *self._names(ask.identity),
                *(None, int(State.SUCCEEDED), ask.result.data, stamp(ask.ttl)),
                *(ask.result.codec, ask.owner, False, None),
                *own.values(),
            ),
            writes=True,
            then=self.read(ask.identity),
        )

    def filled(self, ask: ClaimRequest) -> dict[str, Any]:
        """Give the application's own columns, as this claim fills them."""
        return own_values(self._own, ask)

    def filled_by_mark(self, ask: PutRequest) -> dict[str, Any]:
        """Give the same columns for a mark; none, if their functions cannot."""
        return own_values_of_mark(self._own, ask)

    def _names(self, identity: Identity) -> tuple[object, ...]:
        return (self.digest(identity), self.prefix, identity.key, identity.scope)

    def swap(self, stored: Record, record: Record, own: Mapping[str, Any]) -> Statement:
        """Write `record` over the row, if it is still the one that was read as `stored`.

        A claim has a fence of its own, and what changes during it (renewed, ended, touched)
        shows in the other three columns.
        """
        values: dict[str, object] = dict(zip(COLUMNS, to_row(record), strict=True))
        was: dict[str, object] = dict(zip(COLUMNS, to_row(stored), strict=True))
        same = ("fence", "status", "lease_until", "expire_at")
        more = "".join(f", {quoted(name)} = %s" for name in own)
        return Statement(
            f"UPDATE {self.quoted} SET {_SWAP}{more} "  # noqa: S608 - checked above
            "WHERE digest = %s AND fence = %s AND status = %s "
            f"AND {_microseconds('lease_until')} <=> %s AND {_microseconds('expire_at')} <=> %s",
            (
                *(values[name] for name in _SWAPPED),
                *own.values(),
                self.digest(record.identity),
                *(was[name] for name in same),
            ),
            writes=True,
        )

    def renew(self, ask: RenewRequest) -> Statement:
        """Extend the lease of a running owner."""
        return self._by_owner(
            f"lease_until = {_LATER}", (stamp(ask.lease),), ask.identity, ask.owner
        )

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner."""
        return self._end(ask.identity, ask.owner, State.SUCCEEDED, ask.result, ask.ttl)

    def fail(
        self,
        identity: Identity,
        owner: bytes,
        error: Encoded,
        *,
        retryable: bool,
        keep_fingerprint: bool,
        ttl: float,
        ran: bool = True,
    ) -> Statement:
        """Store the failure of a running owner."""
        forget = "" if keep_fingerprint else ", payload_hash = NULL"
        give_back = "" if ran else ", number = number - 1"
        return self._end(
            identity,
            owner,
            State.FAILED,
            error,
            ttl,
            more=f", retryable = {int(retryable)}{forget}{give_back}",
        )

    def _end(
        self,
        identity: Identity,
        owner: bytes,
        state: State,
        outcome: Encoded,
        ttl: float,
        *,
        more: str = "",
    ) -> Statement:
        return self._by_owner(
            f"status = {int(state)}, result_payload = %s, codec = %s, lease_until = NULL, "
            f"expire_at = {_LATER}{more}",
            (outcome.data, outcome.codec, stamp(ttl)),
            identity,
            owner,
        )

    def _by_owner(
        self, changes: str, values: tuple[object, ...], identity: Identity, owner: bytes
    ) -> Statement:
        return Statement(
            f"UPDATE {self.quoted} SET {changes}, updated_at = {NOW} "  # noqa: S608 - checked above
            "WHERE digest = %s AND owner = %s AND status = 0",
            (*values, self.digest(identity), owner),
            writes=True,
        )

    def touch(self, identity: Identity, ttl: float) -> Statement:
        """Keep a finished record for `ttl` from now."""
        return Statement(
            f"UPDATE {self.quoted} SET expire_at = {_LATER} "  # noqa: S608 - checked above
            f"WHERE digest = %s AND expire_at > {NOW}",
            (stamp(ttl), self.digest(identity)),
            writes=True,
        )

    def delete(self, identity: Identity) -> Statement:
        """Remove the record; an expired one is absent already and left to the purge."""
        return Statement(
            f"DELETE FROM {self.quoted} WHERE digest = %s "  # noqa: S608 - checked above
            f"AND (expire_at IS NULL OR expire_at > {NOW})",
            (self.digest(identity),),
            writes=True,
        )

    def digest(self, identity: Identity) -> bytes:
        """Give the primary key of an identity under this prefix."""
        return hashlib.sha256(self._salt + identity.encoded).digest()[:16]


def quoted(name: str) -> str:
    """Write a checked name as it stands in statements: `order` may be one, and is a word of SQL."""
    return f"`{name}`"


def _insert(table: str, fence: str, own: tuple[str, ...]) -> str:
    # A duplicate changes nothing and is no error: the error would leave a shared lock on the row,
    # and two of those that want to write are a deadlock.
    names = "".join(f", {name}" for name in own)
    return (
        f"INSERT INTO {table} (digest, prefix, idem_key, biz_type, "  # noqa: S608 - checked names
        "payload_hash, status, result_payload, expire_at, created_at, updated_at, "
        f"codec, owner, number, fence, hold, lease_until, format{names}) "
        f"VALUES (%s, %s, %s, %s, %s, %s, %s, {_LATER}, {NOW}, {NOW}, "
        f"%s, %s, 1, {fence}, %s, {_LATER}, {FORMAT}{', %s' * len(own)}) "
        "ON DUPLICATE KEY UPDATE digest = digest"
    )


def _checked(own: OwnColumns) -> OwnColumns:
    for name, fill in own.items():
        if checked_name("column", name) in {"digest", "prefix", *COLUMNS}:
            raise ConfigError(f"the column {name} is semel's own; take another name")
        if not callable(fill):
            raise ConfigError(f"the column {name} needs a function of the claim, not {fill!r}")
    return dict(own)
