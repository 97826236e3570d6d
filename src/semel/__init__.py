"""semel (Latin: once): makes any operation safe to retry.

    from semel import Idempotency

    idem = Idempotency("sqlite:///semel.db")
    idem.execute("order:42", lambda: charge(order), payload=order)

Run an operation once per key, give every duplicate the same answer, and know what happened
when something crashed. This module holds the public names and imports no driver or framework.
"""

from __future__ import annotations

from msgspec import UNSET

from semel.aio import AsyncIdempotency
from semel.core.attempts import Attempt, Outcome, current_attempt, require_attempt
from semel.core.codec import Codec, register_type
from semel.core.encryption import EncryptedCodec
from semel.core.keys import KeyGenerator, derive_key, new_key
from semel.core.policy import Policy
from semel.core.records import Record, State
from semel.default import attempt, configure, consume, execute, marks, once, once_per, run
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    IdempotencyError,
    InvalidKey,
    LeaseLost,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    RecordUnreadable,
    ResultUnavailable,
    RetryTransaction,
    SerializationError,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    TooManyWaiting,
    ValueRejected,
    WaitTimeout,
)
from semel.events import Event
from semel.stores.urls import open_async_store, open_store
from semel.sync import Idempotency

__version__ = "0.1.0"

__all__ = [
    "UNSET",
    "AsyncIdempotency",
    "Attempt",
    "AttemptsExhausted",
    "Codec",
    "ConcurrentRequest",
    "ConfigError",
    "DuplicateRequest",
    "EncryptedCodec",
    "Event",
    "Idempotency",
    "IdempotencyError",
    "InvalidKey",
    "KeyGenerator",
    "LeaseLost",
    "NestedCall",
    "Outcome",
    "OutcomeUnknown",
    "PayloadMismatch",
    "Policy",
    "PreviousFailure",
    "Record",
    "RecordUnreadable",
    "ResultUnavailable",
    "RetryTransaction",
    "SerializationError",
    "State",
    "StoreError",
    "StoreFull",
    "StoreRefused",
    "StoreUnavailable",
    "TooManyWaiting",
    "ValueRejected",
    "WaitTimeout",
    "__version__",
    "attempt",
    "configure",
    "consume",
    "current_attempt",
    "derive_key",
    "execute",
    "marks",
    "new_key",
    "once",
    "once_per",
    "open_async_store",
    "open_store",
    "register_type",
    "require_attempt",
    "run",
]
