"""No spelling of a path leads past the patterns of a middleware to a handler, whatever the router.

Routers read a path in their own ways: they merge slashes, ignore one at the end, cut off a root, or
end their patterns with `$`, which a new line may follow.
"""

from __future__ import annotations

import asyncio
import sys
import types
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import litestar
import pytest
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.test import override_settings
from django.urls import path, re_path
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import adapters.django_project  # noqa: F401 - configures Django
from semel import http
from semel.adapters import asgi, wsgi

SPELLINGS = [
    f"{root}{spelling}"
    for root in ("", "/v1", "//v1", "/x/v1")
    for spelling in (
        *("/redeem", "/redeem/", "/redeem//", "//redeem", "///redeem///", "redeem", "/REDEEM"),
        *("/redeem%0A", "/redeem%0D%0A", "/redeem%00", "/redeem%20", "/redeem%C2%85", "/redeem%1F"),
        *("/redeem%2F", "/%2Fredeem", "%2Fredeem", "/./redeem", "/x/../redeem", "/redeem;a=1"),
        *("/sub/redeem", "/sub//redeem", "//sub/redeem", "/sub/redeem/", "/sub/redeem%0A"),
        *("/sub%0A/redeem", "/sub%2Fredeem"),
    )
]
PATTERNS = ("/redeem", "/sub/redeem")
CHOICES: dict[str, dict[str, Any]] = {
    "include": {"include": PATTERNS, "required": True},
    "routes": {"routes": [http.Route(pattern, required=True) for pattern in PATTERNS]},
    "exclude": {"exclude": ["/login", "*/status"], "required": True},
}
ROOTS = ["", "/v1"]


@pytest.fixture(params=CHOICES)
def options(request) -> dict[str, Any]:
    return CHOICES[request.param]


async def unprotected(app: Any, ran: list[object], root: str) -> list[str]:
    """Spellings without a key that reach the handler."""
    found = []
    for spelling in SPELLINGS:
        before = len(ran)
        await asked(app, spelling, root)
        if len(ran) > before:
            found.append(spelling)
    return found


async def asked(app: Any, spelling: str, root: str, key: str | None = None) -> int:
    lines = [(b"host", b"x"), (b"content-length", b"0")]
    if key is not None:
        lines.append((b"idempotency-key", key.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": unquote_to_bytes(spelling).decode(),
        "root_path": root,
        "raw_path": spelling.encode(),
        "query_string": b"",
        "headers": lines,
        "state": {},
        "server": ("x", 80),
        "client": ("127.0.0.1", 1),
    }
    sent: list[Any] = []

    waiting = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]


def on_starlette(ran: list[object]) -> Any:
    async def redeem(request):
        ran.append(1)
        return JSONResponse({})

    routes = [Route("/redeem", redeem, methods=["POST"])]
    return Starlette(routes=[*routes, Mount("/sub", routes=routes)])


def on_fastapi(ran: list[object]) -> Any:
    app, sub = FastAPI(), FastAPI()

    @app.post("/redeem")
    @sub.post("/redeem")
    async def redeem() -> None:
        ran.append(1)

    app.mount("/sub", sub)
    return app


def on_fastapi_with_a_root(ran: list[object]) -> Any:
    app = on_fastapi(ran)
    app.root_path = "/v1"  # what its argument of this name does
    return app


def on_litestar(ran: list[object]) -> Any:
    @litestar.post(["/redeem", "/sub/redeem"])
    async def redeem() -> None:
        ran.append(1)

    return litestar.Litestar([redeem], openapi_config=None)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize(
    "framework", [on_starlette, on_fastapi, on_fastapi_with_a_root, on_litestar]
)
async def test_no_spelling_leads_past_the_asgi_middleware(framework, root, options):
    ran: list[object] = []
    app = asgi.IdempotencyMiddleware(framework(ran), "memory://", **options)
    assert await unprotected(app, ran, root) == []
    await asked(app, "/redeem", root, key="k")
    assert len(ran) == 1


def said(app: Any, spelling: str, root: str, key: str | None = None) -> str:
    environ = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": root,
        "QUERY_STRING": "",
        "PATH_INFO": unquote_to_bytes(spelling).decode("latin-1"),
        "HTTP_HOST": "localhost",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": "0",
        "wsgi.input": BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.url_scheme": "http",
        "wsgi.version": (1, 0),
        "wsgi.multithread": True,
        **({} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}),
    }
    begun: list[str] = []
    for _ in app(environ, lambda status, *_: begun.append(status)):
        pass
    return begun[0]


def said_unprotected(app: Any, ran: list[object], root: str) -> list[str]:
    found = []
    for spelling in SPELLINGS:
        before = len(ran)
        said(app, spelling, root)
        if len(ran) > before:
            found.append(spelling)
    return found


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize(("strict", "merged"), [(True, True), (False, False)])
def test_no_spelling_leads_past_the_middleware_around_flask(strict, merged, root, options):
    ran: list[object] = []
    app = Flask("shop")
    app.url_map.strict_slashes, app.url_map.merge_slashes = strict, merged

    @app.post("/redeem")
    @app.post("/sub/redeem")
    def redeem() -> str:
        ran.append(1)
        return "done"

    middleware = wsgi.IdempotencyMiddleware(app.wsgi_app, "memory://", **options)
    assert said_unprotected(middleware, ran, root) == []
    said(middleware, "/redeem", root, key="k")
    assert len(ran) == 1


@pytest.fixture
def site(monkeypatch):
    """The urls of a Django project, one of them a pattern that ends with `$`, and what ran."""
    ran: list[object] = []

    def redeem(request):
        ran.append(1)
        return HttpResponse("done")

    urls: Any = types.ModuleType("urls_of_paths")
    urls.urlpatterns = [path("redeem", redeem), re_path(r"^sub/redeem$", redeem)]
    monkeypatch.setitem(sys.modules, "urls_of_paths", urls)
    return ran


def project(middleware: str, options: dict[str, Any]) -> Any:
    settings = {name.upper(): value for name, value in options.items()}
    return override_settings(
        ROOT_URLCONF="urls_of_paths",
        MIDDLEWARE=[middleware] if middleware else [],
        ALLOWED_HOSTS=["*"],
        SEMEL={"URL": "memory://", **settings},
    )


DJANGO = "semel.adapters.django.IdempotencyMiddleware"


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("middleware", ["", DJANGO])
async def test_no_spelling_leads_past_a_middleware_to_django_on_asgi(
    site, middleware, root, options
):
    with project(middleware, options):
        app: Any = ASGIHandler()
        if not middleware:
            app = asgi.IdempotencyMiddleware(app, "memory://", **options)
        assert await unprotected(app, site, root) == []
        await asked(app, f"{root}/redeem", root, key="k")
    assert len(site) == 1


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("middleware", ["", DJANGO])
def test_no_spelling_leads_past_a_middleware_to_django_on_wsgi(site, middleware, root, options):
    with project(middleware, options):
        app: Any = WSGIHandler()
        if not middleware:
            app = wsgi.IdempotencyMiddleware(app, "memory://", **options)
        assert said_unprotected(app, site, root) == []
        said(app, "/redeem", root, key="k")
    assert len(site) == 1


async def test_a_path_with_a_new_line_is_the_clients_mistake():
    app = asgi.IdempotencyMiddleware(on_starlette([]), "memory://", include=["/redeem"])
    assert await asked(app, "/redeem%0A", "") == 400
