"""What the middleware does with answers that are not simply sent: streams, too much, misuse."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import tracemalloc

import pytest
from h2.connection import H2Connection
from h2.events import ResponseReceived
from starlette.responses import FileResponse, PlainTextResponse, StreamingResponse

from adapters.asgi_serving import begun, eventually, keyed, left, replayed, served
from semel import AsyncIdempotency
from semel.adapters.asgi import IdempotencyMiddleware, Protected
from semel.core.records import CompleteRequest, Identity, State


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


class By:
    """An application out of a function of scope, receive and send; it has a life and counts."""

    def __init__(self, answer) -> None:
        self._answer = answer
        self.runs = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            self.runs += 1
            await self._answer(scope, receive, send)


def start(*lines, status=200):
    return {"type": "http.response.start", "status": status, "headers": list(lines)}


def part(body=b"", *, more=False):
    return {"type": "http.response.body", "body": body, "more_body": more}


class Server:
    """A server by hand, where a real one would not do what is needed."""

    def __init__(self, app, **scope) -> None:
        self._app = app
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "headers": [(b"idempotency-key", b"k")],
            **scope,
        }
        self.sent = []
        self.incoming = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive(self):
        if self.incoming:
            return self.incoming.pop(0)
        return await asyncio.Event().wait()

    async def send(self, message) -> None:
        self.sent.append(message)

    async def run(self) -> bytes:
        await self._app(self.scope, self.receive, self.send)
        return self.body

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def test_4_a_websocket_passes_through(engine):
    seen = []

    async def answer(scope, receive, send):
        seen.append((scope, receive, send))

    server = Server(IdempotencyMiddleware(By(answer), engine, required=True), type="websocket")
    await server.run()
    assert seen == [(server.scope, server.receive, server.send)]


def test_what_an_application_is_given_are_coroutine_functions():
    # asgiref, for one, asks whether they are.
    assert inspect.iscoroutinefunction(Protected.send)
    assert inspect.iscoroutinefunction(Protected.receive)


async def test_a_streamed_answer_is_replayed_whole(engine):
    async def answer(scope, receive, send):
        async def chunks():
            for chunk in ("a", "b", "c"):
                yield chunk

        await StreamingResponse(chunks(), media_type="text/plain")(scope, receive, send)

    app = By(answer)
    async with served(IdempotencyMiddleware(app, engine)) as client:
        answers = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert [each.text for each in answers] == ["abc", "abc"]
    assert app.runs == 1


async def test_a_streamed_answer_may_use_its_buffer_again(engine):
    async def answer(scope, receive, send):
        async def views():
            buffer = bytearray(4)
            for number in range(3):
                buffer[:] = b"%04d" % number
                yield memoryview(buffer)

        await StreamingResponse(views(), media_type="text/plain")(scope, receive, send)

    async with served(IdempotencyMiddleware(By(answer), engine)) as client:
        answers = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert [each.text for each in answers] == ["000000010002"] * 2


@pytest.mark.parametrize("chunks", [[b"x" * 11], [b"x" * 4] * 3])
async def test_an_answer_above_the_limit_reaches_its_first_caller_and_is_omitted_after(
    engine, chunks
):
    async def answer(scope, receive, send):
        await send(start(status=201))
        for chunk in chunks[:-1]:
            await send(part(chunk, more=True))
        await send(part(chunks[-1]))

    app = By(answer)
    async with served(IdempotencyMiddleware(app, engine, max_response=10)) as client:
        first, again = [await client.post("/", headers=keyed()) for _ in range(2)]
    assert first.content == b"".join(chunks)
    assert (again.status_code, again.json()["code"]) == (201, "result_omitted")
    assert replayed(again)
    assert app.runs == 1


async def test_an_answer_above_the_limit_flows_as_it_comes(engine):
    arrived = asyncio.Event()

    async def answer(scope, receive, send):
        await send(start())
        await send(part(b"x" * 6, more=True))
        await send(part(b"x" * 6, more=True))
        await send(part(b"w", more=True))
        await arrived.wait()
        await send(part(b"y", more=True))
        await send(part(b"z"))

    app = By(answer)
    async with (
        served(IdempotencyMiddleware(app, engine, max_response=10)) as client,
        client.stream("POST", "/", headers=keyed()) as first,
    ):
        chunks = first.aiter_raw()
        assert await anext(chunks) + await anext(chunks) == b"x" * 12
        arrived.set()
        assert b"".join([chunk async for chunk in chunks]) == b"wyz"
        again = await client.post("/", headers=keyed())
    assert again.json()["code"] == "result_omitted"


async def test_the_end_of_an_answer_above_the_limit_is_saved_before_all_of_it_is_out(engine):
    """Also where its length is told, and its last message is empty, as that of many a file is."""
    known = []

    async def answer(scope, receive, send):
        await send(start((b"content-length", b"12")))
        for _ in range(3):
            await send(part(b"x" * 4, more=True))
        await send(part(more=True))
        known.append((server.body, await engine.internals.store.get(Identity("http", "k"))))
        await send(part())

    server = Server(IdempotencyMiddleware(By(answer), engine, max_response=5))
    assert await server.run() == b"x" * 12
    [(out, record)] = known
    assert (out, record.state) == (b"x" * 8, State.PROCESSING)
    assert (await engine.internals.store.get(Identity("http", "k"))).state is State.SUCCEEDED


async def test_a_stream_of_events_is_live_and_marked_and_hears_that_its_client_has_gone(engine):
    ended = []

    async def answer(scope, receive, send):
        async def events():
            try:
                while True:
                    yield "data: tick\n\n"
                    await asyncio.sleep(0.01)
            finally:
                ended.append(True)

        await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)

    app = By(answer)
    async with served(IdempotencyMiddleware(app, engine)) as client:
        for _ in range(2):
            async with client.stream("POST", "/", headers=keyed()) as live:
                assert live.headers["idempotent-unprotected"] == "stream"
                assert await anext(live.aiter_text()) == "data: tick\n\n"
        await eventually(lambda: len(ended) == 2)
    assert app.runs == 2


async def test_a_stream_of_events_hears_that_it_cannot_be_sent(engine):
    heard = []

    async def answer(scope, receive, send):
        await send(start((b"Content-Type", b"text/event-stream; charset=utf-8")))
        try:
            await send(part(b"data: 1\n\n", more=True))
        except OSError as error:
            heard.append(error)

    class Cut(Server):
        async def send(self, message):
            if message["type"] == "http.response.body":
                raise OSError("nobody there")

    await Cut(IdempotencyMiddleware(By(answer), engine)).run()
    assert len(heard) == 1


@pytest.mark.parametrize("size", [3, 30])
async def test_a_client_that_cannot_be_reached_is_no_reason_to_stop(engine, size):
    ended = []

    async def answer(scope, receive, send):
        await send(start())
        await send(part(b"x" * size, more=True))
        await send(part(b"y" * size))
        ended.append(True)

    class Cut(Server):
        async def send(self, message):
            raise OSError("nobody there")

    app = By(answer)
    middleware = IdempotencyMiddleware(app, engine, max_response=10)
    await Cut(middleware).run()
    assert ended == [True]
    again = Server(middleware)
    await again.run()
    assert app.runs == 1
    assert (b"idempotent-replayed", b"true") in again.sent[0]["headers"]


async def test_ways_to_answer_past_the_middleware_are_not_offered(engine, tmp_path):
    """23: an application is not offered what could not be stored; the rest is left."""
    (tmp_path / "file").write_bytes(b"the content")
    extensions = {
        name: {}
        for name in (
            "http.response.pathsend",
            "http.response.zerocopysend",
            "http.response.trailers",
            "http.response.early_hint",
        )
    }

    async def answer(scope, receive, send):
        scope["seen"] = scope["extensions"]
        if "http.response.early_hint" in scope["extensions"]:
            await send({"type": "http.response.early_hint", "links": [b"</a>"]})
        await FileResponse(tmp_path / "file")(scope, receive, send)

    middleware = IdempotencyMiddleware(By(answer), engine)
    first = Server(middleware, extensions=extensions)
    assert await first.run() == b"the content"
    assert first.scope["seen"] == {"http.response.early_hint": {}}
    assert first.sent[0]["type"] == "http.response.early_hint"
    assert await Server(middleware, extensions=extensions).run() == b"the content"


async def test_trailers_are_not_offered_on_http_2(engine):
    async def answer(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await PlainTextResponse(" ".join(sorted(scope["extensions"])))(scope, receive, send)

    async with served(IdempotencyMiddleware(By(answer), engine), "hypercorn-h2") as client:
        bare = await client.post("/")
        guarded = await client.post("/", headers=keyed())
    assert "http.response.trailers" in bare.text.split()
    assert guarded.text.split() == [
        name for name in bare.text.split() if name != "http.response.trailers"
    ]


@pytest.mark.parametrize(
    "messages",
    [[], [start()], [part(b"too early")]],
    ids=["nothing", "only the beginning", "a body without a beginning"],
)
async def test_an_application_that_does_not_answer_leaves_no_stuck_key(engine, messages):
    good = []

    async def answer(scope, receive, send):
        for message in good or messages:
            await send(message)

    app = By(answer)
    async with served(IdempotencyMiddleware(app, engine)) as client:
        first = await client.post("/", headers=keyed())
        good += [start(), part(b"good")]
        again = await client.post("/", headers=keyed())
    assert (first.status_code, again.text) == (500, "good")


@pytest.mark.parametrize(("size", "code"), [(1, "lease_lost"), (20, None)])
async def test_an_answer_whose_key_was_taken_away_is_not_given(engine, size, code):
    """Unless its first part is out already."""

    async def answer(scope, receive, send):
        await engine.forget("k", scope="http")
        await send(start(status=201))
        await send(part(b"x", more=True))
        await send(part(b"x" * size, more=True))
        await send(part(b"y"))

    middleware = IdempotencyMiddleware(By(answer), engine, max_response=10)
    async with served(middleware) as client:
        first = await client.post("/", headers=keyed())
    if code is None:
        assert first.text == "x" + "x" * size + "y"
    else:
        assert (first.status_code, first.json()["code"]) == (409, code)


async def test_after_its_answer_an_application_hears_that_the_request_is_over(engine):
    heard = []

    async def answer(scope, receive, send):
        await receive()
        waiting, given_up = [asyncio.create_task(receive()) for _ in range(2)]
        await asyncio.sleep(0)
        given_up.cancel()
        await send(start())
        await send(part())
        heard.extend([await waiting, await receive()])

    await Server(IdempotencyMiddleware(By(answer), engine)).run()
    assert heard == [{"type": "http.disconnect"}] * 2


async def test_an_application_hears_of_its_client_when_its_answer_is_out_not_sooner(engine):
    """Who streams an answer listens meanwhile, and stops sending when the client is gone."""
    may_send, heard = asyncio.Event(), []

    async def answer(scope, receive, send):
        await receive()
        listening = asyncio.create_task(receive())
        sending = asyncio.create_task(send_all(send))
        await asyncio.sleep(0.05)
        heard.append(listening.done())
        may_send.set()
        await sending
        heard.append(await listening)

    async def send_all(send):
        await send(start())
        await send(part(b"all"))

    class Slow(Server):
        async def send(self, message) -> None:
            await may_send.wait()
            await super().send(message)

    assert await Slow(IdempotencyMiddleware(By(answer), engine)).run() == b"all"
    assert heard == [False, {"type": "http.disconnect"}]


async def test_who_looks_for_the_client_again_and_again_leaves_nothing_behind(engine):
    left_behind = []

    async def answer(scope, receive, send):
        await receive()
        for _ in range(5):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(receive(), 0.001)
        left_behind.append(receive.__self__._listening)
        await send(start())
        await send(part())

    await Server(IdempotencyMiddleware(By(answer), engine)).run()
    assert left_behind == [()]


@pytest.mark.parametrize("kind", [b"text/plain", b"text/event-stream"])
async def test_an_answer_that_a_layer_inside_gives_up_on_is_saved_all_the_same(engine, kind):
    """The effect is done: what is sent in its place frees no key."""
    slow, ask = asyncio.Event(), engine.internals.store.ask

    async def completing(request):
        if isinstance(request, CompleteRequest):
            await slow.wait()
        return await ask(request)

    async def answer(scope, receive, send):
        try:
            async with asyncio.timeout(0.02):
                await send(start(status=201))
                await send(part(b"pa", more=True))
                await send(part(b"id"))
        except TimeoutError:
            await send(start((b"content-type", kind), status=504))
            await send(part(b"late"))

    app = By(answer)
    middleware = IdempotencyMiddleware(app, engine)
    engine.internals.store.ask = completing
    first = Server(middleware)
    assert await first.run() == b"late"
    assert first.sent[0]["status"] == 504
    slow.set()
    await eventually(lambda: not engine.internals.in_background)
    again = Server(middleware)
    assert (await again.run(), again.sent[0]["status"], app.runs) == (b"paid", 201, 1)


async def test_a_layer_inside_may_begin_another_answer(engine):
    async def answer(scope, receive, send):
        await send(start())
        await send(part(b"half", more=True))
        await send(start(status=201))
        await send(part(b"whole"))

    app = By(answer)
    for _ in range(2):
        # What was given up does not count: together they would be too large to be kept.
        server = Server(IdempotencyMiddleware(app, engine, max_response=6))
        assert (await server.run(), server.sent[0]["status"]) == (b"whole", 201)
    assert app.runs == 1


async def test_another_answer_behind_one_that_is_partly_out_is_not_kept(engine):
    async def answer(scope, receive, send):
        await send(start())
        for _ in range(2):
            await send(part(b"x" * 4, more=True))
        await send(start(status=201))
        await send(part(b"whole"))

    app = By(answer)
    middleware = IdempotencyMiddleware(app, engine, max_response=6)
    assert await Server(middleware).run() == b"xxxxwhole"
    assert b"result_omitted" in await Server(middleware).run()
    assert app.runs == 1


async def test_a_body_without_a_key_passes_however_large_it_is(engine):
    sizes = []

    async def answer(scope, receive, send):
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message["body"])
            more = message["more_body"]
        sizes.append(size)
        await send(start())
        await send(part())

    async def chunks():
        for _ in range(4):
            yield b"x" * 5

    middleware = IdempotencyMiddleware(By(answer), engine, max_body=10)
    async with served(middleware) as client:
        await client.post("/", content=chunks())
        refused = await client.post("/", content=chunks(), headers=keyed())
    assert refused.status_code == 413
    assert sizes == [20]


async def test_a_body_that_was_read_for_its_key_is_given_to_the_application(engine):
    bodies = []

    async def answer(scope, receive, send):
        bodies.append(await receive())
        await send(start())
        await send(part())

    async with served(
        IdempotencyMiddleware(By(answer), engine, header=None, key=lambda request, body: None)
    ) as client:
        await client.post("/", content=b"the body")
    assert [message["body"] for message in bodies] == [b"the body"]


async def test_a_body_in_tiny_messages_needs_the_memory_of_its_bytes(engine):
    """An empty one beside each of them, as some layers send it, is no reason to refuse it."""
    messages = 100_000
    bodies, left = [], iter(range(2 * messages, -1, -1))

    async def answer(scope, receive, send):
        bodies.append((await receive())["body"])
        await send(start())
        await send(part())

    async def receive():
        number = next(left)
        return {"type": "http.request", "body": b"x" * (number % 2), "more_body": number > 1}

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"k")]}
    tracemalloc.start()
    try:
        await IdempotencyMiddleware(By(answer), engine)(scope, receive, send)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bodies == [b"x" * messages]
    assert peak < 2**20


@pytest.mark.parametrize("begins", [[], [b"x"] * 10])
async def test_of_endless_messages_without_content_only_some_are_read(engine, begins):
    read, chunks = [], iter(begins)

    async def answer(scope, receive, send):
        raise AssertionError("it must not run")

    async def receive():
        read.append(1)
        return {"type": "http.request", "body": next(chunks, b""), "more_body": len(read) < 100_000}

    server = Server(IdempotencyMiddleware(By(answer), engine, max_body=1024))
    server.receive = receive
    tracemalloc.start()
    try:
        await server.run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert server.sent[0]["status"] == 413
    assert len(read) < 2000
    assert peak < 2**20
    assert await engine.peek("k", scope="http") is None


async def test_endless_empty_frames_of_http2_are_answered(engine):
    """Each reaches the application as a message of its own."""

    async def answer(scope, receive, send):
        raise AssertionError("it must not run")

    h2 = H2Connection()
    h2.initiate_connection()
    lines = {":method": "POST", ":path": "/", ":scheme": "http", ":authority": "shop"}
    h2.send_headers(1, [*lines.items(), ("idempotency-key", "k")])
    async with served(IdempotencyMiddleware(By(answer), engine), "hypercorn-h2") as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(h2.data_to_send() + b"\0\0\0\0\0\0\0\0\1" * 5000)
        status = None
        async with asyncio.timeout(60):
            while status is None:
                for event in h2.receive_data(await reader.read(65536)):
                    if isinstance(event, ResponseReceived):
                        status = dict(event.headers)[b":status"]
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert status == b"413"


async def test_a_request_that_was_never_whole_runs_nothing_and_takes_no_key(engine):
    async def answer(scope, receive, send):
        await send(start())
        await send(part())

    app = By(answer)
    heads = "POST / HTTP/1.1", "Idempotency-Key: k", "Content-Length: 10"
    async with served(IdempotencyMiddleware(app, engine)) as client:
        await left(await begun(client, *heads, body=b"x"))
        whole = await client.post("/", content=b"x", headers=keyed())
    assert not replayed(whole)
    assert app.runs == 1


# --- methods --------------------------------------------------------------------------------------


async def test_a_method_in_lower_case_is_the_same_method(engine):
    async def answer(scope, receive, send):
        await send(start())
        await send(part(scope["method"].encode()))

    app = By(answer)
    middleware = IdempotencyMiddleware(app, engine, required=True)
    unkeyed = Server(middleware, method="post", headers=[])
    await unkeyed.run()
    assert unkeyed.sent[0]["status"] == 400
    for method in ("post", "POST", "Post"):
        assert await Server(middleware, method=method).run() == b"post"
    assert app.runs == 1
