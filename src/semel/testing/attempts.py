"""Attempts that crash on purpose, and events that a test can look at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from msgspec import UNSET

from semel.aio import AsyncIdempotency
from semel.core.attempts import Attempt, OwnerIds
from semel.core.policy import Policy
from semel.core.records import Claim, Claimed, ClaimRequest, Record
from semel.engine.outcomes import claim_request
from semel.errors import ConfigError, NestedCall
from semel.events import Event
from semel.sync import Idempotency

E = TypeVar("E", bound=Event)

_owners = OwnerIds()


def crash(
    idempotency: Idempotency,
    key: str,
    fn: Callable[[], object] = lambda: None,
    *,
    scope: str = "default",
    payload: object = UNSET,
    policy: Policy | None = None,
) -> Record:
    """Run `fn` as an attempt whose process dies before it stores an outcome; return the record.

    The record is as a killed process leaves it after its lease has ended: abandoned, and held if
    the policy says so. `idempotency` is an engine; `key`, `scope`, `payload`, and `policy` are
    those of its `execute`. For a decorated function, pass `pay.key_for(...)`, `scope=pay.scope`,
    its policy, and a dict of the arguments that it compares as `payload`; `fn` calls the
    undecorated function, `pay.__wrapped__`. What `fn` raises reaches the caller.

    Examples:
        >>> crash(idem, "order:42", policy=Policy(abandoned="hold")).abandoned
        True
    """
    request = _claim(idempotency, key, scope, payload, policy)
    store = idempotency.internals.store
    attempt = _attempt(request, store.claim(request), store)
    try:
        with attempt, _undecorated():
            fn()
    finally:
        store.renew(request.identity, request.owner, 0.0)
    return _left(store.get(request.identity))


async def crash_async(
    idempotency: AsyncIdempotency,
    key: str,
    fn: Callable[[], Awaitable[object]] | None = None,
    *,
    scope: str = "default",
    payload: object = UNSET,
    policy: Policy | None = None,
) -> Record:
    """Run `fn` like `crash`, with an engine for asyncio.

    `idempotency`, `key`, `fn`, `scope`, `payload`, and `policy` are those of `crash`.
    """
    request = _claim(idempotency, key, scope, payload, policy)
    store = idempotency.internals.store
    attempt = _attempt(request, await store.claim(request), store)
    try:
        with attempt, _undecorated():
            if fn is not None:
                await fn()
    finally:
        await store.renew(request.identity, request.owner, 0.0)
    return _left(await store.get(request.identity))


def _claim(
    engine: Idempotency | AsyncIdempotency,
    key: str,
    scope: str,
    payload: object,
    policy: Policy | None,
) -> ClaimRequest:
    setup = engine.internals.setup
    call = setup.call(key, scope, payload, setup.rules(scope, policy))
    return claim_request(call, _owners.next(), setup.digests(call)[0])


def _attempt(request: ClaimRequest, claim: Claim, store: object) -> Attempt:
    if not isinstance(claim, Claimed):
        kind = type(claim).__name__
        raise ConfigError(f"an attempt can't begin here, so it can't crash; the store says {kind}")
    return Attempt(request.identity, claim.number, claim.fence, request.owner, store=store)


@contextmanager
def _undecorated() -> Iterator[None]:
    try:
        yield
    except NestedCall as error:
        raise ConfigError(
            "crash got a function that asks for the key that crashes: pass the undecorated one, "
            "such as lambda: pay.__wrapped__(42)"
        ) from error


def _left(record: Record | None) -> Record:
    if record is None:
        raise ConfigError("the record is gone: something removed it while the attempt ran")
    return record


class RecordedEvents(list[Event]):
    """The recorded events, in their order."""

    def of(self, kind: type[E], *, scope: str | None = None) -> list[E]:
        """Return the events of a `kind`, such as `Replayed`, of one `scope` if given."""
        return [each for each in self if isinstance(each, kind) and scope in {None, each.scope}]


@contextmanager
def record_events(idempotency: Idempotency | AsyncIdempotency) -> Iterator[RecordedEvents]:
    """Record the events of an engine, `idempotency`, while the block runs.

    semel calls its hooks as before.

    Examples:
        >>> with record_events(idem) as events:
        ...     idem.execute("order:42", lambda: "paid")
        'paid'
        >>> [type(event).__name__ for event in events]
        ['Ran']
    """
    events = RecordedEvents()
    with idempotency.internals.setup.announce.also(events.append):
        yield events
