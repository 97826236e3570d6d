"""Django on asyncio: async views and middlewares, streams, and clients who go away."""

from __future__ import annotations

from adapters.django_project import (
    MIDDLEWARE,
    PLAIN_LAYER,
    aclose,
    apost,
    given_to_middlewares,
    post,
    project,
    state,
    urls,
)

# That one told Django its settings, which other parts of it ask for.
# isort: split
import ast
import asyncio
import contextlib
import gc
import inspect
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import uuid
from functools import partial
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.asgi import get_asgi_application
from django.db import connections
from django.http import Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, AsyncRequestFactory, override_settings
from django.utils.datastructures import MultiValueDict
from django.utils.decorators import method_decorator
from django.views import View

from semel import AsyncIdempotency, ConfigError, Idempotency, current_attempt
from semel.adapters import asgi
from semel.adapters.django import (
    IdempotencyMiddleware,
    Idempotent,
    close,
    exempt,
    idempotent,
    running,
)
from semel.adapters.django.bodies import aread
from semel.adapters.django.settings import ENGINES
from semel.adapters.integration import Flow
from semel.core.records import State
from transactions.kinds import django_alias
from versions import needs
from web.client import HOST, PATIENCE, Connection, head

TESTS = Path(__file__).resolve().parents[1]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]

KEYED = {"Idempotency-Key": "k"}
"""For Django's request factory; until 5.0 its `headers` writes Idempotency_Key."""


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=["middleware", "decorator"])
async def integration(request, sqlite_url):
    """Serve one view behind each integration in turn."""

    def serving(view, **options):
        if request.param == "middleware":
            return project(sqlite_url, {"pay": view}, MIDDLEWARE=[MIDDLEWARE], **options)
        return project(sqlite_url, {"pay": idempotent(view)}, **options)

    return serving


@contextlib.asynccontextmanager
async def served(settings):
    """Settings for a while, on asyncio."""
    with settings:
        try:
            yield
        finally:
            await aclose()


# --- both integrations -----------------------------------------------------------------------------------


async def test_an_answer_is_replayed(integration):
    runs = []

    async def pay(request):
        runs.append(current_attempt().key)
        await asyncio.sleep(0)
        return HttpResponse("paid", status=201)

    async with served(integration(pay)):
        first, second = await apost("/pay/?a=%C3%A9"), await apost("/pay/?a=%C3%A9")
        assert (await apost("/pay/?a=1")).status_code == 422
    assert (first.content, second.content) == (b"paid", b"paid")
    assert second["Idempotent-Replayed"] == "true"
    assert runs == ["k"]


async def test_other_methods_and_requests_without_a_key_pass(integration):
    async def pay(request):
        return JsonResponse({"attempt": current_attempt() is not None})

    async with served(integration(pay)):
        answer = await AsyncClient().get("/pay/", **{"Idempotency-Key": "k"})
        assert answer.json() == (await apost(key=None)).json() == {"attempt": False}


async def chunks(count, given=None):
    for number in range(count):
        if given is not None:
            given.append(number)
        yield f"{number:05d}"


async def body_of(response):
    return b"".join([chunk async for chunk in response])


async def test_an_async_stream_is_replayed(integration):
    async def pay(request):
        return StreamingHttpResponse(chunks(3))

    async with served(integration(pay)):
        first, second = await apost(), await apost()
        assert await body_of(first) == second.content == b"000000000100002"


async def test_a_plain_stream_is_replayed(integration):
    async def pay(request):
        return StreamingHttpResponse(iter(["one, ", "two"]))

    async with served(integration(pay)):
        first, second = await apost(), await apost()
        assert await body_of(first) == second.content == b"one, two"


async def test_an_async_stream_beyond_the_cap_is_not_read_far_ahead(integration):
    given = []

    async def pay(request):
        return StreamingHttpResponse(chunks(9, given))

    async with served(integration(pay, MAX_RESPONSE=12)):
        first = await apost()
        assert len(given) <= 4
        assert len(await body_of(first)) == 45
        assert (await apost()).json()["code"] == "result_omitted"


async def test_an_async_stream_that_breaks_after_the_cap_is_broken_not_done(
    integration, sqlite_url
):
    runs = []

    async def breaking():
        for _ in range(5):
            yield b"x" * 6
        raise OSError("broken")

    async def pay(request):
        runs.append(1)
        return StreamingHttpResponse(breaking())

    async with served(integration(pay, MAX_RESPONSE=10)):
        for _ in range(2):
            with pytest.raises(OSError, match="broken"):
                await body_of(await apost())
    assert runs == [1, 1]
    assert state(sqlite_url) is State.FAILED


async def test_a_client_who_leaves_does_not_end_an_async_stream_beyond_the_cap(integration):
    given = []

    async def pay(request):
        return StreamingHttpResponse(chunks(9, given))

    async with served(integration(pay, MAX_RESPONSE=12)):
        answer = await apost()
        assert (await apost()).json()["code"] == "concurrent_request"
        sending = aiter(answer)
        await anext(sending)
        await sending.aclose()
        del answer
        async with asyncio.timeout(PATIENCE):
            while (await apost()).json()["code"] != "result_omitted":  # noqa: ASYNC110 - it cannot tell
                await asyncio.sleep(0.01)
    assert len(given) == 9


async def test_a_plain_stream_beyond_the_cap_reaches_its_first_caller_whole(integration):
    async def pay(request):
        return StreamingHttpResponse(iter([b"x" * 10] * 3))

    async with served(integration(pay, MAX_RESPONSE=12)):
        first = await apost()
        assert await body_of(first) == b"x" * 30
        assert (await apost()).json()["code"] == "result_omitted"


async def test_a_stream_beyond_the_cap_is_not_put_together():
    chunk = bytes(1_000_000)
    tracemalloc.start()
    try:
        told = await aread(StreamingHttpResponse(iter([chunk] * 32)), Flow(12))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told.body is None
    assert most < 16 * len(chunk)


async def test_a_whole_answer_beyond_the_cap_is_told_as_omitted(integration):
    async def pay(request):
        return HttpResponse("x" * 13)

    async with served(integration(pay, MAX_RESPONSE=12)):
        assert len((await apost()).content) == 13
        assert (await apost()).json()["code"] == "result_omitted"


async def test_events_pass_live_and_marked(integration, sqlite_url):
    given = []

    async def pay(request):
        return StreamingHttpResponse(chunks(2, given), content_type="text/event-stream")

    async with served(integration(pay)):
        answer = await apost()
        assert answer["Idempotent-Unprotected"] == "stream"
        assert given == []
        assert await body_of(answer) == b"0000000001"
    assert state(sqlite_url) is State.FAILED  # free


async def test_a_stream_that_fails_frees_the_key_and_is_closed(integration, sqlite_url):
    closed = []

    class Chunks:
        async def __aiter__(self):
            yield b"one"
            raise OSError("broken")

        def close(self):
            closed.append(True)

    async def pay(request):
        return StreamingHttpResponse(Chunks())

    async with served(integration(pay)):
        assert (await apost()).status_code == 500
    assert closed == [True]
    assert state(sqlite_url) is State.FAILED


async def test_a_plain_view_may_answer_with_an_async_stream(integration):
    def pay(request):
        return StreamingHttpResponse(chunks(3))

    async with served(integration(pay)):
        first, second = await apost(), await apost()
        assert await body_of(first) == second.content == b"000000000100002"


async def test_an_exception_frees_the_key(integration, sqlite_url):
    async def pay(request):
        raise OSError("broken")

    async with served(integration(pay)):
        assert (await apost()).status_code == 500
    assert state(sqlite_url) is State.FAILED


@pytest.mark.parametrize("stored", ["web.profiles.deterministic", "web.profiles.doubtful"])
async def test_an_answer_that_is_raised_is_recorded_as_asked_for(integration, stored):
    runs = []

    async def pay(request):
        runs.append(1)
        raise Http404("none")

    async with served(integration(pay, STORED=stored)):
        first, second = await apost(), await apost()
    assert (first.status_code, first.content) == (second.status_code, second.content)
    kept = stored.endswith("deterministic")
    assert ("Idempotent-Replayed" in second) is kept
    assert len(runs) == (1 if kept else 2)


async def test_an_error_handler_runs_once_and_the_first_answer_is_the_stored_one(sqlite_url):
    numbers = itertools.count(1)

    async def pay(request):
        raise Http404("none")

    def word(request, exception):
        return JsonResponse({"error": next(numbers)}, status=404)

    module = urls(pay=idempotent(pay))
    module.handler404 = word
    async with served(project(sqlite_url, {}, STORED="web.profiles.deterministic")):
        with override_settings(ROOT_URLCONF=module):
            assert [(await apost()).json() for _ in range(3)] == [{"error": 1}] * 3
            assert (await apost(key="other")).json() == {"error": 2}


async def test_who_was_replaced_gets_no_error_of_its_own(sqlite_url):
    @idempotent
    async def pay(request):
        async with AsyncIdempotency(sqlite_url) as other:
            await other.forget("k", scope="http")
        raise Http404

    async with served(project(sqlite_url, {"pay": pay}, STORED="web.profiles.deterministic")):
        answer = await apost()
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")


async def test_a_template_response_is_replayed(integration):
    async def pay(request):
        return TemplateResponse(request, engines["django"].from_string("number {{ n }}"), {"n": 7})

    async with served(integration(pay, TEMPLATES=TEMPLATES)):
        assert [(await apost()).content for _ in range(2)] == [b"number 7", b"number 7"]


async def test_who_was_replaced_gets_no_answer_of_its_own(integration, sqlite_url):
    async def pay(request):
        async with AsyncIdempotency(sqlite_url) as other:
            await other.forget("k", scope="http")
        return HttpResponse("mine")

    async with served(integration(pay)):
        answer = await apost()
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")


async def test_the_cap_holds_for_a_body_of_unknown_length(sqlite_url):
    async def pay(request):
        """Never run."""

    request = AsyncRequestFactory().post("/pay/", b"x" * 11, "text/plain")
    request.scope["headers"].append((b"idempotency-key", b"k"))
    del request.META["CONTENT_LENGTH"]
    async with served(project(sqlite_url, {}, MAX_BODY=10)):
        answer = await IdempotencyMiddleware(pay)(request)
    assert answer.status_code == 413
    assert state(sqlite_url) is None


async def test_functions_of_the_application_may_be_async(sqlite_url):
    async def tenant(request):
        await asyncio.sleep(0)
        return request.headers.get("x-user")

    async def pay(request):
        return HttpResponse("paid")

    async with served(project(sqlite_url, {"pay": idempotent(tenant=tenant)(pay)})):
        assert (await apost()).status_code == 401
        assert (await apost(headers={"X-User": "ann"})).status_code == 200


@pytest.fixture
def users(tmp_path, monkeypatch):
    """Functions as a project has them, which ask the database: Django refuses that on a loop."""
    monkeypatch.delenv("DJANGO_ALLOW_ASYNC_UNSAFE")
    alias = django_alias("sqlite", f"sqlite:///{tmp_path / 'users.db'}")

    def known(request):
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT %s", [request.headers.get("x-user")])
            (user,) = cursor.fetchone()
        connections[alias].close()  # of this thread, which may be any
        return user

    async def known_later(request):
        return await sync_to_async(known)(request)

    return {"plain": known, "async": known_later}


@pytest.mark.parametrize(
    ("kind", "option"),
    [("plain", "TENANT"), ("async", "TENANT"), ("plain", "KEY"), ("plain", "PAYLOAD")],
)
async def test_one_function_serves_asgi_and_wsgi(integration, users, kind, option):
    function = users[kind]
    options = {
        "TENANT": {"TENANT": function},
        "KEY": {"HEADER": None, "KEY": lambda request, _: function(request)},
        "PAYLOAD": {"PAYLOAD": lambda request, _: function(request)},
    }[option]
    runs = []

    async def pay(request):
        runs.append(1)
        return HttpResponse("paid")

    def pay_on_threads(request):
        runs.append(1)
        return HttpResponse("paid")

    ann = {"headers": {"X-User": "ann"}}
    async with served(integration(pay, **options)):
        assert [(await apost(**ann)).content for _ in range(2)] == [b"paid"] * 2
        if option != "PAYLOAD":
            assert (await apost(headers={"X-User": "bob"})).content == b"paid"
    served_before = len(runs)
    assert served_before == (1 if option == "PAYLOAD" else 2)

    def on_threads():
        with integration(pay_on_threads, SCOPE="threads", **options):
            assert [post(**ann).content for _ in range(2)] == [b"paid"] * 2

    await asyncio.to_thread(on_threads)
    assert len(runs) == served_before + 1

    def awaited_on_threads():
        with integration(pay, SCOPE="awaited", **options):
            assert [post(**ann).content for _ in range(2)] == [b"paid"] * 2

    await asyncio.to_thread(awaited_on_threads)
    assert len(runs) == served_before + 2


# --- the decorator and the middleware by themselves -----------------------------------------------


class Orders(View):
    @idempotent
    async def post(self, request):
        return JsonResponse({"key": current_attempt().key})


class OtherOrders(View):
    @method_decorator(idempotent)
    async def post(self, request):
        return JsonResponse({"key": current_attempt().key})


@pytest.mark.parametrize(
    "view",
    [
        Orders,
        pytest.param(
            OtherOrders,
            marks=needs("django", "5.2", "before, method_decorator knows no async methods"),
        ),
    ],
)
async def test_async_methods_are_protected(sqlite_url, view):
    async with served(project(sqlite_url, {"pay": view.as_view()})):
        answers = [await apost() for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"key": "k"}] * 2
    assert answers[1]["Idempotent-Replayed"] == "true"


async def test_views_and_middleware_can_be_given_an_engine():
    async def pay(request):
        return HttpResponse("paid")

    async with AsyncIdempotency("memory://") as idem:
        request = AsyncRequestFactory().post("/pay/", **KEYED)
        assert (await Idempotent(idem, required=True)(pay)(request)).content == b"paid"
        layers = [given_to_middlewares(idem, required=True)]
        views = {"pay": pay, "login": exempt(partial(pay))}
        with project("memory://", views, MIDDLEWARE=layers):
            assert (await apost(key="m")).content == b"paid"
            assert (await apost(key="m"))["Idempotent-Replayed"] == "true"
            assert (await apost("/login/", key=None)).content == b"paid"
            assert (await apost(key=None)).status_code == 400
    with Idempotency("memory://") as plain, pytest.raises(ConfigError, match="AsyncIdempotency"):
        IdempotencyMiddleware(pay, plain)


async def test_an_engine_for_threads_would_block_the_loop_of_an_async_view():
    async def pay(request):
        return HttpResponse("paid")

    request = AsyncRequestFactory().post("/pay/", **KEYED)
    with Idempotency("memory://") as plain, pytest.raises(ConfigError, match="AsyncIdempotency"):
        await Idempotent(plain)(pay)(request)


@pytest.mark.parametrize("inside", ["middleware", "decorator"])
async def test_a_request_that_asgi_s_middleware_protects_passes(sqlite_url, inside):
    async def pay(request):
        return HttpResponse("paid")

    view = idempotent(pay) if inside == "decorator" else pay
    layers = [MIDDLEWARE] if inside == "middleware" else []
    async with served(project(sqlite_url, {"pay": view}, MIDDLEWARE=layers)):
        integration = asgi.IdempotencyMiddleware(get_asgi_application(), sqlite_url)
        transport = httpx.ASGITransport(integration)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = [await client.post("/pay/", headers={"Idempotency-Key": "k"}) for _ in "12"]
        await integration._integration.close()
    assert [answer.text for answer in answers] == ["paid", "paid"]
    assert answers[1].headers["Idempotent-Replayed"] == "true"


def test_an_async_view_under_wsgi_is_protected(sqlite_url):
    async def pay(request):
        await asyncio.sleep(0)
        return JsonResponse({"key": current_attempt().key})

    with project(sqlite_url, {"pay": idempotent(pay)}):
        assert [post().json(), post().json()] == [{"key": "k"}] * 2
        assert ENGINES._integrations == {}


def test_an_async_view_under_wsgi_may_call_the_thread_of_its_request(sqlite_url):
    threads = []

    async def pay(request):
        await sync_to_async(lambda: threads.append(threading.current_thread()))()
        if request.headers.get("X-Fail"):
            raise Http404
        return StreamingHttpResponse(iter([b"pa", b"id"]))

    with project(sqlite_url, {"pay": idempotent(max_response=3)(pay)}):
        assert post().getvalue() == b"paid"
        assert post().json()["code"] == "result_omitted"
        assert post(key="other", headers={"X-Fail": "1"}).status_code == 404
    assert threads == [threading.current_thread()] * 2


def test_each_event_loop_has_an_engine_of_its_own(sqlite_url):
    async def pay(request):
        return HttpResponse("paid")

    async def once():
        try:
            return await apost()
        finally:
            await aclose()
            await aclose()  # nothing is left: nothing happens

    async def unclosed():
        ENGINES.async_integration()

    with project(sqlite_url, {"pay": pay}, MIDDLEWARE=[MIDDLEWARE]):
        assert [asyncio.run(once()).content, asyncio.run(once()).content] == [b"paid", b"paid"]
        asyncio.run(unclosed())
        asyncio.run(once())
        assert ENGINES._integrations == {}  # the one whose loop is over is not kept
    close()
    close()


# --- the twins ------------------------------------------------------------------------------------


class Plain(ast.NodeTransformer):
    """Writes code for asyncio as the same code for threads."""

    renamed: ClassVar = {
        "_arender": "rendered",
        "_arun": "_run",
        "_arecord_raised": "_record_raised",
        "_arecord": "_record",
    }

    def visit_AsyncFunctionDef(self, node):
        return self.visit(ast.FunctionDef(**{**vars(node), "name": self.renamed[node.name]}))

    def visit_arguments(self, node):
        known = [ast.arg(each.arg) for each in node.args if each.arg != "flow"]
        return ast.arguments([], known, None, [], [], None, [])

    def visit_Await(self, node):
        return self.visit(node.value)

    def visit_Name(self, node):
        return ast.Name(self.renamed.get(node.id, node.id), node.ctx)

    def visit_Call(self, node):
        self.generic_visit(node)
        node.args = [each for each in node.args if ast.unparse(each) != "flow"]
        if isinstance(node.func, ast.Call) and ast.unparse(node.func.func) == "in_thread":
            node.func = node.func.args[0]
        return node


@pytest.mark.parametrize("name", ["_run", "_record_raised"])
def test_a_request_goes_the_same_way_on_threads_and_on_asyncio(name):
    def text(function):
        tree = ast.parse(inspect.getsource(getattr(running, function)))
        return ast.unparse(Plain().visit(tree))

    assert text(f"_a{name[1:]}") == text(name)


# --- clients who go away --------------------------------------------------------------------------


async def test_a_request_that_is_cancelled_is_waited_for_and_saved(integration, sqlite_url):
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def pay(request):
        entered.set()
        await go_on.wait()
        return HttpResponse("paid")

    async with served(integration(pay)):
        task = asyncio.create_task(apost())
        await asyncio.wait_for(entered.wait(), PATIENCE)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await apost())["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("error", [OSError("broken"), asyncio.CancelledError()])
async def test_a_cancelled_request_that_fails_frees_its_key(sqlite_url, error):
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def pay(request):
        entered.set()
        await go_on.wait()
        raise error

    async with served(project(sqlite_url, {"pay": idempotent(pay)})):
        task = asyncio.create_task(apost())
        await asyncio.wait_for(entered.wait(), PATIENCE)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert state(sqlite_url) is State.FAILED


async def test_a_client_who_leaves_as_its_answer_grows_too_large_ends_nothing(integration):
    runs, entered, go_on = [], asyncio.Event(), asyncio.Event()

    async def growing():
        yield b"x" * 10
        entered.set()
        await go_on.wait()
        yield b"x" * 10

    async def pay(request):
        runs.append(1)
        return StreamingHttpResponse(growing())

    async with served(integration(pay, MAX_RESPONSE=12)):
        task = asyncio.create_task(apost())
        await asyncio.wait_for(entered.wait(), PATIENCE)
        go_on.set()
        task.cancel()  # in the same turn: the stream goes on before the one who waits for it
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await apost()).json()["code"] == "result_omitted"
    assert runs == [1]


class Rows:
    """A stream that asks a thread for all it gives, as one of a database does."""

    def __init__(self, told):
        self.told = told

    async def __aiter__(self):
        for number in range(6):
            await sync_to_async(time.sleep)(0.01)
            self.told.append(number)
            yield b"%05d" % number

    def close(self):
        self.told.append("closed")


async def sent_until(stopped, key="k"):
    """Send a request by Django's own handler, to a client who waits at some message and leaves."""
    stuck, never = asyncio.Event(), asyncio.Event()
    messages = iter([{"type": "http.request", "body": b""}])

    async def receive():
        for message in messages:
            return message
        await stuck.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == stopped:
            stuck.set()
            await never.wait()

    headers = [(b"host", b"test"), (b"idempotency-key", key.encode())]
    scope = {"type": "http", "method": "POST", "path": "/pay/", "query_string": b""}
    async with asyncio.timeout(PATIENCE):
        await get_asgi_application()({**scope, "headers": headers}, receive, send)


@pytest.fixture
def uncollected():
    """Nothing may depend on when the collector finds what is let go."""
    gc.disable()
    yield
    gc.enable()


@needs("django", "5.0", "before, it does not listen for the end of a connection")
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("stopped", ["http.response.start", "http.response.body"])
async def test_what_a_stream_needs_is_closed_after_it_when_its_client_has_gone(
    integration, stopped
):
    told = []

    async def pay(request):
        told.append("ran")
        request._files = MultiValueDict({"upload": [Rows(told)]})  # closed with the request
        return StreamingHttpResponse(Rows(told))

    async with served(integration(pay, MAX_RESPONSE=10)):
        await sent_until(stopped)
        async with asyncio.timeout(PATIENCE):
            while (answer := await apost()).json()["code"] != "result_omitted":
                assert answer.json()["code"] == "concurrent_request"
                await asyncio.sleep(0.01)
    assert told == ["ran", *range(6), "closed", "closed"]


# --- middlewares that know no asyncio -------------------------------------------------------------


@pytest.fixture(params=["middleware", "decorator"])
async def threaded(request, sqlite_url):
    """Serve one view behind each integration in turn, on a thread or around one."""

    def serving(view, **options):
        if request.param == "middleware":
            layers = [MIDDLEWARE, PLAIN_LAYER]
            return project(sqlite_url, {"pay": view}, MIDDLEWARE=layers, **options)
        return project(sqlite_url, {"pay": idempotent(view)}, MIDDLEWARE=[PLAIN_LAYER], **options)

    return serving


async def left(entered):
    """Begin a request, and be cancelled in it."""
    task = asyncio.create_task(apost())
    async with asyncio.timeout(PATIENCE):
        while not entered:  # noqa: ASYNC110 - threads tell of themselves here
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("kind", ["plain", "async", "mixed"])
async def test_a_client_who_leaves_ends_no_view_on_a_thread(threaded, kind):
    runs = []

    def plain(request):
        runs.append("begun")
        time.sleep(0.1)
        runs.append("ended")
        return HttpResponse("paid")

    async def awaiting(request):
        runs.append("begun")
        await asyncio.sleep(0.1)
        runs.append("ended")
        return HttpResponse("paid")

    def mixed(request):
        return async_to_sync(awaiting)(request)

    view = {"plain": plain, "async": awaiting, "mixed": mixed}[kind]
    async with served(threaded(view)):
        await left(runs)
        assert (await apost())["Idempotent-Replayed"] == "true"
    assert runs == ["begun", "ended"]


async def test_a_view_on_a_thread_that_raises_when_its_client_has_gone_frees_its_key(
    threaded, sqlite_url
):
    runs = []

    def pay(request):
        runs.append(1)
        time.sleep(0.1)
        raise OSError("broken")

    async with served(threaded(pay)):
        await left(runs)
    assert state(sqlite_url) is State.FAILED


@pytest.mark.usefixtures("uncollected")
async def test_a_large_answer_of_a_thread_whose_client_has_gone_is_read_to_its_end(threaded):
    told = []

    def pay(request):
        told.append("ran")
        time.sleep(0.1)
        return StreamingHttpResponse(told.append(each) or b"x" * 10 for each in range(3))

    async with served(threaded(pay, MAX_RESPONSE=12)):
        await left(told)
        assert (await apost()).json()["code"] == "result_omitted"
    assert told == ["ran", 0, 1, 2]


async def test_a_view_on_a_thread_that_finds_nothing_fails_as_any_other(sqlite_url):
    """A StopIteration cannot leave a thread for a loop: its task would wait for ever."""

    @idempotent
    def pay(request):
        return next(iter(()))

    layers = {"MIDDLEWARE": [PLAIN_LAYER]}
    async with served(project(sqlite_url, {"pay": pay}, **layers)), asyncio.timeout(PATIENCE):
        assert (await apost()).status_code == 500
    assert state(sqlite_url) is State.FAILED


async def test_a_plain_view_that_is_called_on_the_loop_itself_runs_there(sqlite_url):
    """As by an async view, or by a test: nobody can cancel it, and its key must not stay locked."""

    @idempotent
    def pay(request):
        return HttpResponse("paid")

    async def asking(request):
        return pay(request)

    async with served(project(sqlite_url, {"pay": asking}, MIDDLEWARE=[])):
        assert (await apost()).content == b"paid"
        assert (await apost())["Idempotent-Replayed"] == "true"


async def test_a_large_stream_asks_no_thread_that_has_gone_on(threaded):
    told = []

    async def pay(request):
        return StreamingHttpResponse(Rows(told))

    async with served(threaded(pay, MAX_RESPONSE=10)):
        first = await apost()
        assert await body_of(first) == b"".join(b"%05d" % number for number in range(6))
        assert (await apost()).json()["code"] == "result_omitted"


@pytest.fixture(scope="module", params=["", MIDDLEWARE])
def site(request, tmp_path_factory):
    """A site on uvicorn, with the decorator or with the middleware: its port and its folder."""
    folder = tmp_path_factory.mktemp("site")
    variables = {
        "SITE_STORE": f"sqlite:///{folder / 'semel.db'}",
        "SITE_FOLDER": str(folder),
        "SITE_MIDDLEWARE": request.param,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    with socket.create_server((HOST, 0)) as listening:
        fd = listening.fileno()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "--fd", str(fd), "--lifespan", "off"),
                *("--log-level", "error", "adapters.django_site:application"),
            ],
            cwd=TESTS,
            env={**os.environ, **variables},
            pass_fds=[fd],
        )
        try:
            yield listening.getsockname()[1], folder
        finally:
            process.terminate()
            process.wait(PATIENCE)


def ask(port, path, name):
    lines = [("Host", HOST), ("Connection", "close"), ("Content-Length", "0")]
    return Connection(port).send(
        head("POST", f"/{path}/{name}", [*lines, ("Idempotency-Key", name)])
    )


def eventually(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["slow", "plain"])
def test_a_client_who_goes_away_finds_the_answer_later(site, path):
    port, folder = site
    name = f"{path}-{uuid.uuid4().hex}"
    leaving = ask(port, path, name)
    eventually((folder / f"{name}-entered").exists)
    leaving.leave()
    assert ask(port, path, name).answer().code == "concurrent_request"
    (folder / f"{name}-gate").touch()
    eventually((folder / f"{name}-done").exists)
    answer = ask(port, path, name).answer()
    while answer.status == 409:
        answer = ask(port, path, name).answer()
    assert (answer.body, answer.replayed) == (f"done {name}".encode(), True)


def test_a_view_that_fails_after_its_client_has_gone_frees_the_key(site):
    port, folder = site
    name = uuid.uuid4().hex
    leaving = ask(port, "failing", name)
    eventually((folder / f"{name}-entered").exists)
    leaving.leave()
    (folder / f"{name}-gate").touch()
    answer = ask(port, "failing", name).answer()
    while answer.status == 409:
        answer = ask(port, "failing", name).answer()
    assert answer.status == 500


@pytest.mark.parametrize("pattern", ["/pay/", "/shop/pay/"])
async def test_the_middlewares_paths_hold_below_a_root_path(sqlite_url, pattern):
    chosen = {"MIDDLEWARE": [MIDDLEWARE], "REQUIRED": True, "INCLUDE": [pattern]}
    with project(sqlite_url, {"pay": apay}, **chosen):
        transport = httpx.ASGITransport(UnderRoot(get_asgi_application()))
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            assert (await client.post("/shop/pay/")).status_code == 400
            told = {"headers": {"Idempotency-Key": "k"}}
            answers = [await client.post("/shop/pay/", **told) for _ in range(2)]
        await aclose()
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1].headers["Idempotent-Replayed"] == "true"


async def apay(request):
    return HttpResponse("paid", status=201)


class UnderRoot:
    """A server whose root path is /shop."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        await self._app({**scope, "root_path": "/shop"}, receive, send)
