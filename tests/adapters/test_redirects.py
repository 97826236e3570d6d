"""Answers that are redirects, through every integration: stored on request only, logged if not."""

from __future__ import annotations

from adapters.django_project import MIDDLEWARE, apost, post, project

# That one told Django its settings, which other parts of it ask for.
# isort: split
import asyncio
import contextlib
from typing import NamedTuple

import httpx
import litestar
import pytest
from django.http import HttpResponse
from fastapi import FastAPI, HTTPException
from fastapi.responses import RedirectResponse
from flask import Flask, abort
from flask import redirect as flask_redirect
from litestar import Response as LitestarResponse
from starlette.applications import Starlette
from starlette.routing import Route as StarletteRoute
from werkzeug.test import Client as WsgiClient

from semel import AsyncIdempotency, Idempotency
from semel.adapters import asgi, django, fastapi, flask, wsgi
from versions import has


class Seen(NamedTuple):
    """What a client sees of an answer."""

    status: int
    location: str | None
    replayed: bool


class Site:
    """One protected route of one framework; it answers with the redirects that a test names."""

    def __init__(self, leads_to):
        self._leads_to = iter(leads_to)
        self.runs = 0

    def next(self):
        """The status and the location of the next answer."""
        self.runs += 1
        return next(self._leads_to)


def seen(answer, status):
    headers = answer.headers
    return Seen(status, headers.get("location"), headers.get("idempotent-replayed") == "true")


KEYED = {"Idempotency-Key": "k"}


@contextlib.contextmanager
def over_asgi(app):
    """Send requests to an ASGI application, all on one event loop."""
    with asyncio.Runner() as runner:

        async def send():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return await client.post("/orders/17", headers=KEYED)

        def answered():
            answer = runner.run(send())
            return seen(answer, answer.status_code)

        yield answered


@contextlib.contextmanager
def over_wsgi(app):
    client = WsgiClient(app)

    def answered():
        answer = client.post("/orders/17", headers=KEYED)
        return seen(answer, answer.status_code)

    yield answered


@contextlib.contextmanager
def on_bare_asgi(site, **options):
    async def app(scope, receive, send):
        status, location = site.next()
        lines = [(b"location", location.encode())]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": b""})

    with over_asgi(asgi.IdempotencyMiddleware(app, "memory://", **options)) as answered:
        yield answered


@contextlib.contextmanager
def on_starlette(site, **options):
    async def order(request):
        status, location = site.next()
        return RedirectResponse(location, status)

    app = Starlette(routes=[StarletteRoute("/orders/{number}", order, methods=["POST"])])
    app.add_middleware(asgi.IdempotencyMiddleware, idempotency="memory://", **options)
    with over_asgi(app) as answered:
        yield answered


@contextlib.contextmanager
def on_fastapi(site, **options):
    app = FastAPI()

    @app.post("/orders/{number}")
    @fastapi.Idempotent("memory://", **options)
    async def order(number: int):
        status, location = site.next()
        return RedirectResponse(location, status)

    with over_asgi(app) as answered:
        yield answered


@contextlib.contextmanager
def on_fastapi_raising(site, **options):
    app = FastAPI()

    @app.post("/orders/{number}")
    @fastapi.Idempotent("memory://", **options)
    def order(number: int):
        status, location = site.next()
        raise HTTPException(status, headers={"Location": location})

    with over_asgi(app) as answered:
        yield answered


@contextlib.contextmanager
def on_bare_wsgi(site, **options):
    def app(environ, start_response):
        status, location = site.next()
        start_response(f"{status} Elsewhere", [("Location", location)])
        return [b""]

    with (
        Idempotency("memory://") as idem,
        over_wsgi(wsgi.IdempotencyMiddleware(app, idem, **options)) as answered,
    ):
        yield answered


@contextlib.contextmanager
def on_flask(site, *, raising=False, **options):
    app = Flask(__name__)
    with Idempotency("memory://") as idem:

        @app.post("/orders/<number>")
        @flask.Idempotent(idem, **options)
        def order(number):
            status, location = site.next()
            answer = flask_redirect(location, status)
            return abort(answer) if raising else answer

        with over_wsgi(app) as answered:
            yield answered


@contextlib.contextmanager
def on_flask_middleware(site, **options):
    app = Flask(__name__)

    @app.post("/orders/<number>")
    def order(number):
        status, location = site.next()
        return flask_redirect(location, status)

    with Idempotency("memory://") as idem:
        flask.Idempotent(idem, **options).init_app(app, middleware=True)
        with over_wsgi(app) as answered:
            yield answered


@contextlib.contextmanager
def on_litestar(site, **options):
    @litestar.post("/orders/{number:int}")
    async def order() -> LitestarResponse[None]:
        status, location = site.next()
        return LitestarResponse(None, status_code=status, headers={"Location": location})

    app = litestar.Litestar([order], logging_config=None)
    with over_asgi(asgi.IdempotencyMiddleware(app, "memory://", **options)) as answered:
        yield answered


@contextlib.contextmanager
def on_old_starlette(site, **options):
    """Tells its endpoint in the scope, not its route."""

    async def app(scope, receive, send):
        scope["endpoint"] = on_old_starlette
        status, location = site.next()
        await RedirectResponse(location, status)(scope, receive, send)

    with over_asgi(asgi.IdempotencyMiddleware(app, "memory://", **options)) as answered:
        yield answered


def on_flask_raising(site, **options):
    return on_flask(site, raising=True, **options)


@contextlib.contextmanager
def on_django(site, **options):
    @django.idempotent(**options)
    def order(request):
        status, location = site.next()
        return HttpResponse(status=status, headers={"Location": location})

    def answered():
        answer = post("/orders/")
        return seen(answer, answer.status_code)

    with project("memory://", {"orders": order}):
        yield answered


@contextlib.contextmanager
def on_async_django(site, **options):
    @django.idempotent(**options)
    async def order(request):
        status, location = site.next()
        return HttpResponse(status=status, headers={"Location": location})

    with asyncio.Runner() as runner, project("memory://", {"orders": order}):

        def answered():
            answer = runner.run(apost("/orders/"))
            return seen(answer, answer.status_code)

        yield answered
        runner.run(django.aclose())


@contextlib.contextmanager
def on_django_middleware(site, **options):
    def order(request):
        status, location = site.next()
        return HttpResponse(status=status, headers={"Location": location})

    def answered():
        answer = post("/orders/")
        return seen(answer, answer.status_code)

    capitals = {name.upper(): value for name, value in options.items()}
    with project("memory://", {"orders": order}, MIDDLEWARE=[MIDDLEWARE], **capitals):
        yield answered


STARLETTES_NAME = "/orders/{number}" if has("starlette", "1.7") else "on_starlette.<locals>.order"
"""Starlette before 1.7 tells the endpoint, not the route."""

SITES = {
    "asgi": (on_bare_asgi, "/orders/17"),
    "starlette": (on_starlette, STARLETTES_NAME),
    "starlette, old": (on_old_starlette, "on_old_starlette"),
    "litestar": (on_litestar, "/orders/{number}"),
    "fastapi": (on_fastapi, "/orders/{number}"),
    "fastapi, raised": (on_fastapi_raising, "/orders/{number}"),
    "wsgi": (on_bare_wsgi, "/orders/17"),
    "flask": (on_flask, "/orders/<number>"),
    "flask, middleware": (on_flask_middleware, "/orders/17"),
    "flask, raised": (on_flask_raising, "/orders/<number>"),
    "django": (on_django, "orders/"),
    "django, async": (on_async_django, "orders/"),
    "django, middleware": (on_django_middleware, "orders/"),
}
"""How each integration is served, and how its log names the route."""


@pytest.fixture(params=SITES)
def integration(request):
    return SITES[request.param]


@pytest.fixture
def serving(integration):
    return integration[0]


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if "redirect" in each.getMessage()]


def thanks_only(status, headers):
    return status < 300 or headers.get("Location") == "/thanks"


def test_a_redirect_is_not_stored_by_default_and_logged_once(integration, caplog):
    serving, route = integration
    site = Site([(302, "/login")] * 3)
    with serving(site) as answered:
        assert [answered() for _ in range(3)] == [Seen(302, "/login", False)] * 3
    assert site.runs == 3
    (warning,) = warnings_of(caplog)
    assert f"'{route}' redirected" in warning
    assert "(302)" in warning
    assert "stored=[303]" in warning


def test_a_see_other_is_stored_on_request_and_replayed_with_its_location(serving, caplog):
    site = Site([(303, "/orders/17/receipt")])
    with serving(site, stored=[303]) as answered:
        first, again = answered(), answered()
    assert first == Seen(303, "/orders/17/receipt", False)
    assert again == Seen(303, "/orders/17/receipt", True)
    assert site.runs == 1
    assert warnings_of(caplog) == []


def test_a_function_stores_the_redirect_that_means_done_and_no_login(serving, caplog):
    site = Site([(302, "/login"), (302, "/thanks")])
    with serving(site, stored=thanks_only) as answered:
        answers = [answered() for _ in range(3)]
    assert answers == [
        Seen(302, "/login", False),
        Seen(302, "/thanks", False),
        Seen(302, "/thanks", True),
    ]
    assert site.runs == 2
    assert warnings_of(caplog) == []


def test_who_names_303_and_answers_with_302_finds_that_in_the_log(serving, caplog):
    with serving(Site([(302, "/thanks")] * 2), stored=[303]) as answered:
        assert [answered().replayed for _ in range(2)] == [False, False]
    (warning,) = warnings_of(caplog)
    assert "answer with 303 and stored=[303]" in warning


def test_each_route_of_a_middleware_is_logged_once(caplog):
    with Idempotency("memory://") as idem:

        def app(environ, start_response):
            start_response("303 See Other", [("Location", "/thanks")])
            return [b""]

        client = WsgiClient(wsgi.IdempotencyMiddleware(app, idem))
        for number in range(3):
            for path in ("/orders", "/refunds", f"/{'x' * 1000}"):
                client.post(path, headers={"Idempotency-Key": f"{path[:20]}-{number}"})
    told = warnings_of(caplog)
    assert [line.partition(" redirected")[0] for line in told] == [
        "'/orders'",
        "'/refunds'",
        f"'/{'x' * 199}'",
    ]
    assert all("name it: stored=[303]" in line for line in told)


def test_endlessly_many_paths_do_not_fill_the_log(caplog):
    with Idempotency("memory://") as idem:

        def app(environ, start_response):
            start_response("303 See Other", [("Location", "/thanks")])
            return [b""]

        client = WsgiClient(wsgi.IdempotencyMiddleware(app, idem))
        for number in range(80):
            client.post(f"/orders/{number}", headers={"Idempotency-Key": str(number)})
    assert len(warnings_of(caplog)) == 50


def test_a_redirect_whose_body_was_too_large_is_replayed_with_its_location():
    def app(environ, start_response):
        start_response("303 See Other", [("Location", "/thanks"), ("X-Other", "1")])
        return [b"x" * 100]

    with Idempotency("memory://") as idem:
        client = WsgiClient(wsgi.IdempotencyMiddleware(app, idem, stored=[303], max_response=10))
        first, again = [client.post("/", headers=KEYED) for _ in range(2)]
    assert (first.status_code, len(first.data)) == (303, 100)
    assert seen(again, again.status_code) == Seen(303, "/thanks", True)
    assert again.json["code"] == "result_omitted"
    assert "X-Other" not in again.headers


async def test_the_settings_of_a_shared_engine_stay_apart(caplog):
    """Two decorators on one engine: what one of them stores is not what the other does."""
    async with AsyncIdempotency("memory://") as engine:
        app, idempotent = FastAPI(), fastapi.Idempotent(engine, separate_routes=True)

        @app.post("/form")
        @idempotent(stored=303)
        async def form():
            return RedirectResponse("/thanks", 303)

        @app.post("/other")
        @idempotent
        async def other():
            return RedirectResponse("/thanks", 303)

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            for path, expected in (("/form", [False, True]), ("/other", [False, False])):
                answers = [await client.post(path, headers=KEYED) for _ in range(2)]
                assert [seen(each, 303).replayed for each in answers] == expected
    (warning,) = warnings_of(caplog)
    assert "'/other'" in warning
