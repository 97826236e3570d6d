"""Flask: what is its own. The rules of the web are tested for every framework at once elsewhere."""

from __future__ import annotations

import gc
import io
import itertools
import threading
from typing import ClassVar

import flask
import pytest
from flask import Flask, Response, abort, g, jsonify, request
from flask.views import MethodView
from werkzeug.exceptions import HTTPException, NotFound
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.serving import make_server

from semel import ConfigError, Idempotency, Policy, current_attempt
from semel.adapters.flask import Idempotent
from semel.adapters.wsgi import IdempotencyMiddleware
from semel.core.records import State
from semel.http import Route
from web.client import HOST, PATIENCE, Connection, head

KEY = {"Idempotency-Key": "k"}


@pytest.fixture
def idem():
    with Idempotency("memory://") as engine:
        yield engine


@pytest.fixture
def app():
    return Flask(__name__)


def state(idem, key="k"):
    return idem.peek(key, scope="http").state


def state_or_none(idem, key="k"):
    record = idem.peek(key, scope="http")
    return None if record is None else record.state


def counting(view):
    """Count the runs of a view."""

    def counted(*args, **kwargs):
        counted.runs += 1
        return view(*args, **kwargs)

    counted.runs = 0
    return counted


def post_twice(app, path="/", **told):
    client = app.test_client()
    told = {"headers": KEY, **told}
    first = client.post(path, **told)
    first.get_data()
    first.close()  # as a server does, before the next request on this thread
    second = client.post(path, **told)
    assert "Idempotent-Replayed" not in first.headers
    return first, second


# --- what a view may return -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "status", "body"),
    [
        ("text", 200, b"text"),
        (b"bytes", 200, b"bytes"),
        ({"a": [1]}, 200, b'{"a":[1]}\n'),
        (["a"], 200, b'["a"]\n'),
        (("made", 201, {"X-Number": "7"}), 201, b"made"),
        (("", 204), 204, b""),
    ],
)
def test_whatever_a_view_returns_is_replayed(app, idem, value, status, body):
    idempotent = Idempotent(idem)
    view = counting(lambda: value)
    app.add_url_rule("/", "view", idempotent(view), methods=["POST"])
    first, second = post_twice(app)
    assert (first.status_code, first.data) == (second.status_code, second.data) == (status, body)
    assert second.headers.pop("Idempotent-Replayed") == "true"
    assert {line[0].lower(): line[1] for line in first.headers} == {
        line[0].lower(): line[1] for line in second.headers
    }
    assert view.runs == 1


def test_a_view_may_return_another_wsgi_application(app, idem):
    def other(environ, start_response):
        start_response("202 Accepted", [("Content-Type", "text/plain")])
        return [b"by another"]

    app.post("/")(Idempotent(idem)(lambda: other))
    first, second = post_twice(app)
    assert (
        (first.status_code, first.data) == (second.status_code, second.data) == (202, b"by another")
    )


def test_a_view_that_returns_nothing_is_an_error_and_frees_the_key(app, idem):
    app.post("/", endpoint="view")(Idempotent(idem)(lambda: None))
    app.testing = True
    with pytest.raises(TypeError, match="did not return a valid response"):
        app.test_client().post("/", headers=KEY)
    assert state(idem) is State.FAILED


def test_an_async_view_is_protected(app, idem):
    @app.post("/")
    @Idempotent(idem)
    async def view():
        return {"key": current_attempt().key}

    first, second = post_twice(app)
    assert first.json == second.json == {"key": "k"}
    assert second.headers["Idempotent-Replayed"] == "true"


def test_arguments_of_the_route_arrive(app, idem):
    @app.post("/orders/<int:number>")
    @Idempotent(idem)
    def view(number):
        return {"number": number}

    assert post_twice(app, "/orders/7")[1].json == {"number": 7}


def test_the_name_of_a_view_stays_its_own(idem):
    @Idempotent(idem)(required=True)
    def create_order():
        """Make one."""

    assert (create_order.__name__, create_order.__doc__) == ("create_order", "Make one.")


# --- streams and files ----------------------------------------------------------------------------


class Chunks:
    """A stream that knows whether it was closed."""

    def __init__(self, count, error=None):
        self._count, self._error = count, error
        self.given = self.closed = 0

    def __iter__(self):
        for _ in range(self._count):
            self.given += 1
            yield "chunk "
        if self._error is not None:
            raise self._error

    def close(self):
        self.closed += 1


def streaming(app, idem, chunks, **options):
    after = []

    @app.post("/")
    @Idempotent(idem)(**options)
    def view():
        response = Response(chunks, mimetype="text/plain")
        response.call_on_close(lambda: after.append(state(idem)))
        return response

    return after


def test_a_stream_is_replayed_and_closed_after_it_is_saved(app, idem):
    chunks = Chunks(3)
    after = streaming(app, idem, chunks)
    first, second = post_twice(app)
    assert first.data == second.data == b"chunk chunk chunk "
    assert first.headers["Content-Length"] == "18"
    assert (chunks.given, chunks.closed) == (3, 1)
    assert after == [State.SUCCEEDED]


def test_a_stream_without_close_is_replayed(app, idem):
    @app.post("/")
    @Idempotent(idem)
    def view():
        return Response(iter(["a", "b"]))

    assert post_twice(app)[1].data == b"ab"


def test_a_stream_beyond_the_cap_is_sent_as_it_comes(app, idem):
    chunks = Chunks(5)
    after = streaming(app, idem, chunks, max_response=10)
    response = app.test_client().post("/", headers=KEY)
    assert chunks.given == 2  # no more than is needed to see that it does not fit
    assert response.data == b"chunk " * 5
    response.close()
    assert chunks.closed == 1
    assert after == [State.SUCCEEDED]
    again = app.test_client().post("/", headers=KEY)
    assert (again.status_code, again.json["code"]) == (200, "result_omitted")


def test_a_client_who_leaves_does_not_end_a_stream_beyond_the_cap(app, idem):
    chunks = Chunks(5)
    streaming(app, idem, chunks, max_response=10)
    response = app.test_client().post("/", headers=KEY, buffered=False)
    response.close()
    assert (chunks.given, chunks.closed) == (5, 1)
    assert state(idem) is State.SUCCEEDED


def test_a_stream_that_fails_frees_the_key_and_is_closed(app, idem):
    chunks = Chunks(2, OSError("broken"))
    after = streaming(app, idem, chunks)
    assert app.test_client().post("/", headers=KEY).status_code == 500
    assert chunks.closed == 1
    assert after == [State.PROCESSING]
    assert state(idem) is State.FAILED


def test_a_whole_answer_beyond_the_cap_is_told_as_omitted(app, idem):
    @app.post("/")
    @Idempotent(idem)(max_response=10)
    def view():
        return "x" * 11

    first, second = post_twice(app)
    assert first.data == b"x" * 11
    assert second.json["code"] == "result_omitted"


def test_events_pass_live_and_marked(app, idem):
    chunks = Chunks(2)

    @app.post("/")
    @Idempotent(idem)
    def view():
        return Response(chunks, mimetype="text/event-stream")

    response = app.test_client().post("/", headers=KEY)
    assert chunks.given <= 1
    assert response.headers["Idempotent-Unprotected"] == "stream"
    assert response.data == b"chunk chunk "
    assert state(idem) is State.FAILED  # free


def test_a_file_is_replayed(app, idem):
    @app.post("/")
    @Idempotent(idem)
    def view():
        return flask.send_file(io.BytesIO(b"a file"), mimetype="text/plain")

    def own(file, size):
        raise AssertionError("a file must not go past the middleware")

    first, second = post_twice(app, environ_overrides={"wsgi.file_wrapper": own})
    assert first.data == second.data == b"a file"


def test_a_file_beyond_the_cap_is_sent(app, idem):
    @app.post("/")
    @Idempotent(idem)(max_response=10)
    def view():
        return flask.send_file(io.BytesIO(b"x" * 20_000), mimetype="text/plain")

    first, second = post_twice(app)
    assert first.data == b"x" * 20_000
    assert second.json["code"] == "result_omitted"


def test_the_application_cannot_claim_a_replay(app, idem):
    @app.post("/")
    @Idempotent(idem)
    def view():
        return "x", {"Idempotent-Replayed": "true"}

    post_twice(app)


# --- answers that are raised ----------------------------------------------------------------------


def handled(app):
    @app.errorhandler(404)
    def words(error):
        return {"error": error.description}, 404


@pytest.mark.parametrize("words", [True, False])
def test_an_abort_is_stored_as_the_first_caller_gets_it_when_asked_for(app, idem, words):
    if words:
        handled(app)
    view = counting(lambda: abort(404, "no such order"))
    idempotent = Idempotent(idem, stored=lambda status: status < 500)
    app.add_url_rule("/", "view", idempotent(view), methods=["POST"])
    first, second = post_twice(app)
    assert (first.status_code, first.data) == (second.status_code, second.data)
    assert first.status_code == 404
    assert first.is_json is words
    assert second.headers["Idempotent-Replayed"] == "true"
    assert view.runs == 1


def numbering(app, *kinds):
    """Error handlers that word each error they are asked about in another way."""
    numbers = itertools.count(1)
    for kind in kinds:

        @app.errorhandler(kind)
        def word(error):
            return {"error": next(numbers)}, 404


@pytest.mark.parametrize("kind", [404, NotFound, HTTPException])
def test_an_error_handler_runs_once_and_the_first_answer_is_the_stored_one(app, idem, kind):
    numbering(app, kind)
    error = NotFound()  # the same object, again and again
    view = counting(lambda: raising(error))
    protect = Idempotent(idem, stored=lambda status: status < 500)
    app.add_url_rule("/", "view", protect(view), methods=["POST"])
    app.add_url_rule("/bare", "bare", lambda: raising(error), methods=["POST"])
    client = app.test_client()
    assert [answer.json for answer in post_twice(app)] == [{"error": 1}] * 2
    assert client.post("/", headers={"Idempotency-Key": "other"}).json == {"error": 2}
    assert client.post("/bare").json == {"error": 3}
    assert error.code == 404
    assert view.runs == 2


def raising(error):
    raise error


def test_a_stream_of_an_error_handler_is_stored_and_sent_whole(app, idem):
    @app.errorhandler(404)
    def word(error):
        return Response((each for each in ["not ", "found"]), 404)

    app.post("/", endpoint="view")(Idempotent(idem, stored=lambda _: True)(lambda: abort(404)))
    assert [answer.text for answer in post_twice(app)] == ["not found"] * 2


def test_events_of_an_error_handler_pass_live_and_marked(app, idem):
    @app.errorhandler(404)
    def word(error):
        return Response((each for each in ["data: 1\n\n"]), 404, mimetype="text/event-stream")

    app.post("/", endpoint="view")(Idempotent(idem, stored=lambda _: True)(lambda: abort(404)))
    answer = app.test_client().post("/", headers=KEY)
    assert answer.headers["Idempotent-Unprotected"] == "stream"
    assert answer.text == "data: 1\n\n"
    assert state(idem) is State.FAILED


def test_who_was_replaced_gets_no_error_of_its_own(app, idem):
    @app.post("/")
    @Idempotent(idem, stored=lambda _: True)
    def view():
        idem.forget("k", scope="http")
        abort(404)

    response = app.test_client().post("/", headers=KEY)
    assert (response.status_code, response.json["code"]) == (409, "lease_lost")


def test_an_abort_frees_the_key_even_under_hold(app, idem):
    view = counting(lambda: abort(409))
    idempotent = Idempotent(idem, policy=Policy(abandoned="hold"))
    app.add_url_rule("/", "view", idempotent(view), methods=["POST"])
    assert [answer.status_code for answer in post_twice(app)] == [409, 409]
    assert view.runs == 2


def test_after_an_abort_with_an_error_of_the_server_the_policy_is_asked(app, idem):
    asked = []

    def failure(error):
        asked.append(type(error).__name__)
        return "final"

    app.post("/", endpoint="view")(
        Idempotent(idem, policy=Policy(failure=failure))(lambda: abort(503))
    )
    first, second = post_twice(app)
    assert (first.status_code, second.status_code) == (503, 409)
    assert second.json["code"] == "previous_failure"
    assert asked == ["ServiceUnavailable"]


def test_an_abort_reaches_decorators_around_it_as_an_exception(app, idem):
    seen = []

    def rolling_back(view):
        def around():
            try:
                return view()
            except HTTPException as error:
                seen.append(type(error))
                raise

        return around

    protected = Idempotent(idem, stored=lambda status: True)(lambda: abort(404))
    app.add_url_rule("/", "view", rolling_back(protected), methods=["POST"])
    post_twice(app)
    assert seen == [NotFound]


def test_a_response_that_is_raised_counts_with_its_own_status(app, idem):
    view = counting(lambda: abort(Response("taken", 201)))
    app.add_url_rule("/", "view", Idempotent(idem)(view), methods=["POST"])
    first, second = post_twice(app)
    assert (first.status_code, first.data) == (second.status_code, second.data) == (201, b"taken")
    assert view.runs == 1


def test_the_cap_holds_for_an_answer_that_is_raised(app, idem):
    view = counting(lambda: abort(Response("too much", 201)))
    app.add_url_rule("/", "view", Idempotent(idem, max_response=3)(view), methods=["POST"])
    first, second = post_twice(app)
    assert (first.data, second.json["code"]) == (b"too much", "result_omitted")
    assert view.runs == 1


def test_an_error_handler_that_fails_leaves_no_stuck_key(app, idem):
    @app.errorhandler(404)
    def broken(error):
        raise OSError("broken")

    app.post("/", endpoint="view")(Idempotent(idem, stored=lambda status: True)(lambda: abort(404)))
    assert app.test_client().post("/", headers=KEY).status_code == 500
    assert state(idem) is State.FAILED


def test_an_exception_frees_the_key_and_stays_the_applications(app, idem):
    class OutOfStock(Exception):
        pass

    @app.errorhandler(OutOfStock)
    def words(error):
        return "none left", 409

    @app.post("/")
    @Idempotent(idem)
    def view():
        raise OutOfStock

    first, second = post_twice(app)
    assert (
        (first.status_code, first.data) == (second.status_code, second.data) == (409, b"none left")
    )
    assert state(idem) is State.FAILED


@pytest.mark.parametrize("max_response", [4, 3], ids=["kept", "too large"])
def test_who_was_replaced_gets_no_answer_of_its_own(app, idem, max_response):
    closed = []

    @app.post("/")
    @Idempotent(idem, max_response=max_response)
    def view():
        idem.forget("k", scope="http")
        response = Response("mine")
        response.call_on_close(lambda: closed.append(True))
        return response

    response = app.test_client().post("/", headers=KEY)
    assert (response.status_code, response.json["code"]) == (409, "lease_lost")
    response.close()
    assert closed == [True]


@pytest.mark.parametrize("kind", [iter, flask.stream_with_context])
@pytest.mark.parametrize("layer", ["wraps", "replaces", "raises"])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_large_answer_that_is_put_aside_leaves_no_stuck_key(app, idem, breaks, layer, kind):
    def parts():
        yield from (b"large", b"larger")
        if breaks:
            raise OSError("broken")

    @app.post("/")
    @Idempotent(idem, max_response=3)
    def view():
        return Response(kind(parts()))

    @app.after_request
    def another(response):
        if layer == "raises":
            raise LookupError
        if layer == "replaces":
            return Response("another")
        response.response = (part for part in response.response)  # closed, it leaves the inner one
        return response

    gc.disable()  # the error that is raised keeps the answer until it is collected
    try:
        answer = app.test_client().post("/", headers=KEY)
        assert answer.status_code == (500 if layer == "raises" else 200)
        answer.close()
        del answer
        assert state(idem) is (State.FAILED if breaks else State.SUCCEEDED)
        assert current_attempt() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [iter, flask.stream_with_context])
def test_the_policy_sees_the_error_of_a_large_stream(app, idem, kind):
    class Declined(Exception):
        pass

    def parts():
        yield from (b"large", b"larger")
        raise Declined

    @app.post("/")
    @Idempotent(idem, max_response=3, policy=Policy.payment(not_done=[Declined]))
    def view():
        return Response(kind(parts()))

    with pytest.raises(Declined):
        app.test_client().post("/", headers=KEY).get_data()
    assert state(idem) is State.FAILED  # any other error would park it


# --- around the view ------------------------------------------------------------------------------


def test_authorization_runs_before_the_replay(app, idem):
    revoked = []

    @app.before_request
    def authorize():
        if revoked:
            abort(403)

    @app.post("/")
    @Idempotent(idem)
    def view():
        return "secret"

    client = app.test_client()
    assert client.post("/", headers=KEY).data == b"secret"
    revoked.append("ann")
    assert client.post("/", headers=KEY).status_code == 403


def test_after_request_runs_for_a_replay_too_and_what_it_adds_is_not_stored(app, idem):
    numbers = iter("123")

    @app.after_request
    def number(response):
        response.headers["X-Number"] = next(numbers)
        return response

    @app.post("/")
    @Idempotent(idem)
    def view():
        return "x"

    assert [answer.headers["X-Number"] for answer in post_twice(app)] == ["1", "2"]


def test_a_function_of_the_request_sees_flasks_own(app, idem):
    def tenant(seen):
        assert isinstance(seen.raw, flask.Request)
        assert (seen.method, seen.path, seen.query) == ("POST", "/shop/orders", b"a=1")
        return g.user

    @app.before_request
    def authenticate():
        g.user = request.headers["X-User"]

    @app.post("/orders")
    @Idempotent(idem)(tenant=tenant)
    def view():
        return g.user

    client = app.test_client()
    for user in ("ann", "bob"):
        told = {"base_url": "http://shop.example/shop", "headers": {**KEY, "X-User": user}}
        assert client.post("/orders?a=1", **told).text == user


def test_the_decorator_knows_the_methods(app, idem):
    runs = []

    @app.route("/", methods=["GET", "PUT", "POST"])
    @Idempotent(idem)(methods=["PUT"], required=True)
    def view():
        runs.append(request.method)
        return "x"

    client = app.test_client()
    assert client.get("/", headers=KEY).status_code == 200
    assert client.post("/").status_code == 200
    assert client.put("/").status_code == 400
    assert (
        client.put("/", headers=KEY).status_code == client.put("/", headers=KEY).status_code == 200
    )
    assert runs == ["GET", "POST", "PUT"]


# --- bodies that were read before -----------------------------------------------------------------


def reading(app, idem, before, **options):
    """A view behind something that reads the request before it."""

    @app.before_request
    def read():
        before()

    @app.post("/")
    @Idempotent(idem)(**options)
    def view():
        files = {name: file.read().decode() for name, file in request.files.items()}
        return jsonify(
            form=request.form.to_dict(flat=False), files=files, data=request.get_data(as_text=True)
        )

    return app.test_client()


def request_data():
    request.get_data()


def request_stream():
    request.stream.read()


FORM = {"a": "1", "b": "2"}


def upload(text="content", name="a.txt", kind="text/plain"):
    return {"a": "1", "file": (io.BytesIO(text.encode()), name, kind)}


def test_an_untouched_form_is_compared_and_can_be_read(app, idem):
    client = reading(app, idem, lambda: None)
    assert client.post("/", headers=KEY, data=upload()).json["files"] == {"file": "content"}
    assert client.post("/", headers=KEY, data=upload()).headers["Idempotent-Replayed"]
    assert client.post("/", headers=KEY, data=upload("other")).status_code == 422


@pytest.mark.parametrize("form", [dict, upload])
def test_a_form_that_was_parsed_before_is_compared(app, idem, form):
    client = reading(app, idem, lambda: request.form)
    data = (lambda **more: {**FORM, **more}) if form is dict else upload
    first = client.post("/", headers=KEY, data=data())
    assert first.json["form"]["a"] == ["1"]
    again = client.post("/", headers=KEY, data=data())
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.json == first.json
    others = (
        [{"a": "2", "b": "2"}]
        if form is dict
        else [
            upload("other"),
            upload(name="b.txt"),
            upload(kind="text/html"),
            {"a": "1"},
        ]
    )
    for other in others:
        assert client.post("/", headers=KEY, data=other).status_code == 422


def test_fields_are_not_taken_for_files_of_a_form_that_was_parsed_before(app, idem):
    client = reading(app, idem, lambda: request.form)

    def post(**fields):
        given = {**fields, "doc": (io.BytesIO(b"data"), "d.txt", "text/plain")}
        return client.post("/", headers=KEY, data=given)

    assert post(files="a", b="c").status_code == 200
    assert post(a=(io.BytesIO(b"files"), "b", "c")).status_code == 422
    assert post(files="a", b="c").headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("size", [-1, 3])
def test_an_upload_that_somebody_has_read_before_is_compared_whole(app, idem, size):
    seen = []

    def scanned():
        seen.append(request.files["file"].read(size))

    client = reading(app, idem, scanned)
    assert client.post("/", headers=KEY, data=upload("a file")).status_code == 200
    again = client.post("/", headers=KEY, data=upload("a file"))
    assert again.headers["Idempotent-Replayed"] == "true"
    other = client.post("/", headers=KEY, data=upload("no file"))
    assert other.status_code == 422
    assert seen[0] == seen[1] != seen[2]


def test_a_view_finds_an_upload_where_somebody_has_left_it(app, idem):
    client = reading(app, idem, lambda: request.files["file"].read(3))
    assert client.post("/", headers=KEY, data=upload()).json["files"] == {"file": "tent"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", b"&&&"),
        ("application/x-www-form-urlencoded", b"&"),
        ("multipart/form-data; boundary=B", b"garbage"),
        ("multipart/form-data; boundary=B", b"--B--"),
        ("multipart/form-data; boundary=B", b"--B\r\nContent-Disposition: form-data"),
    ],
)
def test_a_form_of_which_nothing_was_parsed_before_is_the_clients_mistake(app, idem, kind, body):
    client = reading(app, idem, lambda: request.form)
    answer = client.post("/", headers=KEY, data=body, content_type=kind)
    assert (answer.status_code, answer.json["code"]) == (400, "body_incomplete")
    assert state_or_none(idem) is None


def test_an_empty_form_that_was_parsed_before_is_a_body_like_any_other(app, idem):
    client = reading(app, idem, lambda: request.form)
    assert client.post("/", headers=KEY, data=b"", content_type=FORM_TYPE).status_code == 200
    again = client.post("/", headers=KEY, data=b"", content_type=FORM_TYPE)
    assert again.headers["Idempotent-Replayed"] == "true"


def test_fields_are_found_in_a_form_that_was_parsed_before(app, idem):
    options = {"header": None, "field": "b", "payload": ["a"], "format": "form"}
    client = reading(app, idem, lambda: request.form, **options)
    assert client.post("/", data={"a": "1", "b": "2", "at": "3"}).status_code == 200
    again = client.post("/", data={"a": "1", "b": "2", "at": "4"})
    assert again.headers["Idempotent-Replayed"] == "true"
    assert client.post("/", data={"a": "2", "b": "2"}).status_code == 422
    assert state(idem, "2") is State.SUCCEEDED


def test_data_that_was_read_before_is_compared(app, idem):
    client = reading(app, idem, request_data)
    assert client.post("/", headers=KEY, data="raw").json["data"] == "raw"
    assert client.post("/", headers=KEY, data="raw").headers["Idempotent-Replayed"] == "true"
    assert client.post("/", headers=KEY, data="other").status_code == 422
    assert client.post("/", headers=KEY, json={"a": 1}).status_code == 422


def test_a_form_whose_data_was_kept_is_compared_raw(app, idem):
    def before():
        request.get_data()
        assert request.form

    client = reading(app, idem, before)
    assert client.post("/", headers=KEY, data=FORM).status_code == 200
    assert client.post("/", headers=KEY, data=FORM).headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("before", [lambda: request.form, request_data])
def test_the_cap_holds_for_what_was_read_before(app, idem, before):
    client = reading(app, idem, before, max_body=10)
    answer = client.post("/", headers=KEY, data=upload("x" * 100))
    assert answer.json["code"] == "body_too_large"


def test_the_cap_holds_for_a_body_of_unknown_length_that_was_read_before(app, idem):
    client = reading(app, idem, request_data, max_body=10)
    told = {"environ_overrides": {"wsgi.input_terminated": True, "CONTENT_LENGTH": ""}}
    answer = client.post("/", headers=KEY, input_stream=io.BytesIO(b"x" * 100), **told)
    assert answer.json["code"] == "body_too_large"


def test_a_body_that_nobody_kept_is_an_error_and_runs_nothing(app, idem):
    client = reading(app, idem, request_stream)
    assert client.post("/", headers=KEY, data="raw").status_code == 500
    assert idem.peek("k", scope="http") is None


def post_chunks(client, body, *, kind="text/plain", length="", terminated=True):
    """Send a body as a server gives it whose client sent it in chunks."""
    told = {"CONTENT_LENGTH": length, "HTTP_TRANSFER_ENCODING": "chunked"}
    if terminated:
        told["wsgi.input_terminated"] = True
    return client.post(
        "/",
        headers=KEY,
        content_type=kind,
        input_stream=io.BytesIO(body),
        environ_overrides=told,
    )


@pytest.mark.parametrize("length", ["", "6"])
@pytest.mark.parametrize("before", [lambda: None, request_data])
def test_a_length_beside_chunks_does_not_cut_the_body(app, idem, before, length):
    client = reading(app, idem, before)
    assert post_chunks(client, b"pay 10 to ann", length=length).json["data"] == "pay 10 to ann"
    again = post_chunks(client, b"pay 10 to ann", length=length)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert post_chunks(client, b"pay 10 to eve", length=length).status_code == 422


@pytest.mark.parametrize("before", [lambda: None, request_data, lambda: request.form])
def test_chunks_whose_end_the_server_does_not_tell_are_refused(app, idem, before):
    client = reading(app, idem, before)
    answer = post_chunks(client, b"pay 10 to ann", length="6", terminated=False)
    assert (answer.status_code, answer.json["code"]) == (400, "body_incomplete")
    assert state_or_none(idem) is None


def lost_in_a_form():
    request.stream.read()
    assert not request.form


FORM_TYPE = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        (request_stream, "text/plain"),
        (lambda: request.stream.read(4), "text/plain"),
        (lambda: request.get_data(cache=False), "text/plain"),
        (lost_in_a_form, "text/plain"),
    ],
)
def test_chunks_that_nobody_kept_are_an_error_and_run_nothing(app, idem, before, kind):
    client = reading(app, idem, before)
    assert post_chunks(client, b"pay=ann", kind=kind).status_code == 500
    assert post_chunks(client, b"pay=eve", kind=kind).status_code == 500
    assert state_or_none(idem) is None


def test_chunks_of_a_form_that_nobody_kept_are_refused(app, idem):
    client = reading(app, idem, lost_in_a_form)
    answer = post_chunks(client, b"pay=ann", kind=FORM_TYPE)  # as a form with errors looks
    assert (answer.status_code, answer.json["code"]) == (400, "body_incomplete")
    assert state_or_none(idem) is None


@pytest.mark.parametrize(
    ("before", "kind"),
    [(lambda: request.form, "text/plain"), (lambda: request.form, FORM_TYPE), (request_data, "")],
)
def test_chunks_that_were_kept_are_compared(app, idem, before, kind):
    client = reading(app, idem, before)
    assert post_chunks(client, b"pay=ann", kind=kind).status_code == 200
    again = post_chunks(client, b"pay=ann", kind=kind)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert post_chunks(client, b"pay=eve", kind=kind).status_code == 422


def test_an_empty_body_in_chunks_that_was_kept_is_compared(app, idem):
    client = reading(app, idem, request_data)
    assert post_chunks(client, b"").status_code == 200
    assert post_chunks(client, b"").headers["Idempotent-Replayed"] == "true"
    assert post_chunks(client, b"pay=eve").status_code == 422


def test_a_body_of_which_somebody_took_a_part_is_an_error_and_runs_nothing(app, idem):
    client = reading(app, idem, lambda: request.stream.read(2))
    assert client.post("/", headers=KEY, data="raw data").status_code == 500
    assert state_or_none(idem) is None


# --- applications and their configuration ---------------------------------------------------------


def shop(idempotent, **config):
    """An application as a factory makes it."""
    app = Flask(__name__)
    app.config.update(config)

    @app.post("/", endpoint="view")
    @idempotent
    def view():
        return {"attempt": current_attempt() is not None}

    idempotent.init_app(app)
    return app


def test_the_configuration_says_where_records_are_and_what_counts(sqlite_url):
    idempotent = Idempotent()
    app = shop(idempotent, SEMEL_URL=sqlite_url, SEMEL_REQUIRED=True, SEMEL_HEADER="X-Key")
    client = app.test_client()
    assert client.post("/").json["code"] == "key_missing"
    assert client.post("/", headers={"X-Key": "k"}).json == {"attempt": True}
    assert client.post("/", headers={"X-Key": "k"}).headers["Idempotent-Replayed"] == "true"
    idempotent.close()
    with Idempotency(sqlite_url) as idem:
        assert state(idem) is State.SUCCEEDED
    assert app.extensions["semel"] is idempotent


def test_options_in_the_code_go_before_the_configuration(idem):
    app = shop(Idempotent(idem, required=False), SEMEL_REQUIRED=True)
    assert app.test_client().post("/").status_code == 200


def test_a_mistyped_option_in_the_configuration_is_told_with_those_that_exist(app, sqlite_url):
    app.config.update(SEMEL_WIAT=5)
    with pytest.raises(ConfigError, match=r"SEMEL_WIAT in .* known: SEMEL_URL, .*SEMEL_WAIT"):
        Idempotent(sqlite_url).init_app(app)


def test_one_decorator_serves_several_applications(tmp_path):
    idempotent = Idempotent()
    urls = [f"sqlite:///{tmp_path / name}" for name in ("a.db", "b.db")]
    clients = [shop(idempotent, SEMEL_URL=url).test_client() for url in urls]
    assert not any(
        "Idempotent-Replayed" in client.post("/", headers=KEY).headers for client in clients
    )
    idempotent.close()


def test_without_an_application_semels_own_settings_say_where(monkeypatch, sqlite_url):
    monkeypatch.setenv("SEMEL_URL", sqlite_url)
    idempotent = Idempotent()
    assert shop(idempotent).test_client().post("/", headers=KEY).json == {"attempt": True}
    idempotent.close()


def test_a_decorator_above_that_of_its_route_is_refused_at_the_first_request(app, idem):
    app.testing = True
    idempotent = Idempotent(idem)
    idempotent.init_app(app)

    @idempotent
    @app.post("/")
    def view():
        return "x"

    for _ in range(2):
        with pytest.raises(ConfigError, match="view is not protected: its route took it before"):
            app.test_client().post("/", headers=KEY)


def test_a_decorator_on_a_route_of_other_methods_is_refused_at_the_first_request(app, idem):
    app.testing = True
    idempotent = Idempotent(idem)
    idempotent.init_app(app)
    app.put("/", endpoint="view")(idempotent(lambda: "x"))
    with pytest.raises(ConfigError, match="it handles PUT, and methods= lists none"):
        app.test_client().put("/", headers=KEY)


def test_classes_of_views_may_have_some_that_only_read(app, idem):
    app.testing = True
    idempotent = Idempotent(idem)
    idempotent.init_app(app)

    class Api(MethodView):
        decorators: ClassVar = [idempotent]

    class Prices(Api):
        def get(self):
            return "7"

    class Orders(Api):
        def post(self):
            return {"attempt": current_attempt() is not None}

    app.add_url_rule("/prices", view_func=Prices.as_view("prices"))
    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    assert app.test_client().get("/prices").text == "7"
    assert app.test_client().post("/orders", headers=KEY).json == {"attempt": True}


def test_a_method_that_a_middleware_protects_is_not_told_of(app, idem, caplog):
    app.put("/", endpoint="view")(Idempotent(idem)(lambda: "x"))
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, idem, methods=["PUT"])
    answers = [app.test_client().put("/", headers=KEY) for _ in range(2)]
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert "without protection" not in caplog.text


def test_that_a_method_is_not_protected_is_told_once_of_each_view(app, idem, caplog):
    protect = Idempotent(idem)(required=True)
    app.put("/", endpoint="rename")(protect(lambda: "x"))
    app.put("/other", endpoint="move")(protect(lambda: "x"))
    for path in ("/", "/", "/other", "/other"):
        assert app.test_client().put(path, headers=KEY).status_code == 200
    assert caplog.text.count("rename handles PUT without protection") == 1
    assert caplog.text.count("move handles PUT without protection") == 1
    assert caplog.text.count("methods=['PATCH', 'POST', 'PUT']") == 2


def test_an_unknown_application_is_refused(app):
    app.testing = True
    app.post("/", endpoint="view")(Idempotent()(lambda: "x"))
    with pytest.raises(ConfigError, match="init_app"):
        app.test_client().post("/", headers=KEY)


def test_an_engine_that_is_given_by_its_url_is_closed(app, sqlite_url):
    idempotent = Idempotent(sqlite_url)
    app.post("/", endpoint="view")(idempotent(lambda: "x"))
    post_twice(app)
    idempotent.close()
    assert app.test_client().post("/", headers=KEY).status_code == 503


def test_the_middleware_protects_every_view_and_decorated_ones_only_once(app, idem):
    idempotent = Idempotent(idem, required=True)
    idempotent.init_app(app, middleware=True, exclude=["/login"])

    @app.post("/login")
    def login():
        return {"attempt": current_attempt() is not None}

    @app.post("/pay")
    def pay():
        return {"attempt": current_attempt() is not None}

    @app.post("/refund")
    @idempotent
    def refund():
        return {"attempt": current_attempt() is not None}

    client = app.test_client()
    assert client.post("/login").json == {"attempt": False}
    assert client.post("/pay").json["code"] == "key_missing"
    for path in ("/pay", "/refund"):
        told = {"headers": {"Idempotency-Key": path}}
        assert client.post(path, **told).json == {"attempt": True}
        assert client.post(path, **told).headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("pattern", ["/pay", "/shop/pay"])
def test_the_middlewares_paths_hold_below_a_mount(app, idem, pattern):
    Idempotent(idem, required=True).init_app(app, middleware=True, include=[pattern])
    app.post("/pay", endpoint="pay")(lambda: "paid")
    outer = Flask("outer")
    outer.wsgi_app = DispatcherMiddleware(outer.wsgi_app, {"/shop": app})
    client = outer.test_client()
    assert client.post("/shop/pay").json["code"] == "key_missing"
    assert client.post("/shop/pay", headers=KEY).text == "paid"
    assert client.post("/shop/pay", headers=KEY).headers["Idempotent-Replayed"] == "true"


def test_the_middlewares_paths_may_be_configured(idem):
    app = Flask(__name__)
    app.config["SEMEL_INCLUDE"] = ["/pay"]
    app.config["SEMEL_ROUTES"] = [Route("/pay", required=True)]
    Idempotent(idem).init_app(app, middleware=True)
    assert app.test_client().post("/pay").status_code == 400
    assert app.test_client().post("/other").status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Idempotent("memory://", reqired=True),
        lambda: Idempotent("memory://", max_body=-1),
        lambda: Idempotent("nonsense://"),
        lambda: Idempotent(7),
        lambda: Idempotent(header="X_Key"),
        lambda: Idempotent("memory://")(header="X_Key"),
        lambda: Idempotent()(wait=-1),
        lambda: shop(Idempotent("memory://"), SEMEL_REQIRED=True),
        lambda: shop(Idempotent("memory://"), SEMEL_MAX_BODY=-1),
        lambda: shop(Idempotent("memory://"), SEMEL_EXCLUDE=["/login"]),
        lambda: Idempotent("memory://").init_app(Flask(__name__), exclude=["/login"]),
        lambda: Idempotent("memory://").init_app(
            Flask(__name__), middleware=True, exclude="/login"
        ),
    ],
)
def test_what_is_wrong_is_told_before_a_request_comes(wrong):
    with pytest.raises(ConfigError):
        wrong()


# --- on a real server -----------------------------------------------------------------------------


def test_a_client_who_goes_away_finds_the_answer_later(app, idem):
    entered, go_on = threading.Event(), threading.Event()

    @app.post("/")
    @Idempotent(idem)
    def view():
        entered.set()
        go_on.wait(PATIENCE)
        return "done"

    server = make_server(HOST, 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    lines = [
        ("Host", HOST),
        ("Idempotency-Key", "k"),
        ("Content-Length", "0"),
        ("Connection", "close"),
    ]
    try:
        leaving = Connection(server.port).send(head("POST", "/", lines))
        assert entered.wait(PATIENCE)
        leaving.leave()
        go_on.set()
        answer = Connection(server.port).send(head("POST", "/", lines)).answer()
        while answer.status == 409:
            answer = Connection(server.port).send(head("POST", "/", lines)).answer()
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
    assert (answer.body, answer.replayed) == (b"done", True)


@pytest.mark.parametrize("raised", [False, True])
def test_a_location_outside_of_ascii_is_stored_and_replayed_as_it_is_sent(app, idem, raised):
    seen, runs = [], itertools.count(1)

    def stored(status, headers):
        seen.append(headers.get("location"))
        return status == 303

    @app.post("/pay")
    @Idempotent(idem, stored=stored)
    def pay():
        next(runs)
        answer = flask.redirect("/caf\u00e9/\U0001f600?a=b", 303)
        if raised:
            abort(answer)
        return answer

    first, second = (app.test_client().post("/pay", headers=KEY) for _ in range(2))
    sent = "/caf%C3%A9/%F0%9F%98%80?a=b"
    assert (first.status_code, first.location) == (second.status_code, second.location)
    assert (first.status_code, first.location) == (303, sent)
    assert second.headers["Idempotent-Replayed"] == "true"
    assert set(seen) == {sent}
    assert next(runs) == 2
