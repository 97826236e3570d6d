"""Stores that fail on purpose, on top of real ones.

    store = FaultyStore(MemoryStore())
    store.inject("complete", LoseReply())       # applied, but the caller gets an error
    ...
    assert store.fired("complete") == 1         # the fault really happened

A verb's faults are used up in the order they were injected, one per call; then it works again.
A fault of `renew` hits a `send` that has a renewal among its requests, too: engines renew leases in
batches. One of `renew_many` hits batches alone. Every call is recorded, so that a test can check
that its fault really fired.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import force_setattr

from semel.core.policy import seconds
from semel.core.records import (
    LISTINGS,
    VERBS,
    Identity,
    Request,
)
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.base import AsyncStore, AsyncWatch, Store, Watch

T = TypeVar("T")
Given = TypeVar("Given", bound="Request[Any] | Sequence[Request[Any]]")


def verb_of(requests: Sequence[Request[Any]]) -> str:
    """Name a `send` of claims `claim_many`, and so on; one of several kinds, or of none, `send`."""
    kinds = {VERBS[type(request)] for request in requests}
    return f"{kinds.pop()}_many" if len(kinds) == 1 else "send"


def _cut() -> Exception:
    return StoreUnavailable("the connection was cut (a fault of the test)")


class _Failing(Struct, frozen=True):
    error: Exception = field(default_factory=_cut)

    def __post_init__(self) -> None:
        if not isinstance(self.error, BaseException):
            name = type(self).__name__
            raise ConfigError(f"{name} takes the exception to raise; got {self.error!r}")


class Refuse(_Failing, frozen=True):
    """The call fails before the store has seen it."""


class LoseReply(_Failing, frozen=True):
    """The store applies the verb, but its answer never arrives."""


class Delay(Struct, frozen=True):
    """The call reaches the store only after some seconds."""

    seconds: float

    def __post_init__(self) -> None:
        force_setattr(self, "seconds", seconds("a delay", self.seconds))  # a timedelta, too


Fault: TypeAlias = Refuse | LoseReply | Delay


class Call(Struct, frozen=True):
    """A recorded call, and the fault that it met."""

    verb: str
    requests: tuple[Request[Any], ...]
    fault: Fault | None
    injected: str | None = None
    """The verb of the injected fault, or None if the call met none."""


class FaultScript:
    """The faults to inject, and the calls that were made; `unsupported` requests can't fail."""

    def __init__(self, unsupported: frozenset[type[Request[Any]]]) -> None:
        self.calls: list[Call] = []
        single = {verb for kind, verb in VERBS.items() if kind not in unsupported}
        many = {f"{verb}_many" for kind, verb in VERBS.items() if kind not in LISTINGS}
        self._verbs = frozenset(single | many | {"send"})
        self._faults: defaultdict[str, deque[Fault]] = defaultdict(deque)

    def inject(self, verb: str, fault: Fault, *, times: int = 1) -> None:
        """Inject this `fault` into the next `times` calls of a `verb`.

        The store must have such a verb.
        """
        # What would never happen is rejected: the test that counts on it would prove nothing.
        self._check_verb(verb)
        if isinstance(fault, type):
            raise ConfigError(f"a fault is made by calling its class: {fault.__name__}(...)")
        if not isinstance(fault, Fault):
            raise ConfigError(f"a fault is a Refuse, LoseReply or Delay; got {fault!r}")
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ConfigError(f"times must be a whole number of 1 or more; got {times!r}")
        self._faults[verb].extend(repeat(fault, times))

    def heal(self) -> None:
        """Remove the faults that have not happened yet."""
        self._faults.clear()

    def fired(self, verb: str) -> int:
        """Return how many calls met a fault of this verb, which the store must have."""
        self._check_verb(verb)
        return sum(call.injected == verb for call in self.calls)

    def _check_verb(self, verb: str) -> None:
        if verb not in self._verbs:
            known = ", ".join(sorted(self._verbs))
            raise ConfigError(f"no call of {verb!r} can meet a fault: the verbs are {known}")

    def _next(self, verb: str, given: Request[Any] | Sequence[Request[Any]]) -> Fault | None:
        requests = (given,) if isinstance(given, Request) else tuple(given)
        # A batch meets the fault of its own verb first, then that of a request in it.
        names = (verb, *dict.fromkeys(VERBS[type(request)] for request in requests))
        injected = next((name for name in names if self._faults[name]), None)
        fault = None if injected is None else self._faults[injected].popleft()
        self.calls.append(Call(verb, requests, fault, injected))
        return fault


class FaultyStore(FaultScript, Store):
    """A `store` for threads whose calls fail as scripted.

    Examples:
        >>> store = FaultyStore(open_store("memory://"))
        >>> store.inject("claim", Refuse())
    """

    def __init__(self, store: Store) -> None:
        _check(store, asynchronous=False)
        super().__init__(store.unsupported)
        self.store = store
        self.unsupported = store.unsupported

    def ask(self, request: Request[T]) -> T:
        """Answer one `request`, or meet the fault of its verb."""
        return self._meet(VERBS[type(request)], self.store.ask, request)

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer `requests`, or meet the fault of their verb (`claim_many`)."""
        return self._meet(verb_of(requests), self.store.send, requests)

    def migrate(self) -> int | None:
        """Create the tables of the store; this never fails on purpose."""
        return self.store.migrate()

    def close(self) -> None:
        """Close the store; this never fails on purpose."""
        self.store.close()

    def watch(self, identity: Identity) -> AbstractContextManager[Watch] | None:
        """Listen as the store does; this never fails on purpose. See `Store.watch`."""
        return self.store.watch(identity)

    def server_of(self, identity: Identity) -> Hashable:
        """Name the server of an `identity`."""
        return self.store.server_of(identity)

    def _meet(self, verb: str, apply: Callable[[Given], T], given: Given) -> T:
        match self._next(verb, given):
            case Refuse(error):
                raise error
            case LoseReply(error):
                apply(given)
                raise error
            case Delay(seconds):
                time.sleep(seconds)
        return apply(given)


class AsyncFaultyStore(FaultScript, AsyncStore):
    """A `store` for asyncio whose calls fail as scripted."""

    def __init__(self, store: AsyncStore) -> None:
        _check(store, asynchronous=True)
        super().__init__(store.unsupported)
        self.store = store
        self.unsupported = store.unsupported

    def ask(self, request: Request[T]) -> Awaitable[T]:
        """Answer one `request`, or meet the fault of its verb."""
        return self._meet(VERBS[type(request)], self.store.ask, request)

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer `requests`, or meet the fault of their verb (`claim_many`)."""
        return await self._meet(verb_of(requests), self.store.send, requests)

    async def migrate(self) -> int | None:
        """Create the tables of the store; this never fails on purpose."""
        return await self.store.migrate()

    async def close(self) -> None:
        """Close the store; this never fails on purpose."""
        await self.store.close()

    def watch(self, identity: Identity) -> AbstractContextManager[AsyncWatch] | None:
        """Listen as the store does; this never fails on purpose. See `Store.watch`."""
        return self.store.watch(identity)

    def server_of(self, identity: Identity) -> Hashable:
        """Name the server of an `identity`."""
        return self.store.server_of(identity)

    async def _meet(self, verb: str, apply: Callable[[Given], Awaitable[T]], given: Given) -> T:
        match self._next(verb, given):
            case Refuse(error):
                raise error
            case LoseReply(error):
                await apply(given)
                raise error
            case Delay(seconds):
                await asyncio.sleep(seconds)
        return await apply(given)


def _check(store: object, *, asynchronous: bool) -> None:
    """Reject what is no store of this kind: on it, no fault would ever be met."""
    kind, opener = (
        ("AsyncFaultyStore", "open_async_store") if asynchronous else ("FaultyStore", "open_store")
    )
    if not isinstance(store, Store | AsyncStore):
        raise ConfigError(
            f"{kind} stands in front of a store, such as {opener}(url) or one of your own; got "
            f"{type(store).__name__}"
        )
    if isinstance(store, AsyncStore) is not asynchronous:
        other = "FaultyStore" if asynchronous else "AsyncFaultyStore"
        raise ConfigError(
            f"{type(store).__name__} is a store {'for threads' if asynchronous else 'for asyncio'}"
            f": use {other}"
        )
