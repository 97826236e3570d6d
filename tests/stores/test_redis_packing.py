"""The packed record: what the scripts write is what we read."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from semel.core.records import (
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    GetRequest,
    Identity,
    RenewRequest,
    State,
)
from semel.errors import RecordUnreadable, StoreError
from semel.stores.redis import commands
from semel.stores.redis.commands import Commands, KeyLayout, pack
from semel.stores.redis.replies import (
    CODECS,
    pack_outcome,
    unpack_finished,
    unpack_outcome,
    unpack_record,
)
from stores.redis_given import ERROR, IDENTITY, RESULT, ask, new_owner, opened

outcomes = st.builds(
    Encoded,
    st.one_of(st.sampled_from(sorted(CODECS)), st.text(max_size=60)),
    st.binary(max_size=300),
)


@pytest.fixture
def store(redis_url):
    with opened(redis_url) as store:
        yield store


def raw(client, store, identity=IDENTITY) -> bytes:
    return client.get(store.keys.record(identity))


@given(outcomes)
def test_every_outcome_comes_back_as_it_was(outcome):
    assert unpack_outcome(pack_outcome(outcome)) == outcome


def test_well_known_codecs_take_one_byte():
    for name in CODECS:
        assert len(pack_outcome(Encoded(name, b""))) == 1


def test_the_numbers_of_codecs_never_change():
    assert CODECS == {
        "json/1": 1,
        "msgpack/1": 2,
        "omitted": 3,
        "failure": 4,
        "http/1": 5,
        "grpc/1": 6,
    }


def test_a_codec_name_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="longer than 255 bytes"):
        pack_outcome(Encoded("x" * 256, b""))


@given(st.binary(max_size=120))
def test_no_bytes_at_all_surprise_the_reader(noise):
    for raw_record in (noise, b"\x01" + noise):
        with contextlib.suppress(RecordUnreadable):
            unpack_record(IDENTITY, raw_record, 0, 0)


def test_a_finished_record_of_100_bytes_fits_the_allocation_class_of_160(
    store, redis_of_this_worker
):
    request = ask(fingerprint=b"f" * 16)
    store.claim(request)
    store.complete(IDENTITY, request.owner, Encoded("json/1", b"x" * 100), 600)
    with redis_of_this_worker.client() as client:
        assert len(raw(client, store)) + 4 <= 160  # 4: what Redis puts around a short string


@given(
    fingerprint=st.none() | st.binary(min_size=16, max_size=16),
    hold=st.booleans(),
    lease=st.floats(1, 1e9),
    outcome=outcomes,
    key=st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable()),
    retryable=st.booleans(),
    keep=st.booleans(),
)
def test_what_the_scripts_write_is_what_we_read(
    server_for_hypothesis, *, fingerprint, hold, lease, outcome, key, retryable, keep
):
    store = server_for_hypothesis
    identity = Identity("packing", key)
    store.forget(identity)
    request = ask(identity, fingerprint=fingerprint, lease=lease, hold=hold)
    claimed = store.claim(request)
    running = store.get(identity)
    assert running.state is State.PROCESSING
    assert (running.number, running.fence) == (claimed.number, claimed.fence)
    assert (running.owner, running.hold) == (request.owner, hold)
    assert running.fingerprint == fingerprint
    assert running.lease_until == pytest.approx(claimed.fence / 1e6 + lease, abs=1e-5)
    assert running.expires_at is None
    assert store.fail(
        identity, request.owner, outcome, retryable=retryable, keep_fingerprint=keep, ttl=60
    )
    ended = store.get(identity)
    assert (ended.state, ended.outcome, ended.retryable) == (State.FAILED, outcome, retryable)
    assert ended.fingerprint == (fingerprint if keep else None)
    assert ended.remaining == pytest.approx(60, abs=5)


@pytest.fixture(scope="module")
def server_for_hypothesis(redis_of_this_worker):
    with opened(redis_of_this_worker.url, prefix="packing:") as store:
        yield store


def test_superseded_fingerprints_are_kept_in_order_and_only_eight_of_them(store):
    prints = [bytes([n]) * 16 for n in range(12)]
    for fingerprint in prints:
        request = ask(fingerprint=fingerprint, replace=True)
        store.claim(request)
        store.complete(IDENTITY, request.owner, RESULT, 60)
    assert store.get(IDENTITY).superseded == tuple(prints[3:11])


def test_century_long_leases_and_retentions_are_exact(store):
    century = 100 * 365 * 86400.0
    request = ask(lease=century, ttl=century)
    store.claim(request)
    record = store.get(IDENTITY)
    assert record.lease_until - record.fence / 1e6 == pytest.approx(century, abs=1)
    assert store.complete(IDENTITY, request.owner, RESULT, float("inf"))
    assert store.get(IDENTITY).remaining == pytest.approx(century, abs=60)


@pytest.mark.parametrize("size", [0, 11, 13])
@pytest.mark.parametrize("verb", ["claim", "put", "adopt"])
def test_an_owner_of_another_size_is_refused_before_anything_is_sent(store, verb, size):
    owner = b"o" * size
    asking = {
        "claim": lambda: store.claim(replace(ask(), owner=owner)),
        "put": lambda: store.put(IDENTITY, RESULT, 60, owner=owner),
        "adopt": lambda: store.adopt(IDENTITY, owner, 30.0),
    }[verb]
    with pytest.raises(ValueError, match="owner must be 12 bytes"):
        asking()
    assert store.get(IDENTITY) is None


def test_a_fingerprint_of_another_size_is_refused_before_anything_is_sent(store):
    with pytest.raises(ValueError, match="fingerprint must be 16 bytes"):
        store.claim(ask(fingerprint=b"short"))


GARBAGE = {
    "text": b"hello",
    "empty": b"",
    "newer version": b"\x02" + b"x" * 80,
    "header only": b"\x01" + b"\x00" * 37,
    "cut inside the header": b"\x01" + b"\x00" * 10,
    "finished without an outcome": b"\x01\x01" + b"\x00" * 36,
    "a byte": b"\x01",
    "two bytes, succeeded": b"\x01\x01",
    "two bytes, failed": b"\x01\x02",
    "unknown state": b"\x01\x03" + b"\x00" * 80,
    "nine replaced fingerprints": b"\x01\x00\x09" + b"\x00" * 200,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_a_damaged_record_is_a_typed_error_and_nobody_gets_to_run(
    store, redis_of_this_worker, garbage
):
    with redis_of_this_worker.client() as client:
        client.set(store.keys.record(IDENTITY), garbage)
        for refused in (
            lambda: store.claim(ask()),
            lambda: store.get(IDENTITY),
            lambda: store.renew(IDENTITY, new_owner(), 1),
            lambda: store.complete(IDENTITY, new_owner(), RESULT, 1),
            lambda: store.fail(
                IDENTITY, new_owner(), ERROR, retryable=True, keep_fingerprint=True, ttl=1
            ),
            lambda: store.put(IDENTITY, RESULT, 1, owner=new_owner()),
            lambda: store.touch(IDENTITY, 1),
        ):
            with pytest.raises(RecordUnreadable, match="nothing ran"):
                refused()
        assert raw(client, store) == garbage
    assert store.forget(IDENTITY)


# --- a newer release beside this one --------------------------------------------------------


MORE = b"\x02{}what a later release keeps"
"""It comes behind the run_info, here `{}`."""


@pytest.fixture
def newer(store, redis_of_this_worker):
    """Claims keys as a later release may: the running part of a record is longer than ours."""
    with redis_of_this_worker.client() as client:

        def claim(**terms):
            request = ask(**terms)
            assert isinstance(store.claim(request), Claimed)
            longer = raw(client, store) + MORE
            client.set(store.keys.record(IDENTITY), longer, keepttl=True)
            return request

        def unknown() -> bytes:
            return raw(client, store)[-len(MORE) :]

        claim.unknown = unknown
        yield claim


@pytest.mark.parametrize("fingerprint", [None, b"f" * 16])
@pytest.mark.parametrize("hold", [False, True])
def test_a_running_record_with_more_than_we_know_is_read_renewed_and_completed(
    store, newer, fingerprint, hold
):
    request = newer(hold=hold, fingerprint=fingerprint)
    assert store.get(IDENTITY).owner == request.owner
    assert store.counts().processing == 1
    assert isinstance(store.claim(ask(fingerprint=fingerprint)), Busy)
    assert newer.unknown() == MORE
    assert store.renew(IDENTITY, request.owner, 60)
    assert newer.unknown() == MORE
    assert store.claim(request).number == 1
    assert newer.unknown() == MORE
    assert store.complete(IDENTITY, request.owner, RESULT, 60)
    assert store.get(IDENTITY).outcome == RESULT
    assert store.claim(ask(fingerprint=fingerprint)).outcome == RESULT


def test_the_plain_case_of_an_end_reads_a_longer_record_too(store, newer):
    request = newer()
    assert store.complete(IDENTITY, request.owner, RESULT, 60)
    assert store.get(IDENTITY).outcome == RESULT


def test_a_running_record_with_more_than_we_know_may_fail_and_run_again(store, newer):
    request = newer()
    terms = {"retryable": True, "keep_fingerprint": True, "ttl": 60}
    assert store.fail(IDENTITY, request.owner, ERROR, **terms)
    assert store.get(IDENTITY).outcome == ERROR
    assert store.claim(ask()).number == 2


def test_a_resolver_keeps_what_it_does_not_know(store, newer):
    request = newer(hold=True)
    assert store.renew(IDENTITY, request.owner, 0)
    assert [record.identity for record in store.stuck()] == [IDENTITY]
    resolver = new_owner()
    assert store.adopt(IDENTITY, resolver, 60).owner == resolver
    assert newer.unknown() == MORE
    assert store.complete(IDENTITY, resolver, RESULT, 60)
    assert store.get(IDENTITY).outcome == RESULT


def test_a_takeover_leaves_out_what_was_kept_of_the_attempt_before(store, newer):
    request = newer()
    assert store.renew(IDENTITY, request.owner, 0)
    taken = ask()
    assert store.claim(taken).takeover
    assert newer.unknown() != MORE
    assert store.complete(IDENTITY, taken.owner, RESULT, 60)


def test_an_abandoned_record_with_more_than_we_know_is_marked_or_purged(store, newer):
    request = newer()
    assert store.renew(IDENTITY, request.owner, 0)
    assert store.put(IDENTITY, RESULT, 60, owner=new_owner())
    assert store.get(IDENTITY).outcome == RESULT
    store.forget(IDENTITY)
    request = newer()
    assert store.renew(IDENTITY, request.owner, 0)
    assert store.purge(abandoned_after=0) == 1


def test_an_unknown_codec_number_is_a_typed_error(store, redis_of_this_worker):
    store.put(IDENTITY, RESULT, 60, owner=new_owner())
    with redis_of_this_worker.client() as client:
        packed = raw(client, store)
        client.set(store.keys.record(IDENTITY), packed.replace(b"\x01{", b"\xc8{"), px=60_000)
    with pytest.raises(RecordUnreadable, match="unknown codec"):
        store.get(IDENTITY)
    with pytest.raises(RecordUnreadable, match="unknown codec"):
        store.claim(ask())


def test_a_codec_whose_name_is_no_text_is_a_typed_error(store, redis_of_this_worker):
    store.put(IDENTITY, RESULT, 60, owner=new_owner())
    with redis_of_this_worker.client() as client:
        packed = raw(client, store)
        named = packed.replace(b"\x01{", b"\xff\x02\xff\xff{")
        client.set(store.keys.record(IDENTITY), named, px=60_000)
    with pytest.raises(RecordUnreadable, match="damaged"):
        store.get(IDENTITY)
    with pytest.raises(RecordUnreadable, match="damaged"):
        store.claim(ask())


def test_a_key_of_another_type_is_a_typed_error(store, redis_of_this_worker):
    with redis_of_this_worker.client() as client:
        client.hset(store.keys.record(IDENTITY), "a", "b")
    with pytest.raises(RecordUnreadable, match="another type"):
        store.claim(ask())
    (answer,) = store.send([ask()])
    assert isinstance(answer, RecordUnreadable)


def test_one_damaged_record_does_not_spoil_a_batch_or_a_listing(
    store, redis_of_this_worker, caplog
):
    good, bad = Identity("orders.create", "good"), IDENTITY
    store.put(good, RESULT, 60, owner=new_owner())
    with redis_of_this_worker.client() as client:
        client.set(store.keys.record(bad), b"hello")
    answers = store.send([ask(good), ask(bad), ask(Identity("s", "new"))])
    assert [isinstance(answer, StoreError) for answer in answers] == [False, True, False]
    assert {record.identity.key for record in store.scan().records} == {"good", "new"}
    assert store.counts().succeeded == 1
    assert "left out of the listing" in caplog.text
    assert bad.key_digest in caplog.text
    with pytest.raises(RecordUnreadable):
        store.get_many([good, bad])


# --- commands as they are sent -----------------------------------------------------------------


def _calls():
    verbs = Commands(KeyLayout("idem:"))
    identity, owner = Identity("orders.create", "Ünïcode-42"), b"o" * 12
    result = Encoded("json/1", b'{"id": 42}')
    yield verbs.claim(ClaimRequest(identity, owner, None, 30.0, 600.0))
    yield verbs.claim(ClaimRequest(identity, owner, b"f" * 16, 0.5, 1e12, True, True, 7))
    yield verbs.claim(ClaimRequest(identity, owner, None, 30.0, 600.0, run_info=b"{}"))
    yield verbs.claim(ClaimRequest(identity, owner, None, 30.0, 600.0, run_info=b"\r\n" * 100))
    yield verbs.renew(RenewRequest(identity, owner, 30.0))
    yield verbs.renew(RenewRequest(identity, owner, 0.0, b"{}"))
    yield verbs.complete(CompleteRequest(identity, owner, result, 600.0))
    yield verbs.fail(
        FailRequest(identity, owner, result, retryable=True, keep_fingerprint=False, ttl=0.0)
    )
    yield verbs.get(GetRequest(identity))
    yield verbs.claim(ClaimRequest(identity, owner, None, 30.0, 600.0)).without_index()


@pytest.mark.parametrize("call", list(_calls()))
def test_what_is_sent_is_what_the_arguments_say(call):
    assert call.packed() == pack(call.parts(with_text=False))


def test_hiredis_is_given_no_number_to_write(monkeypatch):
    """A handler of a signal that raised while it wrote one ended the process (hiredis 3.5)."""
    asked = []
    monkeypatch.setattr(commands, "pack_command", lambda parts: asked.extend(parts) or b"written")
    assert pack(("EVALSHA", b"digest", 2, "k", State.FAILED, -1, 2**60)) == b"written"
    assert asked == ["EVALSHA", b"digest", b"2", "k", b"2", b"-1", str(2**60).encode()]


def test_a_finished_record_that_is_cut_short_is_unreadable():
    with pytest.raises(RecordUnreadable, match="damaged"):
        unpack_finished(b"\x01\x01", 0.0)


@pytest.mark.parametrize("raw", [b"", b"\x02", b"\x02\x01\x00", b"\x02" + b"x" * 80])
def test_a_finished_record_of_another_version_is_named_as_such_however_short_it_is(raw):
    said = "it is version 2" if raw else "it is empty"
    with pytest.raises(RecordUnreadable, match=said):
        unpack_finished(raw, 0.0)
