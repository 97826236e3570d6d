"""WSGI on real servers: what they make of requests, and of what the middleware gives them to send."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import waitress.server
from werkzeug.serving import make_server

from adapters.wsgi_shop import EVENTS, shop
from semel.adapters.wsgi import IdempotencyMiddleware
from web.client import HOST, PATIENCE, Connection, chunked, head

TESTS = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def gunicorn(store):
    with socket.create_server((HOST, 0)) as listening:
        port, fd = listening.getsockname()[1], listening.fileno()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "--bind", f"fd://{fd}", "--threads", "4"),
                *("--log-level", "warning", "adapters.wsgi_shop:made()"),
            ],
            cwd=TESTS,
            env={**os.environ, "SHOP_STORE": store, "PYTHONPATH": str(TESTS)},
            pass_fds=[fd],
        )
        try:
            yield port
        finally:
            process.terminate()
            process.wait(PATIENCE)


@contextlib.contextmanager
def on_waitress(store):
    middleware = IdempotencyMiddleware(shop, store, max_response=4000)
    server = waitress.server.create_server(middleware, host=HOST, port=0, threads=2)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.effective_port
    finally:
        server.trigger.pull_trigger(server.close)
        server.task_dispatcher.shutdown()
        thread.join(PATIENCE)
        middleware.close()


@contextlib.contextmanager
def on_werkzeug(store):
    middleware = IdempotencyMiddleware(shop, store, max_response=4000)
    server = make_server(HOST, 0, middleware, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.port
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
        middleware.close()


SERVERS = {"gunicorn": gunicorn, "waitress": on_waitress, "werkzeug": on_werkzeug}


@pytest.fixture(scope="module", params=SERVERS)
def port(request, tmp_path_factory):
    with SERVERS[request.param](
        f"sqlite:///{tmp_path_factory.mktemp('wsgi') / 'semel.db'}"
    ) as port:
        yield port


@pytest.fixture
def key():
    return uuid.uuid4().hex


def post(port, path, *lines, body=b"", chunks=None):
    told = [("Host", HOST), ("Connection", "close"), *lines]
    if chunks is None:
        told.append(("Content-Length", str(len(body))))
    else:
        told.append(("Transfer-Encoding", "chunked"))
        body = chunked(chunks)
    return Connection(port).send(head("POST", path, told) + body).answer()


def run_of(answer):
    return answer.header("x-run")


def test_an_answer_is_replayed(port, key):
    first, second = (post(port, "/pay", ("Idempotency-Key", key), body=b"5") for _ in range(2))
    assert (first.status, first.body) == (second.status, second.body) == (201, b"said: 5")
    assert (first.replayed, second.replayed) == (False, True)
    assert run_of(first) == run_of(second)
    assert first.header("content-length") == second.header("content-length") == "7"
    assert first.header("transfer-encoding") is second.header("transfer-encoding") is None


def test_a_body_in_chunks_is_read_and_compared(port, key):
    line = ("Idempotency-Key", key)
    first = post(port, "/pay", line, chunks=[b"in ", b"chunks"])
    assert first.body == b"said: in chunks"
    assert run_of(post(port, "/pay", line, chunks=[b"in chunks"])) == run_of(first)
    assert post(port, "/pay", line, chunks=[b"in ", b"others"]).status == 422


@pytest.mark.parametrize("body", [b"zz\r\nabc\r\n0\r\n\r\n", b"3\r\nabcdef\r\n0\r\n\r\n"])
def test_wrong_chunks_are_the_clients_mistake(port, key, body):
    told = [("Host", HOST), ("Connection", "close"), ("Idempotency-Key", key)]
    request = head("POST", "/pay", [*told, ("Transfer-Encoding", "chunked")]) + body
    assert Connection(port).send(request).end().answer().status == 400
    assert not post(port, "/pay", ("Idempotency-Key", key), body=b"5").replayed


@pytest.mark.parametrize("length", ["6", "0"])
def test_a_length_beside_chunks_is_refused_or_cuts_nothing(port, key, length):
    def pay(body):
        told = [("Host", HOST), ("Connection", "close"), ("Idempotency-Key", key)]
        told += [("Content-Length", length), ("Transfer-Encoding", "chunked")]
        return Connection(port).send(head("POST", "/pay", told) + chunked([body])).answer()

    first, other = pay(b"pay 10 to ann"), pay(b"pay 10 to eve")
    if first.status == other.status == 400:
        return  # the server itself refuses it
    assert (first.status, first.body) == (201, b"said: pay 10 to ann")
    assert (other.status, other.code) == (422, "payload_mismatch")


def test_an_underscore_does_not_smuggle_a_key(port, key):
    """Neither in the place of the true header nor beside it."""
    first, second = (post(port, "/pay", ("Idempotency_Key", key)) for _ in range(2))
    assert run_of(first) != run_of(second)
    both = post(port, "/pay", ("Idempotency-Key", key), ("Idempotency_Key", "another"))
    again = post(port, "/pay", ("Idempotency-Key", key))
    assert run_of(both) == run_of(again)
    assert again.replayed


def test_two_lines_are_two_keys(port, key):
    answer = post(port, "/pay", ("Idempotency-Key", key), ("Idempotency-Key", key))
    assert (answer.status, answer.code) == (400, "invalid_key")


def test_a_file_is_sent_whole_and_replayed(port, key):
    first, second = (post(port, "/file", ("Idempotency-Key", key)) for _ in range(2))
    assert first.body == second.body == b"a file of this server" * 100
    assert run_of(first) == run_of(second)


def test_what_is_written_the_old_way_is_replayed(port, key):
    first, second = (post(port, "/written", ("Idempotency-Key", key)) for _ in range(2))
    assert first.body == second.body == b"written, returned"
    assert run_of(first) == run_of(second)


def test_an_answer_beyond_the_cap_reaches_its_first_caller_whole(port, key):
    first, second = (post(port, "/large", ("Idempotency-Key", key)) for _ in range(2))
    assert first.body == b"".join(b"%08d" % part for part in range(1000))
    assert (second.status, second.code) == (200, "result_omitted")


def test_events_pass_and_run_again(port, key):
    first, second = (post(port, "/events", ("Idempotency-Key", key)) for _ in range(2))
    assert first.body == second.body == b"".join(b"data: %d\n\n" % event for event in range(EVENTS))
    assert first.header("idempotent-unprotected") == "stream"
    assert run_of(first) != run_of(second)


@pytest.fixture
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.fault(56, 57)
@pytest.mark.usefixtures("uncollected")
def test_a_client_who_leaves_a_large_answer_holds_no_key(port, key):
    """Whatever the garbage collector does: the server closes what it does not send."""
    for number in range(3):
        told = [("Host", HOST), ("Idempotency-Key", f"{key}{number}"), ("Content-Length", "0")]
        with socket.create_connection((HOST, port)) as client:
            client.sendall(head("POST", "/huge", told))
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + PATIENCE
    for number in range(3):
        while (answer := post(port, "/huge", ("Idempotency-Key", f"{key}{number}"))).status == 409:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (answer.status, answer.code) == (200, "result_omitted")
