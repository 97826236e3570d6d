"""What only httpx has: transports that are wrapped, and extensions."""

from __future__ import annotations

import httpx
import pytest

from adapters.scripted import answer, scripted_server
from semel.adapters.httpx import AsyncIdempotentTransport, IdempotentTransport
from semel.errors import ConfigError


def test_requests_go_through_the_wrapped_transport():
    seen = []

    def handle(request):
        seen.append(request.headers["idempotency-key"])
        return httpx.Response(503 if len(seen) == 1 else 200, json={"paid": True})

    transport = IdempotentTransport(httpx.MockTransport(handle), sleep=lambda _: None)
    with httpx.Client(transport=transport) as client:
        assert client.post("https://bank.example/charges").json() == {"paid": True}
    assert len(seen) == 2
    assert len(set(seen)) == 1


@pytest.mark.parametrize("wrapped", [httpx.AsyncHTTPTransport(), "https://bank.example"])
def test_a_transport_of_the_wrong_kind_is_refused(wrapped):
    with pytest.raises(ConfigError):
        IdempotentTransport(wrapped)


def test_an_async_transport_needs_an_async_one():
    with pytest.raises(ConfigError):
        AsyncIdempotentTransport(httpx.HTTPTransport())


async def test_a_client_of_the_other_kind_is_told_which_transport_it_takes():
    with pytest.raises(ConfigError, match="AsyncClient takes an AsyncIdempotentTransport"):
        await httpx.AsyncClient(transport=IdempotentTransport()).get("https://bank.example/")
    with pytest.raises(ConfigError, match="AsyncClient takes an AsyncIdempotentTransport"):
        await httpx.AsyncClient(transport=IdempotentTransport()).__aenter__()
    with pytest.raises(ConfigError, match="Client takes an IdempotentTransport"):
        httpx.Client(transport=AsyncIdempotentTransport()).get("https://bank.example/")
    with pytest.raises(ConfigError, match="Client takes an IdempotentTransport"):
        httpx.Client(transport=AsyncIdempotentTransport()).__enter__()


def test_extensions_that_are_shared_by_requests_do_not_share_a_key():
    shared = {"sni_hostname": "bank.example"}
    requests = [httpx.Request("POST", "https://bank.example/", extensions=shared) for _ in "ab"]
    keys = []

    def handle(request):
        keys.append(request.headers["idempotency-key"])
        return httpx.Response(500)

    with IdempotentTransport(httpx.MockTransport(handle), retries=0) as transport:
        for request in requests:
            transport.handle_request(request)
    assert keys[0] != keys[1]
    assert shared == {"sni_hostname": "bank.example"}


def test_a_stream_that_was_read_before_can_be_sent_again():
    with (
        scripted_server() as server,
        httpx.Client(transport=IdempotentTransport(sleep=lambda _: None)) as client,
    ):
        server.says(answer(503))
        request = client.build_request("POST", server.url, content=iter([b"one", b"two"]))
        request.read()
        assert client.send(request).status_code == 200
    assert [received.body for received in server.received] == [b"onetwo", b"onetwo"]


def test_the_time_of_a_call_is_measured():
    with scripted_server() as server, httpx.Client(transport=IdempotentTransport()) as client:
        assert client.post(server.url).elapsed.total_seconds() > 0
