"""The middleware and the checks of `process_view`: nothing is replayed before they have passed."""

from __future__ import annotations

from adapters.django_project import (
    MIDDLEWARE,
    PLAIN_LAYER,
    aclose,
    apost,
    post,
    project,
    state,
    urls,
)

# That one told Django its settings, which other parts of it ask for.
# isort: split
import asyncio
import logging

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.checks import run_checks
from django.http import HttpResponse, HttpResponseForbidden, JsonResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory, override_settings
from django.utils.decorators import sync_and_async_middleware

from semel import Policy, current_attempt
from semel.adapters.django import IdempotencyMiddleware, exempt, idempotent
from semel.core.records import State

HERE = "adapters.test_django_process_view"
CSRF = "django.middleware.csrf.CsrfViewMiddleware"


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class LoginRequired:
    """Admits those who say their name, as Django's LoginRequiredMiddleware does: by process_view."""

    sync_capable = async_capable = True

    def __init__(self, get_response):
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request):
        return self.get_response(request)

    def process_view(self, request, callback, args, kwargs):
        return None if "X-User" in request.headers else HttpResponseForbidden("log in")


class Views:
    """Count what runs."""

    def __init__(self, status=201):
        self.runs, self._status = 0, status

    def plain(self, request):
        self.runs += 1
        return HttpResponse(f"paid {current_attempt().key}", status=self._status)

    async def awaited(self, request):
        return self.plain(request)


def users(**headers):
    return {"headers": {"X-User": "ann", **headers}}


LAYERS = {
    "last": [f"{HERE}.LoginRequired", MIDDLEWARE],
    "inside a layer for threads": [PLAIN_LAYER, f"{HERE}.LoginRequired", MIDDLEWARE],
    "outside a layer for threads": [f"{HERE}.LoginRequired", MIDDLEWARE, PLAIN_LAYER],
    "outside the check": [MIDDLEWARE, f"{HERE}.Early"],
}


class Early(LoginRequired):
    """Asks before the view, although it stands inside our middleware: in its own call."""

    def __call__(self, request):
        if "X-User" not in request.headers:
            denied = HttpResponseForbidden("log in")
            return self._given(denied) if iscoroutinefunction(self.get_response) else denied
        return self.get_response(request)

    async def _given(self, response):
        return response

    process_view = property()  # hidden: it has none


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_somebody_whom_a_check_refuses_gets_no_stored_answer(sqlite_url, layers, kind):
    views = Views()
    with project(sqlite_url, {"pay": getattr(views, kind)}, MIDDLEWARE=layers):
        assert post(**users()).content == b"paid k"
        assert post().status_code == 403
        again = post(**users())
    assert (again.status_code, again.content) == (201, b"paid k")
    assert again["Idempotent-Replayed"] == "true"
    assert views.runs == 1


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("kind", ["plain", "awaited"])
async def test_somebody_whom_a_check_refuses_gets_no_stored_answer_on_asyncio(
    sqlite_url, layers, kind
):
    views = Views()
    with project(sqlite_url, {"pay": getattr(views, kind)}, MIDDLEWARE=layers):
        assert (await apost(**users())).content == b"paid k"
        assert (await apost()).status_code == 403
        again = await apost(**users())
        await aclose()
    assert (again.status_code, again.content) == (201, b"paid k")
    assert again["Idempotent-Replayed"] == "true"
    assert views.runs == 1


def test_a_refused_request_claims_nothing(sqlite_url):
    with project(sqlite_url, {"pay": Views().plain}, MIDDLEWARE=LAYERS["last"], REQUIRED=True):
        assert post().status_code == 403
        assert post(key=None).status_code == 403  # not told that a key is missing
        assert post(key=None, **users()).status_code == 400
        assert state(sqlite_url) is None


def form(client, token, **fields):
    headers = {"Idempotency-Key": "k", "X-User": "ann"}
    told = {"csrfmiddlewaretoken": token, **fields}
    # Until Django 5.0 the client for asyncio writes Idempotency_Key for one of its `headers`.
    said = {"headers": headers} if isinstance(client, Client) else headers
    return client.post("/pay/", told, **said)


def echo(request):
    return JsonResponse({name: request.POST[name] for name in request.POST if len(name) < 9})


def test_a_form_without_its_token_is_refused_and_one_with_it_is_replayed(sqlite_url):
    secret = "a" * 32
    with project(sqlite_url, {"pay": echo}, MIDDLEWARE=[CSRF, MIDDLEWARE]):
        known, unknown = Client(enforce_csrf_checks=True), Client(enforce_csrf_checks=True)
        known.cookies["csrftoken"] = secret
        assert form(known, secret, amount="5").json() == {"amount": "5"}
        assert form(unknown, secret, amount="5").status_code == 403
        again = form(known, secret, amount="5")
        assert again["Idempotent-Replayed"] == "true"
        assert form(known, secret, amount="6").status_code == 422


async def test_a_form_without_its_token_is_refused_on_asyncio(sqlite_url):
    secret = "a" * 32
    with project(sqlite_url, {"pay": echo}, MIDDLEWARE=[CSRF, MIDDLEWARE]):
        known = AsyncClient(enforce_csrf_checks=True)
        known.cookies["csrftoken"] = secret
        assert (await form(known, secret, amount="5")).json() == {"amount": "5"}
        unknown = AsyncClient(enforce_csrf_checks=True)
        assert (await form(unknown, secret, amount="5")).status_code == 403
        assert (await form(known, secret, amount="5"))["Idempotent-Replayed"] == "true"
        await aclose()


class Wrapping:
    """Changes every answer, from inside the middleware."""

    def __init__(self, get_response):
        self._get_response = get_response

    def __call__(self, request):
        response = self._get_response(request)
        response.content = b"<" + response.content + b">"
        return response


def test_a_replay_is_what_was_stored_whatever_layers_inside_make_of_it(sqlite_url):
    layers = [MIDDLEWARE, f"{HERE}.Wrapping"]
    with project(sqlite_url, {"pay": Views().plain}, MIDDLEWARE=layers):
        assert [post().content, post().content] == [b"<paid k>", b"<paid k>"]


class Refusing:
    """A later check, which Django asks after ours: what it answers is not the view's."""

    def __init__(self, get_response):
        self._get_response = get_response

    def __call__(self, request):
        return self._get_response(request)

    def process_view(self, request, callback, args, kwargs):
        if request.headers.get("X-User") == "raises":
            raise OSError("broken")
        return HttpResponseForbidden() if "X-User" not in request.headers else None


@pytest.mark.parametrize("told", [{}, {"headers": {"X-User": "raises"}}])
def test_a_later_check_that_refuses_frees_the_key(sqlite_url, told):
    views, layers = Views(), [MIDDLEWARE, f"{HERE}.Refusing"]
    with project(sqlite_url, {"pay": views.plain}, MIDDLEWARE=layers):
        assert post(**told).status_code in {403, 500}
        assert state(sqlite_url) is State.FAILED
        assert post(**users()).status_code == 201
    assert views.runs == 1


def test_under_two_middlewares_the_outer_one_protects(sqlite_url):
    views = Views()
    with project(sqlite_url, {"pay": views.plain}, MIDDLEWARE=[MIDDLEWARE, MIDDLEWARE]):
        assert post().status_code == 201
        assert post()["Idempotent-Replayed"] == "true"
    assert views.runs == 1


@exempt
def free(request):
    return HttpResponse(str(current_attempt()))


def other_urls(get_response):
    """A layer inside that decides by itself which views there are."""
    others = urls(pay=free)

    def layer(request):
        request.urlconf = others
        return get_response(request)

    return layer


def test_the_view_that_is_called_decides_whether_it_is_exempt(sqlite_url):
    layers = [MIDDLEWARE, f"{HERE}.other_urls"]
    with project(sqlite_url, {"pay": Views().plain}, MIDDLEWARE=layers):
        assert post().content == b"None"
    assert state(sqlite_url) is None


def test_a_key_that_a_function_does_not_find_lets_the_request_pass(sqlite_url):
    def pay(request):
        return HttpResponse(str(current_attempt()))

    options = {"KEY": lambda request, body: None, "HEADER": None}
    with project(sqlite_url, {"pay": pay}, MIDDLEWARE=[MIDDLEWARE], **options):
        assert post().content == b"None"


def test_a_path_without_a_view_needs_no_key(sqlite_url):
    with project(sqlite_url, {}, MIDDLEWARE=[MIDDLEWARE], REQUIRED=True):
        assert post("/nowhere/", key=None).status_code == 404


# --- a middleware whose process_view Django does not see ------------------------------------------


@sync_and_async_middleware
def hiding(get_response):
    """Calls the middleware, in the place of giving it to Django."""
    return IdempotencyMiddleware(get_response).__call__


def test_a_middleware_that_is_hidden_from_django_is_told_of_once(sqlite_url, caplog):
    logging.disable(logging.NOTSET)

    def pay(request):
        return HttpResponse("paid")

    views = {"pay": pay, "none": lambda request: HttpResponse(status=404)}
    with project(sqlite_url, views, MIDDLEWARE=[f"{HERE}.hiding"]):
        client = Client()
        for path in ("/none/", "/nowhere/", "/pay/", "/pay/"):
            client.post(path, headers={"Idempotency-Key": "k"})
    assert caplog.text.count("must return the middleware itself") == 1


async def test_an_error_that_no_layer_inside_answers_goes_on(sqlite_url):
    def breaking(request):
        raise OSError("broken")

    async def breaking_later(request):
        breaking(request)

    told = {"headers": {"Idempotency-Key": "k"}}
    with project(sqlite_url, {}):
        with pytest.raises(OSError, match="broken"):
            IdempotencyMiddleware(breaking)(RequestFactory().post("/pay/", **told))
        with pytest.raises(OSError, match="broken"):
            await IdempotencyMiddleware(breaking_later)(AsyncRequestFactory().post("/pay/", **told))
        await aclose()
    assert state(sqlite_url) is None


# --- the check of the settings --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ([CSRF, MIDDLEWARE], []),
        ([MIDDLEWARE, CSRF, f"{HERE}.LoginRequired"], [CSRF, f"{HERE}.LoginRequired"]),
        ([MIDDLEWARE, PLAIN_LAYER, "no.such.layer"], []),
        ([CSRF, f"{HERE}.LoginRequired"], []),
        ([f"{HERE}.Ours", CSRF], [CSRF]),
    ],
)
def test_the_check_warns_of_middlewares_that_ask_after_ours(layers, told):
    with override_settings(SEMEL={"URL": "memory://"}, MIDDLEWARE=layers):
        messages = run_checks(tags=["semel"])
    assert [message.id for message in messages] == ["semel.W002"] * len(told)
    for message, name in zip(messages, told, strict=True):
        assert name in message.msg


class Ours(IdempotencyMiddleware):
    """A project's own."""


# --- what runs after a replay of the middleware ---------------------------------------------------


def test_a_decorator_of_the_view_itself_is_met_by_the_decorators_replay_only(sqlite_url):
    """As `@login_required`: the middleware replays before it, `@idempotent` below it after."""

    def login_required(view):
        def checked(request):
            return view(request) if "X-User" in request.headers else HttpResponseForbidden()

        return checked

    views = Views()
    inside = login_required(idempotent(views.plain))
    with project(sqlite_url, {"pay": inside}):
        assert post(**users()).status_code == 201
        assert post().status_code == 403
        assert post(**users())["Idempotent-Replayed"] == "true"


async def test_a_client_who_leaves_while_the_key_is_claimed_ends_nothing(sqlite_url):
    entered, go_on, runs = asyncio.Event(), asyncio.Event(), []

    async def tenant(request):
        entered.set()
        await go_on.wait()
        return "ann"

    async def pay(request):
        runs.append(1)
        return HttpResponse("paid")

    options = {"TENANT": tenant, "POLICY": Policy(ttl=60)}
    with project(sqlite_url, {"pay": pay}, MIDDLEWARE=[MIDDLEWARE], **options):
        task = asyncio.create_task(apost())
        await asyncio.wait_for(entered.wait(), 30)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await apost())["Idempotent-Replayed"] == "true"
        await aclose()
    assert runs == [1]
