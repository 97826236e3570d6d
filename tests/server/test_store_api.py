"""The service as a store: what it accepts, who may ask it, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import socket
import threading
from typing import Any

import msgspec
import pytest

from engines.facade import KINDS, PATIENCE, wait_until
from semel.core import audit
from semel.core.records import (
    AUDIT_SCOPE,
    AdoptRequest,
    ClaimRequest,
    CompleteRequest,
    CountRequest,
    Encoded,
    FailRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    PurgeRequest,
    PutRequest,
    RenewRequest,
    ScanRequest,
    StuckRequest,
    TouchRequest,
)
from semel.core.run_info import build, read
from semel.errors import (
    RecordUnreadable,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    ValueRejected,
)
from semel.server import store_api
from semel.server.tokens import checked_table, new_token
from semel.stores.memory import AsyncMemoryStore
from semel.stores.remote import wire
from semel.stores.urls import open_async_store, open_store
from semel.testing import AsyncFaultyStore, LoseReply, Refuse, StoreDriver
from semel.testing.faults import VERBS
from server.remote_given import ANNA, BERT, ERROR, KEY, LONG, RED, RESULT, RUN_INFO, served

PAY = Identity("orders.pay", "order:1")
OTHER = Identity("bills.pay", "bill:1")


@pytest.fixture(scope="module", name="served")
def _served():
    with served() as running:
        yield running


@pytest.fixture
def store(served):
    """The store of a service without tokens; its faults are the test's."""
    behind = AsyncFaultyStore(AsyncMemoryStore())
    served.use(lambda: behind)
    yield behind
    served.leave()


class Tenant:
    """Sends what a token permits."""

    def __init__(self, served, token=None):
        self._served = served
        self._token = token

    def post(self, path, body, content_type=wire.CONTENT_TYPE):
        headers = {"Content-Type": content_type}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = http.client.HTTPConnection("127.0.0.1", self._served.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return wire.Reply(response.status, response.headers.get_content_type(), response.read())

    def send(self, *requests, remaining=PATIENCE):
        reply = self.post(wire.SEND, wire.write_batch(requests, remaining, "here"))
        return wire.read_answers(reply, requests, "here") if reply.status == 200 else problem(reply)

    def watch(self, identity, seconds):
        reply = self.post(wire.WATCH, wire.write_watch(identity, seconds))
        return wire.read_changed(reply, "here") if reply.status == 200 else problem(reply)


def problem(reply) -> dict[str, Any]:
    assert reply.content_type == "application/problem+json"
    return json.loads(reply.body)


@pytest.fixture
def anyone(served, store) -> Tenant:
    return Tenant(served)


@pytest.fixture
def tenant(served, tmp_path):
    """Makes tokens, for one service over one store: `tenant("shop", ["store"], ["orders.*"])`."""
    tables, made = [], {}
    behind = AsyncFaultyStore(AsyncMemoryStore())
    file = tmp_path / "tokens.toml"

    def make(name, rights, scopes=("*",), **more):
        text, digest = new_token()
        fields = {"sha256": digest, "rights": list(rights), "scopes": list(scopes), **more}
        tables.append(checked_table(name, fields))
        file.write_text("\n".join(tables))
        served.use(lambda: behind, tokens=str(file))
        made[name] = text
        return Tenant(served, text)

    make.behind = behind
    yield make
    served.leave()


def claim(identity=PAY, owner=ANNA, **more) -> ClaimRequest:
    fields = {"lease": LONG, "ttl": LONG, "run_info": RUN_INFO} | more
    return ClaimRequest(identity, owner, fields.pop("fingerprint", None), **fields)


# --- what is accepted ------------------------------------------------------------------------------


def packed(**fields) -> bytes:
    return msgspec.msgpack.encode({"version": 1, "remaining": 5.0, "requests": [], **fields})


GET = ["get", {"identity": {"scope": "s", "key": "k"}}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xc1", "body"),
        (b"\x91" * 100_000, "body"),
        (msgspec.msgpack.encode([1]), "body"),
        (packed(), "requests"),
        (packed(version=2, requests=[GET]), "version"),
        (packed(version="1", requests=[GET]), "version"),
        (packed(more=1, requests=[GET]), "more"),
        (packed(remaining=0, requests=[GET]), "remaining"),
        (packed(remaining=math.nan, requests=[GET]), "remaining"),
        (packed(requests=[GET] * 1001), "requests"),
        (packed(requests=[["get"]]), "requests[0]"),
        (packed(requests=[["look", {}]]), "requests[0]"),
        (packed(requests=[GET, ["get", {}]]), "requests[1].identity"),
        (packed(requests=[["get", {"identity": {"scope": "s"}}]]), "requests[0].identity"),
        (packed(requests=[["get", {**GET[1], "fast": True}]]), "requests[0].fast"),
        (packed(requests=[GET, ["counts", {}]]), "requests"),
        (packed(requests=[["scan", {"limit": "all"}]]), "requests[0].limit"),
    ],
)
def test_a_body_that_is_not_of_this_version_is_refused(anyone, store, body, field):
    told = problem(anyone.post(wire.SEND, body))
    assert (told["status"], told["code"], told["field"]) == (400, "invalid_request", field)
    assert store.calls == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"seconds": -1.0}, "seconds"), ({"seconds": 26.0}, "seconds"), ({"version": 3}, "version")],
)
def test_a_watch_that_is_not_of_this_version_is_refused(anyone, fields, field):
    body = {"version": 1, "identity": {"scope": "s", "key": "k"}, "seconds": 1.0} | fields
    told = problem(anyone.post(wire.WATCH, msgspec.msgpack.encode(body)))
    assert (told["status"], told["code"], told["field"]) == (400, "invalid_request", field)


def test_only_messagepack_is_taken_and_no_more_than_4_mb(anyone):
    for path in (wire.SEND, wire.WATCH):
        told = problem(anyone.post(path, b"{}", "application/json"))
        assert (told["status"], told["code"]) == (415, "unsupported_media_type")
    told = problem(anyone.post(wire.SEND, b"x" * (wire.MOST_BYTES + 1)))
    assert (told["status"], told["code"]) == (413, "body_too_large")


NAN, INF = math.nan, math.inf

WRONG = [
    (claim(Identity("s", "k" * 300)), "invalid_key", "key"),
    (claim(Identity("s", "a b")), "invalid_key", "key"),
    (claim(Identity("s" * 256, "k")), "invalid_key", "scope"),
    (claim(Identity(AUDIT_SCOPE, "k")), "invalid_key", "scope"),
    (GetRequest(Identity("s", "a\x1bb")), "invalid_key", None),
    (GetRequest(Identity("s\n", "k")), "invalid_key", None),
    (RenewRequest(Identity(AUDIT_SCOPE, "k"), ANNA, LONG), "invalid_key", None),
    (claim(owner=b"short"), "invalid_request", "owner"),
    (RenewRequest(PAY, ANNA + b"x", LONG), "invalid_request", "owner"),
    (claim(fingerprint=b"x"), "invalid_request", "fingerprint"),
    (claim(lease=1e9), "invalid_request", "lease"),
    (claim(lease=0.01), "invalid_request", "lease"),
    (claim(lease=-1.0), "invalid_request", "lease"),
    (claim(lease=NAN), "invalid_request", "lease"),
    (RenewRequest(PAY, ANNA, 1e9), "invalid_request", "lease"),
    (RenewRequest(PAY, ANNA, -INF), "invalid_request", "lease"),
    (AdoptRequest(PAY, ANNA, 0.0), "invalid_request", "lease"),
    (claim(ttl=INF), "invalid_request", "ttl"),
    (claim(ttl=-1.0), "invalid_request", "ttl"),
    (CompleteRequest(PAY, ANNA, RESULT, NAN), "invalid_request", "ttl"),
    (CompleteRequest(PAY, ANNA, Encoded("", b""), LONG), "invalid_request", "result"),
    (CompleteRequest(PAY, ANNA, Encoded("a\nb", b""), LONG), "invalid_request", "result"),
    (
        FailRequest(
            PAY, ANNA, Encoded("c" * 256, b""), retryable=True, keep_fingerprint=True, ttl=1.0
        ),
        "invalid_request",
        "error",
    ),
    (claim(max_attempts=-1), "invalid_request", "max_attempts"),
    (claim(max_attempts=2**40), "invalid_request", "max_attempts"),
    (claim(run_info=b"x" * 201), "invalid_request", None),
    (ScanRequest(limit=0), "invalid_request", "limit"),
    (ScanRequest(prefix="a\0"), "invalid_request", "prefix"),
    (ScanRequest(scope="s" * 3000), "invalid_request", "scope"),
    (ScanRequest(cursor="none of ours"), "invalid_request", ""),
    (StuckRequest(older_than=NAN), "invalid_request", "older_than"),
    (PurgeRequest(abandoned_after=NAN), "invalid_request", "abandoned_after"),
]


@pytest.mark.parametrize(("request_", "code", "field"), WRONG)
def test_what_no_store_should_get_is_refused(anyone, request_, code, field):
    told = anyone.send(request_)
    place = "requests[0]" if field is None else f"requests[0].{field}" if field else "requests"
    assert (told["status"], told["code"], told["field"]) == (400, code, place)


def test_every_request_of_a_batch_is_checked_before_the_first_is_sent(anyone, store):
    told = anyone.send(claim(), claim(OTHER, lease=1e9))
    assert (told["status"], told["field"]) == (400, "requests[1].lease")
    assert store.calls == []


def test_entries_of_the_audit_trail_are_neither_touched_nor_forgotten(anyone, store):
    for verb, more in (("touch", {"ttl": 0.0}), ("forget", {})):
        fields = {"identity": {"scope": AUDIT_SCOPE, "key": "audit-1"}, **more}
        told = problem(anyone.post(wire.SEND, packed(requests=[[verb, fields]])))
        assert (told["status"], told["code"]) == (400, "invalid_key")
    assert store.calls == []


def test_the_bounds_of_a_scope_hold_for_engines_too(served, store, monkeypatch, tmp_path):
    file = tmp_path / "semel.toml"
    file.write_text('[scopes."orders.*"]\nbounds = {lease = [5, 60]}\n')
    monkeypatch.setenv("SEMEL_CONFIG", str(file))
    served.use(lambda: store)
    anyone = Tenant(served)
    for wrong in (claim(lease=4.0), claim(lease=61.0), RenewRequest(PAY, ANNA, 61.0)):
        told = anyone.send(wrong)
        assert (told["status"], told["field"]) == (400, "requests[0].lease")
    [claimed] = anyone.send(claim(lease=60.0))
    assert claimed.number == 1
    assert anyone.send(RenewRequest(PAY, ANNA, 0.0)) == [True]  # to park is no lease
    assert anyone.send(claim(OTHER, lease=4.0))[0].number == 1


# --- who may ask -----------------------------------------------------------------------------------

NEEDED = {
    "store": [
        claim(),
        RenewRequest(PAY, ANNA, LONG),
        CompleteRequest(PAY, ANNA, RESULT, LONG),
        FailRequest(PAY, ANNA, ERROR, retryable=True, keep_fingerprint=True, ttl=LONG),
    ],
    "view": [GetRequest(PAY), ScanRequest(scope=PAY.scope)],
    "operate": [
        PutRequest(PAY, ANNA, RESULT, LONG),
        TouchRequest(PAY, LONG),
        ForgetRequest(PAY),
        AdoptRequest(PAY, ANNA, LONG),
    ],
}
OF_ALL_SCOPES = {
    "view": [ScanRequest(), StuckRequest(), CountRequest()],
    "operate": [PurgeRequest(), ScanRequest(scope=AUDIT_SCOPE)],
}
ALL = {"use", "store", "view", "operate"}


def test_every_kind_of_request_needs_its_right():
    kinds = {
        type(each) for table in (NEEDED, OF_ALL_SCOPES) for many in table.values() for each in many
    }
    assert kinds == set(VERBS)


@pytest.mark.parametrize("right", NEEDED)
def test_a_right_permits_its_requests_and_no_other_right_does(tenant, right):
    may = tenant("may", [right], ["orders.*"])
    may_not = tenant("may-not", ALL - {right}, ["*"])
    other = tenant("other", ALL, ["orders", "order", "bills.*"])
    for request in NEEDED[right]:
        for each in (may_not, other):
            told = each.send(request)
            assert (told["status"], told["code"]) == (403, "forbidden")
        assert tenant.behind.calls == []
        assert isinstance(may.send(request), list), request
        tenant.behind.calls.clear()


@pytest.mark.parametrize("right", OF_ALL_SCOPES)
def test_what_is_about_all_scopes_needs_all_of_them(tenant, right):
    may = tenant("may", [right], ["*"])
    may_not = tenant("may-not", ALL - {right}, ["*"])
    some = tenant("some", ALL, ["orders.*", "s*"])
    for request in OF_ALL_SCOPES[right]:
        assert may_not.send(request)["status"] == some.send(request)["status"] == 403
        assert isinstance(may.send(request), list), request


def test_one_request_that_is_not_permitted_refuses_the_batch(tenant):
    shop = tenant("shop", ["store"], ["orders.*"])
    assert shop.send(claim(), claim(OTHER))["code"] == "forbidden"
    assert tenant.behind.calls == []


def test_a_watch_needs_the_right_store(tenant):
    shop = tenant("shop", ["store"], ["orders.*"])
    viewer = tenant("viewer", ALL - {"store"})
    assert shop.watch(PAY, 0.0) is True
    assert shop.watch(OTHER, 0.0)["code"] == viewer.watch(PAY, 0.0)["code"] == "forbidden"


def test_without_a_token_nothing_is_answered(tenant, served):
    tenant("shop", ALL)
    for each in (Tenant(served), Tenant(served, "wrong")):
        assert each.send(GetRequest(PAY))["code"] == "unauthorized"
        assert each.watch(PAY, 0.0)["code"] == "unauthorized"


def test_owners_are_blank_without_the_right_store(tenant):
    shop = tenant("shop", ["store", "view"], ["orders.*"])
    viewer = tenant("viewer", ["view", "operate"])
    shop.send(claim(), claim(Identity("orders.refund", "1")))
    assert shop.send(GetRequest(PAY))[0].owner == ANNA
    assert viewer.send(GetRequest(PAY))[0].owner == b""
    assert shop.send(ScanRequest(scope=PAY.scope))[0].records[0].owner == ANNA
    assert {each.owner for each in viewer.send(ScanRequest())[0].records} == {b""}
    shop.send(RenewRequest(PAY, ANNA, 0.0))
    assert [each.owner for each in viewer.send(StuckRequest())[0]] == [b""]
    assert viewer.send(AdoptRequest(PAY, BERT, LONG))[0].owner == b""
    assert tenant.behind.store._store.get(PAY).owner == BERT


def test_the_rate_counts_claims_inside_batches_and_no_renewals(tenant):
    shop = tenant("shop", ["store"], rate=1)
    assert len(shop.send(*(claim(Identity("s", str(number))) for number in range(50)))) == 50
    told = shop.send(claim(OTHER))
    assert (told["status"], told["code"]) == (429, "rate_limited")
    assert shop.send(RenewRequest(Identity("s", "1"), ANNA, LONG)) == [True]


# --- the token's name --------------------------------------------------------------------------


def test_a_record_names_the_token_of_its_attempt(tenant):
    shop = tenant("shop", ["store", "view"])
    said = build("web-1:4711", 60.0, "json/1", None, 3)
    shop.send(claim(run_info=said))
    assert read(shop.send(GetRequest(PAY))[0].run_info) == read(
        build("web-1:4711@shop", 60.0, "json/1", None, 3)
    )
    shop.send(RenewRequest(PAY, ANNA, LONG))
    assert read(shop.send(GetRequest(PAY))[0].run_info).by == "web-1:4711@shop"
    shop.send(RenewRequest(PAY, ANNA, 0.0, build("web-1:4711", 60.0, "json/1", "TimeoutError")))
    known = read(shop.send(GetRequest(PAY))[0].run_info)
    assert (known.by, known.why) == ("web-1:4711@shop", "TimeoutError")


@pytest.mark.parametrize("ttl", [60.0, 0.0])
def test_what_a_record_says_of_nobody_names_the_token(tenant, ttl):
    shop = tenant("shop", ["store", "view"])
    shop.send(claim(run_info=b"\xff", ttl=ttl))
    assert read(shop.send(GetRequest(PAY))[0].run_info).by == "shop"


def entry(**said) -> PutRequest:
    return audit.request_for({"by": "anna", "action": "forget", **said})


def test_an_entry_of_the_audit_trail_names_the_token(tenant):
    operator = tenant("operator", ["operate"])
    assert operator.send(entry(scope="orders.pay"), entry()) == [True, True]
    records = operator.send(ScanRequest(scope=AUDIT_SCOPE))[0].records
    assert {json.loads(each.outcome.data)["by"] for each in records} == {"anna@operator"}


def test_an_operator_of_some_scopes_writes_entries_about_them_alone(tenant):
    operator = tenant("operator", ["operate"], ["orders.*"])
    assert operator.send(entry(scope="orders.pay")) == [True]
    for each in (entry(scope="bills.pay"), entry()):
        assert operator.send(each)["code"] == "forbidden"


@pytest.mark.parametrize(
    "result",
    [Encoded("json", b'{"by":"x"}'), Encoded(audit.CODEC, b"{"), Encoded(audit.CODEC, b"{}")],
)
def test_nothing_else_goes_into_the_audit_trail(tenant, result):
    operator = tenant("operator", ["operate"])
    told = operator.send(PutRequest(Identity(AUDIT_SCOPE, "audit-1"), ANNA, result, LONG))
    assert (told["status"], told["field"]) == (400, "requests[0].result")


# --- errors of the store -----------------------------------------------------------------------

SECRET = "db-7.internal:5432"


@pytest.mark.parametrize(
    "error", [StoreUnavailable(f"{SECRET} is down"), StoreRefused(f"{SECRET} refuses the login")]
)
def test_a_store_that_is_down_is_a_503_that_only_an_operator_reads_whole(tenant, error):
    shop, operator = tenant("shop", ["store", "view"]), tenant("operator", ["view", "operate"])
    tenant.behind.inject("get", Refuse(error), times=2)
    told = shop.send(GetRequest(PAY))
    assert (told["status"], told["code"], told["error"]) == (503, "store_error", error.code)
    assert SECRET not in json.dumps(told)
    assert SECRET in operator.send(GetRequest(PAY))["detail"]
    tenant.behind.inject("get", Refuse(error))
    told = shop.watch(PAY, 1.0)
    assert (told["status"], told["code"]) == (503, "store_error")
    assert SECRET not in json.dumps(told)


@pytest.mark.parametrize("error", [StoreFull(f"{SECRET} is full"), ValueRejected(SECRET)])
def test_the_error_of_one_request_is_its_answer(tenant, error):
    shop, operator = tenant("shop", ["store"]), tenant("operator", ["store", "operate"])
    tenant.behind.inject("claim", Refuse(error), times=2)
    [answer] = shop.send(claim())
    assert type(answer) is type(error)
    assert SECRET not in str(answer)
    [answer] = operator.send(claim())
    assert SECRET in str(answer)


def test_why_a_record_cannot_be_read_is_told_to_everybody(tenant):
    shop = tenant("shop", ["view"])
    tenant.behind.inject("get", Refuse(RecordUnreadable("its row is damaged")))
    [answer] = shop.send(GetRequest(PAY))
    assert str(answer) == str(RecordUnreadable("its row is damaged"))


def test_the_service_gives_up_before_its_client_and_what_it_sent_is_done(served):
    """A claim that hangs is never canceled: it may have been applied."""
    entered, left = threading.Event(), threading.Event()

    class Slow(AsyncMemoryStore):
        async def ask(self, request):
            gate = asyncio.get_running_loop().create_future()
            entered.set()
            self.gate = gate
            await gate
            try:
                return await super().ask(request)
            finally:
                left.set()

    slow = Slow()
    served.use(lambda: slow)
    anyone = Tenant(served)
    told = anyone.send(claim(), remaining=0.1)
    assert (told["code"], told["error"]) == ("store_error", "store_unavailable")
    assert entered.is_set()
    assert not left.is_set()
    served.on_loop(_set(slow))
    assert left.wait(PATIENCE)
    assert slow._store.get(PAY).owner == ANNA


async def _set(slow) -> None:
    slow.gate.set_result(None)


def test_an_error_that_comes_after_the_service_gave_up_is_nobodys(served):
    class Failing(AsyncMemoryStore):
        gone = False

        async def ask(self, request):
            self.gate = asyncio.get_running_loop().create_future()
            await self.gate
            self.gone = True
            raise StoreUnavailable("too late")

    failing = Failing()
    served.use(lambda: failing)
    assert Tenant(served).send(claim(), remaining=0.05)["code"] == "store_error"
    served.on_loop(_set(failing))
    wait_until(lambda: failing.gone)


# --- how much one answer carries -----------------------------------------------------------------


def stored(anyone, count, result):
    identities = [Identity("large", str(number)) for number in range(count)]
    for each in identities:
        assert anyone.send(PutRequest(each, ANNA, result, LONG)) == [True]
    return identities


@pytest.mark.parametrize("ask", [GetRequest, claim])
def test_a_batch_with_too_many_results_is_to_be_split(anyone, store, monkeypatch, ask):
    monkeypatch.setattr(store_api, "MOST_ANSWERED", 2 << 20)
    large = Encoded("raw", bytes(1 << 20))
    [identity] = stored(anyone, 1, large)
    store.calls.clear()
    told = anyone.send(*[ask(identity)] * 1000)
    assert (told["status"], told["code"]) == (413, "body_too_large")
    assert told["detail"] == "The results that were asked for have more than 2 MB together."
    assert len(store.calls) == 1  # no more than these are read
    assert len(anyone.send(ask(identity), ask(identity))) == 2
    monkeypatch.setattr(store_api, "MOST_ANSWERED", 1)
    [answer] = anyone.send(ask(identity))  # alone: any result has an answer
    assert answer.outcome == large


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_gets_large_results_in_several_answers(served, anyone, monkeypatch, kind):
    monkeypatch.setattr(store_api, "MOST_ANSWERED", 2 << 20)
    large = Encoded("raw", bytes(1 << 20))
    identities = stored(anyone, 9, large)
    opener = open_store if kind == "threads" else open_async_store
    driven = StoreDriver(opener(served.url, timeout=PATIENCE))
    with contextlib.closing(driven):
        answers = driven.send([claim(each) for each in identities])
        assert [each.outcome for each in answers] == [large] * 9
        records = driven.get_many([*identities, PAY])
        assert [each and each.outcome for each in records] == [large] * 9 + [None]


def test_what_answers_no_results_goes_to_the_store_at_once(anyone, store):
    many = [RenewRequest(Identity("s", str(number)), ANNA, LONG) for number in range(1000)]
    assert anyone.send(*many) == [False] * 1000
    assert len(store.calls) == 1


def test_a_page_has_an_end(anyone, monkeypatch):
    monkeypatch.setattr(store_api, "MOST_LISTED", 2)
    stored(anyone, 5, RESULT)
    found, cursor = [], None
    while found == [] or cursor is not None:
        [page] = anyone.send(ScanRequest(limit=1000, cursor=cursor))
        assert len(page.records) <= 2
        found += page.records
        cursor = page.cursor
    assert len(found) == 5


# --- watches -----------------------------------------------------------------------------------


def in_thread(function, *args):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function(*args)))
    thread.start()
    return thread, answers


def test_a_watch_asks_for_a_level(anyone):
    assert anyone.watch(PAY, 20.0) is True  # there is no record
    anyone.send(claim())
    assert anyone.watch(PAY, 0.0) is False
    anyone.send(RenewRequest(PAY, ANNA, 0.0))
    assert anyone.watch(PAY, 20.0) is True  # parked
    anyone.send(claim(), CompleteRequest(PAY, ANNA, RESULT, LONG))
    anyone.send(CompleteRequest(PAY, ANNA, RESULT, LONG))
    assert anyone.watch(PAY, 20.0) is True


@pytest.mark.parametrize(
    "end",
    [
        CompleteRequest(KEY, ANNA, RESULT, LONG),
        FailRequest(KEY, ANNA, ERROR, retryable=True, keep_fingerprint=True, ttl=LONG),
        RenewRequest(KEY, ANNA, 0.0),
        ForgetRequest(KEY),
    ],
    ids=lambda request: VERBS[type(request)],
)
def test_what_ends_an_attempt_through_the_service_wakes_its_watchers(
    anyone, served, end, monkeypatch
):
    monkeypatch.setattr("semel.server.waiting.NET", PATIENCE)
    anyone.send(claim(KEY))
    thread, answers = in_thread(anyone.watch, KEY, 25.0)
    wait_until(lambda: served.service.waiting.count == 1)
    assert anyone.send(RenewRequest(KEY, ANNA, LONG)) == [True]  # which ends nothing
    assert anyone.send(end) == [True]
    thread.join(PATIENCE)
    assert answers == [True]


def test_a_watch_is_told_of_what_others_did(anyone, served, store):
    anyone.send(claim(KEY))
    thread, answers = in_thread(anyone.watch, KEY, 25.0)
    wait_until(lambda: served.service.waiting.count == 1)
    store.store._store.complete(KEY, ANNA, RESULT, LONG)  # by another instance, perhaps
    thread.join(PATIENCE)
    assert answers == [True]


def test_a_lease_that_ends_ends_a_watch(anyone):
    anyone.send(claim(KEY, lease=0.3))
    assert anyone.watch(KEY, 25.0) is True


def test_a_service_that_stops_ends_its_watches(anyone, served):
    anyone.send(claim(KEY))
    thread, answers = in_thread(anyone.watch, KEY, 25.0)
    wait_until(lambda: served.service.waiting.count == 1)

    async def stop() -> None:
        served.service.stop()

    served.on_loop(stop())
    thread.join(PATIENCE)
    assert answers == [False]


def test_a_watcher_that_leaves_frees_its_place(anyone, served):
    anyone.send(claim(KEY))
    body = wire.write_watch(KEY, 25.0)
    head = (
        f"POST {wire.WATCH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port)) as leaving:
        leaving.sendall(head.encode() + body)
        wait_until(lambda: served.service.waiting.count == 1)
    wait_until(lambda: served.service.waiting.count == 0)


def test_more_watches_than_may_wait_are_refused_at_once(served):
    served.use(AsyncMemoryStore, max_waiting=1)
    anyone = Tenant(served)
    anyone.send(claim(KEY))
    thread, _ = in_thread(anyone.watch, KEY, 2.0)
    wait_until(lambda: served.service.waiting.count == 1)
    told = anyone.watch(KEY, 2.0)
    assert (told["status"], told["code"]) == (503, "too_many_waiting")
    thread.join(PATIENCE)


def test_a_lost_reply_of_the_store_is_asked_for_again(served, store):
    """The same owner is the same attempt, through the service too."""
    store.inject("claim", LoseReply())
    with contextlib.closing(open_store(served.url)) as remote:
        with pytest.raises(StoreUnavailable):
            remote.claim(claim())
        assert remote.claim(claim()).number == 1
        assert remote.get(PAY).fingerprint is None
        assert remote.claim(claim(owner=BERT, fingerprint=RED)).retry_after > 0
