"""A Django project that a test makes for itself: its views, its middlewares, its settings."""

# ruff: noqa: E402 - Django has to know its settings before its other parts are imported
from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import django
from django.conf import settings

if not settings.configured:
    settings.configure(
        DATABASES={"default": {}}, INSTALLED_APPS=["semel.contrib.django"], USE_TZ=True
    )
    django.setup()
settings.SECRET_KEY = "of these tests"  # which other tests of Django have no need of

from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.utils.decorators import sync_and_async_middleware

from semel import Idempotency
from semel.adapters.django import IdempotencyMiddleware, aclose, close
from semel.core.records import State

MIDDLEWARE = "semel.adapters.django.IdempotencyMiddleware"
_OF_DJANGO = ("MIDDLEWARE", "REST_FRAMEWORK", "DATA_UPLOAD_MAX_MEMORY_SIZE", "DEBUG", "TEMPLATES")
_PLAIN = {"data": b"", "content_type": "text/plain"}


def urls(**views: Callable[..., Any]) -> types.ModuleType:
    """A module of URLs: each view at its own name."""
    module = types.ModuleType("urls")
    module.urlpatterns = [path(f"{name}/", view) for name, view in views.items()]  # type: ignore[attr-defined]
    return module


@contextlib.contextmanager
def project(url: str, views: dict[str, Any], **options: Any) -> Iterator[None]:
    """Settings for a while; those of SEMEL are named by their own names."""
    chosen = {"ROOT_URLCONF": urls(**views), "ALLOWED_HOSTS": ["*"], "MIDDLEWARE": []}
    chosen |= {name: options.pop(name) for name in _OF_DJANGO if name in options}
    with override_settings(**chosen, SEMEL={"URL": url, **options}):
        yield
    close()


def post(path: str = "/pay/", key: str | None = "k", **told: Any) -> Any:
    """Send one request through the whole of Django."""
    headers = {"Idempotency-Key": key} if key is not None else {}
    headers.update(told.pop("headers", {}))
    client = Client(raise_request_exception=False)
    return client.post(path, headers=headers, **{**_PLAIN, **told})


async def apost(path: str = "/pay/", key: str | None = "k", **told: Any) -> Any:
    """Send one request through the whole of Django, on asyncio."""
    headers = {"Idempotency-Key": key} if key is not None else {}
    headers.update(told.pop("headers", {}))
    client = AsyncClient(raise_request_exception=False)
    # Not by `headers`: until Django 5.0 this client writes Idempotency_Key there.
    return await client.post(path, **headers, **{**_PLAIN, **told})


def state(url: str, key: str = "k") -> State | None:
    """What the store says of a key."""
    with Idempotency(url) as idem:
        record = idem.peek(key, scope="http")
    return None if record is None else record.state


class Given:
    """What a middleware with an engine of its own is made of: Django only calls a function."""

    arguments: tuple[Any, dict[str, Any]]


@sync_and_async_middleware
def with_given(get_response: Any) -> IdempotencyMiddleware:
    """Make the middleware as a project does that has engines of its own."""
    engine, options = Given.arguments
    return IdempotencyMiddleware(get_response, engine, **options)


def given_to_middlewares(engine: Any, **options: Any) -> str:
    """Name a middleware that is made with an engine and options."""
    Given.arguments = engine, options
    return "adapters.django_project.with_given"


__all__ = [
    "MIDDLEWARE",
    "aclose",
    "apost",
    "given_to_middlewares",
    "post",
    "project",
    "state",
    "urls",
]


PLAIN_LAYER = "adapters.django_project.plain_layer"


def plain_layer(get_response):
    """Stand for the many middlewares that know no asyncio: below it Django goes by threads."""

    def layer(request):
        return get_response(request)

    return layer
