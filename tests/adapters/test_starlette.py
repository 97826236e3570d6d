"""Starlette's decorator: functions and methods, plain and async, with and without a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from adapters.asgi_serving import keyed, replayed, served
from semel import AsyncIdempotency, ConfigError
from semel.adapters.starlette import Idempotent

if TYPE_CHECKING:
    from nowhere import Receipt


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


def application(routes, idempotent=None):
    app = Starlette(routes=routes)
    if idempotent is not None:
        idempotent.init_app(app)
    return app


async def test_functions_and_methods_of_both_kinds_are_protected(engine):
    runs, idempotent = [], Idempotent(engine)

    @idempotent
    async def pay(request: Request) -> Response:
        runs.append(await request.body())
        return PlainTextResponse("paid", 201, {"X-A": "1"})

    @idempotent(required=True)
    def plain(request: Request, more: Receipt | None = None) -> Response:
        runs.append(b"plain")
        return PlainTextResponse("plain", 201)

    class Paying(HTTPEndpoint):
        @idempotent
        async def post(self, request: Request) -> Response:
            runs.append(type(self).__name__.encode())
            return PlainTextResponse("method", 201)

        async def get(self, request: Request) -> Response:
            return PlainTextResponse("read")

    routes = [
        Route("/pay", pay, methods=["POST"]),
        Mount("/inner", routes=[Route("/plain", plain, methods=["POST"])]),
        Route("/method", Paying),
    ]
    async with served(application(routes, idempotent)) as client:
        answers = [
            await client.post(path, content=b"5", headers=keyed(path.strip("/")))
            for path in ("/pay", "/inner/plain", "/method") * 2
        ]
        missing = await client.post("/inner/plain")
        assert (await client.get("/method")).text == "read"
        unprotected = [await client.post("/pay", content=b"6") for _ in range(2)]
    assert [answer.text for answer in answers] == ["paid", "plain", "method"] * 2
    assert [replayed(answer) for answer in answers] == [False] * 3 + [True] * 3
    assert answers[3].headers["X-A"] == "1"
    assert missing.json()["code"] == "key_missing"
    assert [answer.status_code for answer in unprotected] == [201, 201]
    assert runs == [b"5", b"plain", b"Paying", b"6", b"6"]


async def test_an_answer_that_is_raised_frees_the_key_or_is_stored_on_request(engine):
    runs, idempotent = [], Idempotent(engine)

    async def pay(request: Request) -> Response:
        runs.append(request.url.path)
        raise HTTPException(404, "no such order")

    routes = [
        Route("/free", idempotent(pay), methods=["POST"]),
        Route("/kept", idempotent(stored=[404])(pay), methods=["POST"]),
    ]
    async with served(application(routes)) as client:
        for path in ("/free", "/kept"):
            answers = [await client.post(path, headers=keyed(path[1:])) for _ in range(2)]
            assert [answer.text for answer in answers] == ["no such order"] * 2
            assert replayed(answers[1]) is (path == "/kept")
    assert runs == ["/free", "/free", "/kept"]


async def test_an_endpoint_has_to_return_a_response(engine, caplog):
    @Idempotent(engine)
    async def pay(request: Request) -> str:
        return "paid"

    async with served(application([Route("/pay", pay, methods=["POST"])])) as client:
        assert (await client.post("/pay", headers=keyed())).status_code == 500
    assert "an endpoint returns a Response, not str" in caplog.text


async def test_mistakes_are_told_when_an_endpoint_is_decorated(engine):
    class Paying(HTTPEndpoint): ...

    with pytest.raises(ConfigError, match="decorate the methods of an endpoint's class"):
        Idempotent(engine)(Paying)
    with pytest.raises(ConfigError, match="an endpoint is needed, not str"):
        Idempotent(engine)("/pay")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="needs a store or an engine"):
        Idempotent()


async def test_an_endpoint_that_starlette_does_not_call_says_what_it_needs(engine):
    @Idempotent(engine)
    async def pay(request: Request) -> Response:
        return PlainTextResponse("paid")

    with pytest.raises(ConfigError, match="without a request"):
        await pay()


async def test_a_decorator_that_protects_nothing_is_refused_at_the_start(engine):
    idempotent = Idempotent(engine)

    async def pay(request: Request) -> Response:
        return PlainTextResponse("paid")

    app = application([Mount("/v1", routes=[Route("/pay", pay, methods=["POST"])])], idempotent)
    idempotent(pay)
    with pytest.raises(ConfigError, match="pay is not protected: its route took it before"):
        async with app.router.lifespan_context(app):
            pass
