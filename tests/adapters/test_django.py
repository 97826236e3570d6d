"""Django on threads: what is its own. The rules of the web are tested for every framework at once."""

from __future__ import annotations

from adapters.django_project import MIDDLEWARE, given_to_middlewares, post, project, state, urls

# That one told Django its settings, which other parts of it ask for.
# isort: split
import gc
import io
import itertools
import logging
import os
import re

import httpx
import pytest
from django.core.checks import run_checks
from django.core.exceptions import BadRequest, PermissionDenied
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.wsgi import get_wsgi_application
from django.http import (
    FileResponse,
    Http404,
    HttpRequest,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory, override_settings
from django.test.client import encode_multipart
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_protect

from semel import AsyncIdempotency, ConfigError, Idempotency, Policy, current_attempt
from semel.adapters import wsgi
from semel.adapters.django import IdempotencyMiddleware, Idempotent, close, exempt, idempotent
from semel.adapters.django.settings import ENGINES, configured
from semel.core.records import State
from semel.http import Route

TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]


class Counted:
    """A view that counts its runs."""

    def __init__(self, answer=None):
        self.runs = 0
        self._answer = answer

    def __call__(self, request, *args, **kwargs):
        self.runs += 1
        return HttpResponse("paid", status=201) if self._answer is None else self._answer(request)


def raising(error):
    def view(request):
        raise error

    return Counted(view)


@pytest.fixture(params=["middleware", "decorator"])
def integration(request, sqlite_url):
    """Serve one view behind each integration in turn."""

    def serving(view, **options):
        if request.param == "middleware":
            return project(sqlite_url, {"pay": view}, MIDDLEWARE=[MIDDLEWARE], **options)
        return project(sqlite_url, {"pay": idempotent(view)}, **options)

    serving.is_middleware = request.param == "middleware"
    return serving


# --- both integrations -----------------------------------------------------------------------------------


def test_an_answer_is_replayed_with_its_own_headers(integration):
    def pay(request):
        response = HttpResponse("paid", status=201, headers={"X-Number": current_attempt().key})
        response.set_cookie("session", "secret")
        response["Idempotent-Replayed"] = "nonsense"
        return response

    view = Counted(pay)
    with integration(view):
        first, second = post(), post()
    assert (
        (first.status_code, first.content) == (second.status_code, second.content) == (201, b"paid")
    )
    assert first["X-Number"] == second["X-Number"] == "k"
    assert first.cookies["session"].value == "secret"
    assert not second.cookies
    assert "Idempotent-Replayed" not in first
    assert second["Idempotent-Replayed"] == "true"
    assert view.runs == 1


def test_an_answer_without_a_content_type_has_none_again(integration):
    def pay(request):
        response = HttpResponse(status=204)
        del response["Content-Type"]
        return response

    with integration(pay):
        assert ["Content-Type" in answer for answer in (post(), post())] == [False, False]


def test_a_request_without_a_key_passes(integration):
    view = Counted()
    with integration(view):
        post(key=None)
        post(key=None)
        Client().get("/pay/", headers={"Idempotency-Key": "k"})
    assert view.runs == 3


def test_the_settings_name_functions_by_their_paths(integration):
    view = Counted(lambda request: HttpResponse(status=404))
    options = {
        "REQUIRED": True,
        "TENANT": "web.profiles.user",
        "STORED": "web.profiles.deterministic",
        "PAYLOAD": "web.profiles.amount",
    }
    with integration(view, **options):
        assert post(key=None).status_code == 400
        assert post().status_code == 401
        for user in ("ann", "bob", "ann"):
            answer = post(headers={"X-User": user})
        assert answer["Idempotent-Replayed"] == "true"
        assert post(headers={"X-User": "ann"}, data=b"longer").status_code == 422
    assert view.runs == 2


def test_a_stream_is_replayed_and_its_source_closed(integration, sqlite_url):
    closed = []

    def chunks():
        try:
            yield "one, "
            yield b"two"
        finally:
            closed.append(True)

    with integration(lambda request: StreamingHttpResponse(chunks())):
        first, second = post(), post()
        assert first.getvalue() == second.content == b"one, two"
    assert closed == [True]


def test_a_file_is_replayed(integration):
    with integration(lambda request: FileResponse(io.BytesIO(b"a file"))):
        first, second = post(), post()
        assert first.getvalue() == second.content == b"a file"
        assert first["Content-Type"] == second["Content-Type"]


def test_an_answer_beyond_the_cap_reaches_its_first_caller_whole(integration):
    with integration(lambda request: HttpResponse("x" * 11), MAX_RESPONSE=10):
        first, second = post(), post()
    assert first.content == b"x" * 11
    assert (second.status_code, second.json()["code"]) == (200, "result_omitted")


def test_a_stream_beyond_the_cap_is_not_read_ahead(integration):
    given = []

    def chunks():
        for number in range(9):
            given.append(number)
            yield b"%05d" % number

    with integration(lambda request: StreamingHttpResponse(chunks()), MAX_RESPONSE=12):
        first = post()
        assert len(given) == 3
        assert first.getvalue() == b"".join(b"%05d" % number for number in range(9))
        assert post().json()["code"] == "result_omitted"


def breaking():
    for _ in range(5):
        yield b"x" * 6
    raise OSError("broken")


def test_a_stream_that_breaks_after_the_cap_is_broken_not_done(integration, sqlite_url):
    view = Counted(lambda request: StreamingHttpResponse(breaking()))
    with integration(view, MAX_RESPONSE=10):
        for _ in range(2):
            with pytest.raises(OSError, match="broken"):
                post().getvalue()
    assert view.runs == 2
    assert state(sqlite_url) is State.FAILED


def test_a_client_who_leaves_does_not_end_a_stream_beyond_the_cap(integration, sqlite_url):
    given = []

    def chunks():
        for number in range(9):
            yield b"%05d" % number
            given.append(number)

    with integration(lambda request: StreamingHttpResponse(chunks()), MAX_RESPONSE=12):
        answer = post()
        assert state(sqlite_url) is State.PROCESSING
        answer.close()
        assert len(given) == 9
        assert post().json()["code"] == "result_omitted"


async def chunks_on_a_loop():
    for _ in range(3):
        yield b"x" * 6


def plain(request):
    return StreamingHttpResponse(chunks_on_a_loop())


async def awaited(request):
    return plain(request)


def raising_middleware(get_response):
    def layer(request):
        get_response(request)
        raise LookupError

    return layer


def replacing_middleware(get_response):
    def layer(request):
        get_response(request)
        return HttpResponse("another")

    return layer


@pytest.mark.parametrize(("layer", "status"), [("raising", 500), ("replacing", 200)])
def test_a_stream_that_a_layer_drops_is_read_to_its_end(sqlite_url, layer, status):
    """When the request is closed: the garbage collector may never run."""
    sent = []
    layers = [f"adapters.test_django.{layer}_middleware"]

    @idempotent
    def pay(request):
        return StreamingHttpResponse(sent.append(each) or b"x" * 10 for each in range(3))

    gc.disable()
    try:
        with project(sqlite_url, {"pay": pay}, MIDDLEWARE=layers, MAX_RESPONSE=12):
            assert post().status_code == status
            assert state(sqlite_url) is State.SUCCEEDED
    finally:
        gc.enable()
    assert sent == [0, 1, 2]


def test_the_uploads_of_a_request_are_closed_if_its_dropped_stream_fails(sqlite_url):
    uploads = []

    @idempotent
    def pay(request):
        uploads.extend(request.FILES.values())
        return StreamingHttpResponse(b"x" * 10 if each < 2 else 1 / 0 for each in range(3))

    layers = ["adapters.test_django.replacing_middleware"]
    upload = SimpleUploadedFile("order.txt", b"order")
    with project(sqlite_url, {"pay": pay}, MIDDLEWARE=layers, MAX_RESPONSE=12):
        Client().post("/pay/", {"file": upload}, headers={"Idempotency-Key": "k"})
    assert [each.closed for each in uploads] == [True]


@pytest.mark.parametrize("view", [plain, awaited])
def test_an_async_stream_beyond_the_cap_reaches_its_first_caller_whole_on_threads(
    integration, view
):
    with integration(view, MAX_RESPONSE=10):
        first = post()
        with pytest.warns(Warning, match="asynchronous iterators"):
            assert b"".join(first) == b"x" * 18
        assert post().json()["code"] == "result_omitted"


def test_events_pass_live_and_marked(integration, sqlite_url):
    given = []

    def events():
        given.append(1)
        yield "data: 1\n\n"

    with integration(
        lambda request: StreamingHttpResponse(events(), content_type="text/event-stream")
    ):
        answer = post()
        assert answer["Idempotent-Unprotected"] == "stream"
        assert given == []
        assert answer.getvalue() == b"data: 1\n\n"
    assert state(sqlite_url) is State.FAILED  # free


def test_a_stream_that_fails_frees_the_key_and_is_closed(integration, sqlite_url):
    closed = []

    class Chunks:
        def __iter__(self):
            yield b"one"
            raise OSError("broken")

        def close(self):
            closed.append(True)

    with integration(lambda request: StreamingHttpResponse(Chunks())):
        assert post().status_code == 500
    assert closed == [True]
    assert state(sqlite_url) is State.FAILED


def test_an_exception_frees_the_key(integration, sqlite_url):
    view = raising(OSError("broken"))
    with integration(view):
        assert [post().status_code, post().status_code] == [500, 500]
    assert view.runs == 2
    assert state(sqlite_url) is State.FAILED


@pytest.mark.parametrize(
    ("error", "status"),
    [(Http404("none"), 404), (PermissionDenied(), 403), (BadRequest("bad"), 400)],
)
def test_an_answer_that_is_raised_frees_the_key_even_under_hold(integration, error, status):
    view = raising(error)
    with integration(view, POLICY=Policy(abandoned="hold")):
        assert [post().status_code, post().status_code] == [status, status]
    assert view.runs == 2


@pytest.mark.parametrize("debug", [True, False])
def test_an_answer_that_is_raised_is_stored_when_asked_for(integration, debug):
    view = raising(Http404("no such order"))
    with integration(view, STORED="web.profiles.deterministic", DEBUG=debug, TEMPLATES=TEMPLATES):
        first, second = post(), post()
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert first.status_code == 404
    assert second["Idempotent-Replayed"] == "true"
    assert view.runs == 1


def numbering_urls(views):
    """URLs whose error handlers word each error they are asked about in another way."""
    module, numbers = urls(**views), itertools.count(1)

    def word(request, exception):
        return JsonResponse({"error": next(numbers)}, status=404)

    module.handler404 = word
    return module


def test_an_error_handler_runs_once_and_the_first_answer_is_the_stored_one(sqlite_url):
    error = Http404("no such order")  # the same object, again and again
    view = raising(error)
    views = {"pay": idempotent(view), "bare": raising(error)}
    with (
        project(sqlite_url, {}, STORED="web.profiles.deterministic"),
        override_settings(ROOT_URLCONF=numbering_urls(views)),
    ):
        assert [post().json() for _ in range(3)] == [{"error": 1}] * 3
        assert post(key="other").json() == {"error": 2}
        assert post("/bare/").json() == {"error": 3}
        assert post("/nowhere/").json() == {"error": 4}
        assert not run_checks()
    assert view.runs == 2


def test_the_handler_of_errors_of_the_server_is_left_alone(sqlite_url):
    module = numbering_urls({"pay": idempotent(raising(Http404())), "broken": raising(OSError())})
    module.handler500 = lambda request: HttpResponse("broken", status=500)
    with (
        project(sqlite_url, {}, STORED="web.profiles.deterministic"),
        override_settings(ROOT_URLCONF=module),
    ):
        assert post().json() == {"error": 1}
        assert post("/broken/").content == b"broken"


def test_who_was_replaced_gets_no_error_of_its_own(sqlite_url):
    @idempotent
    def forgetting(request):
        with Idempotency(sqlite_url) as other:
            other.forget("k", scope="http")
        raise Http404

    with project(sqlite_url, {"pay": forgetting}, STORED="web.profiles.deterministic"):
        answer = post()
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")


def test_who_was_replaced_gets_no_answer_of_its_own(integration, sqlite_url):
    def forgetting(request):
        with Idempotency(sqlite_url) as other:
            other.forget("k", scope="http")
        return HttpResponse("mine")

    with integration(forgetting):
        answer = post()
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")


def test_a_view_that_gives_no_response_is_an_error_and_frees_the_key(integration, sqlite_url):
    with integration(lambda request: None):
        assert post().status_code == 500
    assert state(sqlite_url) is State.FAILED


def test_a_template_response_is_replayed(integration):
    def pay(request):
        template = engines["django"].from_string("number {{ number }}")
        return TemplateResponse(request, template, {"number": 7})

    with integration(pay, TEMPLATES=TEMPLATES):
        assert [post().content, post().content] == [b"number 7", b"number 7"]


def test_the_path_and_the_query_are_compared(integration):
    view = Counted()
    with integration(view):
        post("/pay/?a=%C3%A9")
        assert post("/pay/?a=%C3%A9")["Idempotent-Replayed"] == "true"
        assert post("/pay/?a=1").status_code == 422


# --- bodies ---------------------------------------------------------------------------------------


def echo(request):
    files = {name: file.read().decode() for name, file in request.FILES.items()}
    return JsonResponse({"form": dict(request.POST.lists()), "files": files})


def parsing(get_response):
    """A middleware that reads forms, as some do that look for a token."""

    def middleware(request):
        assert request.POST is not None
        return get_response(request)

    return middleware


def streaming_middleware(get_response):
    """A middleware that takes the body away."""

    def middleware(request):
        request.read()
        return get_response(request)

    return middleware


@pytest.mark.parametrize("before", [[], ["adapters.test_django.parsing"]])
def test_a_form_is_compared_and_can_be_read(before, sqlite_url):
    with project(sqlite_url, {"pay": echo}, MIDDLEWARE=[*before, MIDDLEWARE]):
        first, second = _multipart("content"), _multipart("content")
        assert first.json() == second.json() == {"form": {"a": ["1"]}, "files": {"file": "content"}}
        assert second["Idempotent-Replayed"] == "true"
        assert _multipart("other").status_code == 422
        assert _multipart("content", name="b.txt").status_code == 422
        assert _multipart("content", kind="text/html").status_code == 422
        assert _multipart("content", a="2").status_code == 422


def _multipart(text, name="a.txt", kind="text/plain", a="1"):
    """Send a form as a browser does: with another boundary each time."""
    boundary = os.urandom(8).hex()
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n{a}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        f"Content-Type: {kind}\r\n\r\n{text}\r\n--{boundary}--\r\n"
    )
    return post(data=body, content_type=f"multipart/form-data; boundary={boundary}")


def scanning(get_response):
    """A middleware that looks at the beginning of an upload."""

    def middleware(request):
        request.FILES["file"].read(3)
        return get_response(request)

    return middleware


def test_an_upload_that_somebody_has_read_before_is_compared_whole_and_left_there(sqlite_url):
    layers = ["adapters.test_django.scanning", MIDDLEWARE]
    with project(sqlite_url, {"pay": echo}, MIDDLEWARE=layers):
        assert _multipart("content").json()["files"] == {"file": "tent"}
        assert _multipart("content")["Idempotent-Replayed"] == "true"
        assert _multipart("Content").status_code == 422


def test_fields_are_not_taken_for_files_of_a_form_that_was_parsed_before(sqlite_url):
    def send(**fields):
        given = {**fields, "doc": SimpleUploadedFile("d.txt", b"data", "text/plain")}
        body = encode_multipart("B", given)
        return post(data=body, content_type="multipart/form-data; boundary=B")

    layers = ["adapters.test_django.parsing", MIDDLEWARE]
    with project(sqlite_url, {"pay": echo}, MIDDLEWARE=layers):
        assert send(files="a", b="c").status_code == 200
        assert send(a=SimpleUploadedFile("b", b"files", "c")).status_code == 422
        assert send(files="a", b="c")["Idempotent-Replayed"] == "true"


def test_a_form_behind_djangos_own_check_of_its_token_is_replayed(sqlite_url):
    view = idempotent(csrf_protect(echo))
    with project(sqlite_url, {"pay": csrf_protect(view)}):
        assert _multipart("content").json()["files"] == {"file": "content"}
        assert _multipart("content")["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("inside", ["middleware", "decorator"])
def test_a_request_that_wsgi_s_middleware_protects_passes(sqlite_url, inside):
    def pay(request):
        return HttpResponse("paid")

    view = idempotent(pay) if inside == "decorator" else pay
    layers = [MIDDLEWARE] if inside == "middleware" else []
    with project(sqlite_url, {"pay": view}, MIDDLEWARE=layers):
        integration = wsgi.IdempotencyMiddleware(get_wsgi_application(), sqlite_url)
        transport = httpx.WSGITransport(integration)
        with httpx.Client(transport=transport, base_url="http://test") as client:
            answers = [client.post("/pay/", headers={"Idempotency-Key": "k"}) for _ in range(2)]
        integration.close()
    assert [answer.text for answer in answers] == ["paid", "paid"]
    assert answers[1].headers["Idempotent-Replayed"] == "true"


def test_a_method_that_wsgi_s_middleware_protects_is_not_told_of(sqlite_url, caplog):
    logging.disable(logging.NOTSET)
    with project(sqlite_url, {"pay": idempotent(Counted())}):
        integration = wsgi.IdempotencyMiddleware(
            get_wsgi_application(), sqlite_url, methods=["PUT"]
        )
        transport = httpx.WSGITransport(integration)
        with httpx.Client(transport=transport, base_url="http://test") as client:
            answers = [client.put("/pay/", headers={"Idempotency-Key": "k"}) for _ in range(2)]
        integration.close()
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert "without protection" not in caplog.text


def test_that_a_method_is_not_protected_is_told_once_of_each_view(sqlite_url, caplog):
    logging.disable(logging.NOTSET)

    def rename(request):
        return HttpResponse("renamed")

    class Orders(View):
        @idempotent
        def put(self, request):
            return HttpResponse("moved")

    class Prices(View):
        def put(self, request):
            return HttpResponse("set")

    views = {
        "names": idempotent(rename),
        "orders": Orders.as_view(),
        "prices": idempotent(Prices.as_view()),
        "object": idempotent(Counted()),
    }
    with project(sqlite_url, views):
        for path in views:
            for _ in range(2):
                Client().put(f"/{path}/", headers={"Idempotency-Key": "k"})
    for name in ("rename", "Orders.put", "Prices", "Counted object at .*>"):
        assert len(re.findall(rf"{name} handles PUT without protection", caplog.text)) == 1
    assert caplog.text.count("methods=['PATCH', 'POST', 'PUT']") == len(views)


def test_a_form_with_errors_is_refused_before_the_claim(sqlite_url):
    def broken(request):
        request._read_started = True  # as Django leaves it when the parser gave up
        request._mark_post_parse_error()
        return idempotent(echo)(request)

    with project(sqlite_url, {"pay": broken}):
        assert _multipart("content").json()["code"] == "body_incomplete"
    assert state(sqlite_url) is None


def test_a_body_that_nobody_kept_is_an_error_and_runs_nothing(sqlite_url):
    view = Counted()
    middlewares = ["adapters.test_django.streaming_middleware", MIDDLEWARE]
    with project(sqlite_url, {"pay": view}, MIDDLEWARE=middlewares):
        assert post(data=b"raw").status_code == 500
    assert view.runs == 0


@pytest.mark.parametrize("pattern", ["/pay/", "/shop/pay/", "/v1/shop/pay/"])
def test_the_middlewares_paths_hold_below_a_script_name(sqlite_url, pattern):
    view = Counted()
    chosen = {"MIDDLEWARE": [MIDDLEWARE], "REQUIRED": True, "INCLUDE": [pattern]}
    with project(sqlite_url, {"pay": view}, **chosen):
        told = {"SCRIPT_NAME": "/v1/shop"}
        assert post("/pay/", key=None, **told).status_code == 400
        assert [post("/pay/", **told).status_code for _ in range(2)] == [201, 201]
    assert view.runs == 1


def in_chunks(body, length="", *, terminated=True, kind="text/plain"):
    """What a server says about a body that its client sent in chunks."""
    told = {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": length, "CONTENT_TYPE": kind}
    told["HTTP_TRANSFER_ENCODING"] = "chunked"
    if terminated:
        told["wsgi.input_terminated"] = True
    return told


@pytest.mark.parametrize("length", ["", "6"])
def test_a_length_beside_chunks_does_not_cut_the_body(integration, length):
    with integration(Counted(lambda request: HttpResponse(request.body))):
        first = post(**in_chunks(b"pay 10 to ann", length))
        assert (first.status_code, first.content) == (200, b"pay 10 to ann")
        assert post(**in_chunks(b"pay 10 to ann", length))["Idempotent-Replayed"] == "true"
        other = post(**in_chunks(b"pay 10 to eve", length))
        assert (other.status_code, other.json()["code"]) == (422, "payload_mismatch")


def test_a_form_in_chunks_is_read_by_the_view(integration):
    with integration(Counted(lambda request: JsonResponse(request.POST.dict()))):
        told = in_chunks(b"to=ann&amount=10", kind="application/x-www-form-urlencoded")
        assert post(**told).json() == {"to": "ann", "amount": "10"}


def test_chunks_whose_end_the_server_does_not_tell_are_refused(integration, sqlite_url):
    view = Counted()
    with integration(view):
        for length in ("", "6"):
            answer = post(**in_chunks(b"pay 10 to ann", length, terminated=False))
            assert (answer.status_code, answer.json()["code"]) == (400, "body_incomplete")
    assert (view.runs, state(sqlite_url)) == (0, None)


def test_chunks_that_django_has_cut_before_us_are_refused(sqlite_url):
    view = Counted()

    def reading_before(request):
        assert request.body == b"pay 10"
        return idempotent(view)(request)

    with project(sqlite_url, {"pay": reading_before}):
        answer = post(**in_chunks(b"pay 10 to ann", "6"))
        assert (answer.status_code, answer.json()["code"]) == (400, "body_incomplete")
    assert (view.runs, state(sqlite_url)) == (0, None)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"data": b"x" * 11}, "body_too_large"),
        ({"CONTENT_LENGTH": "five"}, "body_incomplete"),
        ({"data": b"short", "CONTENT_LENGTH": "7"}, "body_incomplete"),
        ({"CONTENT_LENGTH": "9" * 5000}, "body_too_large"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(sqlite_url, told, code):
    body = told.pop("data", b"")
    environ = {"wsgi.input": io.BytesIO(body), **told}
    request = RequestFactory().post("/pay/", body, "text/plain", **environ)
    request.META["HTTP_IDEMPOTENCY_KEY"] = "k"
    with project(sqlite_url, {}, MAX_BODY=10):
        response = IdempotencyMiddleware(Counted())(request)
        assert b'"code":"%b"' % code.encode() in response.content
    assert state(sqlite_url) is None


def test_djangos_own_limit_counts_too(sqlite_url):
    with project(
        sqlite_url, {"pay": Counted()}, MIDDLEWARE=[MIDDLEWARE], DATA_UPLOAD_MAX_MEMORY_SIZE=10
    ):
        assert post(data=b"x" * 11).json()["code"] == "body_too_large"


def test_a_client_who_goes_away_while_it_sends_is_refused(sqlite_url):
    class Gone(io.BytesIO):
        def read(self, *_):
            raise ConnectionResetError

    request = RequestFactory().post("/pay/", b"12345", "text/plain", **{"wsgi.input": Gone()})
    request.META["HTTP_IDEMPOTENCY_KEY"] = "k"
    with project(sqlite_url, {}):
        response = IdempotencyMiddleware(Counted())(request)
    assert response.status_code == 400


# --- the decorator --------------------------------------------------------------------------------


def test_options_of_a_view_go_before_the_settings(sqlite_url):
    strict, loose = idempotent(required=True)(Counted()), idempotent(Counted())
    with project(sqlite_url, {"strict": strict, "loose": loose}):
        assert post("/strict/", key=None).status_code == 400
        assert post("/loose/", key=None).status_code == 201


def test_a_decorator_can_be_given_an_engine():
    with Idempotency("memory://") as idem:
        view = Idempotent(idem, header="X-Key")(Counted())
        with project("memory://", {"pay": view}):
            assert post(headers={"X-Key": "mine"}).status_code == 201
        assert idem.peek("mine", scope="http").state is State.SUCCEEDED


class Orders(View):
    runs = 0

    @method_decorator(idempotent(required=True))
    def post(self, request, number):
        type(self).runs += 1
        return JsonResponse({"number": number, "key": current_attempt().key})

    def get(self, request, number):
        return HttpResponse(number)

    @idempotent(methods=["PUT"])
    def put(self, request, number):
        type(self).runs += 1
        return HttpResponse("put")


@method_decorator(idempotent, name="dispatch")
class WholeOrders(View):
    def post(self, request):
        return JsonResponse({"key": current_attempt().key})


def test_methods_of_classes_are_protected(sqlite_url):
    views = {"orders/<int:number>": Orders.as_view(), "whole": WholeOrders.as_view()}
    Orders.runs = 0
    with project(sqlite_url, views):
        assert post("/orders/7/", key=None).status_code == 400
        assert [post("/orders/7/").json() for _ in range(2)] == [{"number": 7, "key": "k"}] * 2
        assert Client().get("/orders/7/").content == b"7"
        told = {"headers": {"Idempotency-Key": "put"}}
        assert [Client().put("/orders/7/", **told).content for _ in range(2)] == [b"put"] * 2
        assert [post("/whole/", "w").json() for _ in range(2)] == [{"key": "w"}] * 2
    assert Orders.runs == 2


def test_a_decorated_view_follows_its_own_rules_inside_the_middleware(sqlite_url):
    def hidden(request):
        return idempotent(Counted())(request)

    views = {
        "orders/<int:number>": Orders.as_view(),
        "whole": WholeOrders.as_view(),
        "own": idempotent(header="X-Own")(Counted()),
        "hidden": hidden,
    }
    with project(sqlite_url, views, MIDDLEWARE=[MIDDLEWARE], SEPARATE_ROUTES=True):
        for path in ("/orders/7/", "/whole/", "/hidden/"):
            assert post(path).status_code in {200, 201}
            assert post(path)["Idempotent-Replayed"] == "true"
        assert "Idempotent-Replayed" not in post("/own/")
        assert "Idempotent-Replayed" not in post("/own/")


def test_a_view_that_is_exempt_is_left_alone(sqlite_url):
    @exempt
    class Plain(View):
        def post(self, request):
            return HttpResponse("plain")

    class Partly(View):
        @exempt
        def post(self, request):
            return HttpResponse("partly")

        def patch(self, request):
            return HttpResponse("patched")

    views = {"login": exempt(Counted()), "plain": Plain.as_view(), "partly": Partly.as_view()}
    with project(sqlite_url, {**views, "pay": Counted()}, MIDDLEWARE=[MIDDLEWARE], REQUIRED=True):
        for path in ("/login/", "/plain/", "/partly/"):
            assert post(path, key=None).status_code in {200, 201}
        assert Client().patch("/partly/").status_code == 400
        assert post("/pay/", key=None).status_code == 400
        assert post("/nowhere/", key=None).status_code == 404
        assert post("/nowhere/").status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: idempotent(reqired=True),
        lambda: idempotent(header="X_Key"),
        lambda: idempotent(atomic=7),
        lambda: idempotent(Orders),
        lambda: idempotent(7),
        lambda: Idempotent("memory://"),
    ],
)
def test_what_is_wrong_is_told_when_a_view_is_decorated(wrong):
    with pytest.raises(ConfigError):
        wrong()


@pytest.mark.parametrize("name", ["_read_started", "_stream"])
def test_what_a_request_of_django_has_no_more_is_named(name):
    view = Counted()
    request = RequestFactory().post("/pay/", HTTP_IDEMPOTENCY_KEY="k")
    delattr(request, name)
    expected = rf"django .* has no .*\.WSGIRequest\.{name}, which semel needs"
    with Idempotency("memory://") as idem, pytest.raises(ConfigError, match=expected):
        Idempotent(idem)(view)(request)
    assert view.runs == 0


def test_a_plain_request_object_without_a_body_is_refused():
    request = HttpRequest()
    request.method = "POST"
    with Idempotency("memory://") as idem, pytest.raises(ConfigError, match="RequestFactory"):
        Idempotent(idem)(Counted())(request)


def test_what_is_no_view_is_refused(sqlite_url):
    with project(sqlite_url, {}), pytest.raises(ConfigError, match="is not a view"):
        idempotent(lambda *_: None)("not a request")


async def test_an_engine_of_the_wrong_kind_is_refused(sqlite_url):
    async with AsyncIdempotency(sqlite_url) as idem:
        with pytest.raises(ConfigError, match="a plain view needs an Idempotency"):
            Idempotent(idem)(Counted())
        with pytest.raises(ConfigError, match="an Idempotency or a URL"):
            IdempotencyMiddleware(Counted(), idem)


# --- the middleware -------------------------------------------------------------------------------


def test_the_middleware_takes_paths_and_routes(sqlite_url):
    views = {"login": Counted(), "coupon": Counted(), "pay": Counted()}
    routes = [Route("/coupon/", policy=Policy(duplicate="reject", message="used"))]
    with project(
        sqlite_url,
        views,
        MIDDLEWARE=[MIDDLEWARE],
        EXCLUDE=["/login/"],
        ROUTES=routes,
        REQUIRED=True,
    ):
        assert post("/login/", key=None).status_code == 201
        assert post("/pay/", key=None).status_code == 400
        assert [post("/coupon/").status_code for _ in range(2)] == [201, 409]


def test_a_middleware_can_be_given_an_engine_and_options():
    with Idempotency("memory://") as idem:
        layers = [given_to_middlewares(idem, required=True)]
        with project("memory://", {"pay": Counted()}, MIDDLEWARE=layers):
            assert post(key=None).status_code == 400
            assert [post().status_code for _ in range(2)] == [201, 201]
        assert idem.peek("k", scope="http").state is State.SUCCEEDED
    with pytest.raises(ConfigError, match="without an engine"):
        IdempotencyMiddleware(Counted(), required=True)


def test_a_request_with_urls_of_its_own_is_resolved_there(sqlite_url):
    request = RequestFactory().post("/own/")
    request.urlconf = urls(own=exempt(Counted()))
    with project(sqlite_url, {}, REQUIRED=True):
        assert IdempotencyMiddleware(Counted())(request).status_code == 201


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        {"REQIRED": True},
        {"required": True},
        {"URL": "nonsense://"},
        {"MAX_BODY": -1},
        {"HEADER": "X_Key"},
        {"ROUTES": [Route("/", header="X_Key")]},
        {"TENANT": "no.such.module"},
        {"TENANT": "web.profiles.nobody"},
        {"EXCLUDE": "/login"},
        {"ENGINE": 7},
        {"ENGINE": {"nonsense": 1}},
    ],
)
def test_wrong_settings_are_found_by_the_check_and_stop_the_start(wrong):
    if isinstance(wrong, dict):
        wrong = {"URL": "memory://", **wrong}
    with override_settings(SEMEL=wrong):
        (message,) = run_checks(tags=["semel"])
        assert message.id == "semel.E001"
        with pytest.raises((ConfigError, TypeError)):
            IdempotencyMiddleware(Counted())


def test_the_check_tells_every_mistake_once_by_the_name_that_the_settings_have():
    wrong = {
        "URL": "memory://",
        "EXCLUDE": "/login",
        "HEADER": None,  # not wrong: the key comes from elsewhere
        "QUERY": 7,
        "INCLUDE": ["login"],
        "MAX_BODY": -1,
        "METHODS": 7,
        "TENANT": "no.such.module",
        "TENNANT": None,
        "ENGINE": {"nonsense": 1},
    }
    told = [
        "there is no 'TENNANT'; known: URL, ENGINE, HEADER",
        "TENANT cannot be imported: No module named 'no'",
        "METHODS: ",
        "QUERY must be a string or None; got 7",
        "MAX_BODY must be a number of bytes; got -1",
        "INCLUDE: a path pattern begins with / or *",
        "EXCLUDE must be a sequence of patterns, not the text '/login'",
        "ENGINE: Idempotency() got an unexpected keyword argument 'nonsense'",
    ]
    with override_settings(SEMEL=wrong):
        messages = [message.msg for message in run_checks(tags=["semel"])]
        with pytest.raises(ConfigError) as caught:
            IdempotencyMiddleware(Counted())
    assert len(messages) == len(told)
    for words in told:
        (found,) = [text for text in messages if text.startswith(f"settings.SEMEL: {words}")]
        if not words.startswith("ENGINE"):
            assert found.removeprefix("settings.SEMEL: ") in str(caught.value)


def test_options_that_do_not_go_together_are_found_by_the_check():
    with override_settings(SEMEL={"URL": "memory://", "HEADER": None}):
        (message,) = run_checks(tags=["semel"])
    assert message.msg.startswith("settings.SEMEL: a key comes from header, query, field or key")


def test_a_cap_above_djangos_own_is_warned_of():
    with override_settings(SEMEL={"URL": "memory://", "MAX_BODY": 10_000_000}):
        (message,) = run_checks(tags=["semel"])
        assert message.id == "semel.W001"
        with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=None):
            assert run_checks(tags=["semel"]) == []


def test_right_settings_and_none_pass_the_check():
    with override_settings(SEMEL={"URL": "memory://", "ENGINE": {"policy": Policy(ttl=60)}}):
        assert run_checks(tags=["semel"]) == []
    assert run_checks(tags=["semel"]) == []


def test_an_engine_gets_what_the_settings_have_for_it(sqlite_url):
    heard = []
    with project(sqlite_url, {"pay": idempotent(Counted())}, ENGINE={"hooks": [heard.append]}):
        post()
        post()
    assert [type(event).__name__ for event in heard] == ["Ran", "Replayed"]


def test_a_secret_of_the_settings_keys_the_fingerprints_of_requests(sqlite_url):
    def stored(**setting):
        with project(sqlite_url, {"pay": idempotent(Counted())}, **setting):
            post()
            engine = ENGINES.integration().engine
            (record,) = engine.records()
            assert engine.forget(record.key, scope=record.scope)
            return record.fingerprint

    plain, again = stored(), stored()
    assert plain == again
    assert stored(ENGINE={"fingerprint_secret": "a secret of the project"}) != plain


def test_a_representation_of_the_settings_hides_their_values(sqlite_url):
    engine = {"fingerprint_secret": "PASSWORD of the project"}
    with override_settings(
        SEMEL={"URL": "redis://:PASSWORD@h", "SECRET": b"PASSWORD", "ENGINE": engine}
    ):
        read = configured()
    assert repr(read) == "Configured({'engine': ['fingerprint_secret'], 'options': ['secret']})"
    assert "PASSWORD" not in f"{read.__rich_repr__()}"


def test_without_a_setting_semels_own_say_where(monkeypatch, sqlite_url):
    monkeypatch.setenv("SEMEL_URL", sqlite_url)
    with override_settings(
        ROOT_URLCONF=urls(pay=idempotent(Counted())), ALLOWED_HOSTS=["*"], MIDDLEWARE=[]
    ):
        assert post().status_code == 201
    close()
    assert state(sqlite_url) is State.SUCCEEDED


def test_settings_that_change_make_new_engines(tmp_path):
    view = idempotent(Counted())
    for name in ("a.db", "b.db"):
        with project(f"sqlite:///{tmp_path / name}", {"pay": view}):
            assert "Idempotent-Replayed" not in post()


def test_a_forked_child_never_waits_for_a_lock_of_its_parent(sqlite_url):
    with project(sqlite_url, {"pay": idempotent(Counted())}), ENGINES._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if ENGINES._lock.acquire(timeout=5) and not ENGINES._integrations else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(autouse=True)
def quiet():
    """Django logs every answer that is an error."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
