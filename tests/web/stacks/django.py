"""Django: the middleware of a project, on WSGI and on ASGI, inside compression, CORS, authorization."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseForbidden, StreamingHttpResponse
from django.urls import re_path
from django.utils.decorators import sync_and_async_middleware
from django.utils.deprecation import MiddlewareMixin

from semel import AsyncIdempotency, Idempotency
from semel.adapters.django import IdempotencyMiddleware, Idempotent
from web.handlers import CORS_ORIGIN, Asked, Business, Reply

_END = object()

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=[
        "django.middleware.gzip.GZipMiddleware",
        f"{__name__}.Around",
        f"{__name__}.middleware",
    ],
    SECRET_KEY="a secret of these tests",
)
urlpatterns: list[Any] = []


class Making:
    """What the middlewares of the next handler are made with; Django only calls them."""

    business: Business
    engine: Any
    options: Mapping[str, Any]


def application(business: Business, engine: Idempotency, options: Mapping[str, Any]) -> WSGIHandler:
    _prepare(view, business, engine, options)
    return WSGIHandler()


def async_application(
    business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]
) -> ASGIHandler:
    _prepare(async_view, business, engine, options)
    return ASGIHandler()


def of_view(business: Business, engine: Idempotency, options: Mapping[str, Any]) -> WSGIHandler:
    """The decorator of a view, without the middleware; for one profile in a process."""
    _prepare(Idempotent(engine, **options)(view), business, engine, options)
    settings.MIDDLEWARE = [f"{__name__}.Around"]
    return WSGIHandler()


def of_async_view(
    business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]
) -> ASGIHandler:
    _prepare(Idempotent(engine, **options)(async_view), business, engine, options)
    settings.MIDDLEWARE = [f"{__name__}.Around"]
    return ASGIHandler()


def of_atomic_view(
    business: Business, engine: Idempotency, options: Mapping[str, Any]
) -> WSGIHandler:
    """The record is committed with the rows that the view wrote."""
    name = engine.internals.setup.opening["url"].removeprefix("sqlite:///")
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": name}
    known = connections.configure_settings({"default": {}, "shop": database})
    connections.databases["shop"] = known["shop"]
    return of_view(business, engine, {**options, "atomic": "shop"})


def _prepare(
    answering: Callable[..., Any], business: Business, engine: Any, options: Mapping[str, Any]
) -> None:
    urlpatterns[:] = [re_path("", answering)]
    Making.business, Making.engine, Making.options = business, engine, options


@sync_and_async_middleware
def middleware(get_response: Callable[..., Any]) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(get_response, Making.engine, **Making.options)


class Around(MiddlewareMixin):
    """Authorization and CORS."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        return None if Making.business.admits(_headers(request)) else HttpResponseForbidden()

    def process_response(self, request: HttpRequest, response: Any) -> Any:
        if request.headers.get("Origin") == CORS_ORIGIN:
            response["Access-Control-Allow-Origin"] = CORS_ORIGIN
        return response


def view(request: HttpRequest) -> Any:
    reply = Making.business(_asked(request))
    return _response(reply, reply.chunks)


async def async_view(request: HttpRequest) -> Any:
    reply = await asyncio.to_thread(Making.business, _asked(request))
    return _response(reply, _waiting(reply.chunks) if reply.streamed else reply.chunks)


def _asked(request: HttpRequest) -> Asked:
    return Asked(request.method or "", request.path, _headers(request), request.body)


def _headers(request: HttpRequest) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


async def _waiting(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    waited = iter(chunks)
    while (chunk := await asyncio.to_thread(next, waited, _END)) is not _END:
        yield chunk  # type: ignore[misc]  # it is no longer the end


def _response(reply: Reply, chunks: Any) -> Any:
    kind = StreamingHttpResponse if reply.streamed else HttpResponse
    response = kind(chunks, status=reply.status)
    del response["Content-Type"]
    for name, value in reply.lines:
        if name == "Set-Cookie":
            response.set_cookie(*value.partition(";")[0].split("=", 1))
        else:
            response[name] = value
    if reply.after is not None:
        response._resource_closers.append(reply.after)
    return response
