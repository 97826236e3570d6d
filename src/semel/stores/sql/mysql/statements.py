"""The statements of MySQL and MariaDB: every query the verbs send, for one table.

This module writes SQL. It runs none. It keeps to what both servers understand.

Each statement reads the server's clock once: UTC_TIMESTAMP(6) is the moment when it began. Times
are DATETIME(6) in UTC, which no session's time zone touches, and cross the wire as whole
microseconds since the epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from semel.core.records import (
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    State,
    TouchRequest,
    checked_run_info,
)
from semel.errors import ConfigError, RecordUnreadable
from semel.stores.sql.rows import COLUMNS, FORMAT, Row, stamp, to_row
from semel.stores.sql.schema import checked_columns, checked_table, quoted
from semel.stores.sql.verbs import (
    OwnColumns,
    Reply,
    Statement,
    compared_of,
    own_values,
    own_values_of_mark,
)

PREFIX_LENGTH = 128

NOW: Final = "UTC_TIMESTAMP(6)"
_LATER: Final = f"{NOW} + INTERVAL %s MICROSECOND"
_EPOCH: Final = "'1970-01-01'"
_TIMES: Final = frozenset({"expire_at", "created_at", "updated_at", "lease_until"})


def _microseconds(time: str) -> str:
    return f"TIMESTAMPDIFF(MICROSECOND, {_EPOCH}, {time})"


READ_COLUMNS: Final = ", ".join(_microseconds(name) if name in _TIMES else name for name in COLUMNS)
READ_NOW: Final = _microseconds(NOW)


# --- the packed read ----------------------------------------------------------------------
#
# The drivers take time for each column of an answer: for its definition, then for its value, 5 us
# in all with PyMySQL. So a read of one row, or of a batch, has two columns: the result, and a text
# with everything else. The text is ASCII up to its last field, which is the scope, the codec and
# the key, one behind the other; their lengths are among the numbers, which are a list in JSON.

_NO_BYTES: Final = "-"


def _number(value: str) -> str:
    return f"IFNULL({value}, 'null')"


def _hex(column: str) -> str:
    return f"IFNULL(HEX({column}), '{_NO_BYTES}')"


_NUMBERS: Final = ", ".join(
    (
        "CHAR_LENGTH(biz_type)",
        _number("CHAR_LENGTH(codec)"),
        "status",
        # Each of them may be NULL, for a date of zeros; CONCAT_WS would leave that out.
        _number(_microseconds("expire_at")),
        _number(_microseconds("created_at")),
        _number(_microseconds("updated_at")),
        "retryable",
        "number",
        "fence",
        "hold",
        _number(_microseconds("lease_until")),
        "format",
        READ_NOW,
    )
)
# Without the literal '', which is NULL on a session with EMPTY_STRING_IS_NULL.
TEXTS: Final = "CONCAT(IFNULL(CONCAT(biz_type, codec), biz_type), idem_key)"


def read_packed(made_here: str, texts: str = TEXTS) -> str:
    """Write the columns that `unpacked` takes; `made_here`: whether this insert made the row."""
    return (
        f"CONCAT_WS(' ', CONCAT_WS(',', {_NUMBERS}, {made_here}), {_hex('payload_hash')}, "
        f"HEX(owner), {_hex('superseded')}, {texts}), result_payload"
    )


def unpacked(packed: Sequence[Any], read_texts: Callable[[str], str] = str) -> Row:
    """Return the columns of `rows`, the server's time, and whether this insert made the row."""
    text, data = packed
    try:
        numbers, fingerprint, owner, superseded, last = text.split(" ", 4)
        texts = read_texts(last)
        (
            scope_length,
            codec_length,
            state,
            expires_at,
            created_at,
            updated_at,
            retryable,
            number,
            fence,
            hold,
            lease_until,
            version,
            now,
            made_here,
        ) = _read_numbers(f"[{numbers}]")
        key_start = scope_length + (codec_length or 0)
        return (
            texts[key_start:],
            texts[:scope_length],
            None if fingerprint == _NO_BYTES else bytes.fromhex(fingerprint),
            state,
            data,
            expires_at,
            created_at,
            updated_at,
            None if codec_length is None else texts[scope_length:key_start],
            retryable,
            bytes.fromhex(owner),
            number,
            fence,
            hold,
            lease_until,
            None if superseded == _NO_BYTES else bytes.fromhex(superseded),
            version,
            now,
            made_here,
        )
    except (AttributeError, TypeError, ValueError, msgspec.DecodeError) as broken:
        # Its text stays untold: it may quote the key.
        raise RecordUnreadable("its row is damaged (its columns cannot be unpacked)") from broken


_read_numbers: Final = msgspec.json.Decoder(list[Any]).decode

_SWAPPED: Final = tuple(name for name in COLUMNS if name not in {"idem_key", "biz_type"})
_SWAP: Final = ", ".join(
    f"{name} = {_EPOCH} + INTERVAL %s MICROSECOND" if name in _TIMES else f"{name} = %s"
    for name in _SWAPPED
)


ALL_NEW: Final = 1 << 61
SOME_MET: Final = 1 << 62
"""What an insert leaves in LAST_INSERT_ID(), added to its fence: that it made every row, or that it
met one. Beyond what a counting column of the application's own would leave there; and not
the count of rows, since connections differ in what they count."""

_NOTE_FENCE: Final = f"LAST_INSERT_ID({ALL_NEW} + {READ_NOW}) - {ALL_NEW}"
_NOTE_MET: Final = f"IF(LAST_INSERT_ID({SOME_MET} + {READ_NOW}), digest, digest)"
_UNLESS_ALL_NEW: Final = f"LAST_INSERT_ID() NOT BETWEEN {ALL_NEW} AND {SOME_MET} AND "


class MySQLTable:
    """One table of records, seen by the store of one prefix."""

    new_fence = _NOTE_FENCE
    when_met = f"IF(LAST_INSERT_ID({SOME_MET + 1}), digest, digest)"
    unless_made = _UNLESS_ALL_NEW
    """What an insert leaves in LAST_INSERT_ID() tells that it made its row, and with which fence;
    the read that follows then returns nothing."""
    made_here = "0"
    """So what is read was there before."""
    texts = TEXTS
    read_texts: Callable[[str], str] = staticmethod(str)
    """How the texts of a row are selected, and read."""

    def __init__(self, name: str, prefix: str, own: OwnColumns) -> None:
        if len(prefix) > PREFIX_LENGTH:
            raise ConfigError(f"the prefix has {len(prefix)} characters, at most {PREFIX_LENGTH}")
        self.name = checked_table(name)
        self.quoted = quoted(name)
        """The name as it stands in statements."""
        self.prefix = prefix
        self.own_columns = checked_columns(own, {"digest", "prefix", *COLUMNS})
        self.own_names = tuple(map(quoted, self.own_columns))
        """The application's own columns, as they stand in statements."""
        self._salt = f"{len(prefix)}:{prefix}:".encode()
        read = f"SELECT {read_packed(self.made_here, self.texts)} FROM {self.quoted} WHERE "  # noqa: S608 - checked above
        self._read = f"{read}digest = %s"
        self._read_met = f"{read}{self.unless_made}digest = %s"
        self._insert = self._insert_with(self.own_names)
        self._insert_plain = self._insert_with(())

    # --- one record ----------------------------------------------------------------------

    def read(self, identity: Identity) -> Statement:
        """Read the row and the server's time."""
        return Statement(self._read, (self.digest(identity),), writes=False)

    def unpacked(self, packed: Sequence[Any]) -> Row:
        """Return the columns of a row that was read."""
        return unpacked(packed, self.read_texts)

    def read_met(self, identity: Identity) -> Statement:
        """Read the row, unless the insert that came before has made it."""
        return Statement(self._read_met, (self.digest(identity),), writes=False)

    def claim(self, ask: ClaimRequest) -> Statement:
        """Insert the first claim; if there is a row, read it instead."""
        return Statement(
            self._insert,
            (
                *self._names(ask.identity),
                *(ask.fingerprint, int(State.PROCESSING), checked_run_info(ask.run_info), None),
                *(None, ask.owner, ask.hold, stamp(ask.lease)),
                *self.filled(ask).values(),
            ),
            writes=True,
            then=self.read_met(ask.identity),
        )

    def put(self, ask: PutRequest) -> Statement:
        """Insert the mark; if there is a row, read it instead."""
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
            then=self.read_met(ask.identity),
        )

    def filled(self, ask: ClaimRequest) -> dict[str, Any]:
        """Return the application's own columns, as this claim fills them."""
        return own_values(self.own_columns, ask)

    def filled_by_mark(self, ask: PutRequest) -> dict[str, Any]:
        """Return the same columns for a mark; none, if their functions cannot."""
        return own_values_of_mark(self.own_columns, ask)

    def _insert_with(self, own: tuple[str, ...]) -> str:
        # A duplicate changes nothing and is no error: the error would leave a shared lock on the
        # row, and two of those that want to write are a deadlock.
        names = "".join(f", {name}" for name in own)
        return (
            f"INSERT INTO {self.quoted} (digest, prefix, idem_key, biz_type, "  # noqa: S608 - checked names
            "payload_hash, status, result_payload, expire_at, created_at, updated_at, "
            f"codec, owner, number, fence, hold, lease_until, format{names}) "
            f"VALUES (%s, %s, %s, %s, %s, %s, %s, {_LATER}, {NOW}, {NOW}, "
            f"%s, %s, 1, {self.new_fence}, %s, {_LATER}, {FORMAT}{', %s' * len(own)}) "
            f"ON DUPLICATE KEY UPDATE digest = {self.when_met}"
        )

    def _names(self, identity: Identity) -> tuple[object, ...]:
        return (self.digest(identity), self.prefix, identity.key, identity.scope)

    def swap(self, row: Row, record: Record, own: Mapping[str, Any]) -> Statement:
        """Write `record` over the row, if it is still the one that was read."""
        values: dict[str, object] = dict(zip(COLUMNS, to_row(record), strict=True))
        more = "".join(f", {quoted(name)} = %s" for name in own)
        return Statement(
            f"UPDATE {self.quoted} SET {_SWAP}{more} "  # noqa: S608 - checked above
            "WHERE digest = %s AND fence = %s AND status = %s "
            f"AND {_microseconds('lease_until')} <=> %s AND {_microseconds('expire_at')} <=> %s",
            (
                *(values[name] for name in _SWAPPED),
                *own.values(),
                self.digest(record.identity),
                *compared_of(row),
            ),
            writes=True,
        )

    def renew(self, ask: RenewRequest) -> Statement:
        """Extend the lease of a running owner."""
        lease, run_info = stamp(ask.lease), ask.run_info
        if run_info is None:
            return self._by_owner(ask, f"lease_until = {_LATER}", lease)
        return self._by_owner(ask, f"lease_until = {_LATER}, result_payload = %s", lease, run_info)

    def complete(self, ask: CompleteRequest) -> Statement:
        """Store the success of a running owner."""
        return self._end(ask, State.SUCCEEDED, ask.result)

    def fail(self, ask: FailRequest) -> Statement:
        """Store the failure of a running owner."""
        forget = "" if ask.keep_fingerprint else ", payload_hash = NULL"
        give_back = "" if ask.ran else ", number = number - 1"
        more = f", retryable = {int(ask.retryable)}{forget}{give_back}"
        return self._end(ask, State.FAILED, ask.error, more)

    def _end(
        self, ask: CompleteRequest | FailRequest, state: State, outcome: Encoded, more: str = ""
    ) -> Statement:
        return self._by_owner(
            ask,
            f"status = {int(state)}, result_payload = %s, codec = %s, lease_until = NULL, "
            f"expire_at = {_LATER}{more}",
            outcome.data,
            outcome.codec,
            stamp(ask.ttl),
        )

    def _by_owner(
        self, ask: RenewRequest | CompleteRequest | FailRequest, changes: str, *values: object
    ) -> Statement:
        return Statement(
            f"UPDATE {self.quoted} SET {changes}, updated_at = {NOW} "  # noqa: S608 - checked above
            "WHERE digest = %s AND owner = %s AND status = 0",
            (*values, self.digest(ask.identity), ask.owner),
            writes=True,
        )

    def touch(self, ask: TouchRequest) -> Statement:
        """Keep a finished record for `ttl` from now."""
        return Statement(
            f"UPDATE {self.quoted} SET expire_at = {_LATER} "  # noqa: S608 - checked above
            f"WHERE digest = %s AND expire_at > {NOW}",
            (stamp(ask.ttl), self.digest(ask.identity)),
            writes=True,
        )

    def delete(self, identity: Identity, *, expired: bool) -> Statement:
        """Remove the record, if it has expired, or if it has not."""
        condition = f"(expire_at <= {NOW}) IS {'TRUE' if expired else 'NOT TRUE'}"  # or it is NULL
        return Statement(
            f"DELETE FROM {self.quoted} WHERE digest = %s AND {condition}",  # noqa: S608 - checked above
            (self.digest(identity),),
            writes=True,
        )

    def digest(self, identity: Identity) -> bytes:
        """Return the primary key of an identity under this prefix."""
        return hashlib.sha256(self._salt + identity.encoded).digest()[:16]


# --- many records at once, and one commit --------------------------------------------------
#
# Bytes stand in the text as hexadecimal literals: a digest is written once and used twice, and the
# drivers' own quoting takes twice the time. Texts, and results, which may be large, are parameters.
# An insert of many is also written for one row, to be prepared, with the rows apart from it.
#
# An UPDATE finds its rows by their digests, in their order. FORCE INDEX says so: in a small table a
# server would rather read, and lock, every row. It has one CASE for a column; a join with a list of
# members takes a server half as long again, which notes the rows it finds before it changes them.

T = TypeVar("T")

_RUNNING: Final = int(State.PROCESSING)

_MADE_HERE: Final = f"fence + {SOME_MET} = LAST_INSERT_ID()"


class Bulk(Statement):
    """A statement for one row, with `?` for its values; the parameters are the rows."""

    __slots__ = ()


UNABLE: Final = Reply([], 0)
"""The answer to a `Bulk` that this server, or this connection, does not take: nothing was done."""


class BatchStatements:
    """The statements for many, on one table. The members come by their digests."""

    def __init__(self, table: MySQLTable) -> None:
        self._table = table
        own = "".join(f", {name}" for name in table.own_names)
        self._insert = (
            f"INSERT INTO {table.quoted} (digest, prefix, idem_key, biz_type, "  # noqa: S608 - a checked name
            "payload_hash, status, result_payload, created_at, updated_at, "
            f"owner, number, fence, hold, lease_until, format{own}) VALUES "
        )
        self._own = ", %s" * len(table.own_names)
        self._insert_row = {
            hashed: f"{self._insert}(?, ?, ?, ?, {'?' if hashed else 'NULL'}, {_RUNNING}, "
            f"?, {NOW}, {NOW}, ?, 1, IF(?, {_NOTE_FENCE}, {READ_NOW}), ?, {_later('?')}, {FORMAT}) "
            f"ON DUPLICATE KEY UPDATE digest = {_NOTE_MET}"
            for hashed in (True, False)
        }

    def claim(self, asks: Mapping[bytes, ClaimRequest]) -> Statement:
        """Insert what is new; if that is not all, read what is there, and what this insert made."""
        rows: list[str] = []
        values: list[object] = []
        fence = _NOTE_FENCE  # by the first row, before any can be met; it is the same for all
        for digest, ask in asks.items():
            rows.append(
                f"({literal(digest)}, %s, %s, %s, {literal(ask.fingerprint)}, {_RUNNING}, "
                f"{literal(checked_run_info(ask.run_info))}, {NOW}, {NOW}, {literal(ask.owner)}, "
                f"1, {fence}, {ask.hold:d}, {_later(str(stamp(ask.lease)))}, {FORMAT}{self._own})"
            )
            values += self._table.prefix, ask.identity.key, ask.identity.scope
            values += self._table.filled(ask).values()
            fence = READ_NOW
        return Statement(
            f"{self._insert}{', '.join(rows)} ON DUPLICATE KEY UPDATE digest = {_NOTE_MET}",
            tuple(values),
            writes=True,
            then=self._look(asks, _MADE_HERE, _UNLESS_ALL_NEW),
        )

    def claim_in_bulk(self, asks: Mapping[bytes, ClaimRequest]) -> Bulk:
        """Insert what is new, as `claim` does; what is there has to be read by `read_after`.

        Not for a table with columns of the application's own: their values may be of any type, and
        the driver would not write them as it does in a text.
        """
        # A column without any value has no type, and the driver would not send it.
        hashed = any(ask.fingerprint is not None for ask in asks.values())
        rows: list[tuple[object, ...]] = []
        for digest, ask in asks.items():
            fingerprint = (ask.fingerprint,) if hashed else ()
            names = (digest, self._table.prefix, ask.identity.key, ask.identity.scope)
            notes_fence = not rows
            lease = stamp(ask.lease)
            run = (checked_run_info(ask.run_info), ask.owner, notes_fence, ask.hold, lease)
            rows.append((*names, *fingerprint, *run))
        return Bulk(self._insert_row[hashed], tuple(rows), writes=True)

    def read_after(self, digests: Iterable[bytes], noted: int) -> Statement:
        """Read what is there, and what the insert made that noted this in LAST_INSERT_ID()."""
        return self._look(digests, f"fence = {noted - SOME_MET}")

    def read(self, digests: Iterable[bytes]) -> Statement:
        """Read what is there, locking nothing."""
        return self._look(digests, "0")

    def _look(self, digests: Iterable[bytes], made_here: str, condition: str = "") -> Statement:
        return Statement(
            f"SELECT digest, {read_packed(made_here)} "  # noqa: S608 - a checked name
            f"FROM {self._table.quoted} WHERE {condition}digest IN ({_listed(digests)})",
            (),
            writes=False,
        )

    def owners(self, digests: Iterable[bytes], state: State) -> Statement:
        """Read who owns the records that are in this state, and have not expired."""
        return Statement(
            f"SELECT digest, owner FROM {self._table.quoted} "  # noqa: S608 - a checked name
            f"WHERE digest IN ({_listed(digests)}) AND status = {int(state)} "
            f"AND (expire_at IS NULL OR expire_at > {NOW})",
            (),
            writes=False,
        )

    def complete(self, asks: Mapping[bytes, CompleteRequest]) -> Statement:
        """Store the success of running owners."""
        results = [ask.result for ask in asks.values()]
        data, data_values = _each(asks, [result.data for result in results])
        codec, codec_values = _each(asks, [result.codec for result in results])
        ttl, ttl_values = _each(asks, [stamp(ask.ttl) for ask in asks.values()])
        return self._by_owner(
            asks,
            f"status = {int(State.SUCCEEDED)}, result_payload = {data}, codec = {codec}, "
            f"lease_until = NULL, expire_at = {_later(ttl)}",
            (*data_values, *codec_values, *ttl_values),
        )

    def renew(self, asks: Mapping[bytes, RenewRequest]) -> Statement:
        """Extend the leases of running owners."""
        lease, values = _each(asks, [stamp(ask.lease) for ask in asks.values()])
        changes = f"lease_until = {_later(lease)}"
        told = [ask.run_info for ask in asks.values()]
        if told.count(None) == len(told):
            return self._by_owner(asks, changes, (*values,))
        run_info, run_infos = _each(asks, told)
        changes += f", result_payload = IFNULL({run_info}, result_payload)"
        return self._by_owner(asks, changes, (*values, *run_infos))

    def _by_owner(
        self,
        asks: Mapping[bytes, CompleteRequest] | Mapping[bytes, RenewRequest],
        changes: str,
        values: tuple[object, ...],
    ) -> Statement:
        # As one value: digests are of one length, and pairs cost a server two microseconds a row.
        owned = _listed(digest + ask.owner for digest, ask in asks.items())
        return Statement(
            f"UPDATE {self._table.quoted} FORCE INDEX (PRIMARY) "  # noqa: S608 - a checked name
            f"SET {changes}, updated_at = {NOW} WHERE digest IN ({_listed(asks)}) "
            f"AND CONCAT(digest, owner) IN ({owned}) AND status = {_RUNNING}",
            values,
            writes=True,
        )


def _each(digests: Iterable[bytes], values: list[T]) -> tuple[str, list[T]]:
    """Write what gives each row the value of its member, and the parameters that this takes."""
    if values.count(values[0]) == len(values):
        return "%s", values[:1]
    cases = " ".join(f"WHEN {literal(digest)} THEN %s" for digest in digests)
    return f"CASE digest {cases} END", values


def literal(value: bytes | None) -> str:
    """Write bytes for the text of a statement."""
    return "NULL" if value is None else f"x'{value.hex()}'"


def written_out(statement: Statement) -> Statement:
    """Write the values into the text, for a session that is not ours.

    A driver quotes them by what it believes of the session: asyncmy with backslashes, which under
    NO_BACKSLASH_ESCAPES let a value end its literal. And it writes texts in the character set of
    the connection, which may not have all characters. Nothing changes what these literals mean.
    A value of another type, in a column of the application's own, stays with the driver.
    """
    first, *others = statement.sql.split("%s")
    text, left = [first], []
    for value, part in zip(statement.parameters, others, strict=True):
        match value:
            case None | bytes():
                written = literal(value)
            case int():
                written = f"{int(value):d}"
            case str():
                written = f"_utf8mb4 {literal(value.encode())}"
            case _:
                written = "%s"
                left.append(value)
        text += written, part
    then = None if statement.then is None else written_out(statement.then)
    return Statement("".join(text), tuple(left), statement.writes, then)


def _listed(digests: Iterable[bytes]) -> str:
    return ", ".join(map(literal, digests))


def _later(microseconds: str) -> str:
    return f"{NOW} + INTERVAL {microseconds} MICROSECOND"
