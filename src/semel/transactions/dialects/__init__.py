"""What a transaction needs of each database beside the verbs of its store."""

from __future__ import annotations

from typing import Any, Protocol

from semel.core.records import Identity
from semel.stores.sql.dialect import Dialect
from semel.stores.sql.verbs import Verb


class Records(Protocol):
    """The records of a store, as a caller's transaction reaches them."""

    @property
    def has_lock(self) -> bool:
        """Whether the record's own lock is held: who waits now waits for the whole table."""
        ...

    @property
    def by_key(self) -> bool:
        """Whether who waits, waits for a transaction with the same key."""
        ...

    @property
    def rolls_back(self) -> bool:
        """Whether a wait that is too long ends the caller's transaction; known once prepared."""
        ...

    @property
    def verbs(self) -> Dialect:
        """The verbs of the store, fit to run inside a transaction."""
        ...

    def prepare(self, seconds: float, *, wait: bool) -> Verb[Any]:
        """Refuse a connection to another database; bound the wait for locks, and tell the old one.

        Without `wait` the caller wants to hear at once that somebody else has the record.
        """
        ...

    def restore(self, before: Any) -> Verb[None]:
        """Give the session back the bound that it had."""
        ...

    def lock(self, identity: Identity, *, wait: bool) -> Verb[bool]:
        """Stand in line for the record; False = somebody has it, and this caller does not wait."""
        ...

    def hold(self, identity: Identity, owner: bytes, *, held: bool) -> Verb[None]:
        """Mark this owner's attempt as held, or as not held."""
        ...
