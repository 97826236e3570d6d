"""What every client does with keys, over real sockets: httpx, httpx on asyncio, requests."""

from __future__ import annotations

import threading

import pytest

from adapters.clients import KINDS
from adapters.scripted import CUT, DROP, answer, scripted_server, stall
from semel import Attempt, new_key
from semel.core.records import Identity
from semel.errors import ConfigError
from semel.http.requests import key_of_lines

OWN = {"Idempotency-Key": "order-42"}


@pytest.fixture
def server():
    with scripted_server() as started:
        yield started


@pytest.fixture
def elsewhere():
    """Another origin: another port."""
    with scripted_server() as started:
        yield started


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def opened(kind):
    """Opens clients, and closes them."""
    clients = []

    def make(**options):
        clients.append(kind(**options))
        return clients[-1]

    yield make
    for one in clients:
        one.close()


@pytest.fixture
def client(opened):
    return opened()


def only_key(server):
    """The one key that every request to the server had."""
    lines = server.keys
    assert all(len(line) == 1 for line in lines), lines
    assert len({line for (line,) in lines}) == 1, lines
    return lines[0][0]


# --- one key per call ----------------------------------------------------------------------


def test_a_call_brings_a_key_in_the_quoted_form(client, server):
    assert client.call(server.url) == (200, b"done")
    assert key_of_lines(server.keys[0], strict=True) is not None
    assert server.received[0].body == b"{}"


def test_every_call_has_a_key_of_its_own(client, server):
    client.call(server.url)
    client.call(server.url, "PATCH")
    assert server.keys[0] != server.keys[1]


def test_new_keys_begin_with_the_name_of_the_application(opened, server):
    opened(app="shop").call(server.url)
    assert key_of_lines(server.keys[0]).startswith("shop-")


def test_every_retry_has_the_key_and_the_body_of_the_first_try(client, server):
    server.says(DROP, answer(503), answer(429))
    assert client.call(server.url) == (200, b"done")
    assert len(server.received) == 4
    only_key(server)
    assert {request.body for request in server.received} == {b"{}"}
    assert len(client.waits) == 3


def test_the_callers_own_key_is_sent_as_it_is(client, server):
    server.says(answer(503))
    assert client.call(server.url, headers=OWN).status == 200
    assert server.keys == [["order-42"], ["order-42"]]


def test_the_header_can_have_another_name(opened, server):
    opened(header="X-Idempotency-Key").call(server.url)
    assert server.keys == [[]]
    assert "x-idempotency-key" in dict(server.received[0].lines)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods_are_left_alone(client, server, method):
    server.says(answer(503, b"no"))
    assert client.call(server.url, method) == (503, b"no")
    assert server.keys == [[]]


def test_more_methods_can_be_protected(opened, server):
    server.says(answer(503))
    assert opened(methods=["PUT"]).call(server.url, "PUT").status == 200
    only_key(server)


# --- when it tries again -------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_answer_that_may_change_is_asked_for_again(client, server, status):
    server.says(answer(status))
    assert client.call(server.url).status == 200
    assert len(server.received) == 2


@pytest.mark.parametrize("status", [201, 400, 401, 404, 409, 422])
def test_a_final_answer_is_the_callers(client, server, status):
    server.says(answer(status, b"final"))
    assert client.call(server.url) == (status, b"final")
    assert len(server.received) == 1
    assert client.waits == []


def test_a_call_that_runs_elsewhere_is_asked_for_when_the_server_says(client, server):
    server.says(answer(409, retry_after="7"))
    assert client.call(server.url).status == 200
    only_key(server)
    assert client.waits[0] >= 7


def test_a_call_that_runs_elsewhere_is_waited_for_beyond_the_retries(opened, server):
    server.says(*[answer(409, retry_after="1")] * 8)
    client = opened(retries=1)
    assert client.call(server.url).status == 200
    only_key(server)
    assert len(client.waits) == 8


def test_a_call_that_runs_elsewhere_is_not_waited_for_without_end(client, server):
    server.says(*[answer(409, b"still running", retry_after="10")] * 9)
    assert client.call(server.url) == (409, b"still running")
    assert 30 < sum(client.waits) <= 60


def test_a_server_that_asks_for_too_long_a_wait_has_said_its_last(client, server):
    server.says(answer(503, b"tomorrow", retry_after="86400"))
    assert client.call(server.url) == (503, b"tomorrow")
    assert client.waits == []


@pytest.mark.parametrize("fault", [DROP, CUT], ids=["dropped", "cut"])
def test_a_broken_connection_is_no_answer(client, server, fault):
    server.says(fault)
    assert client.call(server.url) == (200, b"done")
    only_key(server)
    assert len(server.received) == 2


def test_silence_is_no_answer(client, server, kind):
    server.says(stall, stall, stall, stall)
    with pytest.raises(kind.Silence):
        client.call(server.url, timeout=0.05)
    only_key(server)
    assert len(client.waits) == 3


def test_after_the_last_try_the_caller_gets_the_last_answer(opened, server):
    client = opened(retries=2)
    server.says(answer(503, b"1"), answer(502, b"2"), answer(500, b"3"))
    assert client.call(server.url) == (500, b"3")
    assert len(client.waits) == 2


def test_after_the_last_try_the_caller_gets_the_last_error(opened, server, kind):
    server.says(DROP, DROP)
    with pytest.raises(kind.Error):
        opened(retries=1).call(server.url)
    only_key(server)
    assert len(server.received) == 2


def test_without_retries_a_call_still_has_a_key(opened, server):
    server.says(answer(503))
    assert opened(retries=0).call(server.url).status == 503
    only_key(server)


def test_a_stream_that_can_be_read_once_is_sent_once_with_a_key(client, server):
    server.says(answer(503, b"no"))
    assert client.call(server.url, body=client.chunks()) == (503, b"no")
    only_key(server)
    assert server.received[0].body == b"onetwo"


@pytest.mark.parametrize(
    ("length", "rest"),
    [(b"Connection: close", b"two"), (b"Content-Length: 1048577", b"2" * 1048574)],
    ids=["of no length", "long"],
)
def test_an_answer_that_may_take_long_is_not_held_back(client, server, length, rest):
    gate = threading.Event()

    def in_pieces(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\none")
        gate.wait(30)
        connection.sendall(rest)

    server.says(in_pieces)
    assert client.first_chunk(server.url, then=gate.set) == (b"one", rest)


# --- the key of what was sent --------------------------------------------------------------


def test_the_request_of_an_answer_has_the_key_that_was_sent(client, server):
    server.says(answer(503))
    answered = client.answered(server.url)
    assert answered.request.headers["Idempotency-Key"] == only_key(server)


def test_the_request_of_an_error_has_the_key_that_was_sent(opened, server, kind):
    server.says(DROP, CUT)
    with pytest.raises(kind.Broken) as raised:
        opened(retries=1).call(server.url)
    assert raised.value.request.headers["Idempotency-Key"] == only_key(server)


def test_who_gave_up_sends_the_key_again(opened, server):
    server.says(answer(503))
    key = opened(retries=0).answered(server.url).request.headers["Idempotency-Key"]
    assert opened().call(server.url, headers={"Idempotency-Key": key}).status == 200
    assert only_key(server) == key


def test_the_key_that_an_answer_shows_does_not_go_along_with_a_redirect(
    opened, server, elsewhere, kind
):
    challenge = 'Digest realm="shop", nonce="n", qop="auth", algorithm=MD5'
    server.says(answer(401, www_authenticate=challenge), moved(elsewhere))
    client = opened(only=server.url)
    assert client.call(server.url, auth=kind.Digest("ann", "secret")).status == 200
    only_key(server)
    assert len(server.received) == 2
    assert elsewhere.keys == [[]]


# --- redirects and authentication ----------------------------------------------------------


def moved(server, path="/moved", status=307):
    return answer(status, location=f"{server.url}{path}")


def test_a_redirect_within_the_origin_keeps_the_key(client, server):
    server.says(moved(server), answer(503))
    assert client.call(server.url).status == 200
    assert [request.target for request in server.received] == ["/", "/moved", "/moved"]
    only_key(server)


def test_no_key_goes_to_another_origin(client, server, elsewhere):
    server.says(moved(elsewhere))
    elsewhere.says(moved(elsewhere, "/further"))
    assert client.call(server.url) == (200, b"done")
    assert [len(keys) for keys in server.keys] == [1]
    assert elsewhere.keys == [[], []]
    assert [request.method for request in elsewhere.received] == ["POST", "POST"]


def test_the_callers_own_key_does_not_go_to_another_origin_either(client, server, elsewhere):
    server.says(moved(elsewhere))
    client.call(server.url, headers=OWN)
    assert (server.keys, elsewhere.keys) == ([["order-42"]], [[]])


def test_a_key_that_the_caller_gave_to_another_method_stays_at_its_origin(
    client, server, elsewhere
):
    server.says(moved(elsewhere))
    client.call(server.url, "PUT", headers=OWN)
    assert (server.keys, elsewhere.keys) == ([["order-42"]], [[]])


def test_what_has_no_key_is_not_sent_twice(client, server, elsewhere):
    server.says(moved(elsewhere))
    elsewhere.says(answer(503, b"no"))
    assert client.call(server.url) == (503, b"no")
    assert len(elsewhere.received) == 1


def test_no_key_goes_to_an_origin_that_has_a_plain_transport(opened, server, elsewhere):
    server.says(moved(elsewhere))
    opened(only=f"{server.url}").call(server.url)
    assert [len(keys) for keys in server.keys] == [1]
    assert elsewhere.keys == [[]]


def test_a_redirect_back_to_the_first_origin_has_the_key_again(client, server, elsewhere):
    server.says(moved(elsewhere))
    elsewhere.says(moved(server, "/back"))
    assert client.call(server.url).status == 200
    only_key(server)
    assert len(server.received) == 2


def test_a_redirect_to_a_page_is_a_plain_get(client, server):
    server.says(moved(server, status=303))
    assert client.call(server.url).status == 200
    assert [request.method for request in server.received] == ["POST", "GET"]
    assert [len(keys) for keys in server.keys] == [1, 0]


def test_an_authentication_keeps_the_key(client, server, kind):
    challenge = 'Digest realm="shop", nonce="n", qop="auth", algorithm=MD5'
    server.says(answer(401, www_authenticate=challenge))
    assert client.call(server.url, auth=kind.Digest("ann", "secret")).status == 200
    assert len(server.received) == 2
    only_key(server)


# --- requests that are sent again by hand --------------------------------------------------


def test_a_request_that_failed_keeps_its_key_when_it_is_sent_again(opened, server, kind):
    client = opened(retries=0)
    request = client.request(server.url)
    server.says(DROP, answer(503))
    with pytest.raises(kind.Error):
        client.send(request)
    assert client.send(request).status == 503
    assert client.send(request).status == 200
    only_key(server)


def test_a_request_that_succeeded_is_another_call_when_it_is_sent_again(client, server):
    request = client.request(server.url)
    client.send(request)
    client.send(request)
    assert server.keys[0] != server.keys[1]


def test_a_key_put_on_a_request_later_wins(opened, server):
    client = opened(retries=0)
    request = client.request(server.url)
    server.says(answer(503))
    client.send(request)
    request.headers.update(OWN)
    client.send(request)
    assert server.keys[1] == ["order-42"]


# --- inside an attempt ---------------------------------------------------------------------


def attempt(key="order:42", number=1):
    return Attempt(Identity("orders", key), number)


def test_keys_of_an_attempt_are_the_same_when_it_runs_again(client, server):
    def ship():
        client.call(f"{server.url}/charges?at={new_key()}")
        client.call(f"{server.url}/charges")
        client.call(f"{server.url}/parcels")

    for number in (1, 2):
        with attempt(number=number):
            ship()
    first, second = server.keys[:3], server.keys[3:]
    assert first == second
    assert len({key for (key,) in first}) == 3


def test_keys_of_an_attempt_are_derived_from_what_is_called(client, server):
    running = attempt()
    with running:
        client.call(f"{server.url}/charges")
    expected = running.derive(f"POST:{server.url}/charges")
    assert server.keys == [[f'"{expected}"']]


def test_keys_of_two_operations_differ(client, server):
    for key in ("order:42", "order:43"):
        with attempt(key):
            client.call(server.url)
    assert server.keys[0] != server.keys[1]


def test_retries_and_redirects_inside_an_attempt_are_one_call(client, server):
    server.says(answer(503), moved(server))
    with attempt():
        client.call(server.url)
    only_key(server)
    assert len(server.received) == 3


# --- options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"header": "no header"},
        {"methods": ["GET"]},
        {"methods": "POST"},
        {"retries": -1},
        {"retries": 101},
        {"retries": True},
        {"backoff": 0},
        {"backoff_max": -1},
        {"retry_after_max": "1"},
        {"retry_for": float("inf")},
        {"app": "my shop"},
        {"app": "é"},
    ],
    ids=str,
)
def test_a_bad_option_is_refused_when_the_client_is_made(kind, options):
    with pytest.raises(ConfigError):
        kind(**options)


def test_an_option_that_does_not_exist_is_named(kind):
    with pytest.raises(ConfigError, match="no option 'retry'; known: header, "):
        kind(retry=3)
