"""Puts the running operation on every log record, so that effects and records can be compared."""

from __future__ import annotations

import logging

from semel.attempts import current_attempt

NOTHING = "-"
"""What a format shows while no attempt runs."""


class KeyFilter(logging.Filter):
    """Adds `semel_scope`, `semel_key_digest` and `semel_attempt` to log records.

    Add it to handlers: `handler.addFilter(KeyFilter())`. The raw key may be a secret; it is added
    as `semel_key` only where asked for, and is `-` otherwise.
    """

    def __init__(self, *, key: bool = False) -> None:
        super().__init__()
        self._key = key

    def filter(self, record: logging.LogRecord) -> bool:
        """Mark the record; none is dropped."""
        attempt = current_attempt()
        record.semel_scope = NOTHING if attempt is None else attempt.scope
        record.semel_key_digest = NOTHING if attempt is None else attempt.identity.key_digest
        record.semel_attempt = NOTHING if attempt is None else attempt.number
        record.semel_key = attempt.key if attempt is not None and self._key else NOTHING
        return True
