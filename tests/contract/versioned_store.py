"""A store on a database with conditional writes and nothing more: no transactions, no clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from semel.core import judge, records
from semel.errors import RecordUnreadable, StoreError, StoreUnavailable, ValueRejected
from semel.stores.base import Store


class Table:
    """Stands for your database: items with a version, written only if it is still the same.

    A version is never used twice. A counter that starts again after a delete would let
    a late write pass for one that has seen the new item.
    """

    def __init__(self) -> None:
        self._items: dict[bytes, tuple[str, bytes]] = {}
        self._lock = threading.Lock()

    def read(self, key: bytes) -> tuple[str, bytes] | None:
        """Read the latest version, never an older one from a replica or a cache."""
        return self._items.get(key)

    def write_if(self, key: bytes, version: str | None, item: bytes | None) -> bool:
        """Write the item (None: delete) if its version is this one (None: absent)."""
        with self._lock:
            if self._items.get(key, (None, b""))[0] != version:
                return False
            if item is None:
                self._items.pop(key, None)
            else:
                self._items[key] = (uuid4().hex, item)
            return True


class VersionedStore(Store):
    """Reads the record, judges it, and writes only over the record that was judged."""

    unsupported = records.LISTINGS

    FORMAT = b"\x01"
    """Before each record, so that a later release can tell what an earlier one wrote."""

    def __init__(
        self,
        table: Table,
        clock: Callable[[], float] = time.time,
        *,
        tries: int = 20,
        largest_item: int = 16 << 20,
    ) -> None:
        self._table = table
        self._clock = clock
        self._tries = tries
        self._largest_item = largest_item

    def send(self, requests: Sequence[records.Request[Any]]) -> list[Any]:
        return [self._own_answer(request) for request in requests]

    def close(self) -> None:
        """Nothing was opened."""

    def _own_answer(self, request: Any) -> Any:
        try:
            return self._answer(request)
        except StoreError as error:
            return error  # of this request; the others have their own answers

    def _answer(self, request: Any) -> Any:
        identity: records.Identity = request.identity
        for _ in range(self._tries):
            version, item = self._table.read(identity.digest) or (None, None)
            stored = None if item is None else self._read(item)
            answer, record = judge.answer(stored, request, self._clock())
            if record is stored:
                return answer  # there is nothing to write
            written = None if record is None else self._packed(record)
            if self._table.write_if(identity.digest, version, written):
                return answer
            # Another process has written meanwhile: judge what is there now.
        raise StoreUnavailable(f"the record changed {self._tries} times in a row")

    def _packed(self, record: records.Record) -> bytes:
        item = self.FORMAT + msgspec.msgpack.encode(record)
        if len(item) > self._largest_item:
            raise ValueRejected(f"{len(item)} bytes; at most {self._largest_item} fit")
        return item

    def _read(self, item: bytes) -> records.Record:
        if not item.startswith(self.FORMAT):
            raise RecordUnreadable("this release doesn't know the record's format")
        try:
            return msgspec.msgpack.decode(item[len(self.FORMAT) :], type=records.Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as broken:
            raise RecordUnreadable(f"the record is damaged ({broken})") from broken
