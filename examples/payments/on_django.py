"""The payment API on Django: a decorator on each view that must not run twice, in a single file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.http import require_GET, require_POST
from examples.payments.business import Book, NotFound, Refused
from examples.payments.serving import Place, run

from semel import Policy

urlpatterns: list[Any] = []


def create_app(place: Place) -> Any:
    """Make the WSGI application; Django has one per process."""
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1", "localhost"],
        ROOT_URLCONF=__name__,
        MIDDLEWARE=[],
        SEMEL={"URL": place.store},
    )
    django.setup()
    from semel.adapters.django import idempotent  # noqa: PLC0415 - reads the settings

    book = Book(place.book)
    once = idempotent(required=True, policy=Policy(ttl=3 * 86400))

    @require_POST
    @once
    @_with_answers
    def pay(request: HttpRequest) -> HttpResponse:
        try:
            asked = json.loads(request.body)
            made = book.pay(str(asked["account"]), int(asked["amount"]), str(asked["currency"]))
        except (KeyError, TypeError, ValueError) as error:
            told = {"error": f"account, amount and currency are needed: {error}"}
            return JsonResponse(told, status=422)
        return JsonResponse(asdict(made), status=201)

    @require_POST
    @once
    @_with_answers
    def refund(request: HttpRequest, number: int) -> HttpResponse:
        del request
        return JsonResponse(asdict(book.refund(number)))

    @require_GET
    @_with_answers
    def show(request: HttpRequest, number: int) -> HttpResponse:
        del request
        return JsonResponse(asdict(book.find(number)))

    urlpatterns[:] = [
        path("payments", pay),
        path("payments/<int:number>/refund", refund),
        path("payments/<int:number>", show),
    ]
    return get_wsgi_application()


def _with_answers(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Turn what the business says no to into answers."""

    @wraps(view)
    def answering(*args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return view(*args, **kwargs)
        except Refused as error:
            return JsonResponse({"error": str(error)}, status=409)
        except NotFound as error:
            return JsonResponse({"error": str(error)}, status=404)

    return answering


if __name__ == "__main__":
    from wsgiref.simple_server import make_server

    run(lambda place, port: make_server("127.0.0.1", port, create_app(place)).serve_forever())
