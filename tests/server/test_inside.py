"""The application in this process: what no client can bring about from outside."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.requests import Request

from semel import Idempotency
from semel.core.records import FAILURE, ClaimRequest, Encoded, GetRequest, Identity
from semel.errors import StoreUnavailable
from semel.server.app import create_app
from semel.server.bodies import client_left
from semel.server.running import Options, reload, setup_of
from semel.server.service import Service
from semel.server.tokens import Tokens
from semel.stores.memory import AsyncMemoryStore
from semel.stores.remote import wire


@pytest.fixture
async def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Service(AsyncMemoryStore(), setup_of("memory://", None))
    yield made
    await made.close()


@pytest.fixture
async def client(inside):
    transport = httpx.ASGITransport(create_app(inside), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_a_fault_of_ours_is_a_problem_that_says_nothing(inside, client):
    async def fault(*_):
        raise RuntimeError("SECRET")

    inside.store.ask = fault
    answer = await client.post("/v1/start", json={"scope": "s", "key": "k"})
    assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_error")
    assert "SECRET" not in answer.text
    counted = (await client.get("/metrics")).text
    assert 'semel_service_requests_total{verb="start",code="idempotency_error"} 1' in counted


async def test_a_failure_that_cannot_be_read_is_a_failure_all_the_same(inside, client):
    identity, owner = Identity("s", "k"), b"o" * 12
    await inside.store.claim(ClaimRequest(identity, owner, None, 9.0, 9.0))
    garbled = Encoded(FAILURE, b"x")
    await inside.store.fail(
        identity, owner, garbled, retryable=False, keep_fingerprint=True, ttl=9.0
    )
    answer = await client.post("/v1/start", json={"scope": "s", "key": "k"})
    assert (answer.status_code, answer.json()["code"]) == (409, "previous_failure")
    assert answer.json()["error"] == {"type": "Unknown", "message": ""}


async def test_a_request_that_is_cut_off_at_the_end_is_to_be_sent_again(inside, client):
    async def cut_off(*_):
        raise asyncio.CancelledError

    inside.store.ask = cut_off
    for answer in (
        await client.post("/v1/start", json={"scope": "s", "key": "k"}),
        await client.get("/ready"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (503, "store_error")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/start", wire.SEND])
async def test_a_token_that_is_taken_back_while_the_body_comes_gets_nothing(
    inside, tmp_path, make_token, path
):
    one, other = (make_token(name, ["use", "store"], ["*"]) for name in ("one", "other"))
    file = tmp_path / "tokens.toml"
    file.write_text(one.table + other.table)
    app = create_app(inside, Tokens.load(file))
    claim = ClaimRequest(Identity("s", "k"), b"o" * 12, None, 9.0, 9.0)
    if path == wire.SEND:
        media_type, body = wire.CONTENT_TYPE, wire.write_batch([claim], 9.0, "here")
    else:
        media_type, body = "application/json", b'{"scope": "s", "key": "k"}'

    async def arriving():
        yield body[:9]
        file.write_text(other.table)
        reload(app, inside, Options(url="memory://", store_prefix=None, tokens=str(file)))
        yield body[9:]

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for token, status in ((one, 401), (other, 200)):
            headers = {"Content-Type": media_type, "Authorization": f"Bearer {token.text}"}
            answer = await client.post(path, content=arriving(), headers=headers)
            assert answer.status_code == status


async def test_a_service_that_stops_is_not_ready(inside, client):
    assert (await client.get("/ready")).status_code == 200
    inside.stop()
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["code"]) == (503, "store_error")
    assert answer.headers["connection"] == "close"
    assert (await client.get("/live")).status_code == 200


async def test_a_service_without_its_store_is_not_ready(inside, client):
    async def fault(request):
        assert isinstance(request, GetRequest)
        raise StoreUnavailable("away")

    inside.store.ask = fault
    assert (await client.get("/ready")).status_code == 503


async def test_a_client_has_left_when_the_server_says_so():
    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    await asyncio.wait_for(client_left(Request({"type": "http"}, receive)), 60)
    assert messages == []


async def test_the_application_runs_on_servers_that_announce_its_life(inside):
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    told = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        told.append(message["type"])

    await create_app(inside)({"type": "lifespan", "state": {}}, receive, send)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_body_with_too_many_levels_for_the_parser(client):
    body = b'{"scope": "s", "key": "k", "payload": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/v1/start", content=body, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (400, "body")


SECRET, NEXT = "the first of all secrets", "a second one of secrets"


@pytest.mark.parametrize("mismatch", ["reject", "replace"])
def test_fingerprints_of_an_older_secret_are_known(service, tmp_path, monkeypatch, mismatch):
    rules = f'[policy]\nmismatch = "{mismatch}"\n'
    file = tmp_path / "semel.toml"
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    file.write_text(f'fingerprint_secret = "{SECRET}"\n{rules}')
    first = service(url)
    owner = first.post("start", scope="s", key="k", payload=1).data["owner"]
    first.post("finish", scope="s", key="k", owner=owner, result="kept")
    assert first.stop() == 0
    file.write_text(f'fingerprint_secret = ["{NEXT}", "{SECRET}"]\n{rules}')
    second = service(url)
    again = second.post("start", scope="s", key="k", payload=1).data
    assert (again["status"], again.get("result")) == ("done", "kept")
    other = second.post("start", scope="s", key="k", payload=2)
    assert other.status == (422 if mismatch == "reject" else 200)
    monkeypatch.chdir(tmp_path)
    with Idempotency(url) as engine:
        assert len(list(engine.records())) == 1
