"""A decorated endpoint answers as FastAPI itself would, and its replay says the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import fastapi
import httpx
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Request,
    Response,
)
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    StreamingResponse,
)
from packaging.version import Version
from pydantic import BaseModel, Field

from adapters.asgi_serving import eventually, keyed, replayed, served
from semel import AsyncIdempotency, current_attempt
from semel.adapters.fastapi import Idempotent
from semel.core.records import State

THIS_FILE = Path(__file__).read_text()


class Receipt(BaseModel):
    number: int = Field(serialization_alias="receiptNumber")
    note: str | None = None
    secret: str = "hidden"


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


async def model() -> Receipt:
    return Receipt(number=1)


def plain_model() -> Receipt:
    return Receipt(number=1)


async def wider_dict() -> dict[str, Any]:
    return {"number": 2, "note": "n", "secret": "s", "more": "left out by the model"}


async def text() -> str:
    return "text"


async def nothing():
    return None


async def anything():
    return {"path": Path("a/b"), "list": [1, 2.5, None]}


async def bytes_by_class() -> bytes:
    return b"bytes"


async def with_beginnings(response: Response) -> Receipt:
    response.status_code = 203
    response.headers["X-Own"] = "1"
    response.set_cookie("session", "secret")
    return Receipt(number=3)


async def with_annotated(
    told: Annotated[Response, "metadata"], request: Annotated[Request, "metadata"]
) -> str:
    told.headers["X-Method"] = request.method
    return "annotated"


async def response_of_its_own() -> Response:
    return PlainTextResponse("own", 202, headers={"X-Twice": "1"})


async def response_beside_beginnings(response: Response) -> Response:
    response.headers["X-Ignored"] = "FastAPI ignores this"
    return JSONResponse({"own": True})


async def streamed() -> StreamingResponse:
    async def chunks():
        yield b"one "
        yield "two"

    return StreamingResponse(chunks(), media_type="text/plain")


def streamed_from_a_thread() -> StreamingResponse:
    return StreamingResponse(iter([b"one ", b"two"]))


class Array(StreamingResponse):
    """Sends more than its chunks."""

    async def stream_response(self, send):
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send({"type": "http.response.body", "body": b"[", "more_body": True})
        async for chunk in self.body_iterator:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"]"})


class Shouted(StreamingResponse):
    """Sends its chunks in another way."""

    async def __call__(self, scope, receive, send):
        async def louder(message):
            await send({**message, "body": message.get("body", b"").upper()})

        await super().__call__(scope, receive, louder)


async def streamed_with_more_than_its_chunks() -> StreamingResponse:
    return Array(iter([b"1,", b"2"]), 201)


async def streamed_in_another_way() -> StreamingResponse:
    return Shouted(iter([b"one ", b"two"]))


async def file() -> FileResponse:
    return FileResponse(__file__, filename="test.py")


async def redirect() -> RedirectResponse:
    return RedirectResponse("/elsewhere")


CASES: list[tuple[Any, dict[str, Any]]] = [
    (model, {}),
    (model, {"status_code": 201}),
    (plain_model, {"response_model_exclude_none": True}),
    (model, {"response_model_include": {"number"}}),
    (model, {"response_model_exclude": {"secret"}, "response_model_by_alias": False}),
    (model, {"response_model_exclude_unset": True}),
    (model, {"response_model_exclude_defaults": True, "response_class": JSONResponse}),
    (model, {"response_model": None}),
    (wider_dict, {"response_model": Receipt}),
    (text, {}),
    (text, {"response_class": HTMLResponse}),
    (nothing, {}),
    (nothing, {"status_code": 204}),
    (nothing, {"status_code": 204, "response_class": Response}),
    (anything, {}),
    (bytes_by_class, {"response_class": PlainTextResponse, "response_model": None}),
    (with_beginnings, {}),
    (with_annotated, {}),
    (response_of_its_own, {}),
    (response_beside_beginnings, {}),
    (streamed, {}),
    (streamed_from_a_thread, {}),
    (streamed_with_more_than_its_chunks, {}),
    (streamed_in_another_way, {}),
    (file, {}),
]


def lines(answer) -> list[tuple[bytes, bytes]]:
    return [line for line in answer.headers.raw if line[0] != b"date"]


async def test_an_answer_is_what_fastapi_would_have_made(engine):
    bare, guarded = FastAPI(), FastAPI()
    idempotent = Idempotent(engine)
    for number, (endpoint, options) in enumerate(CASES):
        bare.post(f"/{number}", **options)(endpoint)
        guarded.post(f"/{number}", **options)(idempotent(endpoint))
    async with served(bare) as without, served(guarded) as client:
        for number, (endpoint, options) in enumerate(CASES):
            expected = await without.post(f"/{number}")
            unkeyed = await client.post(f"/{number}")
            first, again = [
                await client.post(f"/{number}", headers=keyed(str(number))) for _ in range(2)
            ]
            case = f"{endpoint.__name__} {options}"
            for answer in (unkeyed, first):
                assert answer.status_code == expected.status_code, case
                assert lines(answer) == lines(expected), case
                assert answer.content == expected.content, case
            assert replayed(again), case
            assert again.status_code == first.status_code, case
            assert again.content == first.content, case
            assert "set-cookie" not in again.headers, case
            never = {"set-cookie", "idempotent-replayed", "transfer-encoding", "content-length"}
            stored = [line for line in first.headers.items() if line[0] not in {*never, "date"}]
            given = [line for line in again.headers.items() if line[0] not in {*never, "date"}]
            assert given == stored, case


async def test_a_redirection_is_stored_on_request(engine):
    app = FastAPI()
    app.post("/")(Idempotent(engine, stored=lambda status: status < 400)(redirect))
    async with served(app) as client:
        answers = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [307, 307]
    assert answers[1].headers["location"] == "/elsewhere"
    assert replayed(answers[1])


async def test_routers_complete_a_route(engine):
    """The class of its answers, its path and its dependencies come from the routers around it."""
    app, outer, inner = FastAPI(), APIRouter(prefix="/outer"), APIRouter(prefix="/inner")
    inner.post("/text")(Idempotent(engine)(text))
    outer.include_router(inner, default_response_class=HTMLResponse)
    app.include_router(outer)
    async with served(app) as client:
        first, again = [await client.post("/outer/inner/text", headers=keyed()) for _ in range(2)]
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert again.headers["content-type"] == "text/html; charset=utf-8"
    assert (first.text, again.text, replayed(again)) == ("text", "text", True)


async def test_one_endpoint_on_two_routes_answers_as_each_of_them(engine):
    app = FastAPI()
    endpoint = Idempotent(engine, separate_routes=True)(text)
    app.post("/json")(endpoint)
    app.post("/html", response_class=HTMLResponse)(endpoint)
    async with served(app) as client:
        answers = [await client.post(path, headers=keyed()) for path in ("/json", "/html") * 2]
    assert [answer.text for answer in answers] == ['"text"', "text"] * 2
    assert [replayed(answer) for answer in answers] == [False, False, True, True]


async def test_a_function_runs_in_a_thread_and_knows_its_attempt(engine):
    app, seen = FastAPI(), []

    @app.post("/")
    @Idempotent(engine)
    def pay(request: Request) -> str:
        attempt = current_attempt()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            seen.append((attempt.key, request.method))
        return "paid"

    async with served(app) as client:
        answers = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert [answer.json() for answer in answers] == ["paid", "paid"]
    assert seen == [("k", "POST")]


async def test_background_tasks_run_once_after_the_save(engine):
    app, ran = FastAPI(), []
    idempotent = Idempotent(engine)

    async def saved(name: str) -> None:
        record = await engine.peek(name, scope="http")
        ran.append((name, record.state.name))

    @app.post("/given")
    @idempotent
    async def given(tasks: BackgroundTasks) -> str:
        tasks.add_task(saved, "given")
        return "done"

    @app.post("/own")
    @idempotent
    async def own() -> Response:
        tasks = BackgroundTasks()
        tasks.add_task(saved, "own")
        return FileResponse(__file__, background=tasks)

    async with served(app) as client:
        for name in ("given", "own") * 2:
            await client.post(f"/{name}", headers=keyed(name))
        await eventually(lambda: len(ran) == 2)
    assert ran == [("given", "SUCCEEDED"), ("own", "SUCCEEDED")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PlainTextResponse("x" * 30),
        lambda: StreamingResponse(iter(["x" * 6] * 5), media_type="text/plain"),
        lambda: Shouted(iter([b"x" * 6] * 5)),
        lambda: FileResponse(__file__),
    ],
    ids=["text", "stream", "subclass", "file"],
)
async def test_too_much_reaches_its_first_caller_and_is_omitted_after(engine, make):
    app, runs = FastAPI(), []

    @app.post("/", status_code=200)
    @Idempotent(engine, max_response=10)
    async def pay() -> Response:
        runs.append(1)
        return make()

    async with served(app) as client:
        first, again = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert first.text in {"x" * 30, "X" * 30, THIS_FILE}
    assert (again.status_code, again.json()["code"]) == (200, "result_omitted")
    assert runs == [1]


class Breaking(Response):
    """Makes its body when it is sent, and breaks at the end of it."""

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(5):
            await send({"type": "http.response.body", "body": b"x" * 6, "more_body": True})
        raise OSError("broken")


async def breaking():
    for _ in range(5):
        yield b"x" * 6
    raise OSError("broken")


@pytest.mark.parametrize(
    "make", [Breaking, lambda: StreamingResponse(breaking())], ids=["sent", "stream"]
)
async def test_an_answer_that_breaks_after_the_cap_is_broken_not_done(engine, make):
    app, runs = FastAPI(), []

    @app.post("/")
    @Idempotent(engine, max_response=10)
    async def pay() -> Response:
        runs.append(1)
        return make()

    async with served(app) as client:
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/", headers=keyed())
    assert (await engine.peek("k", scope="http")).state is State.FAILED
    assert runs == [1, 1]


def held_back(go: asyncio.Event, ended: list[Any]) -> StreamingResponse:
    """An answer whose second half waits."""

    async def chunks():
        yield b"x" * 20
        yield b"y"
        yield b"z"
        await go.wait()
        for _ in range(20):
            yield b"x" * 20
        ended.append(current_attempt().key)

    return StreamingResponse(chunks())


async def test_an_answer_beyond_the_cap_is_done_when_it_has_ended(engine):
    app, go, ended = FastAPI(), asyncio.Event(), []

    @app.post("/")
    @Idempotent(engine, max_response=10)
    async def pay() -> Response:
        return held_back(go, ended)

    async with served(app) as client, client.stream("POST", "/", headers=keyed()) as live:
        chunks = live.aiter_bytes()
        assert await anext(chunks) == b"x" * 20
        assert (await client.post("/", headers=keyed())).json()["code"] == "concurrent_request"
        go.set()
        rest = b"".join([chunk async for chunk in chunks])
        assert rest == b"yz" + b"x" * 400
        assert (await client.post("/", headers=keyed())).json()["code"] == "result_omitted"
    assert ended == ["k"]


async def test_a_client_who_leaves_does_not_end_an_answer_beyond_the_cap(engine):
    app, go, ended, released = FastAPI(), asyncio.Event(), [], []

    async def session() -> AsyncIterator[None]:
        yield
        released.append([*ended])

    @app.post("/", dependencies=[Depends(session)])
    @Idempotent(engine, max_response=10)
    async def pay() -> Response:
        return held_back(go, ended)

    async with served(app) as client:
        async with client.stream("POST", "/", headers=keyed()) as live:
            await anext(live.aiter_bytes())
        go.set()
        await eventually(lambda: ended)
        await eventually(lambda: released)
        assert (await client.post("/", headers=keyed())).json()["code"] == "result_omitted"
    # From 0.106 on, and until 0.118, FastAPI closed dependencies before it sent the response.
    closes_first = Version(fastapi.__version__) < Version("0.118")
    assert released[0] == ([] if closes_first else ["k"])


async def test_a_request_cancelled_before_its_answer_reads_it_to_the_end(engine):
    ended = []
    idempotent = Idempotent(engine, max_response=10)
    entered, go = asyncio.Event(), asyncio.Event()

    async def pay() -> Response:
        entered.set()
        await go.wait()
        return held_back(go, ended)

    app = FastAPI()
    app.post("/")(idempotent(pay))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        request = asyncio.create_task(client.post("/", headers=keyed()))
        await entered.wait()
        request.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert ended == ["k"]
    assert (await engine.peek("k", scope="http")).state is State.SUCCEEDED


async def test_an_answer_beyond_the_cap_that_is_put_aside_is_read_to_its_end(engine):
    app, go, ended = FastAPI(), asyncio.Event(), []
    go.set()

    @Idempotent(engine, max_response=10)
    async def pay() -> Response:
        return held_back(go, ended)

    @app.post("/")
    @wraps(pay)
    async def other(**values: Any) -> str:
        await pay(**values)
        return "another answer"

    async with served(app) as client:
        assert (await client.post("/", headers=keyed())).json() == "another answer"
        await eventually(lambda: ended)
        assert (await client.post("/", headers=keyed())).json() == "another answer"
    assert (await engine.peek("k", scope="http")).state is State.SUCCEEDED


async def test_an_error_whose_wording_is_beyond_the_cap_is_omitted_after(engine):
    app = FastAPI()

    @app.exception_handler(404)
    async def word(request: Request, error: Exception) -> Response:
        return StreamingResponse(iter([b"x" * 6] * 5), 404)

    @app.post("/")
    @Idempotent(engine, max_response=10, stored=lambda status: status < 500)
    async def pay() -> None:
        raise HTTPException(404)

    async with served(app) as client:
        first, again = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert (first.status_code, first.content) == (404, b"x" * 30)
    assert (again.status_code, again.json()["code"]) == (404, "result_omitted")


async def test_a_stream_of_events_is_live_and_marked(engine):
    app, runs, go = FastAPI(), [], asyncio.Event()

    @app.post("/")
    @Idempotent(engine)
    async def listen() -> StreamingResponse:
        runs.append(1)

        async def events():
            yield "data: 1\n\n"
            await go.wait()
            yield "data: 2\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async with served(app) as client:
        for _ in range(2):
            go.clear()
            async with client.stream("POST", "/", headers=keyed()) as live:
                texts = live.aiter_text()
                assert await anext(texts) == "data: 1\n\n"
                go.set()
                assert await anext(texts) == "data: 2\n\n"
            assert live.headers["idempotent-unprotected"] == "stream"
    assert runs == [1, 1]


async def test_a_replay_of_somebody_else_is_not_pretended(engine):
    """21: the marker of a replay is ours alone."""
    app = FastAPI()

    @app.post("/")
    @Idempotent(engine)
    async def pay(response: Response, idempotent_replayed: Annotated[str, Header()]) -> str:
        response.headers["Idempotent-Replayed"] = idempotent_replayed
        return "paid"

    async with served(app) as client:
        first = await client.post("/", headers=keyed() | {"Idempotent-Replayed": "true"})
    assert (first.json(), replayed(first)) == ("paid", False)
