"""Starts that wait: what wakes them, what ends them, and how many may."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from semel import Idempotency
from semel.core.records import (
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    GetRequest,
    Identity,
)
from semel.errors import ConfigError, RecordUnreadable, StoreUnavailable, ValueRejected
from semel.server.problems import Problem
from semel.server.running import setup_of
from semel.server.service import Gone, Service
from semel.server.tokens import ANYONE, Caller
from semel.server.wire import Fail, Finish, Start
from semel.stores.memory import AsyncMemoryStore

PATIENCE = 60.0
A, B = b"a" * 12, b"b" * 12


def eventually(condition, what):
    end = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < end, what
        time.sleep(0.01)


def gauge(running, token=None):
    lines = running.get("/metrics", token).body.decode().splitlines()
    return int(next(line for line in lines if line.startswith("semel_service_waiting ")).split()[1])


@contextmanager
def in_background(call) -> Iterator[list]:
    """Make a call in a thread; its answer is in the list after the block."""
    answers: list = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    yield answers
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture(params=["sqlite_url", "redis_url", "postgres_url"])
def url(request):
    return request.getfixturevalue(request.param)


# --- over sockets ----------------------------------------------------------------------------------


def test_finish_wakes_a_start_that_waits(service, url):
    running = service(url)
    owner = running.post("start", scope="s", key="k", lease=3600).data["owner"]
    with in_background(lambda: running.post("start", scope="s", key="k", wait=25)) as answers:
        eventually(lambda: gauge(running) == 1, "the start to wait")
        running.post("finish", scope="s", key="k", owner=owner, result="here")
    assert answers[0].data == {"status": "done", "attempt": 1, "result": "here"}
    assert gauge(running) == 0


def test_what_another_process_finished_is_seen_too(service, url):
    running = service(url)
    ready, go = threading.Event(), threading.Event()

    def slowly() -> str:
        ready.set()
        go.wait(PATIENCE)
        return "there"

    with Idempotency(url) as engine:
        run = lambda: engine.execute("k", slowly, scope="s")  # noqa: E731
        with in_background(run) as results:
            assert ready.wait(PATIENCE)
            start = lambda: running.post("start", scope="s", key="k", wait=25)  # noqa: E731
            with in_background(start) as answers:
                eventually(lambda: gauge(running) == 1, "the start to wait")
                go.set()
    assert results == ["there"]
    assert answers[0].data["result"] == "there"


def test_fail_wakes_a_start_that_then_runs(service):
    running = service()
    owner = running.post("start", scope="s", key="k", lease=3600).data["owner"]
    with in_background(lambda: running.post("start", scope="s", key="k", wait=25)) as answers:
        eventually(lambda: gauge(running) == 1, "the start to wait")
        running.post("fail", scope="s", key="k", owner=owner)
    told = answers[0].data
    assert (told["status"], told["attempt"]) == ("run", 2)
    assert told["waited"] > 0


def test_a_wait_ends_with_wait_timeout(service):
    running = service(env={"SEMEL_WAIT_TIMEOUT": "20"})
    running.post("start", scope="s", key="k", lease=3600)
    answer = running.post("start", scope="s", key="k", wait=0.1)
    assert (answer.status, answer.data["code"]) == (409, "wait_timeout")
    assert int(answer.headers["retry-after"]) > 1000


def test_a_client_that_leaves_frees_its_place_and_claims_nothing(service):
    running = service()
    owner = running.post("start", scope="s", key="k", lease=3600).data["owner"]
    connection = running.connection()
    body = json.dumps({"scope": "s", "key": "k", "wait": 25}).encode()
    connection.request("POST", "/v1/start", body, {"Content-Type": "application/json"})
    eventually(lambda: gauge(running) == 1, "the start to wait")
    connection.close()
    eventually(lambda: gauge(running) == 0, "its place to be free")
    running.post("fail", scope="s", key="k", owner=owner)
    assert running.post("start", scope="s", key="k").data["attempt"] == 2
    text = running.get("/metrics").body.decode()
    assert 'semel_service_requests_total{verb="start",code="client_left"} 1' in text


def test_too_many_waiting_is_an_answer_at_once(service):
    running = service("memory://", "--max-waiting", "1")
    owner = running.post("start", scope="s", key="k", lease=3600).data["owner"]
    with in_background(lambda: running.post("start", scope="s", key="k", wait=25)) as answers:
        eventually(lambda: gauge(running) == 1, "the start to wait")
        answer = running.post("start", scope="s", key="k", wait=25)
        assert (answer.status, answer.data["code"]) == (503, "too_many_waiting")
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert running.post("start", scope="s", key="k").data["code"] == "concurrent_request"
        running.post("finish", scope="s", key="k", owner=owner, result=1)
    assert answers[0].data["result"] == 1


def test_each_token_has_places_of_its_own(service, tmp_path, make_token):
    shop, billing = (make_token(name, ["use", "view"], ["*"]) for name in ("shop", "billing"))
    (tmp_path / "tokens.toml").write_text(shop.table + billing.table)
    bounds = ("--max-waiting", "5", "--max-waiting-per-token", "1")
    running = service("memory://", "--tokens", "tokens.toml", *bounds)
    owner = running.post("start", shop.text, scope="s", key="k", lease=3600).data["owner"]
    wait = lambda token: running.post("start", token, scope="s", key="k", wait=25)  # noqa: E731
    with in_background(lambda: wait(shop.text)) as first:
        eventually(lambda: gauge(running, shop.text) == 1, "the start to wait")
        assert wait(shop.text).data["code"] == "too_many_waiting"
        with in_background(lambda: wait(billing.text)) as second:
            eventually(lambda: gauge(running, shop.text) == 2, "the other start to wait")
            running.post("finish", shop.text, scope="s", key="k", owner=owner, result=1)
    assert first[0].data == second[0].data


# --- inside ----------------------------------------------------------------------------------------


class Store(AsyncMemoryStore):
    """A store whose answers a test can change: `fault` sees each request before it is answered."""

    fault = None
    asked = 0

    async def ask(self, request):
        return (await self.send([request]))[0]

    async def send(self, requests):
        for request in requests:
            self.asked += isinstance(request, ClaimRequest)
            if self.fault is not None:
                await self.fault(request)
        return [await super(Store, self).ask(request) for request in requests]


async def stays() -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def store():
    return Store()


@pytest.fixture
async def inside(store, tmp_path, monkeypatch):
    """A service in this process."""
    monkeypatch.chdir(tmp_path)
    made = Service(store, setup_of("memory://", None))
    yield made
    await made.close()


def start(inside, caller=ANYONE, leaving=stays, **more):
    return inside.start(caller, Start("s", "k", **more), monotonic(), leaving)


async def busy(store, owner=A, lease=3600.0):
    claimed = await store.claim(ClaimRequest(Identity("s", "k"), owner, None, lease, 60.0))
    assert isinstance(claimed, Claimed)


async def until(condition):
    end = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < end
        await asyncio.sleep(0.001)


async def test_a_message_that_wakes_costs_one_question_per_interval(inside, store):
    await busy(store)

    class Noisy:
        def pause(self, planned):
            return planned

        async def wait(self, seconds):
            await asyncio.sleep(0)
            return True

    @contextmanager
    def watch(_identity):
        yield Noisy()

    store.watch = watch
    with pytest.raises(Problem) as told:
        await start(inside, wait=0.5)
    assert told.value.code == "wait_timeout"
    assert 2 < store.asked < 0.5 / 0.05 + 5


async def test_a_watch_that_only_sleeps_polls(inside, store):
    await busy(store, lease=0.2)

    class Deaf:
        def pause(self, planned):
            return planned

        async def wait(self, seconds):
            await asyncio.sleep(seconds)
            return False

    @contextmanager
    def watch(_identity):
        yield Deaf()

    store.watch = watch
    assert (await start(inside, wait=25.0)).takeover is True


async def test_the_net_sees_a_takeover_and_waits_on(inside, store):
    await busy(store)
    waiter = asyncio.create_task(start(inside, wait=25.0))
    await until(lambda: inside.waiting.count == 1)
    owners: dict[Identity, bytes] = {}
    identity = Identity("s", "k")
    await inside.waiting._look_at([identity], owners)
    assert owners == {identity: A}
    before = store.asked
    await store.renew(identity, A, 0.0)
    await busy(store, B)
    await inside.waiting._look_at([identity], owners)
    assert owners == {identity: B}
    await until(lambda: store.asked > before + 1)  # of the takeover and of the waiter
    assert not waiter.done()
    await store.complete(identity, B, Encoded("json/1", b"1"), 60.0)
    assert (await waiter).result == 1


async def test_the_net_outlives_a_store_that_fails(inside, store):
    await busy(store)
    waiter = asyncio.create_task(start(inside, wait=25.0))
    await until(lambda: inside.waiting.count == 1)
    failed = asyncio.Event()

    async def fault(request):
        if isinstance(request, GetRequest):
            failed.set()
            raise StoreUnavailable("away")

    store.fault = fault
    await asyncio.wait_for(failed.wait(), PATIENCE)
    store.fault = None

    send = store.send

    async def one_fails(requests):
        if isinstance(requests[0], GetRequest):
            store.send = send
            return [StoreUnavailable("away")]
        return await send(requests)

    store.send = one_fails
    await until(lambda: store.send is send or "send" not in vars(store))
    await store.complete(Identity("s", "k"), A, Encoded("json/1", b"1"), 60.0)
    assert (await waiter).result == 1
    assert inside.waiting._by_key == {}


async def test_a_service_that_stops_ends_its_waiters_and_its_net(inside, store):
    await busy(store)
    waiters = [asyncio.create_task(start(inside, wait=25.0)) for _ in range(3)]
    await until(lambda: inside.waiting.count == 3)
    inside.stop()
    for waiter in waiters:
        with pytest.raises(Problem) as told:
            await waiter
        assert (told.value.code, told.value.retry_after) == ("concurrent_request", 1.0)
        assert told.value.close
    with pytest.raises(Problem):
        await start(inside, wait=25.0)


async def test_a_claim_that_was_on_its_way_when_the_client_left_stays(inside, store):
    await busy(store, lease=0.05)
    left = asyncio.Event()
    claimed = False

    async def fault(request):
        nonlocal claimed
        if isinstance(request, ClaimRequest) and inside.waiting.count:
            left.set()
            await asyncio.sleep(0.01)
            claimed = True

    store.fault = fault

    async def leaving():
        await left.wait()

    told = await start(inside, leaving=leaving, wait=25.0)
    assert claimed
    record = await store.get(Identity("s", "k"))
    assert record.owner.hex() == told.owner


async def test_a_client_that_has_left_gets_no_claim(inside, store):
    await busy(store)

    async def leaving():
        return

    with pytest.raises(Gone):
        await start(inside, leaving=leaving, wait=25.0)


async def test_a_claim_that_was_answered_too_late_is_sent_again(inside, store):
    slow = 1

    async def fault(request):
        nonlocal slow
        if isinstance(request, ClaimRequest) and slow:
            slow -= 1
            await asyncio.sleep(0.3)

    store.fault = fault
    told = await start(inside, lease=0.6)
    assert store.asked == 2
    assert told.waited > 0.29
    slow = 9
    with pytest.raises(Problem) as refused:
        await inside.start(ANYONE, Start("s", "k2", lease=0.1), monotonic(), stays)
    assert refused.value.code == "store_error"


async def test_a_success_that_the_store_cannot_take_is_stored_without_its_value(inside, store):
    owner = (await start(inside)).owner
    rejected = 1

    async def fault(request):
        nonlocal rejected
        if isinstance(request, CompleteRequest) and rejected:
            rejected -= 1
            raise ValueRejected("SECRET is too large")

    store.fault = fault
    told = await inside.finish(ANYONE, Finish("s", "k", owner, result=1))
    assert told.omitted == "the store cannot take this value"
    with pytest.raises(Problem) as refused:
        await start(inside)
    assert refused.value.code == "result_unavailable"


OPERATOR = Caller("boss", frozenset({"use", "operate"}))
USER = Caller("shop", frozenset({"use"}))


@pytest.mark.parametrize(
    ("error", "code", "status", "retry"),
    [
        (StoreUnavailable("redis://SECRET is away"), "store_error", 503, 1.0),
        (RecordUnreadable("SECRET"), "store_error", 503, None),
        (ConfigError("SECRET"), "idempotency_error", 500, None),
    ],
)
async def test_an_error_of_the_store_hides_where_it_is(  # noqa: PLR0917 - a row of the table
    inside, store, error, code, status, retry
):
    async def fault(request):
        raise error

    owner = (await start(inside)).owner
    store.fault = fault
    for caller in (USER, OPERATOR):
        calls = [start(inside, caller)]
        if code == "store_error":
            calls.append(inside.finish(caller, Finish("s", "k", owner, result=1)))
            calls.append(inside.fail(caller, Fail("s", "k", owner)))
        for call in calls:
            with pytest.raises(Problem) as told:
                await call
            found = told.value
            assert (found.code, found.status, found.retry_after) == (code, status, retry)
            assert ("SECRET" in found.detail) is (caller is OPERATOR)


async def test_ready_asks_the_store_once_a_second_and_logs_a_change(
    inside, store, caplog, monkeypatch
):
    monkeypatch.setattr("semel.server.service.READY_FOR", 0.0)

    async def fault(request):
        raise StoreUnavailable("away")

    assert await inside.ready() is None
    store.fault = fault
    assert isinstance(await inside.ready(), StoreUnavailable)
    assert isinstance(await inside.ready(), StoreUnavailable)
    store.fault = None
    assert await inside.ready() is None
    assert [record.message for record in caplog.records] == [
        "not ready until the store answers: away",
        "ready again: the store answers",
    ]
    monkeypatch.setattr("semel.server.service.READY_FOR", 3600.0)
    store.fault = fault
    assert await inside.ready() is None
