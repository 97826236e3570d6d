"""Stores answer requests: one by `ask`, many of any kinds by `send`."""

from __future__ import annotations

import asyncio

import pytest

from semel.core.records import (
    AUDIT_SCOPE,
    AdoptRequest,
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    Finished,
    ForgetRequest,
    GetRequest,
    Identity,
    PutRequest,
    RenewRequest,
    State,
    TouchRequest,
)
from semel.errors import InvalidKey, StoreError, StoreFull
from semel.stores.base import (
    AsyncStore,
    CountRequest,
    PurgeRequest,
    ScanRequest,
    Store,
    StuckRequest,
)
from semel.stores.urls import open_async_store, open_store

OWNER, OTHER = b"owner-------", b"other-------"
RESULT = Encoded("json/1", b'"done"')


def identity(key: str) -> Identity:
    return Identity("requests", key)


def claim(key: str, owner: bytes = OWNER) -> ClaimRequest:
    return ClaimRequest(identity(key), owner, None, 600.0, 600.0)


class Driven:
    """One kind of store, driven by plain calls."""

    def __init__(self, kind: str, url: str) -> None:
        self._runner = asyncio.Runner() if kind == "asyncio" else None
        self._store = (open_store if self._runner is None else open_async_store)(url)

    def ask(self, request):
        return self._finish(self._store.ask, request)

    def send(self, requests):
        return self._finish(self._store.send, requests)

    def close(self):
        self._finish(self._store.close)
        if self._runner is not None:
            self._runner.close()

    def _finish(self, verb, *given):
        if self._runner is None:
            return verb(*given)

        async def awaited():
            return await verb(*given)

        return self._runner.run(awaited())


@pytest.fixture(params=["threads", "asyncio"])
def store(request, store_url):
    driven = Driven(request.param, store_url)
    yield driven
    driven.close()


def test_requests_of_many_kinds_are_answered_in_their_order(store):
    assert isinstance(store.ask(claim("running")), Claimed)
    assert store.ask(PutRequest(identity("done"), OWNER, RESULT, 600.0)) is True
    busy, renewed, record, finished, put, forgotten = store.send(
        [
            claim("running", OTHER),
            RenewRequest(identity("running"), OWNER, 600.0),
            GetRequest(identity("running")),
            claim("done", OTHER),
            PutRequest(identity("new"), OWNER, RESULT, 600.0),
            ForgetRequest(identity("absent")),
        ]
    )
    assert isinstance(busy, Busy)
    assert renewed is True
    assert record.state is State.PROCESSING
    assert isinstance(finished, Finished)
    assert put is True
    assert forgotten is False


def test_many_of_one_kind_are_answered_in_their_order_too(store):
    keys = [f"{number}" for number in range(5)]
    assert all(isinstance(each, Claimed) for each in store.send([claim(key) for key in keys]))
    owners = [OWNER, OTHER, OWNER, OTHER, OWNER]
    asks = [
        CompleteRequest(identity(key), owner, RESULT, 600.0)
        for key, owner in zip(keys, owners, strict=True)
    ]
    assert store.send(asks) == [True, False, True, False, True]


def test_one_identity_may_be_there_twice(store):
    first, again, other = store.send([claim("k"), claim("k"), claim("k", OTHER)])
    assert first == again
    assert isinstance(first, Claimed)
    assert isinstance(other, Busy)


def test_every_request_can_be_asked_alone(store):
    claimed = claim("k")
    assert isinstance(store.ask(claimed), Claimed)
    assert store.ask(RenewRequest(identity("k"), OWNER, 0.0)) is True
    assert [each.identity for each in store.ask(StuckRequest())] == [identity("k")]
    adopted = store.ask(AdoptRequest(identity("k"), OTHER, 600.0))
    assert adopted.owner == OTHER
    failing = FailRequest(
        identity("k"), OTHER, RESULT, retryable=False, keep_fingerprint=True, ttl=600.0
    )
    assert store.ask(failing) is True
    assert store.ask(TouchRequest(identity("k"), 60.0)) is True
    assert [each.state for each in store.ask(ScanRequest()).records] == [State.FAILED]
    assert store.ask(CountRequest()).failed == 1
    assert store.ask(PurgeRequest()) == 0
    assert store.ask(ForgetRequest(identity("k"))) is True
    assert store.ask(GetRequest(identity("k"))) is None


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_the_error_of_a_member_is_its_own(kind):
    store = Driven(kind, "memory://?max_records=1")
    answers = store.send([claim("a"), claim("b"), GetRequest(identity("a"))])
    assert isinstance(answers[0], Claimed)
    assert isinstance(answers[1], StoreFull)
    assert answers[2].owner == OWNER
    with pytest.raises(StoreError):
        store.ask(claim("b"))
    store.close()


# --- the audit trail -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ForgetRequest, lambda entry: TouchRequest(entry, 0.0)])
def test_no_request_changes_or_removes_an_entry_of_the_audit_trail(kind):
    with pytest.raises(InvalidKey, match="reserved for the audit trail"):
        kind(Identity(AUDIT_SCOPE, "audit-1"))


class Full(Store):
    """A store that has only `send`."""

    def send(self, requests):
        return [StoreFull("no space") for _ in requests]

    def close(self):
        """Nothing was opened."""


class AsyncFull(AsyncStore):
    async def send(self, requests):
        return Full().send(requests)

    async def close(self):
        """Nothing was opened."""


async def test_the_error_of_one_request_is_raised_by_a_store_that_only_sends():
    with pytest.raises(StoreFull):
        Full().ask(claim("a"))
    with pytest.raises(StoreFull):
        await AsyncFull().ask(claim("a"))
