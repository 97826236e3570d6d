"""What a server says to a connection that has subscribed, and what wake-ups carry.

This module reads. It sends nothing. A record's key is also the name of its channel: a shard
channel (SSUBSCRIBE), which in a cluster stays with the record's own node, or a plain one where the
server has no shard channels (before Redis 7).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hiredis import Reader
from redis._parsers.base import BaseParser
from redis.exceptions import AskError, InvalidResponse, ResponseError

from semel.core.records import Ended, Finished, Identity, State
from semel.errors import RecordUnreadable
from semel.stores.redis.packing import unpack_record
from semel.stores.redis.scripts import packed
from semel.stores.wakeups.rooms import Confirmed, Dropped, News, OtherWay, Refused, Told

_NOT_YET: Final = object()
_TTL_BYTES: Final = 6

_SUBSCRIBED: Final = frozenset({b"ssubscribe", b"subscribe"})
_UNSUBSCRIBED: Final = frozenset({b"sunsubscribe", b"unsubscribe"})
_MESSAGE: Final = frozenset({b"smessage", b"message"})


def read_message(identity: Identity, message: bytes) -> Ended | None:
    """What a wake-up tells of the record; None when the store has to be asked.

    The scripts write it: how long the record is kept, in milliseconds, and the packed record.
    """
    ttl = int.from_bytes(message[:_TTL_BYTES])
    try:
        record = unpack_record(identity, message[_TTL_BYTES:], ttl, 0)
    except RecordUnreadable:
        return None  # the empty message of a record that carries none, or anybody's
    if record.state is State.PROCESSING or record.retryable:
        return None
    finished = Finished(record.state, record.outcome, record.number, record.fence, ttl / 1e3)
    return Ended(record.owner, record.fingerprint, finished)


class Manner:
    """How one server is subscribed to: by shard channels, until it says that it has none."""

    def __init__(self) -> None:
        self.sharded = True

    def subscribe(self, channel: Any) -> bytes:
        """Write the command."""
        return packed(("SSUBSCRIBE" if self.sharded else "SUBSCRIBE", channel))

    def unsubscribe(self, channel: Any) -> bytes:
        """Write the command."""
        return packed(("SUNSUBSCRIBE" if self.sharded else "UNSUBSCRIBE", channel))


class Hearsay:
    """Reads the stream of one subscribed connection."""

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._reader = Reader(
            protocolError=InvalidResponse,
            replyError=BaseParser.parse_error,
            notEnoughData=_NOT_YET,
        )

    def read(self, data: bytes) -> Iterator[News]:
        """Give the news in a piece of the stream; an error that ends the line is raised."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _NOT_YET:
            match reply:
                case [kind, channel, message] if kind in _MESSAGE:
                    yield Told(channel, message)
                case [kind, _, _] if kind in _SUBSCRIBED:
                    yield Confirmed()
                case [kind, channel, _] if kind in _UNSUBSCRIBED:
                    yield Dropped(channel)
                case AskError():  # a MovedError is one too: another node has the slot
                    yield Refused()
                case ResponseError() if self._manner.sharded and "unknown command" in str(reply):
                    self._manner.sharded = False
                    raise OtherWay
                case Exception():
                    raise reply
