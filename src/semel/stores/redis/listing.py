"""Lists, counts and clears records: what takes more than one round trip.

This module decides what to ask next. It sends nothing: each generator yields the calls of a round
trip (or one step of SCAN), is given the answers, and returns the result. The sync and the async
store run the same generators.

What is stuck is found through the indexes of running leases: 1024 cheap questions in one round
trip, then one per candidate, however many records there are. An index is a hint: a record is
believed, its index entry is put right. Listing and counting read every key and say so.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from semel.core.observers import Log
from semel.core.records import AUDIT_SCOPE, GetRequest, Identity, Record, Request, State
from semel.errors import ConfigError, StoreError
from semel.stores.base import (
    CountRequest,
    Counts,
    Page,
    PurgeRequest,
    ScanRequest,
    StuckRequest,
)
from semel.stores.redis.commands import (
    CHECK,
    DUE,
    PURGE,
    STATE,
    Command,
    Commands,
    ScanStep,
    member_identity,
    microseconds,
)
from semel.stores.redis.replies import read_record
from semel.stores.redis.retry import certain

log = Log(__name__)

_COUNT_STEP = 1000
_WIDEST_STEP = 10_000
_STEPS_PER_PAGE = 20
"""A page that has found nothing after so many steps is given back short: the caller may go on."""


class Nodes(Struct, frozen=True):
    """Asks for the names of the servers that hold keys."""


Step: TypeAlias = Sequence[Command[Any]] | ScanStep | Nodes
Result = TypeVar("Result")
Steps: TypeAlias = Generator[Step, Any, Result]


class _Cursor(Struct, frozen=True, array_like=True):
    """Where a listing stands; travels as text."""

    node: str | None
    position: int
    waiting: tuple[Identity, ...] = ()
    """Found beyond the end of the page: SCAN returns them once only, so they are carried along."""

    def text(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @staticmethod
    def parse(text: str) -> _Cursor:
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text), type=_Cursor)
        except (ValueError, msgspec.MsgspecError):  # base64 and UTF-8; JSON
            raise ConfigError(f"{text!r} is not a cursor of this store") from None


_END = _Cursor(None, 0)


class Listing:
    """Builds the generators of one store's keys."""

    def __init__(self, single: Commands) -> None:
        self._single = single
        self._keys = single.keys

    def steps(self, request: Request[Result]) -> Steps[Result]:
        """Build the steps that answer a request about many records."""
        return _STEPS[type(request)](self, request)

    def stuck(self, ask: StuckRequest) -> Steps[list[Record]]:
        """See `StuckRequest`."""
        older_than = ask.older_than
        found: list[Record] = []

        def keep(answers: list[Record | None]) -> int:
            before = len(found)
            found.extend(r for r in answers if r is not None and _idle_for(r) >= older_than)
            return len(found) - before

        def check(identity: Identity) -> Command[Record | None]:
            keys = self._keys.record_and_index(identity)
            return Command(CHECK, keys, (), partial(read_record, identity))

        yield from self._visit_due(older_than, ask.limit, check, keep)
        # By when the lease ended, not by how long ago that was: each was read at another moment.
        return sorted(found, key=_lease_end)

    def purge(self, ask: PurgeRequest) -> Steps[int]:
        """See `PurgeRequest`. Expired records go by themselves."""
        abandoned_after = ask.abandoned_after
        if abandoned_after is None:
            return 0
        after = microseconds(abandoned_after)

        def remove(identity: Identity) -> Command[int]:
            return Command(PURGE, self._keys.record_and_index(identity), (after,), int)

        return (yield from self._visit_due(abandoned_after, ask.limit, remove, sum))

    def _visit_due(
        self,
        older_than: float,
        limit: int,
        visit: Callable[[Identity], Command[Any]],
        count: Callable[[list[Any]], int],
    ) -> Steps[int]:
        """Visit records whose lease ended, oldest first, until `count` has added up to `limit`."""
        seen: set[Identity | None] = {None}
        wanted, at_most = limit, limit
        while wanted > 0:
            arguments = (microseconds(older_than), at_most)
            due = yield [
                Command(DUE, (index,), arguments, _read_due) for index in self._keys.indexes
            ]
            buckets = [certain(bucket) for bucket in due]
            oldest_first = sorted((pair for bucket in buckets for pair in bucket), key=_deadline)
            new = [identity for _, identity in oldest_first if identity not in seen]
            seen.update(new)
            while wanted > 0 and new:
                chunk, new = new[:wanted], new[wanted:]
                answers = yield [visit(identity) for identity in chunk]
                wanted -= count(_readable(chunk, answers))
            if all(len(bucket) < at_most for bucket in buckets):
                break
            at_most *= 2  # those seen may stand in front of others: held ones stay where they are
        return limit - wanted

    def scan(self, ask: ScanRequest) -> Steps[Page]:
        """See `ScanRequest`."""
        nodes = yield Nodes()
        at = _Cursor(nodes[0], 0) if ask.cursor is None else _Cursor.parse(ask.cursor)
        pattern, limit = self._keys.pattern(ask.scope, ask.prefix), ask.limit
        node, position = at.node, at.position
        # A cursor is the caller's text: it says where the listing stands, not what it may show.
        waiting = [each for each in at.waiting if ask.covers(each.scope)]
        records: list[Record] = []
        count = limit
        for _ in range(_STEPS_PER_PAGE):
            if not waiting and node is not None:
                position, keys = yield ScanStep(node, position, pattern, count)
                # By the name alone: a long audit trail is not read to be left out.
                waiting = [each for each in self._identities(keys) if ask.covers(each.scope)]
                if not waiting:
                    count = min(count * 2, _WIDEST_STEP)  # few keys here are ours: look further
                if position == 0:
                    node = _next_node(nodes, node)
            room = limit - len(records)
            chunk, waiting = waiting[:room], waiting[room:]
            found = yield [self._single.get(GetRequest(identity)) for identity in chunk]
            records += [
                record
                for record in _readable(chunk, found)
                if record is not None and _matches(record, ask)
            ]
            if len(records) == limit or (node is None and not waiting):
                break
        following = _Cursor(node, position, tuple(waiting))
        return Page(tuple(records), None if following == _END else following.text())

    def counts(self, _: CountRequest) -> Steps[Counts]:
        """See `CountRequest`."""
        tally = dict.fromkeys(_COUNTED, 0)
        pattern = self._keys.pattern(None, "")
        for node in (yield Nodes()):
            position, first = 0, True
            while position != 0 or first:
                first = False
                position, keys = yield ScanStep(node, position, pattern, _COUNT_STEP)
                identities = [
                    identity for identity in self._identities(keys) if identity.scope != AUDIT_SCOPE
                ]
                states = yield [
                    Command(STATE, (self._keys.record(identity),), (), _as_is)
                    for identity in identities
                ]
                for found in _readable(identities, states):
                    if found is not None:
                        tally[found] += 1
        return Counts(**{name: tally[state] for state, name in _COUNTED.items()})

    def _identities(self, keys: Sequence[bytes]) -> list[Identity]:
        found = (self._keys.identity(key) for key in dict.fromkeys(keys))
        return [identity for identity in found if identity is not None]


_STEPS: dict[type, Callable[[Listing, Any], Steps[Any]]] = {
    ScanRequest: Listing.scan,
    StuckRequest: Listing.stuck,
    PurgeRequest: Listing.purge,
    CountRequest: Listing.counts,
}
"""What answers each request about many records."""

_COUNTED = {
    int(State.PROCESSING): "processing",
    int(State.SUCCEEDED): "succeeded",
    int(State.FAILED): "failed",
    3: "abandoned",
}
"""What state.lua answers."""


def _matches(record: Record, ask: ScanRequest) -> bool:
    key = record.identity.key
    return key.startswith(ask.prefix) and (ask.state is None or record.state is ask.state)


def _next_node(nodes: Sequence[str], node: str) -> str | None:
    """The server after this one; a server that joined since has what another one gave away."""
    return next((other for other in nodes if other > node), None)


def _idle_for(record: Record) -> float:
    """Seconds since the lease ended."""
    return record.now - _lease_end(record)


def _lease_end(record: Record) -> float:
    assert record.lease_until is not None  # noqa: S101 - check.lua answers PROCESSING only
    return record.lease_until


def _read_due(reply: list[bytes]) -> list[tuple[float, Identity | None]]:
    """Deadlines and identities; None for a member that is not ours."""
    return list(zip(map(float, reply[1::2]), map(member_identity, reply[::2]), strict=True))


def _deadline(pair: tuple[float, Identity | None]) -> float:
    return pair[0]


def _as_is(reply: Result) -> Result:
    return reply


def _readable(identities: Sequence[Identity], answers: Sequence[Any]) -> list[Any]:
    """Answers without the errors: one damaged record must not hide all the others."""
    for identity, answer in zip(identities, answers, strict=True):
        if isinstance(answer, StoreError):
            log.warning(
                "left out of the listing: %s (scope %s, key_digest %s)",
                answer,
                identity.scope,
                identity.key_digest,
            )
    return [answer for answer in answers if not isinstance(answer, StoreError)]
