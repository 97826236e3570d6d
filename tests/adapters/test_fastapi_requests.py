"""What comes before an endpoint and around it: dependencies, bodies, forms, errors, cancellations."""

import asyncio
import itertools
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Form, HTTPException, Request, Response, UploadFile
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel
from starlette.middleware.base import BaseHTTPMiddleware

from adapters.asgi_serving import begun, eventually, keyed, left, replayed, served
from adapters.test_asgi_lives import Hasty, Impatient, Scoped
from semel import AsyncIdempotency, Policy
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.fastapi import Idempotent
from versions import needs


class Payment(BaseModel):
    amount: int


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


def codes(answers) -> list[int]:
    return [answer.status_code for answer in answers]


async def test_authorization_comes_first_also_before_a_replay(engine):
    revoked: set[str] = set()
    app, runs = FastAPI(), []

    async def user(request: Request) -> str:
        name = request.headers.get("user", "")
        if not name or name in revoked:
            raise HTTPException(401)
        return name

    @app.post("/pay", status_code=201)
    @Idempotent(engine, tenant=lambda request: request.headers.get("user"))
    async def pay(payment: Payment, name: Annotated[str, Depends(user)]) -> str:
        runs.append(name)
        return name

    async with served(app) as client:

        async def ask(name: str, amount: Any = 1):
            given = keyed() | ({"user": name} if name else {})
            return await client.post("/pay", json={"amount": amount}, headers=given)

        answers = [await ask("ann"), await ask("ann"), await ask("bob"), await ask("")]
        wrong = [await ask("ann", 2), await ask("cid", "much"), await ask("cid")]
        revoked.add("ann")
        after = await ask("ann")
    assert codes(answers) == [201, 201, 201, 401]
    assert [answer.json() for answer in answers[:3]] == ["ann", "ann", "bob"]
    assert codes(wrong) == [422, 422, 201]
    assert wrong[0].headers["content-type"] == "application/problem+json"
    assert wrong[1].headers["content-type"] == "application/json"
    assert after.status_code == 401
    assert runs == ["ann", "bob", "cid"]


async def test_every_endpoint_has_its_own_options_over_those_of_all(engine):
    app = FastAPI()
    idempotent = Idempotent(engine, required=True)

    @app.put("/needed")
    @idempotent(methods=["PUT"])
    async def needed() -> str:
        return "needed"

    @app.api_route("/free", methods=["GET", "POST"])
    @idempotent(required=False, replayed_header="X-Again")
    async def free() -> str:
        return "free"

    async with served(app) as client:
        missing = await client.put("/needed")
        put = [await client.put("/needed", headers=keyed("p")) for _ in range(2)]
        posts = [await client.post("/free", headers=keyed("f")) for _ in range(2)]
        read = await client.get("/free", headers=keyed("g"))
    assert (missing.status_code, missing.json()["code"]) == (400, "key_missing")
    assert [replayed(answer) for answer in put] == [False, True]
    assert [answer.headers.get("x-again") for answer in (*posts, read)] == [None, "true", None]


@needs("fastapi", "0.128.2", "before, Depends is forbidden for a parameter of the type Request")
async def test_a_dependency_may_give_what_looks_like_the_request(engine):
    app = FastAPI()

    async def other(request: Request) -> Request:
        return Request({**request.scope, "method": "OTHER"})

    @app.post("/")
    @Idempotent(engine)
    async def pay(
        first: Annotated[Request, Depends(other)],
        request: Request,
        second: Request = Depends(other),  # noqa: B008, FAST002 - the older way to say it
    ) -> list[str]:
        return [first.method, request.method, second.method]

    async with served(app) as client:
        answer = await client.post("/", headers=keyed())
    assert answer.json() == ["OTHER", "POST", "OTHER"]


async def test_an_endpoint_may_read_the_body_by_itself(engine):
    app = FastAPI()
    idempotent = Idempotent(engine, max_body=10)

    @app.post("/body")
    @idempotent
    async def body(request: Request) -> str:
        return (await request.body()).decode()

    @app.post("/unread")
    @idempotent
    async def unread() -> str:
        return "unread"

    @app.post("/json")
    @idempotent
    async def parsed(payment: Payment) -> int:
        return payment.amount

    async def much():
        for _ in range(3):
            yield b"12345"

    async with served(app) as client:
        read = [await client.post("/body", content=b"123", headers=keyed("r")) for _ in range(2)]
        other = await client.post("/unread", content=b"1", headers=keyed("u"))
        differs = await client.post("/unread", content=b"2", headers=keyed("u"))
        large = await client.post("/body", content=much(), headers=keyed("l"))
        model = await client.post("/json", json={"amount": 10**9}, headers=keyed("j"))
        await left(
            await begun(
                client, "POST /body HTTP/1.1", "Idempotency-Key: c", "Content-Length: 9", body=b"1"
            )
        )
        assert await engine.peek("c", scope="http") is None
    assert [(answer.json(), replayed(answer)) for answer in read] == [("123", False), ("123", True)]
    assert codes([other, differs, large, model]) == [200, 422, 413, 413]


SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/",
    "raw_path": b"/",
    "root_path": "",
    "query_string": b"",
    "headers": [(b"idempotency-key", b"k")],
    "http_version": "1.1",
}
"""A request with a key, as a server tells it."""


async def test_a_request_that_ends_too_early_is_not_run(engine):
    app, runs = FastAPI(), []

    @app.post("/")
    @Idempotent(engine)
    async def pay() -> str:
        runs.append(1)
        return "paid"

    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app({**SCOPE}, receive, send)
    assert sent[0]["status"] == 400
    assert runs == []


async def test_of_endless_messages_without_content_only_some_are_read(engine):
    app, read, statuses = FastAPI(), [], []

    @app.post("/")
    @Idempotent(engine)
    async def pay() -> None:
        raise AssertionError("it must not run")

    async def receive():
        read.append(1)
        return {"type": "http.request", "body": b"", "more_body": len(read) < 100_000}

    async def send(message):
        statuses.append(message.get("status"))

    await app({**SCOPE}, receive, send)
    assert statuses[0] == 413
    assert len(read) < 2000


async def test_messages_without_content_between_others_are_no_reason_to_refuse(engine):
    app, bodies, left = FastAPI(), [], iter(range(4000, -1, -1))

    @app.post("/")
    @Idempotent(engine)
    async def pay(request: Request) -> None:
        bodies.append(await request.body())

    async def receive():
        number = next(left)
        return {"type": "http.request", "body": b"x" * (number % 2), "more_body": number > 0}

    async def send(message):
        pass

    await app({**SCOPE}, receive, send)
    assert bodies == [b"x" * 2000]


async def test_14_forms_are_compared_by_their_parts(engine):
    app, seen = FastAPI(), []

    @app.post("/upload")
    @Idempotent(engine, max_body=100)
    async def upload(file: UploadFile, name: Annotated[str, Form()]) -> str:
        content = (await file.read()).decode()
        seen.append(content)
        return f"{name}: {content}"

    @app.post("/fields")
    @Idempotent(engine, max_body=100)
    async def fields(name: Annotated[str, Form()]) -> str:
        return name

    async with served(app) as client:

        async def send(content: str = "the file", **more: Any):
            asked = {"filename": "a.txt", "kind": "text/plain", "name": "n", "key": "k"} | more
            part = asked["filename"], content.encode(), asked["kind"]
            return await client.post(
                "/upload",
                files={"file": part},
                data={"name": asked["name"]},
                headers=keyed(asked["key"]),
            )

        first, again = await send(), await send()
        different = [
            await send("another"),
            await send(filename="b.txt"),
            await send(kind="text/html"),
            await send(name="m"),
        ]
        large = await send("x" * 101, key="large")
        plain = [
            await client.post("/fields", data={"name": name}, headers=keyed("f"))
            for name in ("a", "a", "b")
        ]
        parts = [
            await client.post("/fields", files={"name": (None, name)}, headers=keyed("p"))
            for name in ("a", "a", "b", "x" * 101)
        ]
    assert (first.json(), again.json(), replayed(again)) == ("n: the file", "n: the file", True)
    assert codes(different) == [422] * 4
    assert large.status_code == 413
    assert codes(plain) == [200, 200, 422]
    assert codes(parts) == [200, 200, 422, 413]
    assert seen == ["the file"]


async def form_read(request: Request) -> None:
    await request.form()


async def body_and_form_read(request: Request) -> None:
    await request.body()
    await request.form()


@pytest.mark.parametrize("before", [form_read, body_and_form_read])
async def test_json_is_compared_although_a_dependency_has_asked_for_a_form(engine, before):
    """Of what is no form the framework makes an empty one, and leaves the body where it is."""
    app, runs = FastAPI(), []

    @app.post("/pay", dependencies=[Depends(before)])
    @Idempotent(engine)
    async def pay(request: Request) -> int:
        runs.append(await request.json())
        return runs[-1]["amount"]

    @app.post("/either")
    @Idempotent(engine)
    async def either(request: Request, amount: Annotated[int | None, Form()] = None) -> int:
        return (await request.json())["amount"] if amount is None else amount

    async with served(app) as client:

        async def send(path: str, amount: int):
            return await client.post(path, json={"amount": amount}, headers=keyed(path[1:]))

        answers = [await send("/pay", amount) for amount in (5, 5, 999)]
        others = [await send("/either", amount) for amount in (5, 5, 999)]
    assert codes(answers) == codes(others) == [200, 200, 422]
    assert runs == [{"amount": 5}]


@pytest.mark.parametrize("also_form", [False, True])
async def test_a_body_that_was_read_as_a_stream_is_an_error_that_says_what_to_do(
    engine, also_form, caplog
):
    app, runs = FastAPI(), []

    async def streamed(request: Request) -> None:
        async for _ in request.stream():
            pass
        if also_form:
            await request.form()

    @app.post("/pay", dependencies=[Depends(streamed)])
    @Idempotent(engine)
    async def pay() -> str:
        runs.append(1)
        return "paid"

    async with served(app) as client:
        answer = await client.post("/pay", json={"amount": 5}, headers=keyed())
        plain = await client.post("/pay", json={"amount": 5})
    assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_error")
    assert "await request.body(), which keeps it" in caplog.text
    assert (plain.status_code, runs) == (200, [1])


async def through_form(request: Request, call_next: Any) -> Response:
    await request.form()
    return await call_next(request)


async def through_stream(request: Request, call_next: Any) -> Response:
    async for _ in request.stream():
        pass
    return await call_next(request)


async def through_body(request: Request, call_next: Any) -> Response:
    await request.body()
    return await call_next(request)


@pytest.mark.parametrize("decorated", [True, False])
@pytest.mark.parametrize("around", [through_form, through_stream, through_body])
async def test_a_body_that_a_middleware_has_consumed_is_no_empty_one(
    engine, around, decorated, caplog
):
    """`BaseHTTPMiddleware` shows an empty body then, whatever the client has sent."""
    app, runs = FastAPI(), []

    async def pay() -> str:
        runs.append(1)
        return "paid"

    app.post("/pay")(Idempotent(engine)(pay) if decorated else pay)
    if not decorated:
        app.add_middleware(IdempotencyMiddleware, idempotency=engine)
    app.add_middleware(BaseHTTPMiddleware, dispatch=around)
    async with served(app) as client:
        answers = [
            await client.post("/pay", data={"amount": amount}, headers=keyed())
            for amount in (5, 5, 999)
        ]
        empty = await client.post("/pay", headers=keyed("empty"))
    if around is through_body:
        assert codes(answers) == [200, 200, 422]
    else:
        assert codes(answers) == [500, 500, 500]
        assert "a middleware around the application has read the body" in caplog.text
    assert empty.status_code == 200
    assert len(runs) == (2 if around is through_body else 1)


async def test_14_files_of_a_form_are_compared_whole_and_not_taken_for_its_fields(engine):
    app, runs = FastAPI(), []

    async def scanned(doc: UploadFile) -> None:
        await doc.read(2)

    @app.post("/upload", dependencies=[Depends(scanned)])
    @Idempotent(engine)
    async def upload(doc: UploadFile) -> str:
        runs.append(await doc.read())
        return "done"

    doc = {"doc": ("d.txt", b"data", "text/plain")}
    async with served(app) as client:
        fields = {"files": "a", "b": "c"}
        first = await client.post("/upload", data=fields, files=doc, headers=keyed())
        files = {"a": ("b", b"files", "c"), **doc}
        other = await client.post("/upload", files=files, headers=keyed())
    assert codes([first, other]) == [200, 422]
    assert runs == [b"ta"]


class Declined(HTTPException):
    pass


def failing(engine, error, **options) -> tuple[FastAPI, list[str]]:
    app, told = FastAPI(), []

    async def session():
        try:
            yield
        except HTTPException as seen:
            told.append(f"dependency saw {seen.status_code}")
            raise

    @app.post("/")
    @Idempotent(engine, **options)
    async def pay(_: Annotated[None, Depends(session)]) -> str:
        told.append("ran")
        raise error()

    return app, told


async def posted(app: FastAPI, times: int = 2):
    async with served(app) as client:
        return [await client.post("/", headers=keyed()) for _ in range(times)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", [404, HTTPException, Declined])
async def test_an_error_handler_runs_once_and_the_first_answer_is_the_stored_one(
    engine, kind, streams
):
    numbers = itertools.count(1)
    error = Declined(404, "none")  # the same object, again and again
    app, told = failing(engine, lambda: error, stored=lambda status: status < 500)

    @app.exception_handler(kind)
    async def word(request: Request, error: HTTPException) -> Response:
        text = f"error {next(numbers)}"
        return StreamingResponse(iter(text), 404) if streams else PlainTextResponse(text, 404)

    @app.post("/bare")
    async def bare() -> None:
        raise error

    async with served(app) as client:
        answers = [await client.post("/", headers=keyed()) for _ in range(3)]
        other = await client.post("/", headers=keyed("other"))
        unprotected = await client.post("/bare")
    assert [answer.text for answer in answers] == ["error 1"] * 3
    assert [replayed(answer) for answer in answers] == [False, True, True]
    assert (other.text, unprotected.text) == ("error 2", "error 3")
    assert told == ["ran", "dependency saw 404"] * 2


class Worded:
    """An error handler that is an object."""

    async def __call__(self, request: Request, error: HTTPException) -> Response:
        return PlainTextResponse(f"mine: {error.detail}", error.status_code)


class PlainWorded:
    """An error handler that is an object, called on a thread."""

    def __call__(self, request: Request, error: HTTPException) -> Response:
        assert threading.current_thread() is not threading.main_thread()
        return PlainTextResponse(f"mine: {error.detail}", error.status_code)


@pytest.mark.parametrize(
    "handler",
    [
        Worded(),
        Worded().__call__,
        partial(Worded()),
        partial(partial(Worded().__call__)),
        PlainWorded(),
        partial(PlainWorded()),
    ],
    ids=["object", "method", "partial of object", "partial of method", "plain", "plain partial"],
)
@pytest.mark.parametrize("kind", [404, HTTPException])
async def test_an_error_handler_may_be_anything_that_starlette_calls(engine, handler, kind):
    app, told = failing(engine, lambda: HTTPException(404, "none"), stored=lambda _: True)
    app.add_exception_handler(kind, handler)

    @app.post("/bare")
    async def bare() -> None:
        raise HTTPException(404, "bare")

    async with served(app) as client:
        before = await client.post("/bare")
        first, again = [await client.post("/", headers=keyed()) for _ in range(2)]
        after = await client.post("/bare")
    assert (first.status_code, first.text, replayed(first)) == (404, "mine: none", False)
    assert (again.status_code, again.text, replayed(again)) == (404, "mine: none", True)
    assert (after.status_code, after.text) == (before.status_code, before.text)
    assert (after.status_code, after.text) == (404, "mine: bare")
    assert told.count("ran") == 1


async def test_events_of_an_error_handler_pass_live_and_marked(engine):
    app, _ = failing(engine, lambda: HTTPException(404), stored=lambda _: True)

    @app.exception_handler(404)
    async def word(request: Request, error: HTTPException) -> Response:
        return StreamingResponse(iter(["data: 1\n\n"]), 404, media_type="text/event-stream")

    (answer,) = await posted(app, 1)
    assert (answer.status_code, answer.text) == (404, "data: 1\n\n")
    assert answer.headers["idempotent-unprotected"] == "stream"


async def test_who_was_replaced_gets_no_error_of_its_own(engine):
    app = FastAPI()

    @app.post("/")
    @Idempotent(engine, stored=lambda _: True)
    async def pay() -> None:
        await engine.forget("k", scope="http")
        raise HTTPException(404)

    (answer,) = await posted(app, 1)
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")


async def test_an_http_error_is_not_stored_and_its_dependencies_see_it(engine):
    app, told = failing(engine, lambda: HTTPException(404, "no such order"))
    answers = await posted(app)
    assert codes(answers) == [404, 404]
    assert answers[0].json() == {"detail": "no such order"}
    assert told == ["ran", "dependency saw 404"] * 2


@pytest.mark.parametrize("kind", ["default", "async", "plain", "status"])
async def test_an_http_error_is_stored_on_request_as_the_application_words_it(engine, kind):
    def declined() -> HTTPException:
        return Declined(402, "declined", {"X-Why": "funds"})

    app, told = failing(engine, declined, stored=lambda status: status == 402)
    if kind == "async":

        @app.exception_handler(Declined)
        async def word(request: Request, error: Declined) -> Response:
            return PlainTextResponse(f"sorry: {error.detail}", error.status_code)

    if kind == "plain":

        @app.exception_handler(HTTPException)
        def word_plainly(request: Request, error: HTTPException) -> Response:
            return PlainTextResponse("no", error.status_code)

    if kind == "status":

        @app.exception_handler(402)
        async def word_by_status(request: Request, error: HTTPException) -> Response:
            return PlainTextResponse("402!", 402)

    first, again = await posted(app)
    expected = {
        "default": '{"detail":"declined"}',
        "async": "sorry: declined",
        "plain": "no",
        "status": "402!",
    }
    assert (first.status_code, first.text) == (402, expected[kind])
    assert (again.status_code, again.text, replayed(again)) == (402, expected[kind], True)
    assert again.headers.get("x-why") == ("funds" if kind == "default" else None)
    assert told == ["ran", "dependency saw 402"]


async def test_an_http_error_that_nobody_answers_is_an_error_as_any_other(engine):
    app, told = failing(engine, lambda: Declined(402), stored=lambda status: status == 402)

    @app.exception_handler(Declined)
    async def silent(request: Request, error: Declined) -> None:
        return None

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"idempotency-key", b"k")],
    }

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        assert message.get("status", 500) == 500

    for _ in range(2):
        with suppress(TypeError):  # older Starlettes call the response that is not there
            await app(scope.copy(), receive, send)
    assert told == ["ran", "dependency saw 402"] * 2


async def test_an_http_error_may_leave_the_outcome_unknown(engine):
    app, _ = failing(
        engine,
        lambda: HTTPException(502),
        stored=lambda status: "unknown" if status == 502 else False,
        policy=Policy(abandoned="hold"),
    )
    first, again = await posted(app)
    assert codes([first, again]) == [502, 409]
    assert again.json()["code"] == "outcome_unknown"


@pytest.mark.parametrize("error", [HTTPException(503), ArithmeticError("the sum")])
async def test_the_policy_judges_what_an_endpoint_raises(engine, error):
    judged = []

    def judge(failure: BaseException) -> str:
        judged.append(failure)
        return "final"

    app, _ = failing(engine, lambda: error, policy=Policy(failure=judge))
    first, again = await posted(app)
    assert (first.status_code, again.json()["code"]) == (
        getattr(error, "status_code", 500),
        "previous_failure",
    )
    assert judged == [error]


async def test_a_value_that_is_no_answer_frees_the_key(engine):
    app, runs = FastAPI(), []

    @app.post("/")
    @Idempotent(engine)
    async def pay() -> int:
        runs.append(1)
        return "many"  # type: ignore[return-value]

    assert codes(await posted(app)) == [500, 500]
    assert runs == [1, 1]


@pytest.mark.parametrize("raises", [False, True])
async def test_an_answer_whose_key_was_taken_away_is_not_given(engine, raises):
    app = FastAPI()

    @app.post("/")
    @Idempotent(engine, stored=lambda status: True)
    async def pay() -> str:
        await engine.forget("k", scope="http")
        if raises:
            raise HTTPException(404)
        return "paid"

    (answer,) = await posted(app, 1)
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")


class Slow:
    """An application whose endpoint waits to be let on, with a dependency that is closed after."""

    def __init__(self, engine: AsyncIdempotency, error: Exception | None = None) -> None:
        self.told, self.go = [], asyncio.Event()

        @asynccontextmanager
        async def lifespan(_: FastAPI):
            yield
            asyncio.get_running_loop().call_later(0.05, self.go.set)

        self.app = FastAPI(lifespan=lifespan)

        async def session():
            try:
                yield "session"
            finally:
                self.told.append("closed")

        async def pay(_: Annotated[str, Depends(session)]) -> str:
            self.told.append("begun")
            await self.go.wait()
            if error is not None:
                raise error
            self.told.append("paid")
            return "paid"

        self.idempotent = Idempotent(engine)
        self.app.post("/")(self.idempotent(pay))


@pytest.mark.parametrize("layer", [Impatient, Hasty, Scoped])
async def test_a_dependency_is_not_closed_under_a_cancelled_endpoint(engine, layer):
    slow = Slow(engine)
    around = layer(slow.app)
    async with served(around) as client:
        first = asyncio.create_task(client.post("/", headers=keyed()))
        await eventually(lambda: slow.told)
        around.enough.set()
        for _ in range(200):  # turns of the loop: cancelled by now, again and again
            await asyncio.sleep(0)
        slow.go.set()
        assert (await first).text == "too slow"
        again = await client.post("/", headers=keyed())
    assert replayed(again)
    assert slow.told[:3] == ["begun", "paid", "closed"]


async def test_an_endpoint_that_is_cancelled_twice_goes_on_by_itself(engine, caplog):
    slow = Slow(engine, ArithmeticError("the sum"))
    slow.idempotent.init_app(slow.app)

    class Twice(Hasty):
        async def __call__(self, scope, receive, send) -> None:
            running = asyncio.create_task(self._app(scope, receive, send))
            if scope["type"] == "http":
                await self.enough.wait()
                running.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                running.cancel()
            await asyncio.wait((running,))
            self.left = True

    around = Twice(slow.app)
    around.left = False
    async with served(around) as client:
        writer = await begun(client, "POST / HTTP/1.1", "Idempotency-Key: k", "Content-Length: 0")
        await eventually(lambda: slow.told)
        around.enough.set()
        await eventually(lambda: around.left)
        await left(writer)
        assert "the sum" not in caplog.text
    await eventually(lambda: "the sum" in caplog.text)
    assert "after its client had disconnected" in caplog.text
