"""Record and rows in one transaction: `@idempotent(atomic=...)`."""

from __future__ import annotations

from adapters.django_project import given_to_middlewares, post, project, state

# That one told Django its settings, which other parts of it ask for.
# isort: split
import asyncio
import logging
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import Context

import httpx
import pytest
from django.core.asgi import get_asgi_application
from django.core.exceptions import PermissionDenied
from django.core.wsgi import get_wsgi_application
from django.db import OperationalError, connections, transaction
from django.http import HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.test import override_settings
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from semel import ConfigError, Idempotency, LeaseLost, Policy, current_attempt
from semel.adapters import asgi, wsgi
from semel.adapters.django import Idempotent, close, idempotent
from semel.core.records import Identity, State
from transactions.kinds import PATIENCE, django_alias


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Shop:
    """A database with the view's own rows, and with the records."""

    def __init__(self, url):
        self.url = url
        self.alias = django_alias("sqlite", url)
        with Idempotency(url) as idem:
            idem.peek("any")
        self.run("CREATE TABLE orders (number INTEGER)")

    def run(self, sql):
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def order(self):
        self.run("INSERT INTO orders VALUES (1)")

    def orders(self):
        return len(self.run("SELECT * FROM orders"))

    def serving(self, answer, **options):
        """A view that makes an order, and then answers."""

        @idempotent(atomic=self.alias, **options)
        def view(request):
            self.order()
            return answer()

        return project(self.url, {"pay": view})


@pytest.fixture
def shop(sqlite_url):
    shop = Shop(sqlite_url)
    yield shop
    connections[shop.alias].close()


def test_rows_and_record_are_committed_together(shop):
    seen = []

    def answer():
        seen.append((current_attempt().key, connections[shop.alias].in_atomic_block))
        return HttpResponse("paid", status=201, headers={"X-A": "1"})

    with shop.serving(answer):
        first, second = post(), post()
    assert (
        (first.status_code, first.content) == (second.status_code, second.content) == (201, b"paid")
    )
    assert first["X-A"] == second["X-A"]
    assert second["Idempotent-Replayed"] == "true"
    assert shop.orders() == 1
    assert seen == [("k", True)]
    assert state(shop.url) is State.SUCCEEDED


class SeeOther(HttpResponseRedirect):
    status_code = 303


def to_thanks(status, headers):
    return status < 300 or headers.get("location") == "/thanks"


@pytest.mark.parametrize(
    ("redirect", "stored"), [(SeeOther, [303]), (HttpResponseRedirect, to_thanks)]
)
def test_a_redirect_that_is_stored_keeps_its_rows(shop, redirect, stored):
    with shop.serving(lambda: redirect("/thanks"), stored=stored):
        first, second = post(), post()
    assert first.status_code == second.status_code == redirect.status_code
    assert second["Location"] == "/thanks"
    assert "Idempotent-Replayed" not in first
    assert second["Idempotent-Replayed"] == "true"
    assert shop.orders() == 1
    assert state(shop.url) is State.SUCCEEDED


def test_a_redirect_to_a_login_page_rolls_back_and_the_next_request_runs(shop):
    places = iter(["/login", "/thanks"])
    with shop.serving(lambda: HttpResponseRedirect(next(places)), stored=to_thanks):
        login = post()
        assert (login["Location"], shop.orders()) == ("/login", 0)
        assert state(shop.url) is None
        assert [post()["Location"] for _ in range(2)] == ["/thanks", "/thanks"]
    assert shop.orders() == 1


@pytest.mark.parametrize("redirect", [SeeOther, HttpResponseRedirect])
def test_by_default_a_redirect_rolls_back_and_the_log_says_so_once(shop, redirect, caplog):
    logging.disable(logging.NOTSET)
    with shop.serving(lambda: redirect("/thanks"), tenant=None):
        statuses = [post().status_code for _ in range(3)]
    assert statuses == [redirect.status_code] * 3
    assert shop.orders() == 0
    assert state(shop.url) is None
    (warning,) = [each.getMessage() for each in caplog.records if each.name == "semel"]
    assert "'pay/' redirected" in warning
    assert "what it wrote was rolled back" in warning
    assert "stored=[303]" in warning


def test_an_exception_rolls_back_both(shop):
    def answer():
        raise OSError("broken")

    with shop.serving(answer):
        assert [post().status_code, post().status_code] == [500, 500]
    assert shop.orders() == 0
    assert state(shop.url) is None


def test_an_answer_that_is_not_stored_rolls_back_both_and_reaches_its_caller(shop):
    with shop.serving(lambda: HttpResponse("out of stock", status=409)):
        answers = [post(), post()]
    assert [answer.content for answer in answers] == [b"out of stock"] * 2
    assert shop.orders() == 0
    assert state(shop.url) is None


def test_an_answer_that_is_stored_when_asked_for_commits(shop):
    with shop.serving(
        lambda: HttpResponse("gone", status=410), stored=lambda status: status == 410
    ):
        post()
        assert post()["Idempotent-Replayed"] == "true"
    assert shop.orders() == 1


@pytest.mark.parametrize(("status", "orders"), [(200, 2), (500, 0)])
def test_without_a_key_the_view_runs_in_a_transaction_all_the_same(shop, status, orders):
    def answer():
        if status == 500:
            raise OSError("broken")
        return HttpResponse("paid")

    with shop.serving(answer):
        assert [post(key=None).status_code for _ in range(2)] == [status] * 2
    assert shop.orders() == orders


def test_what_the_rules_refuse_runs_nothing(shop):
    with shop.serving(lambda: HttpResponse("paid"), required=True):
        assert post(key=None).status_code == 400
        assert post(key="two words").status_code == 400
        assert post().status_code == 200
        assert post(data=b"other").status_code == 422
    assert shop.orders() == 1


def test_guard_mode_refuses_duplicates(shop):
    policy = Policy(duplicate="reject", message="This coupon was used.")
    with shop.serving(lambda: HttpResponse("paid"), policy=policy):
        post()
        assert post().json()["detail"] == "This coupon was used."


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_beyond_the_cap_is_told_as_omitted(shop, streamed):
    def answer():
        body = b"x" * 11
        return StreamingHttpResponse(iter([body])) if streamed else HttpResponse(body)

    with shop.serving(answer, max_response=10):
        first, second = post(), post()
        assert b"".join(first) == b"x" * 11
        assert second.json()["code"] == "result_omitted"
    assert shop.orders() == 1


def test_events_pass_live_and_are_not_made_again(shop):
    def answer():
        return StreamingHttpResponse(iter(["data: 1\n\n"]), content_type="text/event-stream")

    with shop.serving(answer):
        assert post().getvalue() == b"data: 1\n\n"
        assert post().json()["code"] == "result_omitted"
    assert shop.orders() == 1


def test_an_error_of_ours_that_the_view_raises_stays_its_own(shop):
    def answer():
        raise LeaseLost("of another operation")

    with shop.serving(answer):
        assert post().status_code == 500
    assert shop.orders() == 0


def test_a_record_that_was_removed_meanwhile_is_no_success(shop):
    def answer():
        shop.run("DELETE FROM idempotent_record")
        return HttpResponse("paid")

    with shop.serving(answer):
        answer = post()
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")
    assert shop.orders() == 0


@pytest.mark.parametrize("made_of_it", [False, True])
def test_a_database_that_asks_for_a_repetition_is_told_as_unavailable_for_now(shop, made_of_it):
    def answer():
        cause = sqlite3.OperationalError("database is locked")
        cause.sqlite_errorname = "SQLITE_BUSY"
        try:
            raise OperationalError("database is locked") from cause  # noqa: TRY301 - the case
        except OperationalError:
            if made_of_it:
                raise PermissionDenied  # noqa: B904 - the case
            raise

    with shop.serving(answer):
        answer = post()
    assert (answer.status_code, answer.json()["code"]) == (503, "retry_transaction")
    assert int(answer["Retry-After"]) >= 1
    assert shop.orders() == 0


@pytest.mark.parametrize("asks_again", [True, False])
def test_a_commit_that_fails_is_told_as_what_it_is(shop, monkeypatch, asks_again):
    def fail():
        cause = sqlite3.OperationalError("database is locked")
        cause.sqlite_errorname = "SQLITE_BUSY" if asks_again else "SQLITE_IOERR"
        raise OperationalError("commit") from cause

    def answer():
        monkeypatch.setattr(connections[shop.alias], "commit", fail)
        return HttpResponse("paid")

    with shop.serving(answer):
        first = post()
        monkeypatch.undo()
    if asks_again:
        assert (first.status_code, first.json()["code"]) == (503, "retry_transaction")
    else:
        assert first.status_code == 500
    assert shop.orders() == 0
    assert state(shop.url) is None


def test_inside_a_transaction_it_is_a_part_of_it(shop):
    @idempotent(atomic=shop.alias)
    def inner(request):
        shop.order()
        return HttpResponse("paid")

    def outer(request):
        with transaction.atomic(using=shop.alias):
            inner(request)
            raise OSError("after all")

    with project(shop.url, {"pay": outer}):
        assert post().status_code == 500
    assert shop.orders() == 0
    assert state(shop.url) is None


def test_rest_framework_rolls_back_too(shop):
    class View(APIView):
        @idempotent(atomic=shop.alias)
        def post(self, request):
            shop.order()
            if request.data["fails"]:
                raise ValidationError("wrong")
            return Response({"paid": True}, 201)

    rest = {"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None}
    told = {"content_type": "application/json"}
    with project(shop.url, {"pay": View.as_view()}, REST_FRAMEWORK=rest):
        assert post("/pay/", "a", data='{"fails": true}', **told).status_code == 400
        assert shop.orders() == 0
        answers = [post("/pay/", "b", data='{"fails": false}', **told) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"paid": True}] * 2
    assert shop.orders() == 1


def test_records_in_another_place_are_refused_before_anything_runs(shop):
    with Idempotency("memory://") as idem:
        view = Idempotent(idem, atomic=shop.alias)(lambda request: shop.order())
        with project("memory://", {"pay": view}):
            assert post().status_code == 500
    assert shop.orders() == 0


# --- behind another integration -------------------------------------------------------------------


def through_wsgi(outer_url, **options):
    integration = wsgi.IdempotencyMiddleware(get_wsgi_application(), outer_url, **options)
    with httpx.Client(transport=httpx.WSGITransport(integration), base_url="http://test") as client:
        yield lambda key="k": client.post("/pay/", headers={"Idempotency-Key": key})
    integration.close()


def through_django(outer_url, **options):
    with Idempotency(outer_url) as idem:
        layers = [given_to_middlewares(idem, **options)]
        with override_settings(MIDDLEWARE=layers):
            yield lambda key="k": post(key=key)


def through_asgi(outer_url, **options):
    async def sent(key):
        integration = asgi.IdempotencyMiddleware(get_asgi_application(), outer_url, **options)
        transport = httpx.ASGITransport(integration)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/pay/", headers={"Idempotency-Key": key})
        await integration._integration.close()
        return answer

    yield lambda key="k": asyncio.run(sent(key))


@pytest.fixture(params=[through_wsgi, through_asgi, through_django])
def outer(request):
    return contextmanager(request.param)


def hidden(view):
    """As a view is that calls a decorated one: the middleware of Django does not leave it alone."""

    def around(request):
        return view(request)

    return around


def test_behind_another_integration_rows_and_record_are_committed_together(shop, outer, tmp_path):
    fails = []

    @idempotent(atomic=shop.alias)
    def pay(request):
        shop.order()
        seen.append(connections[shop.alias].in_atomic_block)
        if fails:
            raise OSError("broken")
        return HttpResponse("paid", status=201)

    seen, elsewhere = [], f"sqlite:///{tmp_path / 'outer.db'}"
    with project(shop.url, {"pay": hidden(pay)}), outer(elsewhere) as send:
        fails.append(1)
        assert send().status_code == 500
        assert shop.orders() == 0
        assert state(shop.url) is None
        fails.clear()
        assert send().status_code == 201
        assert state(shop.url) is state(elsewhere) is State.SUCCEEDED
        with Idempotency(elsewhere) as other:
            other.forget("k", scope="http")  # as if the save of the outer one had been lost
        again = send()
        assert (again.status_code, again.content) == (201, b"paid")
    assert seen == [True, True]
    assert shop.orders() == 1


def test_the_same_record_in_both_integrations_is_a_mistake(shop, outer, caplog):
    logging.disable(logging.NOTSET)
    view = idempotent(atomic=shop.alias)(lambda request: shop.order())
    with project(shop.url, {"pay": hidden(view)}), outer(shop.url) as send:
        answer = send()
        assert answer.status_code == 500
        assert answer.json()["code"] == "idempotency_error"
        instance = f"urn:semel:key:{Identity('http', 'k').key_digest}"
        assert answer.json()["instance"] == instance
    assert "give one of them another scope=" in caplog.text
    assert shop.orders() == 0


def test_one_store_is_enough_for_both_integrations_with_a_scope_for_each(shop, outer):
    view = idempotent(atomic=shop.alias, scope="views")(paying(shop))
    with project(shop.url, {"pay": hidden(view)}), outer(shop.url) as send:
        assert [send().status_code for _ in range(2)] == [201, 201]
    assert shop.orders() == 1


def test_a_key_that_another_request_has_is_no_mistake_behind_an_integration(shop, outer, tmp_path):
    view, elsewhere = idempotent(atomic=shop.alias)(paying(shop)), Idempotency(shop.url)
    with (
        project(shop.url, {"pay": hidden(view)}),
        outer(f"sqlite:///{tmp_path / 'outer.db'}") as send,
        elsewhere,
    ):
        running = elsewhere.attempt("k", scope="http")
        Context().run(running.__enter__)  # as another request does: it is not around this one
        assert send().json()["code"] == "concurrent_request"
        Context().run(running.__exit__, None, None, None)
    assert shop.orders() == 0


@pytest.mark.parametrize("case", ["no record", "another scope", "the store cannot be asked"])
def test_an_error_of_the_database_is_told_as_it_is_behind_an_integration(
    shop, outer, tmp_path, case
):
    def answer(request):
        if case == "the store cannot be asked":
            close()
        cause = sqlite3.OperationalError("database is locked")
        cause.sqlite_errorname = "SQLITE_BUSY"
        raise OperationalError("database is locked") from cause

    scope = "views" if case == "another scope" else "http"
    view = idempotent(atomic=shop.alias, scope=scope)(answer)
    elsewhere = f"sqlite:///{tmp_path / 'outer.db'}"
    with project(shop.url, {"pay": hidden(view)}), outer(elsewhere) as send:
        answer = send()
    assert (answer.status_code, answer.json()["code"]) == (503, "retry_transaction")


def test_a_method_that_is_not_protected_passes_behind_an_integration(shop):
    view = idempotent(atomic=shop.alias, methods=["PUT"])(paying(shop))
    with project(shop.url, {"pay": view}):
        assert [post().status_code for _ in range(2)] == [201, 201]
    assert shop.orders() == 2


def paying(shop):
    def pay(request):
        shop.order()
        return HttpResponse("paid", status=201)

    return pay


def test_the_alias_may_be_the_default_one():
    assert idempotent(atomic=True)._atomic == "default"
    assert idempotent(atomic=False)._atomic is None


def test_an_async_view_cannot_be_atomic():
    async def view(request):
        """Never run."""

    with pytest.raises(ConfigError, match="plain views"):
        idempotent(atomic=True)(view)


def test_beyond_max_waiting_a_duplicate_is_answered_409_and_another_key_runs(postgres_url):
    alias = django_alias("postgresql", postgres_url)
    with Idempotency(postgres_url) as idem:
        idem.peek("any")
    reached, released = threading.Event(), threading.Event()

    @idempotent(atomic=alias, wait=PATIENCE)
    def view(request):
        if request.headers["Idempotency-Key"] == "slow":
            reached.set()
            assert released.wait(PATIENCE)
        return HttpResponse("paid", status=201)

    def posting(key):
        try:
            return post(key=key)
        finally:
            connections[alias].close()

    with project(postgres_url, {"pay": view}), ThreadPoolExecutor(40) as threads:
        try:
            first = threads.submit(posting, "slow")
            assert reached.wait(PATIENCE)
            duplicates = [threads.submit(posting, "slow") for _ in range(30)]
            assert threads.submit(posting, "other").result(PATIENCE).status_code == 201
            ended = as_completed(duplicates, PATIENCE)
            rejected = [next(ended).result() for _ in range(28)]
            assert not first.done()
        finally:
            released.set()
        waited = [each.result() for each in ended]
        assert first.result(PATIENCE).status_code == 201
    assert {(each.status_code, each["Retry-After"]) for each in rejected} == {(409, "1")}
    assert {each.json()["code"] for each in rejected} == {"concurrent_request"}
    told = {each.json()["detail"] for each in rejected}
    assert told == {"A request with this key is being processed."}, "clients read nothing of ours"
    assert [(each.status_code, each["Idempotent-Replayed"]) for each in waited] == [
        (201, "true")
    ] * 2
