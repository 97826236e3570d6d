"""What the tests of tiers start from: a tiered store of either kind, watched from both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import redis

from semel.core.records import VERBS, ClaimRequest, Encoded, Identity
from semel.stores.tiered.front import Calls, Entry, unpack
from semel.stores.urls import open_async_store, open_store
from semel.testing import StoreDriver
from semel.testing.faults import verb_of

PATIENT = 5.0
"""How long the front may take where its outage is not the matter: the machine may be busy."""

LONG = 600.0
"""A lease or retention that cannot end while a test runs."""

KEY = Identity("orders.create", "order:42")
OTHER = Identity("orders.create", "order:43")
ANNA, BERT, CARL = b"\x00anna".ljust(12), b"\x00bert".ljust(12), b"\x00carl".ljust(12)
RED, BLUE = b"\x00red".ljust(16, b"\xff"), b"\x00blue".ljust(16, b"\xff")
RESULT = Encoded("json/1", b'{"charge":"ch_1"}')
OTHER_RESULT = Encoded("json/1", b'{"charge":"ch_2"}')
ERROR = Encoded("failure", b'["ValueError","no such order"]')

OPENERS: dict[str, Callable[..., Any]] = {"threads": open_store, "asyncio": open_async_store}


class Watched:
    """Passes every request on to the store behind, and writes its verb down."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.verbs: list[str] = []
        self.batches: list[Any] = []
        self.instead: dict[str, Callable[[Any, Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def ask(self, request: Any) -> Any:
        return self._noted(VERBS[type(request)], self._store.ask, request)

    def send(self, requests: Any) -> Any:
        self.batches.append(requests)
        return self._noted(verb_of(requests), self._store.send, requests)

    def get_many(self, identities: Any) -> Any:
        return self._noted("get_many", self._store.get_many, identities)

    def _noted(self, verb: str, apply: Any, given: Any) -> Any:
        self.verbs.append(verb)
        return self.instead[verb](apply, given) if verb in self.instead else apply(given)


class Tiers(StoreDriver):
    """A tiered store, driven by plain calls; `sql` lists what the store behind was asked."""

    def __init__(self, kind: str, front: str, behind: str, **options: Any) -> None:
        self.store = OPENERS[kind](front, behind=behind, **{"front_timeout": PATIENT, **options})
        self.behind = self.store.behind = Watched(self.store.behind)
        super().__init__(self.store)

    @property
    def sql(self) -> list[str]:
        """What SQL was asked since this was last read."""
        asked, self.behind.verbs = self.behind.verbs, []
        return asked

    def instead(self, verb: str, answer: Callable[[], Any], *, apply: bool = False) -> None:
        """Let something else answer SQL's next calls of a verb."""

        def plain(real, given):
            if apply:
                real(given)
            return answer()

        async def awaited(real, given):
            if apply:
                await real(given)
            return answer()

        self.behind.instead[verb] = awaited if self._is_async else plain

    def after(self, verb: str, answer: Callable[[], Any]) -> None:
        """The same, once SQL has done what it was asked."""
        self.instead(verb, answer, apply=True)

    @contextlib.contextmanager
    def withheld(self) -> Iterator[list[Any]]:
        """Keep back what would be told to the front, as a network might."""
        kept: list[Any] = []
        front, tell = self.store._front, self.store._front.tell

        def keep(calls):
            kept.extend(calls)
            return tell([])

        front.tell = keep
        try:
            yield kept
        finally:
            del front.tell

    def deliver(self, calls: list[Any]) -> list[bool]:
        """Send what was kept back; tells which calls the front accepted."""
        return self._finish(self.store._front._transport.send(calls))


def ask(owner, fingerprint=None, *, identity=KEY, lease=LONG, **more) -> ClaimRequest:
    """A claim; what a test does not mention does not matter to it."""
    return ClaimRequest(identity, owner, fingerprint, lease, LONG, **more)


def succeed(tiers: Tiers, owner, fingerprint=None, *, identity=KEY, ttl=LONG) -> None:
    """Run an operation to its success."""
    tiers.claim(ask(owner, fingerprint, identity=identity))
    assert tiers.complete(identity, owner, RESULT, ttl)


def fail(tiers: Tiers, *, retryable=True, keep_fingerprint=True) -> None:
    """Let Anna's attempt fail."""
    terms = {"retryable": retryable, "keep_fingerprint": keep_fingerprint, "ttl": LONG}
    assert tiers.fail(KEY, ANNA, ERROR, **terms)


def park(tiers: Tiers, *, identity=KEY) -> None:
    """Abandon Anna's attempt at once, without waiting for its lease."""
    assert tiers.renew(identity, ANNA, 0.0)


def entry_key(identity: Identity, prefix: str = "idem:") -> bytes:
    """The key of an entry in the front."""
    return Calls(prefix, 1.0).get(identity).keys[0]


def entry_of(client: redis.Redis, identity: Identity) -> Entry | None:
    """What the front has of a key."""
    raw = client.get(entry_key(identity))
    return None if raw is None else unpack(raw)
