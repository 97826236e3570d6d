"""A Django site of async views for a real server: `uvicorn adapters.django_site:application`."""

# ruff: noqa: E402 - Django has to know its settings before its other parts are imported
from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import django
from django.conf import settings

settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {}},
    MIDDLEWARE=[name for name in os.environ["SITE_MIDDLEWARE"].split(",") if name],
    ROOT_URLCONF="adapters.django_site",
    SECRET_KEY="of this site",
    SEMEL={"URL": os.environ["SITE_STORE"], "METHODS": ["POST"]},
    USE_TZ=True,
)
django.setup()

from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path

from semel.adapters.django import idempotent

FOLDER = Path(os.environ["SITE_FOLDER"])


def _note(name: str, what: str) -> None:
    (FOLDER / f"{name}-{what}").touch()


async def slow(request: HttpRequest, name: str) -> HttpResponse:
    """Runs until its gate is open."""
    _note(name, "entered")
    while not (FOLDER / f"{name}-gate").exists():  # noqa: ASYNC110 - another process opens it
        await asyncio.sleep(0.01)
    _note(name, "done")
    return HttpResponse(f"done {name}")


def slow_plain(request: HttpRequest, name: str) -> HttpResponse:
    """Runs until its gate is open, on a thread."""
    _note(name, "entered")
    while not (FOLDER / f"{name}-gate").exists():
        time.sleep(0.01)
    _note(name, "done")
    return HttpResponse(f"done {name}")


async def failing(request: HttpRequest, name: str) -> HttpResponse:
    """Fails when its gate is open."""
    await slow(request, name)
    raise OSError("broken")


if settings.MIDDLEWARE:
    urlpatterns = [path("slow/<name>", slow), path("plain/<name>", slow_plain)]
else:
    urlpatterns = [
        path("slow/<name>", idempotent(slow)),
        path("plain/<name>", idempotent(slow_plain)),
    ]
urlpatterns.append(path("failing/<name>", idempotent(failing)))

application = get_asgi_application()
