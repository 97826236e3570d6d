"""A full server (`noeviction`): what it admitted goes on, and only new keys are refused."""

from __future__ import annotations

import contextlib

import pytest

from semel.core.records import (
    Abandoned,
    Busy,
    Claimed,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    RenewRequest,
    State,
)
from semel.errors import StoreFull
from servers.redis import redis_server
from stores.redis_given import ERROR, IDENTITY, RESULT, ask, new_owner, opened, opened_async


@pytest.fixture(scope="module", params=["redis", "valkey"])
def running(request):
    with redis_server(valkey=request.param == "valkey") as server:
        yield server


@pytest.fixture
def server(running):
    with contextlib.closing(running.client()) as client:
        client.flushall()
        yield running
        client.config_set("maxmemory", 0)


def fill(server):
    """Let the server be full from now on."""
    with contextlib.closing(server.client()) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)


def assert_full(store):
    with pytest.raises(StoreFull, match="is full; raise maxmemory"):
        store.claim(ask(Identity("full", "a new key")))
    with pytest.raises(StoreFull, match="is full"):
        store.put(Identity("full", "a new mark"), RESULT, 60, owner=new_owner())


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("waited_for", [False, True])
def test_a_full_server_renews_and_completes_what_it_admitted(server, hold, waited_for):
    with opened(server.url) as store:
        first = ask(hold=hold, fingerprint=b"f" * 16)
        store.claim(first)
        fill(server)
        assert_full(store)
        if waited_for:
            assert isinstance(store.claim(ask()), Busy)
        assert store.renew(IDENTITY, first.owner, 60)
        assert store.get(IDENTITY).lease_until > store.get(IDENTITY).now + 50
        large = Encoded("json/1", b'"' + b"x" * 10_000 + b'"')
        assert store.complete(IDENTITY, first.owner, large, 60)
        assert store.get(IDENTITY).outcome == large
        assert store.stuck() == []
        assert isinstance(store.claim(ask(fingerprint=b"f" * 16)), Finished)
        assert_full(store)


async def test_a_full_server_renews_and_completes_what_it_admitted_for_asyncio(server):
    async with opened_async(server.url) as store:
        first = ask()
        await store.claim(first)
        fill(server)
        with pytest.raises(StoreFull):
            await store.claim(ask(Identity("full", "a new key")))
        assert await store.renew(IDENTITY, first.owner, 60)
        assert await store.complete(IDENTITY, first.owner, RESULT, 60)
        assert isinstance(await store.claim(ask()), Finished)


@pytest.mark.parametrize("keep_fingerprint", [False, True])
def test_a_full_server_stores_failures_and_lets_them_run_again(server, keep_fingerprint):
    with opened(server.url) as store:
        first = ask(fingerprint=b"f" * 16)
        store.claim(first)
        fill(server)
        assert_full(store)
        terms = {"retryable": True, "keep_fingerprint": keep_fingerprint, "ttl": 60}
        assert store.fail(IDENTITY, first.owner, ERROR, **terms)
        assert store.get(IDENTITY).state is State.FAILED
        again = store.claim(ask(fingerprint=b"f" * 16))
        assert isinstance(again, Claimed)
        assert again.number == 2


def test_a_full_server_gives_the_same_owner_the_same_claim_again(server):
    with opened(server.url) as store:
        first = ask()
        store.claim(first)
        fill(server)
        assert_full(store)
        assert store.claim(first) == Claimed(1, store.get(IDENTITY).fence, False)


def test_a_full_server_lets_an_abandoned_key_be_taken_over(server):
    with opened(server.url) as store:
        first = ask()
        store.claim(first)
        fill(server)
        assert_full(store)
        assert store.renew(IDENTITY, first.owner, 0)
        second = store.claim(ask())
        assert isinstance(second, Claimed)
        assert second.takeover


def test_a_full_server_lets_a_resolver_decide(server):
    with opened(server.url) as store:
        first = ask(hold=True)
        store.claim(first)
        fill(server)
        assert_full(store)
        assert store.renew(IDENTITY, first.owner, 0)
        assert isinstance(store.claim(ask()), Abandoned)
        assert [record.identity for record in store.stuck()] == [IDENTITY]
        resolver = new_owner()
        assert store.adopt(IDENTITY, resolver, 60).owner == resolver
        assert store.complete(IDENTITY, resolver, RESULT, 60)


def test_a_full_server_is_purged_of_what_was_abandoned(server):
    with opened(server.url) as store:
        held, free = ask(Identity("s", "held"), hold=True), ask(Identity("s", "free"))
        for request in (held, free):
            store.claim(request)
            assert store.renew(request.identity, request.owner, 0)
        fill(server)
        assert_full(store)
        assert store.purge(abandoned_after=0) == 1
        assert store.get(held.identity) is not None
        assert store.get(free.identity) is None


def test_a_full_server_takes_a_mark_for_a_key_that_it_knows(server):
    with opened(server.url) as store:
        first = ask()
        store.claim(first)
        fill(server)
        assert_full(store)
        assert store.renew(IDENTITY, first.owner, 0)
        assert store.put(IDENTITY, RESULT, 60, owner=new_owner())


def test_a_full_server_notes_that_somebody_waits(server):
    with opened(server.url) as store, contextlib.closing(server.client()) as client:
        first = ask()
        store.claim(first)
        fill(server)
        assert_full(store)
        assert isinstance(store.claim(ask()), Busy)
        [record] = [key for key in client.scan_iter() if not key.endswith(b"~leases")]
        assert client.get(record)[1] & 32
        assert client.pttl(record) > 0


def test_a_full_server_renews_and_completes_a_record_whose_slot_moves(server):
    """Its index is out of reach then: the scripts get the record's key alone."""
    with opened(server.url) as store:
        first = ask()
        store.claim(first)
        fill(server)
        assert_full(store)
        renewal = store._commands.renew(RenewRequest(IDENTITY, first.owner, 0))
        end = store._commands.complete(CompleteRequest(IDENTITY, first.owner, RESULT, 60))
        assert store.transport.send([renewal.without_index()]) == [True]
        assert store.stuck() == []  # the index does not know of it yet
        [noted] = store.transport.send([renewal.note()])
        assert not isinstance(noted, StoreFull)
        assert [record.identity for record in store.stuck()] == [IDENTITY]
        assert store.transport.send([end.without_index()]) == [True]
        assert isinstance(store.claim(ask()), Finished)
