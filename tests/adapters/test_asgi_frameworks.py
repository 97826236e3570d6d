"""The middleware around real frameworks, on real servers, inside the layers that people use."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI
from litestar import Litestar, Response, post
from litestar import Request as LitestarRequest
from litestar.background_tasks import BackgroundTask as LitestarTask
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from adapters.asgi_serving import SERVERS, eventually, keyed, replayed, served
from semel import AsyncIdempotency, Policy
from semel.adapters.asgi import IdempotencyMiddleware

PAYMENT = {"amount": 5}


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


class Shop:
    """A handler, and what it did: one line when it runs, one when its background task does."""

    def __init__(self) -> None:
        self.runs: list[object] = []
        self.after: list[object] = []

    def pay(self, payment: object) -> dict[str, object]:
        self.runs.append(payment)
        return {"number": len(self.runs), "payment": payment}


def bare(shop: Shop):
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            raise NotImplementedError("this application has no lifespan")
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        answer = json.dumps(shop.pay(json.loads(body))).encode()
        lines = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": lines})
        await send({"type": "http.response.body", "body": answer})
        shop.after.append("task")

    return app


def on_starlette(shop: Shop):
    async def pay(request):
        answer = shop.pay(await request.json())
        return JSONResponse(answer, 201, background=BackgroundTask(shop.after.append, "task"))

    return Starlette(routes=[Route("/pay", pay, methods=["POST"])])


def on_fastapi(shop: Shop):
    app = FastAPI()

    @app.post("/pay", status_code=201)
    async def pay(payment: dict[str, int], tasks: BackgroundTasks) -> dict[str, object]:
        tasks.add_task(shop.after.append, "task")
        return shop.pay(payment)

    return app


def on_litestar(shop: Shop):
    @post("/pay")
    async def pay(request: LitestarRequest) -> Response[dict[str, object]]:
        answer = shop.pay(await request.json())
        return Response(answer, background=LitestarTask(shop.after.append, "task"))

    return Litestar([pay])


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("framework", [bare, on_starlette, on_fastapi, on_litestar])
async def test_a_retry_gets_the_same_answer_and_nothing_runs_twice(engine, framework, server):
    shop = Shop()
    protected = IdempotencyMiddleware(framework(shop), engine)
    if framework is bare:
        protected = IdempotencyMiddleware(framework(shop), "memory://")
    async with served(protected, server) as client:
        first, again = [await client.post("/pay", json=PAYMENT, headers=keyed()) for _ in range(2)]
        other = await client.post("/pay", json={"amount": 6}, headers=keyed())
        await eventually(lambda: shop.after)
    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert first.http_version == ("HTTP/2" if server == "hypercorn-h2" else "HTTP/1.1")
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert (replayed(first), replayed(again)) == (False, True)
    assert shop.runs == [PAYMENT]
    assert shop.after == ["task"]


async def test_a_layer_inside_the_application_is_enough(engine):
    shop = Shop()
    app = on_starlette(shop)
    app.add_middleware(IdempotencyMiddleware, idempotency=engine, include=["/pay"])
    async with served(app) as client:
        answers = [await client.post("/pay", json=PAYMENT, headers=keyed()) for _ in range(2)]
        others = [await client.post("/other", headers=keyed("o")) for _ in range(2)]
    assert [replayed(answer) for answer in answers] == [False, True]
    assert [answer.status_code for answer in others] == [404, 404]


async def test_a_layer_around_writes_its_own_lines_to_a_replay(engine):
    around = [
        Middleware(CORSMiddleware, allow_origins=["https://a.example", "https://b.example"]),
        Middleware(GZipMiddleware, minimum_size=10),
        Middleware(IdempotencyMiddleware, idempotency=engine),
    ]
    runs = []

    async def pay(request):
        runs.append(1)
        return JSONResponse({"text": "long" * 100})

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])], middleware=around)
    async with served(app) as client:
        plain = keyed(Origin="https://a.example") | {"Accept-Encoding": "identity"}
        first = await client.post("/pay", headers=plain)
        packed = keyed(Origin="https://b.example") | {"Accept-Encoding": "gzip"}
        again = await client.post("/pay", headers=packed)
        once_more = await client.post("/pay", headers=plain)
    assert runs == [1]
    assert first.json() == again.json() == once_more.json()
    assert again.headers.get_list("access-control-allow-origin") == ["https://b.example"]
    assert once_more.headers.get_list("access-control-allow-origin") == ["https://a.example"]
    assert again.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in once_more.headers
    assert once_more.headers["content-length"] == first.headers["content-length"]


class Broken(Exception):
    pass


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize(("policy", "second"), [(Policy(), 201), (Policy(abandoned="hold"), 409)])
async def test_a_handler_that_raises_leaves_no_stuck_key(engine, position, policy, second):
    """17: on both sides of the framework's own error middleware."""
    runs = []

    async def pay(request):
        runs.append(1)
        if len(runs) == 1:
            raise Broken
        return JSONResponse({}, 201)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    if position == "inside":
        app.add_middleware(IdempotencyMiddleware, idempotency=engine, policy=policy)
    else:
        app = IdempotencyMiddleware(app, engine, policy=policy)
    async with served(app) as client:
        first, again = [await client.post("/pay", headers=keyed()) for _ in range(2)]
    assert (first.status_code, again.status_code) == (500, second)
    assert len(runs) == (2 if second == 201 else 1)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("compressed", [False, True])
async def test_a_stream_reaches_its_first_caller_through_layers_that_take_their_time(
    engine, server, compressed
):
    """They give other tasks a turn while the answer is sent, and one of those listens."""
    marks = []

    async def stream(request):
        return StreamingResponse(chunks(), 201)

    async def chunks():
        for letter in b"abc":
            yield bytes([letter]) * 60_000

    class Marks(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            answer = await call_next(request)
            marks.append(answer.headers.get("Idempotent-Replayed"))
            return answer

    # By name: Starlette before 0.41.3 gives the application of a layer by name, too.
    layers = [Middleware(Marks), Middleware(IdempotencyMiddleware, idempotency=engine)]
    if compressed:
        layers.insert(0, Middleware(GZipMiddleware))
    app = Starlette(routes=[Route("/", stream, methods=["POST"])], middleware=layers)
    async with served(app, server) as client:
        first, second = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert first.status_code == 201
    assert len(first.content) == 180_000
    assert marks == [None, "true"]


# --- mounted applications -------------------------------------------------------------------------


def mounted(shop, engine, **options):
    """An application of its own below /v1, with a middleware inside of it."""

    async def pay(request):
        return JSONResponse(shop.pay(await request.json()), 201)

    inner = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    inner.add_middleware(IdempotencyMiddleware, idempotency=engine, **options)
    return Starlette(routes=[Mount("/v1", inner)])


@pytest.mark.parametrize("pattern", ["/pay", "/v1/pay"])
async def test_include_protects_a_mounted_application(engine, pattern):
    shop = Shop()
    async with served(mounted(shop, engine, include=[pattern], required=True)) as client:
        assert (await client.post("/v1/pay", json=PAYMENT)).status_code == 400
        told = {"json": PAYMENT, "headers": keyed()}
        first, again = [await client.post("/v1/pay", **told) for _ in range(2)]
    assert (first.status_code, again.status_code) == (201, 201)
    assert replayed(again)
    assert len(shop.runs) == 1


@pytest.mark.parametrize("pattern", ["/pay", "/v1/pay"])
async def test_exclude_leaves_out_a_path_of_a_mounted_application(engine, pattern):
    app = mounted(Shop(), engine, exclude=[pattern], required=True)
    async with served(app) as client:
        assert (await client.post("/v1/pay", json=PAYMENT)).status_code == 201


@pytest.mark.parametrize("pattern", ["/v1/pay", "/shop/v1/pay"])
async def test_include_protects_behind_a_root_path(engine, pattern):
    """As uvicorn tells it with --root-path: the path that the application gets has it, too."""
    shop = Shop()
    middleware = IdempotencyMiddleware(
        mounted(shop, engine), engine, include=[pattern], required=True
    )
    async with served(middleware, root_path="/shop") as client:
        assert (await client.post("/v1/pay", json=PAYMENT)).status_code == 400
        told = {"json": PAYMENT, "headers": keyed()}
        assert (await client.post("/v1/pay", **told)).status_code == 201
        assert replayed(await client.post("/v1/pay", **told))
    assert len(shop.runs) == 1


def layered(mounts, inner):
    """An application below all of these mounts, each in the one before."""
    for mount in reversed(mounts):
        inner = Starlette(routes=[Mount(mount, inner)])
    return inner


@pytest.mark.parametrize("root", ["", "/v1", "/v1/"])
@pytest.mark.parametrize("mounts", [("/m",), ("/m/x",), ("/m", "/x")])
async def test_a_pattern_protects_with_every_root_path_and_mount(engine, root, mounts):
    """With a root path, uvicorn puts it before the path of each request."""
    mount = "".join(mounts)
    patterns = {"/pay", f"{mount}/pay", f"{root.rstrip('/')}{mount}/pay"}
    for number, pattern in enumerate(sorted(patterns)):
        shop = Shop()

        async def pay(request, shop=shop):
            return JSONResponse(shop.pay(await request.json()), 201)

        inner = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        middleware = IdempotencyMiddleware(inner, engine, include=[pattern], required=True)
        async with served(layered(mounts, middleware), root_path=root) as client:
            told = {"json": PAYMENT, "headers": keyed(f"k{number}")}
            assert (await client.post(f"{mount}/pay", json=PAYMENT)).status_code == 400, pattern
            answers = [await client.post(f"{mount}/pay", **told) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201], pattern
        assert replayed(answers[1]), pattern
        assert len(shop.runs) == 1


async def test_a_pattern_protects_where_the_server_leaves_its_root_out_of_the_path(engine):
    """As hypercorn tells it: Starlette's mount is in the path then, and the root is not."""

    async def raw(scope, receive, send):
        await JSONResponse([scope["path"], scope["root_path"]])(scope, receive, send)

    for pattern in ("/pay", "/m/pay", "/v1/m/pay"):
        middleware = IdempotencyMiddleware(raw, engine, include=[pattern], required=True)
        transport = httpx.ASGITransport(layered(["/m"], middleware), root_path="/v1")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/m/pay")).status_code == 400, pattern
            answer = await client.post("/m/pay", headers=keyed())
        assert answer.json() == ["/m/pay", "/v1/m"]


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
async def test_a_length_beside_no_chunks_is_the_clients_mistake(engine, server, caplog):
    shop = Shop()
    request = (
        b"POST /pay HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nIdempotency-Key: k\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    async with served(IdempotencyMiddleware(on_starlette(shop), engine), server) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"body_incomplete" in answer
    assert "a middleware around the application" not in caplog.text
    assert shop.runs == []
