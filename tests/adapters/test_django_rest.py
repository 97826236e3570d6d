"""Django REST framework: the decorator on its methods, after authentication and permissions."""

from __future__ import annotations

from adapters.django_project import MIDDLEWARE, post, project, state

# That one told Django its settings, which other parts of it ask for.
# isort: split
import itertools
import logging
import os

import pytest
from django.http import Http404, HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.exceptions import APIException, ValidationError
from rest_framework.permissions import BasePermission
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from semel import ConfigError, Policy, current_attempt
from semel.adapters.django import idempotent
from semel.core.records import State

REST = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "UNAUTHENTICATED_USER": None,
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def serving(sqlite_url):
    def with_views(options=None, **views):
        return project(sqlite_url, views, REST_FRAMEWORK=REST, **(options or {}))

    return with_views


def send(path="/pay/", value="1", **told):
    return post(path, data=value, content_type="application/json", **told)


class Payments(APIView):
    """Counts its runs."""

    runs = 0

    @idempotent(required=True)
    def post(self, request):
        type(self).runs += 1
        return Response(
            {"got": request.data, "key": current_attempt().key}, 201, headers={"X-A": "1"}
        )


def payments(**attributes):
    """A class of its own for each test."""
    return type("Payments", (Payments,), {"runs": 0, **attributes})


def test_a_response_is_rendered_stored_and_replayed(serving):
    view = payments()
    with serving(pay=view.as_view()):
        first, second = send(value='{"a": 1}'), send(value='{"a": 1}')
        assert first.json() == second.json() == {"got": {"a": 1}, "key": "k"}
        assert first.status_code == second.status_code == 201
        assert first["Content-Type"] == second["Content-Type"] == "application/json"
        assert (first["X-A"], first["Allow"]) == (second["X-A"], second["Allow"])
        assert second["Idempotent-Replayed"] == "true"
        assert send(key=None).status_code == 400
        assert send(value="2").status_code == 422
    assert view.runs == 1


def test_what_a_request_of_rest_framework_has_no_more_is_named(serving):
    class Other(Request):
        """As a later version may be, which keeps Django's request elsewhere."""

        def __getattribute__(self, name):
            if name == "_request":
                raise AttributeError(name)
            return super().__getattribute__(name)

    request = Other(RequestFactory().post("/pay/"))
    expected = r"djangorestframework .* has no .*\.Other\._request, which semel needs"
    with serving(), pytest.raises(ConfigError, match=expected):
        Payments().post(request)


def test_the_renderer_that_the_client_asked_for_renders(serving):
    class Shouting(BaseRenderer):
        media_type, format, charset = "text/loud", "loud", "utf-8"

        def render(self, data, media_type, context):
            return f"{context['response'].status_code} {data['key']}!"

    view = payments(renderer_classes=[JSONRenderer, Shouting])
    with serving(pay=view.as_view()):
        answers = [send(headers={"Accept": "text/loud"}) for _ in range(2)]
    assert [answer.content for answer in answers] == [b"201 k!", b"201 k!"]
    assert [answer["Content-Type"] for answer in answers] == ["text/loud; charset=utf-8"] * 2


def test_authentication_and_permissions_run_before_the_replay(serving):
    class Known(BaseAuthentication):
        def authenticate(self, request):
            return request.headers.get("X-User"), None

    class Trusted(BasePermission):
        trusted = True

        def has_permission(self, request, view):
            return self.trusted

    def tenant(request):
        return request.raw.user

    class View(APIView):
        authentication_classes = (Known,)
        permission_classes = (Trusted,)

        @idempotent(tenant=tenant)
        def post(self, request):
            return Response(request.user)

    with serving(pay=View.as_view()):
        told = {"headers": {"X-User": "ann"}}
        assert send(**told).json() == "ann"
        assert send(headers={"X-User": "bob"}).json() == "bob"
        assert send(**told)["Idempotent-Replayed"] == "true"
        Trusted.trusted = False
        assert send(**told).status_code == 403


def test_data_that_a_permission_has_read_is_compared(serving):
    class Reading(BasePermission):
        def has_permission(self, request, view):
            return request.data is not None

    view = payments(permission_classes=[Reading])
    with serving(pay=view.as_view()):
        assert send(value='{"a": 1, "b": 2}').json()["got"] == {"a": 1, "b": 2}
        assert send(value='{"b": 2, "a": 1}')["Idempotent-Replayed"] == "true"
        assert send(value='{"a": 2, "b": 2}').status_code == 422


def test_a_form_that_a_permission_has_read_is_compared(serving):
    class Reading(BasePermission):
        def has_permission(self, request, view):
            return bool(request.data)

    class View(APIView):
        permission_classes = (Reading,)

        @idempotent
        def post(self, request):
            return Response({name: str(value) for name, value in request.data.items()})

    def multipart(value):
        boundary = os.urandom(8).hex()
        body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n{value}\r\n--{boundary}--\r\n'
        return post(data=body, content_type=f"multipart/form-data; boundary={boundary}")

    with serving(pay=View.as_view()):
        assert multipart("1").json() == {"a": "1"}
        assert multipart("1")["Idempotent-Replayed"] == "true"
        assert multipart("2").status_code == 422


def test_viewsets_and_functions_are_protected(serving):
    class Orders(ViewSet):
        @idempotent
        def create(self, request):
            return Response({"key": current_attempt().key})

        def list(self, request):
            return Response([])

    @api_view(["POST"])
    @authentication_classes([])
    @idempotent(required=True)
    def function(request):
        return Response({"key": current_attempt().key})

    class Decorated(APIView):
        @method_decorator(idempotent)
        def post(self, request):
            return Response({"key": current_attempt().key})

    @method_decorator(idempotent, name="dispatch")
    class Whole(APIView):
        def post(self, request):
            return Response({"key": current_attempt().key})

    views = {
        "orders": Orders.as_view({"post": "create", "get": "list"}),
        "function": function,
        "decorated": Decorated.as_view(),
        "whole": Whole.as_view(),
    }
    for middlewares in ([], [MIDDLEWARE]):
        with serving({"MIDDLEWARE": middlewares, "SCOPE": f"http{len(middlewares)}"}, **views):
            for name in views:
                assert send(f"/{name}/", key=name).json() == {"key": name}
                assert send(f"/{name}/", key=name)["Idempotent-Replayed"] == "true"
            assert Client().get("/orders/").json() == []


def failing(error):
    class View(APIView):
        runs = 0

        @idempotent
        def post(self, request):
            type(self).runs += 1
            raise error

    return View


@pytest.mark.parametrize(("error", "status"), [(ValidationError("wrong"), 400), (Http404(), 404)])
def test_an_error_that_is_an_answer_frees_the_key_even_under_hold(serving, error, status):
    view = failing(error)
    with serving({"POLICY": Policy(abandoned="hold")}, pay=view.as_view()):
        assert [send().status_code, send().status_code] == [status, status]
    assert view.runs == 2


@pytest.mark.parametrize("error", [ValidationError({"a": ["wrong"]}), Http404("none")])
def test_an_error_that_is_an_answer_is_stored_as_it_is_told_when_asked_for(serving, error):
    view = failing(error)
    with serving({"STORED": "web.profiles.deterministic"}, pay=view.as_view()):
        first, second = send(), send()
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert second["Idempotent-Replayed"] == "true"
    assert view.runs == 1


numbers = itertools.count(1)


def numbering(error, context):
    """Word each error in another way."""
    return Response({"error": next(numbers)}, status=400)


def test_the_exception_handler_runs_once_and_the_first_answer_is_the_stored_one(serving):
    view = failing(ValidationError("wrong"))
    chosen = {"STORED": "web.profiles.deterministic"}
    rest = {**REST, "EXCEPTION_HANDLER": "adapters.test_django_rest.numbering"}
    with serving(chosen, pay=view.as_view()), override_settings(REST_FRAMEWORK=rest):
        first, second = send(), send()
        other = send(key="other")
    assert first.json() == second.json()
    assert other.json() == {"error": first.json()["error"] + 1}
    assert second["Idempotent-Replayed"] == "true"
    assert view.runs == 2


def test_after_an_error_of_the_server_the_policy_is_asked(serving):
    asked = []

    def failure(error):
        asked.append(type(error).__name__)
        return "final"

    with serving({"POLICY": Policy(failure=failure)}, pay=failing(APIException()).as_view()):
        assert [send().status_code, send().status_code] == [500, 409]
    assert asked == ["APIException"]


def test_any_other_error_frees_the_key(serving, sqlite_url):
    with serving(pay=failing(OSError("broken")).as_view()):
        assert send().status_code == 500
    assert state(sqlite_url) is State.FAILED


def test_a_plain_response_of_django_passes(serving):
    class View(APIView):
        @idempotent
        def post(self, request):
            return HttpResponse("plain")

    with serving(pay=csrf_exempt(View.as_view())):
        assert [send().content, send().content] == [b"plain", b"plain"]
