"""What a server says to a connection that has subscribed, and what wake-ups carry.

This module reads. It sends nothing. A record's key is also the name of its channel: a shard
channel (SSUBSCRIBE), which in a cluster stays with the record's own node, or a plain one where the
server has no shard channels (before Redis 7).
"""

from __future__ import annotations

from typing import Any, Final

from hiredis import Reader
from redis.exceptions import AskError, InvalidResponse, ResponseError

from semel.core.records import Ended
from semel.errors import RecordUnreadable
from semel.stores.redis.packing import unpack_ended
from semel.stores.redis.redis_py import reply_error
from semel.stores.redis.scripts import packed
from semel.stores.wakeups.rooms import OtherWay, Rooms

_NOT_YET: Final = object()
_TTL_BYTES: Final = 6


def read_message(message: bytes) -> Ended | None:
    """What a wake-up tells of the record; None when the store has to be asked.

    The scripts write it: how long the record is kept, in milliseconds, and the packed record.
    """
    try:
        return unpack_ended(message[_TTL_BYTES:], int.from_bytes(message[:_TTL_BYTES]) / 1e3)
    except RecordUnreadable:
        return None  # the empty message of a record that is not carried, or anybody's


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
            replyError=reply_error,
            notEnoughData=_NOT_YET,
        )

    def read(self, data: bytes, rooms: Rooms[Any]) -> None:
        """Tell the news in a piece of the stream; an error that ends the line is raised."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _NOT_YET:
            match reply:
                case [b"smessage" | b"message", channel, message]:
                    rooms.told(channel, message)
                case [b"ssubscribe" | b"subscribe", _, _]:
                    rooms.confirmed()
                case [b"sunsubscribe" | b"unsubscribe", channel, _]:
                    rooms.dropped(channel)
                case AskError():  # a MovedError is one too: another node has the slot
                    rooms.refused()
                case ResponseError() if self._manner.sharded and "unknown command" in str(reply):
                    self._manner.sharded = False
                    raise OtherWay
                case Exception():
                    raise reply
