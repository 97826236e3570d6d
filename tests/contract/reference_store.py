"""The smallest store that follows the rules: a dict, a lock, and `semel.core.judge`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from semel.core import judge
from semel.core.records import LISTINGS, Identity, Record, Request
from semel.stores.base import Store


class DictStore(Store):
    """Reads the record, judges it, and writes the outcome: one step under one lock."""

    unsupported = LISTINGS

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._records: dict[Identity, Record] = {}
        self._lock = threading.Lock()
        self._clock = clock

    def send(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        identity: Identity = request.identity
        with self._lock:
            stored = self._records.get(identity)
            answer, record = judge.answer(stored, request, self._clock())
            if record is None:
                self._records.pop(identity, None)
            elif record is not stored:
                self._records[identity] = record
            return answer

    def close(self) -> None:
        """Nothing was opened."""
