"""Who runs an attempt, in the packed record: kept while it runs, and gone from a finished one."""

from __future__ import annotations

import contextlib
import os

import pytest

from semel.core.records import (
    RUN_INFO_BYTES,
    Busy,
    Claimed,
    CompleteRequest,
    Encoded,
    Identity,
    RenewRequest,
    State,
)
from semel.stores.redis import open_async_store, open_store
from semel.stores.redis.commands import LARGE, KeyLayout
from semel.testing.driver import StoreDriver
from servers.redis import redis_cluster, redis_sentinel, redis_server
from stores.redis_given import ERROR, IDENTITY, RESULT, ask, finish, new_owner, opened

INFO = b'{"by":"web-1:4711","ttl":259200,"codec":"json"}'
PARKED = b'{"by":"web-1:4711","ttl":259200,"codec":"json","why":"TimeoutError"}'
LONGEST = b"x" * RUN_INFO_BYTES
LATER = b"\x03what a later release keeps"
"""Behind run_info."""

KEYS = KeyLayout("idem:")
RECORD = KEYS.record(IDENTITY)
HEADER, FINGERPRINT, RUNNING = 38, 16, 13
"""Bytes, as lua/record.lua has them."""


@pytest.fixture
def store(redis_url):
    with opened(redis_url) as store:
        yield store


@pytest.fixture
def client(redis_of_this_worker):
    with contextlib.closing(redis_of_this_worker.client()) as client:
        yield client


# --- where it is, and for how long ----------------------------------------------------------


@pytest.mark.parametrize("hold", [False, True], ids=["plain", "held"])
@pytest.mark.parametrize("fingerprint", [None, b"f" * 16], ids=["no payload", "payload"])
@pytest.mark.parametrize("info", [INFO, LONGEST, b"\x00", b""], ids=len)
def test_a_running_record_grows_by_its_run_info_alone(store, client, info, fingerprint, hold):
    store.claim(ask(run_info=info, fingerprint=fingerprint, hold=hold))
    without = HEADER + (FINGERPRINT if fingerprint else 0) + RUNNING
    raw = client.get(RECORD)
    assert raw[without:] == (bytes([len(info)]) + info if info else b"")
    assert store.get(IDENTITY).run_info == info


def complete(store, request):
    assert store.complete(IDENTITY, request.owner, RESULT, 60)


def complete_while_somebody_waits(store, request):
    assert isinstance(store.claim(ask()), Busy)
    assert store.complete(IDENTITY, request.owner, RESULT, 60)


def complete_with_a_large_result(store, request):
    large = Encoded("json/1", b"1" * LARGE)
    assert store.complete(IDENTITY, request.owner, large, 60)


def fail(store, request):
    assert store.fail(
        IDENTITY, request.owner, ERROR, retryable=True, keep_fingerprint=False, ttl=60
    )


def fail_without_having_run(store, request):
    terms = {"retryable": True, "keep_fingerprint": True, "ttl": 60, "ran": False}
    assert store.fail(IDENTITY, request.owner, ERROR, **terms)


def mark_as_done(store, request):
    assert store.renew(IDENTITY, request.owner, 0)
    assert store.put(IDENTITY, RESULT, 60, owner=new_owner())


ENDS = [
    complete,
    complete_while_somebody_waits,
    complete_with_a_large_result,
    fail,
    fail_without_having_run,
    mark_as_done,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_finished_record_has_as_many_bytes_with_run_info_as_without(store, client, end):
    sizes = []
    for info in (b"", LONGEST):
        request = ask(run_info=info, fingerprint=b"f" * 16)
        store.claim(request)
        end(store, request)
        assert store.get(IDENTITY).run_info == b""
        assert LONGEST not in client.get(RECORD)
        sizes.append(client.strlen(RECORD))
        store.forget(IDENTITY)
    assert sizes[0] == sizes[1]


def bytes_per_finished_record(info: bytes) -> float:
    """What a server of its own needs for each of many records with results of 100 bytes."""
    batches, size = 60, 1_000
    result = Encoded("json/1", b'"' + b"x" * 98 + b'"')
    with redis_server() as server, contextlib.closing(server.client()) as client:

        def write(batches: int) -> None:
            with opened(server.url) as store:
                for begin in range(0, batches * size, size):
                    asks = [
                        ask(
                            Identity("orders.create", f"{number:036d}"),
                            fingerprint=os.urandom(16),
                            run_info=info,
                        )
                        for number in range(begin, begin + size)
                    ]
                    assert {type(answer) for answer in store.send(asks)} == {Claimed}
                    ends = [CompleteRequest(a.identity, a.owner, result, 600.0) for a in asks]
                    assert set(store.send(ends)) == {True}

        write(1)  # once before: buffers and scripts are not records
        client.flushall()
        before = client.info("memory")["used_memory"]
        write(batches)
        records = client.dbsize()
        assert records == batches * size
        return (client.info("memory")["used_memory"] - before) / records


def test_a_finished_record_takes_at_most_345_bytes_of_memory():
    """What docs/stores/redis.md promises; the benchmark `memory` measures it at 100,000 records."""
    assert bytes_per_finished_record(LONGEST) <= 345


# --- what changes it ------------------------------------------------------------------------


def test_only_a_value_in_a_renewal_replaces_it(store):
    request = ask(run_info=INFO)
    store.claim(request)
    assert store.claim(ask(request.identity, request.owner, run_info=b"again")).number == 1
    assert store.get(IDENTITY).run_info == INFO
    assert isinstance(store.claim(ask(run_info=b"another caller's")), Busy)
    assert store.get(IDENTITY).run_info == INFO
    assert store.renew(IDENTITY, request.owner, 30)
    assert store.get(IDENTITY).run_info == INFO
    assert not store.renew(IDENTITY, new_owner(), 30, run_info=b"a stranger's")
    assert store.get(IDENTITY).run_info == INFO
    assert store.renew(IDENTITY, request.owner, 0, run_info=PARKED)
    assert [record.run_info for record in store.stuck()] == [PARKED]
    assert [record.run_info for record in store.scan().records] == [PARKED]
    assert store.adopt(IDENTITY, new_owner(), 60).run_info == PARKED
    assert store.get(IDENTITY).run_info == PARKED


def test_a_takeover_brings_its_own(store):
    first = ask(run_info=INFO)
    store.claim(first)
    store.renew(IDENTITY, first.owner, 0, run_info=PARKED)
    assert store.claim(ask(run_info=b"{}")).takeover
    assert store.get(IDENTITY).run_info == b"{}"


def test_it_may_be_taken_away(store, client):
    request = ask(run_info=INFO)
    store.claim(request)
    assert store.renew(IDENTITY, request.owner, 30, run_info=b"")
    assert store.get(IDENTITY).run_info == b""
    assert client.get(RECORD)[HEADER + RUNNING :] == b"\x00"


def test_a_full_server_parks_an_attempt_with_a_longer_one():
    with redis_server() as server, opened(server.url) as store:
        request = ask(run_info=INFO, hold=True)
        store.claim(request)
        with contextlib.closing(server.client()) as client:
            client.config_set("maxmemory", 1)
        assert store.renew(IDENTITY, request.owner, 0, run_info=PARKED)
        assert [record.run_info for record in store.stuck()] == [PARKED]


# --- other releases, and damage -------------------------------------------------------------


def rewrite(client, change) -> None:
    """Change the stored bytes past the store."""
    client.set(RECORD, change(client.get(RECORD)), keepttl=True)


def test_a_record_of_a_release_without_run_info_is_read_renewed_parked_and_adopted(store, client):
    request = ask(hold=True)
    store.claim(request)
    assert client.strlen(RECORD) == HEADER + RUNNING  # as the first release wrote it
    assert store.get(IDENTITY).run_info == b""
    assert store.renew(IDENTITY, request.owner, 30)
    assert client.strlen(RECORD) == HEADER + RUNNING
    assert store.renew(IDENTITY, request.owner, 0, run_info=PARKED)
    assert store.adopt(IDENTITY, new_owner(), 60).run_info == PARKED


@pytest.mark.parametrize("replacement", [PARKED, b"", LONGEST], ids=len)
def test_what_a_newer_release_keeps_behind_it_stays_when_it_is_replaced(store, client, replacement):
    request = ask(run_info=INFO)
    store.claim(request)
    rewrite(client, lambda raw: raw + LATER)
    assert store.get(IDENTITY).run_info == INFO
    assert store.renew(IDENTITY, request.owner, 30, run_info=replacement)
    assert store.get(IDENTITY).run_info == replacement
    expected = bytes([len(replacement)]) + replacement + LATER
    assert client.get(RECORD)[HEADER + RUNNING :] == expected


@pytest.mark.parametrize("cut", [1, 20, len(INFO)])
def test_a_record_whose_run_info_is_cut_short_still_runs_and_ends(store, client, cut):
    """Nobody's operation fails because of a word about who runs it."""
    request = ask(run_info=INFO)
    store.claim(request)
    rewrite(client, lambda raw: raw[:-cut])
    assert store.get(IDENTITY).run_info == INFO[:-cut]
    assert isinstance(store.claim(ask()), Busy)
    assert store.claim(request).number == 1
    assert store.renew(IDENTITY, request.owner, 30, run_info=PARKED)
    assert store.get(IDENTITY).run_info == PARKED
    assert store.complete(IDENTITY, request.owner, RESULT, 60)
    assert store.get(IDENTITY).outcome == RESULT


# --- on every kind of server ----------------------------------------------------------------

SERVERS = {
    "redis": redis_server,
    "valkey": lambda: redis_server(valkey=True),
    "cluster": redis_cluster,
    "sentinel": redis_sentinel,
}


@pytest.fixture(scope="module", params=SERVERS)
def url(request):
    with SERVERS[request.param]() as server:
        yield server.url


@pytest.mark.parametrize("kind", [open_store, open_async_store])
def test_each_member_of_a_batch_has_its_own(url, kind):
    prefix = f"{kind.__name__}:"
    with contextlib.closing(StoreDriver(kind(url, prefix=prefix))) as store:
        asks = [
            ask(Identity("s", str(number)), run_info=b"%d" % number, hold=number % 2 == 0)
            for number in range(40)
        ]
        assert {type(answer) for answer in store.send(asks)} == {Claimed}
        identities = [each.identity for each in asks]
        assert [each.run_info for each in store.get_many(identities)] == [
            b"%d" % number for number in range(40)
        ]
        renewals = [
            RenewRequest(each.identity, each.owner, 0.0, None if number % 3 else PARKED)
            for number, each in enumerate(asks)
        ]
        assert set(store.send(renewals)) == {True}
        expected = [b"%d" % number if number % 3 else PARKED for number in range(40)]
        assert [each.run_info for each in store.get_many(identities)] == expected
        assert {record.key: record.run_info for record in store.stuck()} == {
            str(number): info for number, info in enumerate(expected)
        }
        assert set(store.send(list(map(finish, asks)))) == {True}
        ended = store.get_many(identities)
        assert {(each.state, each.run_info) for each in ended} == {(State.SUCCEEDED, b"")}
