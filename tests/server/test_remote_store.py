"""The remote stores: their URL, their connections, what they send again, and what answers mean."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from engines.facade import KINDS, PATIENCE, World, until, wait_until
from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    InvalidKey,
    Policy,
    ResultUnavailable,
    StoreUnavailable,
    open_async_store,
    open_store,
)
from semel.core.records import (
    Claimed,
    ClaimRequest,
    CompleteRequest,
    CountRequest,
    Encoded,
    GetRequest,
    Identity,
    PutRequest,
    RenewRequest,
)
from semel.errors import StoreError, StoreRefused, ValueRejected
from semel.server.tokens import checked_table, new_token
from semel.stores.memory import AsyncMemoryStore
from semel.stores.remote import addresses, aio, threads, wire
from semel.stores.remote import store as threads_store
from semel.stores.remote.addresses import parse
from semel.testing import StoreDriver
from server.remote_given import ANNA, KEY, LONG, OTHER, RESULT, RUN_INFO, problem_app, served
from servers.proxy import proxy_to
from servers.redis import Certificates, free_port

UNHURRIED = 20.0
"""Seconds for a call where time is not what is tested; others may keep the machine busy."""

OPENERS = {"threads": open_store, "asyncio": open_async_store}


@pytest.fixture(scope="module", name="served")
def _served():
    with served() as running:
        yield running


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def behind(served):
    """The store of the service."""
    store = AsyncMemoryStore()
    served.use(lambda: store)
    yield store
    served.leave()


@pytest.fixture
def driven(kind, served, behind):
    driver = StoreDriver(OPENERS[kind](served.url, timeout=UNHURRIED))
    yield driver
    driver.close()


def claim(identity=KEY, owner=ANNA, **more) -> ClaimRequest:
    return ClaimRequest(identity, owner, None, LONG, LONG, run_info=RUN_INFO, **more)


def through(proxy):
    """A store for threads, behind a proxy that counts."""
    return contextlib.closing(open_store(f"semel+http://127.0.0.1:{proxy.port}"))


# --- the URL -------------------------------------------------------------------------------------


def read(url, **options):
    more = {"prefix": "idem:", "timeout": 5.0} | {
        name: options.pop(name) for name in ("prefix", "timeout") if name in options
    }
    return parse(url, options=options, **more)


@pytest.mark.parametrize(
    ("url", "http"),
    [
        ("semel+http://localhost", "http://localhost:8600"),
        ("semel+http://localhost:1/", "http://localhost:1"),
        ("semel+http://[::1]:1/base/", "http://[::1]:1/base"),
        ("semel+https://semel.internal/base", "https://semel.internal:443/base"),
    ],
)
def test_a_url_names_a_service(url, http):
    address = read(url)
    assert address.url == http
    assert address.where == f"the semel service at {http}"
    assert http in repr(address)
    assert address.__rich_repr__() == [("url", http)]


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("semel+http://", {}, "needs a host"),
        ("semel+http://host:port", {}, "needs a host"),
        ("semel+http://host:0", {}, "needs a host"),
        ("semel+http://user:s3cret@host", {}, "has no login: set SEMEL_TOKEN"),
        ("semel+http://s3cret@host", {}, "has no login: set SEMEL_TOKEN"),
        ("semel+http://host/s3@cret", {}, "are written %40"),
        ("semel+http://host?token=s3cret", {}, "token is a secret: set SEMEL_TOKEN"),
        ("semel+http://host?prefix=x", {}, "prefix is an option of open_store"),
        ("semel+http://host?fast=1", {}, "does not know the option fast"),
        ("semel+http://host", {"prefix": "x:"}, "the prefix of semel.http:// is the service's"),
        ("semel+http://host", {"timeout": 0}, "timeout must be"),
        ("semel+http://host", {"token": "s3 cret"}, "token is not a token"),
        ("semel+http://host", {"token": 5}, "token is not a token"),
        ("semel+http://host", {"ca_file": "x"}, "ca_file is for TLS: write semel.https://"),
        ("semel+https://host", {"ca_file": "/lost"}, "ca_file: there is no file /lost"),
        ("semel+https://host", {"key_file": __file__}, "key_file goes with cert_file"),
    ],
)
def test_a_url_that_is_wrong_is_named_without_a_secret(url, options, says):
    with pytest.raises(ConfigError, match=says) as refused:
        read(url, **options)
    assert "s3" not in str(refused.value).replace("s3cret@host/", "")


@pytest.mark.parametrize("opener", OPENERS.values())
def test_a_file_that_is_no_certificate_is_named(opener):
    with pytest.raises(
        ConfigError, match=r"a file of TLS for the semel service at .* can't be used"
    ):
        opener("semel+https://host", ca_file=__file__)


def test_the_token_comes_from_the_environment_unless_it_is_given(monkeypatch):
    assert "Authorization" not in read("semel+http://host").headers
    monkeypatch.setenv("SEMEL_TOKEN", "")
    assert read("semel+http://host").token is None
    monkeypatch.setenv("SEMEL_TOKEN", "of-the-environment")
    assert read("semel+http://host").headers["Authorization"] == "Bearer of-the-environment"
    address = read("semel+http://host", token="given")
    assert address.headers["Authorization"] == "Bearer given"
    assert "given" not in repr(address)
    monkeypatch.setenv("SEMEL_TOKEN", "two words")
    with pytest.raises(ConfigError, match="SEMEL_TOKEN is not a token") as refused:
        read("semel+http://host")
    assert "two words" not in str(refused.value)


def test_the_token_is_no_setting_of_an_engine(monkeypatch):
    monkeypatch.setenv("SEMEL_TOKEN", "secret")
    Idempotency("memory://").close()


def test_a_store_shows_where_it_is(kind):
    store = OPENERS[kind]("semel+http://localhost:1", token="secret")
    name = "RemoteStore" if kind == "threads" else "AsyncRemoteStore"
    assert repr(store) == f"<{name} http://localhost:1>"
    StoreDriver(store).close()


def test_the_package_has_only_its_stores():
    from semel.stores import remote

    with pytest.raises(AttributeError, match="has no attribute 'open'"):
        remote.open  # noqa: B018


# --- what an answer means ------------------------------------------------------------------------


def reply(status, code="", content_type="application/problem+json", **more):
    body = json.dumps({"code": code, "detail": "what happened", **more}).encode()
    return wire.Reply(status, content_type, body)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (reply(401, "unauthorized"), StoreRefused, "rejects the token: set SEMEL_TOKEN"),
        (reply(429, "rate_limited"), StoreUnavailable, "too much to do: what happened"),
        (reply(503, "too_many_waiting"), StoreUnavailable, "too much to do: what happened"),
        (reply(503, "store_error", error="store_refused"), StoreRefused, "^what happened"),
        (reply(503, "store_error", error="of a newer service"), StoreUnavailable, "^what happened"),
        (reply(500, "idempotency_error"), StoreUnavailable, "can't answer: what happened"),
        (reply(500, content_type="text/html"), StoreUnavailable, "can't answer: HTTP status 500"),
        (reply(504, content_type="text/html"), StoreUnavailable, "can't answer: HTTP status 504"),
        (reply(404, "not_found"), StoreRefused, "doesn't answer as a semel service"),
        (reply(302, content_type="text/html"), StoreRefused, "HTTP status 302.*: check the host"),
        (reply(200, content_type="text/html"), StoreRefused, "doesn't answer as a semel service"),
        (wire.Reply(404, "application/problem+json", b"{"), StoreRefused, "HTTP status 404"),
        (wire.Reply(200, wire.CONTENT_TYPE, b"\xc1"), StoreUnavailable, "can't be read"),
        (
            wire.Reply(200, wire.CONTENT_TYPE, msgspec.msgpack.encode({"answers": []})),
            StoreUnavailable,
            "can't be read",
        ),
        (
            wire.Reply(200, wire.CONTENT_TYPE, msgspec.msgpack.encode({"answers": [["new", 1]]})),
            StoreUnavailable,
            "can't be read",
        ),
    ],
)
def test_an_answer_without_answers_is_an_error_of_its_kind(answer, error, says):
    with pytest.raises(error, match=says) as raised:
        wire.read_answers(answer, [claim()], "it")
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("answer", "error", "apart"),
    [
        (reply(400, "invalid_request"), ConfigError, False),
        (reply(400, "invalid_key"), InvalidKey, False),
        (reply(403, "forbidden"), StoreRefused, True),
        (reply(413, "body_too_large"), ValueRejected, True),
        (reply(413, content_type="text/html"), ValueRejected, True),
    ],
)
def test_a_batch_that_is_refused_was_not_sent(answer, error, apart):
    with pytest.raises(wire.NotAnswered) as raised:
        wire.read_answers(answer, [claim()], "it")
    assert type(raised.value.error) is error
    assert raised.value.apart is apart


def test_an_answer_to_a_watch_that_is_none_is_an_error():
    assert wire.read_changed(
        wire.Reply(200, wire.CONTENT_TYPE, wire.write_changed(changed=True)), ""
    )
    with pytest.raises(StoreUnavailable, match="can't be read"):
        wire.read_changed(wire.Reply(200, wire.CONTENT_TYPE, b"\xc1"), "it")
    with pytest.raises(StoreRefused):
        wire.read_changed(reply(200, content_type="text/html"), "it")


def test_what_a_later_service_adds_to_its_answers_is_read_over():
    body = msgspec.msgpack.encode(
        {
            "version": 1,
            "answers": [["claimed", {"number": 1, "fence": 7, "takeover": False, "new": 1}]],
            "new": 2,
        }
    )
    found = wire.read_answers(wire.Reply(200, wire.CONTENT_TYPE, body), [claim()], "it")
    assert found == [Claimed(1, 7)]


# --- batches -------------------------------------------------------------------------------------


def test_more_requests_than_a_batch_has_go_in_several(driven, served, monkeypatch):
    sizes = []
    write = wire.write_batch

    def noted(requests, *more):
        sizes.append(len(requests))
        return write(requests, *more)

    monkeypatch.setattr(wire, "write_batch", noted)
    keys = [Identity("many", str(number)) for number in range(2500)]
    assert driven.get_many(keys) == [None] * 2500
    assert sizes == [1000, 1000, 500]


def test_a_batch_that_is_too_large_is_split(driven):
    large = Encoded("raw", bytes(1_500_000))
    keys = [Identity("large", str(number)) for number in range(5)]
    assert driven.send([PutRequest(key, ANNA, large, LONG) for key in keys]) == [True] * 5
    assert driven.get(keys[4]).outcome == large


def test_one_result_that_is_too_large_is_rejected_and_the_others_are_kept(driven):
    driven.claim(claim())
    driven.claim(claim(OTHER))
    too_large = Encoded("raw", bytes(wire.MOST_BYTES))
    answers = driven.send(
        [CompleteRequest(KEY, ANNA, too_large, LONG), CompleteRequest(OTHER, ANNA, RESULT, LONG)]
    )
    assert type(answers[0]) is ValueRejected
    assert "at most 4 MB in one request; this complete is larger" in str(answers[0])
    assert answers[1] is True
    with pytest.raises(ValueRejected):
        driven.complete(KEY, ANNA, too_large, LONG)


def test_a_function_with_a_result_that_is_too_large_is_done_without_it(kind, served, behind):
    with World(kind, served.url) as world:
        engine = world.engine(policy=Policy(max_result_bytes=8 * wire.MOST_BYTES))
        runs = []
        large = "x" * wire.MOST_BYTES
        assert engine.execute("k", lambda: runs.append(1) or large) == large
        with pytest.raises(ResultUnavailable):
            engine.execute("k", lambda: runs.append(2))
        assert runs == [1]


@pytest.fixture
def tokens(served, tmp_path, behind):
    """The service has tokens: `shop` is the one that may use orders.* as a store."""
    text, digest = new_token()
    table = {"sha256": digest, "rights": ["store", "view", "operate"], "scopes": ["orders.*"]}
    file = tmp_path / "tokens.toml"
    file.write_text(checked_table("shop", table))
    served.use(lambda: behind, tokens=str(file))
    return text


def test_a_request_that_is_not_permitted_takes_no_answer_from_the_others(kind, served, tokens):
    driven = StoreDriver(OPENERS[kind](served.url, token=tokens))
    mine, others = Identity("orders.pay", "1"), Identity("bills.pay", "1")
    answers = driven.send([GetRequest(mine), GetRequest(others), GetRequest(mine)])
    assert [type(each) for each in answers] == [type(None), StoreRefused, type(None)]
    assert "doesn't permit this with the token of SEMEL_TOKEN" in str(answers[1])
    with pytest.raises(StoreRefused):
        driven.claim(claim(others))
    crowd = [claim(Identity("orders.pay", str(number))) for number in range(30)]
    crowd[7] = claim(others)
    if kind == "threads":

        def ask(request):
            try:
                return type(driven.ask(request))
            except StoreError as error:
                return type(error)

        with ThreadPoolExecutor(30) as pool:
            kinds = list(pool.map(ask, crowd))
    else:

        async def ask_all():
            asks = [driven._store.ask(each) for each in crowd]
            return await asyncio.gather(*asks, return_exceptions=True)

        kinds = [type(each) for each in driven._runner.run(ask_all())]
    assert kinds.pop(7) is StoreRefused
    assert set(kinds) == {Claimed}
    driven.close()


def test_a_wrong_token_is_refused_and_never_shown(kind, served, tokens):
    driven = StoreDriver(OPENERS[kind](served.url, token="s3cret"))
    with pytest.raises(StoreRefused, match="rejects the token") as refused:
        driven.get(KEY)
    assert "s3cret" not in str(refused.value)
    driven.close()


def test_what_the_service_rejects_is_the_callers_error(driven):
    with pytest.raises(ConfigError, match="rejects the request: lease"):
        driven.renew(KEY, ANNA, 1e9)
    with pytest.raises(InvalidKey, match="rejects the request"):
        driven.send([GetRequest(KEY), GetRequest(Identity("s" * 300, "k"))])
    with pytest.raises(InvalidKey, match="rejects the request"):
        driven.get(Identity("s", "a b"))


def test_a_renewal_that_the_service_rejects_takes_no_other_with_it(driven):
    driven.claim(claim())
    outside = RenewRequest(OTHER, ANNA, 1e9)
    answers = driven.send([RenewRequest(KEY, ANNA, LONG), outside, RenewRequest(KEY, ANNA, LONG)])
    assert [type(each) for each in answers] == [bool, StoreRefused, bool]
    assert (answers[0], answers[2]) == (True, True)
    assert "rejects the request: lease" in str(answers[1])


def test_a_caller_may_wait_longer_than_a_service_is_told(kind, served, behind):
    driven = StoreDriver(OPENERS[kind](served.url, timeout=100_000))
    assert driven.get(KEY) is None
    driven.close()


def test_a_gateway_that_takes_less_splits_batches_too(kind, served, behind):
    inner = served._app

    async def small(scope, receive, send):
        length = int(dict(scope["headers"])[b"content-length"])
        if length > 300:
            await problem_app(413, b"<html>", "text/html")(scope, receive, send)
        else:
            await inner(scope, receive, send)

    served.answer_with(small)
    driven = StoreDriver(OPENERS[kind](served.url))
    keys = [Identity("many", str(number)) for number in range(20)]
    assert driven.get_many(keys) == [None] * 20
    driven.close()


# --- connections -----------------------------------------------------------------------------------


def app_that(*answers):
    """An application that gives these answers, then those of the service."""

    def wrap(inner):
        left = list(answers)

        async def app(scope, receive, send):
            await (left.pop(0) if left else inner)(scope, receive, send)

        return app

    return wrap


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_request_that_a_balancer_could_not_deliver_is_sent_again(driven, served, status):
    lost = problem_app(status, b"<html>no server is available", "text/html")
    served.answer_with(app_that(lost, lost)(served._app))
    assert isinstance(driven.claim(claim()), Claimed)


def test_what_the_service_itself_says_is_not_asked_again(driven, served):
    body = json.dumps({"code": "store_error", "detail": "down", "error": "store_unavailable"})
    down = problem_app(503, body.encode(), "application/problem+json")
    served.answer_with(app_that(down)(served._app))
    with pytest.raises(StoreUnavailable, match="down"):
        driven.get(KEY)
    assert driven.get(KEY) is None


@pytest.mark.parametrize("kept", [True, False])
def test_a_lost_answer_is_asked_for_again_by_the_same_owner(kind, served, behind, kept):
    with proxy_to(served.port) as proxy:
        driven = StoreDriver(
            OPENERS[kind](f"semel+http://127.0.0.1:{proxy.port}", timeout=UNHURRIED)
        )
        if kept:
            assert driven.get(KEY) is None  # its connection is used again
        proxy.lose_reply(lambda request: b"claim" in request)
        assert driven.claim(claim()).number == 1
        assert proxy.lost == 1
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True
        driven.close()


def test_connections_that_the_service_closed_are_opened_again(kind, served, behind):
    with proxy_to(served.port) as proxy:
        driven = StoreDriver(
            OPENERS[kind](f"semel+http://127.0.0.1:{proxy.port}", timeout=UNHURRIED)
        )
        for _ in range(3):
            assert driven.get(KEY) is None
            proxy.cut_all()
        driven.close()


def test_a_service_that_says_so_has_its_connection_closed(driven, served):
    body = wire.write_answers([None])
    closing = problem_app(200, body, wire.CONTENT_TYPE, connection="close")
    served.answer_with(app_that(closing, closing)(served._app))
    assert [driven.get(KEY) for _ in range(3)] == [None] * 3


def test_a_service_that_is_down_is_named(kind):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    driven = StoreDriver(OPENERS[kind](f"semel+http://127.0.0.1:{port}", timeout=0.2))
    with pytest.raises(
        StoreUnavailable, match=f"service at http://127.0.0.1:{port} can't be reached"
    ):
        driven.get(KEY)
    driven.close()


def test_a_service_that_does_not_answer_is_not_waited_for(kind):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"semel+http://127.0.0.1:{silent.getsockname()[1]}"
        driven = StoreDriver(OPENERS[kind](url, timeout=0.2))
        with pytest.raises(StoreUnavailable, match="no answer within"):
            driven.get(KEY)
        driven.close()


def test_a_connection_that_the_service_closed_has_nothing_to_interrupt():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = read(f"semel+http://127.0.0.1:{silent.getsockname()[1]}")
        connection = threads.Connection(address, None, PATIENCE)
        connection.close()
        connection.interrupt()
        assert not connection.usable


class Speaking(threading.Thread):
    """Answers each connection with these bytes, and closes it."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"semel+http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join(PATIENCE)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\nhalf",
    ],
)
def test_half_an_answer_is_none(kind, answer):
    with contextlib.closing(Speaking(answer)) as speaking:
        driven = StoreDriver(OPENERS[kind](speaking.url, timeout=0.3))
        with pytest.raises(StoreUnavailable, match="can't be reached"):
            driven.get(KEY)
        driven.close()


def test_idle_connections_are_not_used_for_longer_than_the_service_keeps_them(
    served, behind, monkeypatch
):
    """The one for asyncio has aiohttp's `keepalive_timeout`."""
    assert addresses.IDLE < 5  # uvicorn's default
    with proxy_to(served.port) as proxy, through(proxy) as store:
        store.get(KEY)
        store.get(KEY)
        assert proxy.connections == 1
        monkeypatch.setattr("semel.stores.remote.threads.IDLE", 0.0)
        store.get(KEY)
        assert proxy.connections == 2


def test_closing_ends_everything(kind, served, behind):
    driven = StoreDriver(OPENERS[kind](served.url))
    driven.get(KEY)
    driven._finish(driven._store.close())
    for ask in (lambda: driven.get(KEY), lambda: driven.claim(claim())):
        with pytest.raises(StoreUnavailable, match="was closed"):
            ask()
    driven.close()


def test_a_connection_that_comes_back_after_the_end_is_closed(served, behind):
    store = open_store(served.url)
    inner, entered, gate = served._app, threading.Event(), threading.Event()

    async def held(scope, receive, send):
        entered.set()
        await asyncio.to_thread(gate.wait, PATIENCE)
        await inner(scope, receive, send)

    served.answer_with(held)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.get, KEY)
        assert entered.wait(PATIENCE)
        store.close()
        gate.set()
        assert call.result(PATIENCE) is None
    assert store.transport._idle == []


def test_a_store_belongs_to_one_event_loop(served, behind):
    store = open_async_store(served.url)
    with asyncio.Runner() as first:
        first.run(_get(store))
        with pytest.raises(ConfigError, match="belongs to another event loop"):
            asyncio.run(_get(store))
        with pytest.raises(ConfigError, match="close it there"):
            asyncio.run(store.close())
        first.run(store.close())


async def _get(store):
    return await store.get(KEY)


def test_a_store_whose_loop_has_ended_can_be_closed(served, behind):
    store = open_async_store(served.url)
    asyncio.run(_get(store))
    asyncio.run(store.close())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_a_store_that_was_never_used_is_closed(kind):
    StoreDriver(OPENERS[kind]("semel+http://127.0.0.1:1")).close()


def test_a_caller_that_is_interrupted_leaves_no_half_answer_behind(served, behind):
    class Interrupt(BaseException):
        pass

    store = open_store(served.url)
    assert store.get(KEY) is None
    [connection] = store.transport._idle
    get = connection.http.getresponse

    def interrupted():
        raise Interrupt

    connection.http.getresponse = interrupted
    with pytest.raises(Interrupt):
        store.get(KEY)
    connection.http.getresponse = get
    assert store.transport._idle == []
    assert store.get(KEY) is None
    store.close()


def test_more_calls_than_connections_wait_for_one(kind, served, behind, monkeypatch):
    module = threads_store if kind == "threads" else aio
    monkeypatch.setattr(module, "MOST_CALLS", 1)
    inner, entered, gate = served._app, threading.Event(), threading.Event()

    async def held(scope, receive, send):
        entered.set()
        await asyncio.to_thread(gate.wait, PATIENCE)
        await inner(scope, receive, send)

    with World(kind, served.url) as world:
        engine = world.engine()
        served.answer_with(held)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(engine.ask_store, "get", KEY)
            assert entered.wait(PATIENCE)
            engine.store.store._timeout = 0.1
            try:
                with pytest.raises(StoreUnavailable, match="calls of this process wait for"):
                    engine.ask_store("get", KEY)
            finally:
                gate.set()
            first.exception(PATIENCE)


def test_renewals_need_no_place(driven):
    taken = []
    with contextlib.suppress(Exception):
        while True:
            slot = driven._store._calls.get(block=False)
            taken.append(driven._finish(slot))
    driven._store._timeout = 0.2
    assert driven.renew(KEY, ANNA, LONG) is False
    with pytest.raises(StoreUnavailable, match="nothing was sent"):
        driven.get(KEY)


def test_a_listing_has_more_time_than_a_call(driven, monkeypatch):
    sent = []
    write = wire.write_batch
    monkeypatch.setattr(
        wire,
        "write_batch",
        lambda requests, left, where: (sent.append(left), write(requests, left, where))[1],
    )
    driven.ask(CountRequest())
    driven.ask(GetRequest(KEY))
    assert sent[0] > 50
    assert sent[1] <= UNHURRIED


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_url(files, service, sqlite_url):
    running = service(sqlite_url, "--tls-cert", files.certificate, "--tls-key", files.key)
    return f"semel+https://127.0.0.1:{running.port}"


def test_a_service_with_tls(kind, tls_url, files):
    driven = StoreDriver(OPENERS[kind](f"{tls_url}?ca_file={files.authority}", timeout=UNHURRIED))
    assert driven.claim(claim()).number == 1
    driven.close()
    # A certificate of its own is shown to a service that asks for one; this one does not.
    mine = {"cert_file": files.certificate, "key_file": files.key, "ca_file": files.authority}
    driven = StoreDriver(OPENERS[kind](tls_url, timeout=UNHURRIED, **mine))
    assert driven.get(KEY).owner == ANNA
    driven.close()


def test_a_certificate_of_somebody_else_is_refused_at_once(kind, tls_url):
    driven = StoreDriver(OPENERS[kind](tls_url, timeout=UNHURRIED))
    with pytest.raises(StoreRefused, match="no TLS with the semel service"):
        driven.get(KEY)
    driven.close()


def test_a_service_without_tls_is_refused_at_once(kind, served, behind):
    driven = StoreDriver(OPENERS[kind](served.url.replace("http", "https"), timeout=UNHURRIED))
    with pytest.raises(StoreRefused, match="no TLS with the semel service"):
        driven.get(KEY)
    driven.close()


# --- forks ---------------------------------------------------------------------------------------


def in_fork(work) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if work() else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_connections_of_its_own(served, behind):
    with proxy_to(served.port) as proxy, through(proxy) as store:
        store.claim(claim())
        assert proxy.connections == 1

        def in_child() -> bool:
            return store.get(KEY).owner == ANNA and store.get(OTHER) is None

        assert in_fork(in_child) == 0
        assert proxy.connections == 2
        assert store.get(KEY).owner == ANNA
        assert proxy.connections == 2  # the parent's is still the parent's


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_an_event_loop_and_connections_of_its_own(served, behind):
    with proxy_to(served.port) as proxy:
        driven = StoreDriver(open_async_store(f"semel+http://127.0.0.1:{proxy.port}"))
        driven.claim(claim())

        def in_child() -> bool:
            asyncio._set_running_loop(None)
            return asyncio.run(_get(driven._store)).owner == ANNA

        assert in_fork(in_child) == 0
        assert proxy.connections == 2
        assert driven.get(KEY).owner == ANNA
        assert proxy.connections == 2
        driven.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_places_for_calls_of_its_own(kind, served, behind):
    driven = StoreDriver(OPENERS[kind](served.url, timeout=2))
    taken = []  # by tasks and threads that are not in the child
    with contextlib.suppress(Exception):
        while True:
            slot = driven._store._calls.get(block=False)
            taken.append(driven._finish(slot))

    def in_child() -> bool:
        if kind == "threads":
            return driven._store.get(KEY) is None
        asyncio._set_running_loop(None)
        return asyncio.run(_get(driven._store)) is None

    assert in_fork(in_child) == 0
    driven.close()


# --- watches -------------------------------------------------------------------------------------


def test_a_waiting_call_is_told_of_the_end(kind, served, behind, monkeypatch):
    """Not by polling: that would take minutes."""
    monkeypatch.setattr("semel.stores.remote.aio.SAFETY", 500.0)
    monkeypatch.setattr("semel.stores.remote.store.SAFETY", 500.0)
    policy = Policy(wait_interval=0.01, wait_interval_max=60, lease=300)
    with World(kind, served.url) as world, ThreadPoolExecutor(2) as pool:
        first, second = (world.engine(policy=policy) for _ in range(2))
        entered, gate = threading.Event(), threading.Event()

        def slow() -> str:
            entered.set()
            assert gate.wait(PATIENCE)
            return "done"

        running = pool.submit(first.execute, "k", slow)
        assert entered.wait(PATIENCE)
        waiting = pool.submit(second.execute, "k", lambda: "ran twice")
        wait_until(lambda: served.service.waiting.count == 1)
        gate.set()
        assert [running.result(PATIENCE), waiting.result(PATIENCE)] == ["done", "done"]


def test_a_service_that_tells_nothing_is_polled(kind, served, behind, monkeypatch, caplog):
    inner = served._app

    async def without_watches(scope, receive, send):
        refused = problem_app(404, b"", "text/plain")
        await (refused if scope["path"] == wire.WATCH else inner)(scope, receive, send)

    served.answer_with(without_watches)
    policy = Policy(wait_interval=0.01, wait_interval_max=0.02)
    with World(kind, served.url) as world, ThreadPoolExecutor(1) as pool:
        engine = world.engine(policy=policy)
        engine.ask_store("claim", claim(Identity("default", "k")))
        waiting = pool.submit(engine.execute, "k", lambda: "ran twice")
        wait_until(lambda: "no wake-ups from the semel service" in caplog.text)
        engine.ask_store(
            "complete", Identity("default", "k"), ANNA, Encoded("json/1", b'"done"'), LONG
        )
        assert waiting.result(PATIENCE) == "done"


def test_a_watch_that_cannot_be_sent_says_so_and_is_tried_again(kind):
    driven = StoreDriver(OPENERS[kind]("semel+http://127.0.0.1:1"))
    store = driven._store
    with store.watch(KEY) as watch:
        assert watch.pause(0.1) > 1
        assert driven._finish(watch.wait(5.0)) is False
        assert watch.pause(0.1) == 0.1
        assert driven._finish(watch.wait(0.01)) is False
        store.watches.told(StoreUnavailable("of another watch"))  # is the same outage
        store.watches._backoff._until = 0.0
        assert watch.pause(0.1) > 1
        store.watches.told(None)
    assert watch.pause(0.1) == 0.1
    driven.close()


def test_the_callers_beyond_those_that_may_watch_poll(kind, monkeypatch):
    monkeypatch.setattr(threads_store if kind == "threads" else aio, "MOST_WATCHES", 1)
    driven = StoreDriver(OPENERS[kind]("semel+http://127.0.0.1:1"))
    with driven._store.watch(KEY) as first, driven._store.watch(OTHER) as second:
        assert first.pause(0.1) > 1
        assert second.pause(0.1) == 0.1
    driven.close()


def test_closing_a_store_ends_its_watches(kind, served, behind):
    driven = StoreDriver(OPENERS[kind](served.url))
    driven.claim(claim())
    store = driven._store
    if kind == "threads":
        with store.watch(KEY) as watch, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(watch.wait, 25.0)
            wait_until(lambda: served.service.waiting.count == 1)
            store.close()
            assert waiting.result(PATIENCE) is False
    else:

        async def main() -> bool:
            with store.watch(KEY) as watch:
                waiting = asyncio.ensure_future(watch.wait(25.0))
                await until(lambda: served.service.waiting.count == 1)
                await store.close()
                return await waiting

        assert driven._runner.run(main()) is False
    driven.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_the_watches_of_a_parent_are_not_the_childs(served, behind, monkeypatch):
    monkeypatch.setattr(threads_store, "MOST_WATCHES", 1)
    with contextlib.closing(open_store(served.url)) as store, store.watch(KEY):

        def in_child() -> bool:
            with store.watch(OTHER) as watch:
                return watch.pause(0.1) > 1

        assert in_fork(in_child) == 0


# --- a service that restarts ---------------------------------------------------------------------


def test_a_service_that_restarts_is_waited_for(kind, service, sqlite_url):
    port = str(free_port())
    first = service(sqlite_url, "--port", port)
    with World(kind, f"semel+http://127.0.0.1:{port}") as world:
        engine = world.engine()
        engine.store.store._timeout = 2 * PATIENCE
        assert engine.execute("before", lambda: 1) == 1
        first.send_signal(signal.SIGKILL)
        first.process.wait(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(engine.execute, "after", lambda: 2)
            service(sqlite_url, "--port", port)
            assert call.result(PATIENCE) == 2


def test_both_engines_share_one_record(served, behind):
    with Idempotency(served.url) as idem:
        assert idem.execute("k", lambda: {"a": 1}) == {"a": 1}

    async def main():
        async def never():
            raise AssertionError

        async with AsyncIdempotency(served.url) as idem:
            return await idem.execute("k", never)

    assert asyncio.run(main()) == {"a": 1}


def test_a_program_without_aiohttp_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in ("aio", "tasks"):
        monkeypatch.delitem(sys.modules, f"semel.stores.remote.{name}", raising=False)
    with pytest.raises(
        ConfigError, match=r"needs the package aiohttp: pip install 'semel\[remote\]"
    ):
        open_async_store("semel+http://localhost")
