"""What is WSGI's own: start_response, write, close, files, bodies of unknown length.

A validator stands on both sides of the middleware: it must be a good application to the server, and a good
server to the application.
"""

from __future__ import annotations

import gc
import io
import json
import sys
import tracemalloc
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import pytest
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from semel import ConfigError, Idempotency, OutcomeUnknown, Policy, current_attempt
from semel.adapters.wsgi import IdempotencyMiddleware
from semel.core.records import State
from semel.http import Route

TEXT = [("Content-Type", "text/plain")]
EVENTS = [("Content-Type", "text/event-stream")]


@pytest.fixture
def idem():
    with Idempotency("memory://") as engine:
        yield engine


class Source:
    """What an application gives to its server."""

    def __init__(self, chunks):
        self._chunks = iter(chunks)
        self.closed = 0

    def __iter__(self):
        return self._chunks

    def close(self):
        self.closed += 1


class Answer:
    """What a server got, and would have sent."""

    def __init__(self, app, environ):
        self.started = []
        self.chunks = app(environ, self._start)

    def _start(self, status, headers, exc_info=None):
        assert not self.started
        self.started.append((status, headers))
        return lambda _: pytest.fail("a middleware has no need of write")

    @property
    def status(self):
        return int(self.started[-1][0][:3])

    @property
    def headers(self):
        return dict(self.started[-1][1])

    def read(self):
        """Send it to the end, as a server does."""
        try:
            self.body = b"".join(self.chunks)
        finally:
            self.close()
        return self

    def close(self):
        if hasattr(self.chunks, "close"):
            self.chunks.close()


def environ(key="k", body=b"", **more):
    given = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/pay",
        "QUERY_STRING": "",
        "SCRIPT_NAME": "",
        "wsgi.input": io.BytesIO(body),
        "CONTENT_LENGTH": str(len(body)),
        "CONTENT_TYPE": "text/plain",
    }
    if key is not None:
        given["HTTP_IDEMPOTENCY_KEY"] = key
    given.update(more)
    setup_testing_defaults(given)
    return {name: value for name, value in given.items() if value is not None}


def post(app, **told):
    return Answer(app, environ(**told)).read()


def good(middleware):
    """The middleware as the application of a strict server."""
    return validator(middleware)


def guarded(app, idem, **options):
    """A strict server on both sides of the middleware."""
    return good(IdempotencyMiddleware(validator(app), idem, **options))


# --- mounted applications -------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["/pay", "/m/pay", "/v1/m/pay"])
def test_patterns_match_in_a_mount_below_the_servers_script_name(idem, pattern):
    middleware = IdempotencyMiddleware(echo, idem, include=[pattern], required=True)
    server = DispatcherMiddleware(echo, {"/m": middleware})
    told = {"SCRIPT_NAME": "/v1", "PATH_INFO": "/m/pay", "key": None}
    assert post(server, **told).status == 400
    excluding = IdempotencyMiddleware(echo, idem, exclude=[pattern], required=True)
    assert post(DispatcherMiddleware(echo, {"/m": excluding}), **told).status == 200


@pytest.mark.parametrize("pattern", ["/pay", "/caf\xe9/pay"])
def test_patterns_match_with_and_without_the_script_name(idem, pattern):
    told = {"SCRIPT_NAME": "/caf\xc3\xa9", "PATH_INFO": "/pay", "key": None}
    assert (
        post(IdempotencyMiddleware(echo, idem, include=[pattern], required=True), **told).status
        == 400
    )
    excluding = IdempotencyMiddleware(echo, idem, exclude=[pattern], required=True)
    assert post(excluding, **told).status == 200


# --- methods --------------------------------------------------------------------------------------


def test_a_method_in_lower_case_is_the_same_method(idem):
    middleware = IdempotencyMiddleware(echo, idem, required=True)
    assert post(middleware, key=None, REQUEST_METHOD="post").status == 400
    assert post(middleware, REQUEST_METHOD="post").status == 200
    for method in ("POST", "post", "Post"):
        assert post(middleware, REQUEST_METHOD=method).headers["idempotent-replayed"] == "true"


# --- how an application may answer ----------------------------------------------------------------


def test_a_generator_that_begins_its_answer_with_its_first_chunk_is_replayed(idem):
    runs = []

    def app(environ, start_response):
        runs.append(current_attempt().key)
        start_response("201 Created", TEXT)
        yield b"one, "
        yield b"two"

    middleware = good(IdempotencyMiddleware(app, idem))
    first, second = post(middleware), post(middleware)
    assert (first.status, first.body) == (second.status, second.body) == (201, b"one, two")
    assert second.headers["idempotent-replayed"] == "true"
    assert first.headers["Content-Length"] == second.headers["content-length"] == "8"
    assert runs == ["k"]


def test_what_is_written_comes_before_what_is_returned(idem):
    def app(environ, start_response):
        write = start_response("200 OK", TEXT)
        write(b"written, ")
        return [b"returned"]

    middleware = guarded(app, idem)
    assert post(middleware).body == post(middleware).body == b"written, returned"


def test_an_application_may_only_write(idem):
    def app(environ, start_response):
        start_response("200 OK", TEXT)(b"written")
        return []

    middleware = guarded(app, idem)
    assert post(middleware).body == post(middleware).body == b"written"


def failing(*chunks):
    """An application that has a page for its own errors."""

    def answer(start_response):
        start_response("200 OK", TEXT)
        yield from chunks
        raise OSError("broken")

    def app(environ, start_response):
        try:
            yield from answer(start_response)
        except OSError:
            start_response("500 Broken", TEXT, sys.exc_info())
            yield b"sorry"

    return app


def test_an_answer_that_fails_on_its_way_is_replaced_by_the_error_page(idem):
    answer = post(IdempotencyMiddleware(failing(b"half of it"), idem))
    assert (answer.status, answer.body) == (500, b"sorry")
    assert idem.peek("k", scope="http").state is State.FAILED


def test_an_application_that_begins_twice_is_wrong(idem):
    def app(environ, start_response):
        start_response("200 OK", TEXT)
        start_response("200 OK", TEXT)
        return []

    with pytest.raises(AssertionError, match="twice"):
        post(IdempotencyMiddleware(app, idem))
    assert idem.peek("k", scope="http").state is State.FAILED


@pytest.mark.parametrize("chunks", [[], [b"a body"]])
def test_an_application_that_never_begins_is_wrong(idem, chunks):
    with pytest.raises(AssertionError, match="without a response"):
        post(IdempotencyMiddleware(lambda environ, start_response: chunks, idem))
    assert idem.peek("k", scope="http").state is State.FAILED


def test_an_application_that_raises_frees_the_key_and_its_source_is_closed(idem):
    source = None

    def app(environ, start_response):
        nonlocal source

        def chunks():
            yield b"one"
            raise OSError("broken")

        start_response("200 OK", TEXT)
        source = Source(chunks())
        return source

    with pytest.raises(OSError, match="broken"):
        post(guarded(app, idem))
    assert source.closed == 1
    assert idem.peek("k", scope="http").state is State.FAILED


# --- close ----------------------------------------------------------------------------------------


def test_close_is_called_once_after_the_answer_is_saved_and_sent(idem):
    source = Source([b"one"])
    states = []
    source_close = source.close
    source.close = lambda: (states.append(idem.peek("k", scope="http").state), source_close())

    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return source

    answer = Answer(IdempotencyMiddleware(app, idem), environ())
    assert b"".join(answer.chunks) == b"one"
    assert states == []
    answer.close()
    assert states == [State.SUCCEEDED]
    assert source.closed == 1


def test_an_error_in_close_reaches_the_server_and_changes_nothing(idem):
    class Broken(Source):
        def close(self):
            super().close()
            raise OSError("cannot close")

    source = Broken([b"one"])

    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return source

    middleware = IdempotencyMiddleware(app, idem)
    with pytest.raises(OSError, match="cannot close"):
        post(middleware)
    assert source.closed == 1
    assert post(middleware).headers["idempotent-replayed"] == "true"


def test_a_server_that_refuses_the_headers_leaves_nothing_open(idem):
    source = Source([b"one"])

    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return source

    def refusing(status, headers, exc_info=None):
        raise ValueError("no such header")

    with pytest.raises(ValueError, match="no such header"):
        IdempotencyMiddleware(app, idem)(environ(), refusing)
    assert source.closed == 1


def test_the_source_is_closed_when_another_attempt_took_over(idem):
    source = Source([b"one"])

    def app(environ, start_response):
        idem.forget("k", scope="http")
        start_response("200 OK", TEXT)
        return source

    answer = post(guarded(app, idem))
    assert answer.status == 409
    assert b"lease_lost" in answer.body
    assert source.closed == 1


# --- files ----------------------------------------------------------------------------------------


class ServersOwn:
    """A wrapper that only its server can read, such as uWSGI's."""

    def __init__(self, file, size=0):
        raise AssertionError("a file must not go past the middleware")


def test_a_file_goes_through_the_middleware_and_is_closed(idem):
    files = []

    def app(environ, start_response):
        start_response("200 OK", TEXT)
        files.append(io.BytesIO(b"a file" * 1000))
        return environ["wsgi.file_wrapper"](files[-1])

    middleware = good(IdempotencyMiddleware(app, idem))
    first = post(middleware, **{"wsgi.file_wrapper": ServersOwn})
    assert first.body == b"a file" * 1000
    assert post(middleware).body == first.body
    assert [file.closed for file in files] == [True]


def test_without_a_key_the_server_sends_files_its_own_way(idem):
    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return environ["wsgi.file_wrapper"](io.BytesIO(b"a file"))

    answer = Answer(
        IdempotencyMiddleware(app, idem), environ(key=None, **{"wsgi.file_wrapper": FileWrapper})
    )
    assert isinstance(answer.chunks, FileWrapper)
    answer.close()


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
def test_an_event_leaves_before_the_next_one_is_made(idem, lazy):
    made = []

    def events():
        for number in range(3):
            made.append(number)
            yield b"data: %d\n\n" % number

    def eager(environ, start_response):
        start_response("200 OK", EVENTS)
        return events()

    def lazily(environ, start_response):
        start_response("200 OK", EVENTS)
        yield from events()

    answer = Answer(good(IdempotencyMiddleware(lazily if lazy else eager, idem)), environ())
    assert made == ([0] if lazy else [])  # the head does not wait for an event that may never come
    assert answer.headers["idempotent-unprotected"] == "stream"
    sent = iter(answer.chunks)
    assert next(sent) == b"data: 0\n\n"
    assert made == [0]
    assert list(sent) == [b"data: 1\n\n", b"data: 2\n\n"]
    answer.close()
    assert idem.peek("k", scope="http").state is State.FAILED  # free: a retry runs again


def large(count, seen=None, closed=None):
    """An application that answers with chunks of 10 bytes."""

    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return Chunks()

    class Chunks:
        def __iter__(self):
            for number in range(count):
                if seen is not None:
                    seen.append(number)
                yield b"%010d" % number

        def close(self):
            if closed is not None:
                closed.append(True)

    return app


def test_an_answer_beyond_the_cap_is_sent_as_it_comes_and_recorded_before_its_last_chunk(idem):
    seen, closed = [], []
    middleware = guarded(large(6, seen, closed), idem, max_response=25)
    answer = Answer(middleware, environ())
    sent, received = iter(answer.chunks), []
    while len(received) < 5:
        assert idem.peek("k", scope="http").state is State.PROCESSING
        received.append(next(sent))
        assert len(seen) <= len(received) + 3  # it is not read ahead
    received.append(next(sent))
    assert idem.peek("k", scope="http").state is State.SUCCEEDED
    assert list(sent) == []
    answer.close()
    assert b"".join(received) == b"".join(b"%010d" % number for number in range(6))
    assert closed == [True]
    again = post(middleware)
    assert again.status == 200
    assert b"result_omitted" in again.body
    assert len(seen) == 6


def test_a_client_who_leaves_in_the_middle_of_a_large_answer_does_not_end_it(idem):
    seen, closed = [], []
    answer = Answer(guarded(large(9, seen, closed), idem, max_response=25), environ())
    next(iter(answer.chunks))
    answer.close()
    assert len(seen) == 9
    assert closed == [True]
    assert idem.peek("k", scope="http").state is State.SUCCEEDED


def test_a_large_answer_that_fails_on_its_way_is_a_failure(idem):
    closed = []

    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return Source(chunks())

    def chunks():
        try:
            yield b"x" * 30
            yield b"y"
            raise OSError("broken")
        finally:
            closed.append(True)

    answer = Answer(guarded(app, idem, max_response=25), environ())
    with pytest.raises(OSError, match="broken"):
        answer.read()
    assert closed == [True]
    assert idem.peek("k", scope="http").state is State.FAILED


@pytest.mark.parametrize("collected", [True, False])
def test_a_large_answer_that_is_dropped_is_done_only_if_it_was_read_to_its_end(idem, collected):
    """The garbage collector closes the stream itself, which is not its end."""
    made = []

    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return (made.append(part) or b"%010d" % part for part in range(9))

    gc.collect()
    gc.disable()
    try:
        answer = Answer(IdempotencyMiddleware(app, idem, max_response=25), environ())
        answer.itself = answer if collected else None
        del answer
        gc.collect()
    finally:
        gc.enable()
    assert len(made) == (3 if collected else 9)
    ended = State.FAILED if collected else State.SUCCEEDED
    assert idem.peek("k", scope="http").state is ended


def test_an_error_page_cannot_replace_what_is_sent_already(idem):
    middleware = IdempotencyMiddleware(failing(b"x" * 30, b"y"), idem, max_response=25)
    answer = Answer(middleware, environ())
    with pytest.raises(OSError, match="broken"):
        answer.read()
    assert answer.status == 200
    assert idem.peek("k", scope="http").state is State.FAILED


# --- bodies ---------------------------------------------------------------------------------------


def echo(environ, start_response):
    length = environ.get("CONTENT_LENGTH")
    body = environ["wsgi.input"].read(int(length) if length else -1)
    start_response("200 OK", TEXT)
    return [body]


class Socket:
    """A connection: whoever reads past the end of the body would wait for ever."""

    def __init__(self, body, ends=False):
        self._body = io.BytesIO(body)
        self._left, self._ends = len(body), ends
        self.asked = 0

    def read(self, size):
        self.asked += size
        assert self._ends or size <= self._left, "read beyond the end"
        data = self._body.read(min(size, 7))  # a little at a time, as a network does
        self._left -= len(data)
        return data


def test_a_body_of_known_length_is_read_to_its_end_and_no_further(idem):
    source = Socket(b"exactly this")
    middleware = IdempotencyMiddleware(echo, idem)
    answer = post(middleware, **{"wsgi.input": source, "CONTENT_LENGTH": "12"})
    assert answer.body == b"exactly this"


def test_a_body_whose_end_the_server_tells_is_read_to_its_end(idem):
    told = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True}
    middleware = IdempotencyMiddleware(echo, idem)
    answer = post(middleware, **told, **{"wsgi.input": Socket(b"in chunks", ends=True)})
    assert answer.body == b"in chunks"
    other = post(middleware, **told, **{"wsgi.input": Socket(b"other chunks", ends=True)})
    assert other.status == 422


@pytest.mark.parametrize("length", ["6", "0", "100", None])
def test_a_length_beside_chunks_does_not_cut_the_body(idem, length):
    middleware = IdempotencyMiddleware(echo, idem)
    told = {
        "CONTENT_LENGTH": length,
        "HTTP_TRANSFER_ENCODING": "chunked",
        "wsgi.input_terminated": True,
    }
    answer = post(middleware, **told, **{"wsgi.input": Socket(b"pay 10 to ann", ends=True)})
    assert (answer.status, answer.body) == (200, b"pay 10 to ann")
    other = post(middleware, **told, **{"wsgi.input": Socket(b"pay 10 to eve", ends=True)})
    assert (other.status, json.loads(other.body)["code"]) == (422, "payload_mismatch")


def test_of_an_endless_body_only_a_little_more_than_the_cap_is_read(idem):
    class Endless:
        given = 0

        def read(self, size):
            self.given += size
            return b"x" * size

    endless = Endless()
    middleware = IdempotencyMiddleware(echo, idem, max_body=100_000)
    told = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True, "wsgi.input": endless}
    assert post(middleware, **told).status == 413
    assert endless.given == 100_001


def test_a_body_in_tiny_chunks_needs_the_memory_of_its_bytes(idem):
    """As werkzeug's server gives it: what a read returns is one chunk of the client's."""

    class Chunks(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 2))

    told = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True}
    body, source, lengths = b"xy" * 100_000, None, []

    def app(environ, start_response):
        lengths.append(len(environ["wsgi.input"].read()))
        return echo({**environ, "wsgi.input": io.BytesIO()}, start_response)

    source = Chunks(body)
    tracemalloc.start()
    try:
        post(IdempotencyMiddleware(app, idem), **told, **{"wsgi.input": source})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lengths == [len(body)]
    assert peak < 10 * len(body)


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({"CONTENT_LENGTH": "7", "wsgi.input": Socket(b"short", ends=True)}, 400),
        ({"CONTENT_LENGTH": "-1"}, 400),
        ({"CONTENT_LENGTH": "five"}, 400),
        ({"CONTENT_LENGTH": "1048577"}, 413),
        ({"CONTENT_LENGTH": "9" * 30}, 413),
        ({"CONTENT_LENGTH": "9" * 5000}, 413),
        # In chunks, on a server that does not say that it ends: it must not count as empty.
        ({"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked"}, 400),
        ({"CONTENT_LENGTH": "0", "HTTP_TRANSFER_ENCODING": "chunked"}, 400),
        ({"body": b"pay 10", "HTTP_TRANSFER_ENCODING": "chunked"}, 400),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_before_the_claim(idem, told, status):
    assert post(IdempotencyMiddleware(echo, idem), **told).status == status
    assert idem.peek("k", scope="http") is None


def test_a_client_who_goes_away_while_it_sends_is_refused_before_the_claim(idem):
    class Gone:
        def read(self, size):
            raise ConnectionResetError

    told = {"CONTENT_LENGTH": "5", "wsgi.input": Gone()}
    assert post(IdempotencyMiddleware(echo, idem), **told).status == 400
    assert idem.peek("k", scope="http") is None


class Wrong:
    def read(self, size):
        raise LookupError("wrong chunks")


def test_chunks_that_a_server_cannot_read_are_the_clients_mistake_whatever_it_raises(idem):
    told = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input": Wrong()}
    answer = post(IdempotencyMiddleware(echo, idem), **told, **{"wsgi.input_terminated": True})
    assert (answer.status, json.loads(answer.body)["code"]) == (400, "body_incomplete")


def test_an_error_of_what_reads_a_body_of_known_length_is_not_hidden(idem):
    with pytest.raises(LookupError):
        post(IdempotencyMiddleware(echo, idem), **{"CONTENT_LENGTH": "5", "wsgi.input": Wrong()})


def test_a_request_without_length_has_no_body(idem):
    def app(environ, start_response):
        start_response("200 OK", TEXT)
        return [environ["wsgi.input"].read()]

    unread = Socket(b"")
    answer = post(IdempotencyMiddleware(app, idem), **{"CONTENT_LENGTH": "", "wsgi.input": unread})
    assert answer.body == b""
    assert unread.asked == 0


def test_a_body_that_was_read_for_its_key_is_there_for_an_unprotected_application(idem):
    def no_key(request, body):
        assert body == b"a body"

    middleware = guarded(echo, idem, header=None, key=no_key)
    assert post(middleware, body=b"a body").body == b"a body"


# --- the rest -------------------------------------------------------------------------------------


def test_the_whole_path_counts_and_need_not_be_text(idem):
    paths = []

    def only(request):
        paths.append(request.path)
        return "ann"

    middleware = guarded(echo, idem, tenant=only)
    post(middleware, SCRIPT_NAME="/shop", PATH_INFO="/caf\xc3\xa9/\xff")
    assert paths == ["/shop/caf\u00e9/\udcff"]


def test_an_unknown_status_is_replayed_with_a_line_of_its_own(idem):
    def app(environ, start_response):
        start_response("299 Odd", TEXT)
        return [b""]

    middleware = guarded(app, idem)
    post(middleware)
    assert post(middleware).started[0][0] == "299 Unknown"


def test_no_length_is_added_to_an_answer_that_has_no_body(idem):
    def app(environ, start_response):
        start_response("204 No Content", [])
        return []

    answer = post(guarded(app, idem))
    assert answer.headers == {}
    assert answer.body == b""


def test_a_middleware_further_inside_lets_a_protected_request_pass(idem):
    middleware = IdempotencyMiddleware(IdempotencyMiddleware(echo, idem), idem)
    assert post(middleware).status == post(middleware).status == 200


@pytest.mark.parametrize("options", [{}, {"routes": [Route("/pay", header="X_Key")]}])
def test_a_header_with_an_underscore_could_never_come(idem, options):
    options = options or {"header": "Idempotency_Key"}
    with pytest.raises(ConfigError, match="cannot tell _ from -"):
        IdempotencyMiddleware(echo, idem, **options)


@pytest.mark.parametrize(
    "options", [{"header": 7}, {"routes": ["/pay"]}, {"reqired": True}, {"policy": "payment"}]
)
def test_a_wrong_option_is_refused_when_the_middleware_is_made(idem, options):
    with pytest.raises(ConfigError):
        IdempotencyMiddleware(echo, idem, **options)


def test_an_engine_that_was_opened_here_is_closed_here(sqlite_url):
    middleware = IdempotencyMiddleware(echo, sqlite_url, policy=Policy(ttl=60))
    assert post(middleware).status == 200
    middleware.close()
    assert post(middleware).status == 503


def test_an_engine_that_was_given_stays_open(idem):
    middleware = IdempotencyMiddleware(echo, idem)
    middleware.close()
    assert post(middleware).status == 200


def test_an_error_of_the_engine_says_with_which_status_a_request_ended():
    def fail(environ, start_response):
        start_response("502 Bad Gateway", [])
        return [b""]

    with Idempotency("memory://", policy=Policy(abandoned="hold")) as idem:
        protected = IdempotencyMiddleware(fail, idem, stored=lambda status: "unknown")
        environ = {"REQUEST_METHOD": "POST", "HTTP_IDEMPOTENCY_KEY": "k"}
        setup_testing_defaults(environ)
        answer = protected(environ, lambda *_: None)
        assert list(answer) == [b""]
        answer.close()
        with pytest.raises(OutcomeUnknown) as raised:
            idem.execute("k", lambda: "never", scope="http")
    assert raised.value.text == (
        "attempt 1 may have taken effect: it answered with 502, and its record is held"
    )
