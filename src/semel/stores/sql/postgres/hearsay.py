"""What PostgreSQL's wake-ups say. This module reads; it sends nothing.

One channel serves all records: a message begins with the digest of its record. What follows, if
anything does, is the outcome, as `words` writes it.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec
from psycopg.pq.abc import PGconn

from semel.core.records import Encoded, Ended, Finished, State
from semel.stores.listening import Subscriptions
from semel.stores.sql.postgres.words import CHANNEL

LISTEN: Final = f"LISTEN {CHANNEL}"

_DIGEST: Final = 36

_outcomes: Final = msgspec.json.Decoder(
    tuple[bytes, bytes | None, State, int, int, float, str, bytes]
)


def channel(digest: UUID) -> bytes:
    """What the messages of a record begin with."""
    return str(digest).encode()


def tell(pgconn: PGconn, subscriptions: Subscriptions[Any]) -> None:
    """Take in what has come: each message names its record, and others are nobody's."""
    pgconn.consume_input()
    while (notice := pgconn.notifies()) is not None:
        subscriptions.received(notice.extra[:_DIGEST], notice.extra[_DIGEST:])


def read_outcome(message: bytes) -> Ended | None:
    """What a wake-up tells of the record; None when the store has to be asked."""
    try:
        fields: Any = _outcomes.decode(message)
    except msgspec.MsgspecError:
        return None  # a record that was parked, or whose result is too large; or anybody's message
    owner, fingerprint, state, number, fence, remaining, codec, data = fields
    if state is State.PROCESSING or remaining <= 0:
        return None
    return Ended(
        owner, fingerprint, Finished(state, Encoded(codec, data), number, fence, remaining)
    )
