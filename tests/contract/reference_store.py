"""The smallest store that keeps the law: a dict, a lock, and `semel.core.judge`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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

Law = Callable[[Record | None, float], Record | None]


class DictStore:
    """Reads the record, lets the law judge it, writes what it says: one step under one lock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._records: dict[Identity, Record] = {}
        self._lock = threading.Lock()
        self._clock = clock

    def claim(self, ask: ClaimRequest) -> Claim:
        with self._lock:
            answer, record = judge.claim(self._records.get(ask.identity), ask, self._clock())
            if record is not None:
                self._records[ask.identity] = record
            return answer

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
        with self._lock:
            now = self._clock()
            record = judge.present(self._records.get(identity), now)
            return None if record is None else replace(record, now=now)

    def put(self, identity: Identity, result: Encoded, ttl: float, *, owner: bytes) -> bool:
        ask = PutRequest(identity, owner, result, ttl)
        return self._write(identity, lambda record, now: judge.put(record, ask, now))

    def touch(self, identity: Identity, ttl: float) -> bool:
        return self._write(identity, lambda record, now: judge.touch(record, ttl, now))

    def forget(self, identity: Identity) -> bool:
        with self._lock:
            return judge.present(self._records.pop(identity, None), self._clock()) is not None

    def close(self) -> None:
        """Nothing was opened."""

    def _write(self, identity: Identity, law: Law) -> bool:
        with self._lock:
            record = law(self._records.get(identity), self._clock())
            if record is None:
                return False
            self._records[identity] = record
            return True
