"""While a cluster moves a slot, a record is adopted alone and its index entry follows."""

from __future__ import annotations

from redis.exceptions import TryAgainError

from semel.core.records import Identity, RenewRequest
from semel.stores.redis import commands
from semel.stores.redis.commands import Commands, KeyLayout
from semel.stores.redis.retry import Delivery

CALL = Commands(KeyLayout("idem:")).adopt(RenewRequest(Identity("orders", "a"), bytes(12), 30.0))


def after_moving(reply):
    """The scripts of the round trips after one that was told TRYAGAIN."""
    delivery = Delivery([CALL], 0.0, "a server")
    delivery.replied([TryAgainError("slot on the move")])
    (alone,) = delivery.pending
    assert alone.command.keys == CALL.keys[:1]
    delivery.replied([reply])
    return [sending.command.script for sending in delivery.pending]


def test_the_index_entry_of_an_adopted_record_follows():
    assert after_moving([b"adopted", b"the record", -1, 0]) == [commands.NOTE]


def test_nothing_follows_where_nothing_was_adopted():
    assert after_moving(None) == []
