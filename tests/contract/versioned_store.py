"""A store on a database with conditional writes and nothing more: no transactions, no clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from semel.core import judge
from semel.core.records import (
    Claim,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
)
from semel.errors import RecordUnreadable, StoreUnavailable, ValueRejected

Answer = TypeVar("Answer")
Law = Callable[[Record | None, float], tuple[Answer, Record | None]]


class Table:
    """Stands for your database: items with a version, written only if it is still the same.

    A version is never used twice. A counter that starts again after a delete would let a late
    write pass for one that has seen the new item.
    """

    def __init__(self) -> None:
        self._items: dict[bytes, tuple[str, bytes]] = {}
        self._lock = threading.Lock()

    def read(self, key: bytes) -> tuple[str, bytes] | None:
        """Read the latest version, never an older one from a replica or a cache."""
        return self._items.get(key)

    def write_if(self, key: bytes, version: str | None, item: bytes) -> bool:
        """Write the item if it still has this version; None: if there is no item."""
        with self._lock:
            if self._items.get(key, (None, b""))[0] != version:
                return False
            self._items[key] = (uuid4().hex, item)
            return True

    def delete(self, key: bytes) -> bytes | None:
        """Remove the item and give it."""
        with self._lock:
            return self._items.pop(key, (None, None))[1]


class VersionedStore:
    """Reads the record, lets the law judge it, and writes only over what was judged."""

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

    def claim(self, ask: ClaimRequest) -> Claim:
        return self._decide(ask.identity, lambda record, now: judge.claim(record, ask, now))

    def renew(self, identity: Identity, owner: bytes, lease: float) -> bool:
        ask = RenewRequest(identity, owner, lease)
        return self._write(identity, lambda record, now: judge.renew(record, ask, now))

    def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        ask = CompleteRequest(identity, owner, result, ttl)
        return self._write(identity, lambda record, now: judge.complete(record, ask, now))

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
    ) -> bool:
        def law(record: Record | None, now: float) -> Record | None:
            return judge.fail(
                record,
                owner,
                error,
                retryable=retryable,
                keep_fingerprint=keep_fingerprint,
                ttl=ttl,
                ran=ran,
                now=now,
            )

        return self._write(identity, law)

    def get(self, identity: Identity) -> Record | None:
        return self._decide(identity, lambda record, now: (judge.present(record, now), None))

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        ask = PutRequest(identity, owner, result, ttl)
        return self._write(identity, lambda record, now: judge.put(record, ask, now))

    def touch(self, identity: Identity, ttl: float) -> bool:
        return self._write(identity, lambda record, now: judge.touch(record, ttl, now))

    def forget(self, identity: Identity) -> bool:
        item = self._table.delete(identity.digest)
        return item is not None and judge.present(self._read(item), self._clock()) is not None

    def close(self) -> None:
        """Nothing was opened."""

    def _write(
        self, identity: Identity, law: Callable[[Record | None, float], Record | None]
    ) -> bool:
        def answering(record: Record | None, now: float) -> tuple[bool, Record | None]:
            written = law(record, now)
            return written is not None, written

        return self._decide(identity, answering)

    def _decide(self, identity: Identity, law: Law[Answer]) -> Answer:
        for _ in range(self._tries):
            version, item = self._table.read(identity.digest) or (None, None)
            stored = None if item is None else self._read(item)
            now = self._clock()
            answer, record = law(None if stored is None else replace(stored, now=now), now)
            if record is None:
                return answer  # there is nothing to write
            if self._table.write_if(identity.digest, version, self._packed(record)):
                return answer
            # Somebody else has written meanwhile: judge what is there now.
        raise StoreUnavailable(f"the record changed {self._tries} times while it was being judged")

    def _packed(self, record: Record) -> bytes:
        item = self.FORMAT + msgspec.msgpack.encode(record)
        if len(item) > self._largest_item:
            raise ValueRejected(f"the database takes {self._largest_item} bytes, not {len(item)}")
        return item

    def _read(self, item: bytes) -> Record:
        if not item.startswith(self.FORMAT):
            raise RecordUnreadable("the record has a format that this release does not know")
        return msgspec.msgpack.decode(item[len(self.FORMAT) :], type=Record)
