"""How the decorator is made, what OpenAPI says of it, and how it ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel

from adapters.asgi_serving import keyed, replayed, served
from semel import AsyncIdempotency, ConfigError, Idempotency, StoreUnavailable
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.fastapi import Idempotent
from versions import needs


class Payment(BaseModel):
    amount: int


@pytest.fixture
async def engine():
    async with AsyncIdempotency("memory://") as engine:
        yield engine


async def pay(payment: Payment) -> str:
    """Pay."""
    return "paid"


async def pay_for(order: int, payment: Payment) -> str:
    return f"paid for {order}"


async def test_a_bad_option_is_told_of_when_the_integration_is_made(engine):
    with pytest.raises(ConfigError, match="include"):
        Idempotent(engine, include=["/"])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="max_body"):
        Idempotent(engine, max_body=-1)
    with pytest.raises(ConfigError, match="methods"):
        Idempotent(engine)(methods=["GET"])(pay)
    with pytest.raises(ConfigError, match="AsyncIdempotency"), Idempotency("memory://") as wrong:
        Idempotent(wrong)(pay)
    with pytest.raises(ConfigError, match=r"needs a store or an engine: .*uses semel's settings"):
        Idempotent()
    with pytest.raises(ConfigError, match="an endpoint is needed, not str"):
        Idempotent(engine)("/pay")  # type: ignore[type-var]


async def test_an_endpoint_that_yields_is_refused(engine):
    def rows():
        yield 1

    async def events():
        yield 1

    @wraps(events)
    async def wrapped():
        return events()

    for endpoint in (rows, events, wrapped):
        with pytest.raises(ConfigError, match="yields"):
            Idempotent(engine)(endpoint)


class Paying:
    async def __call__(self, payment: Payment) -> int:
        return payment.amount


class Plain:
    def __call__(self, request: Request, payment: Payment) -> str:
        return f"{request.method} {payment.amount}"


@wraps(pay)
async def wrapped(**values: Any) -> str:
    return await pay(**values)


evaluated = needs(
    "fastapi", "0.123.7", "before, annotations of an object's __call__ that are text are not read"
)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        pytest.param(Paying(), 3, marks=evaluated),
        pytest.param(Plain(), "POST 3", marks=evaluated),
        (wrapped, "paid"),
        pytest.param(partial(Paying()), 3, marks=evaluated),
    ],
    ids=["async", "plain", "wrapped", "partial"],
)
async def test_objects_and_wrapped_functions_are_endpoints_too(engine, endpoint, expected):
    app = FastAPI()
    app.post("/", name="pay")(Idempotent(engine)(endpoint))
    async with served(app) as client:
        answers = [await client.post("/", json={"amount": 3}, headers=keyed()) for _ in range(2)]
    assert [answer.json() for answer in answers] == [expected, expected]
    assert [replayed(answer) for answer in answers] == [False, True]


async def test_an_object_whose_annotations_are_types_is_an_endpoint(engine):
    class Evaluated:
        async def __call__(self, payment: Payment) -> int:
            return payment.amount

    # As without `from __future__ import annotations`.
    Evaluated.__call__.__annotations__.update({"payment": Payment, "return": int})
    app = FastAPI()
    app.post("/", name="pay")(Idempotent(engine)(Evaluated()))
    async with served(app) as client:
        answers = [await client.post("/", json={"amount": 3}, headers=keyed()) for _ in range(2)]
    assert [answer.json() for answer in answers] == [3, 3]
    assert [replayed(answer) for answer in answers] == [False, True]


async def test_25_openapi_shows_the_header_and_our_answers(engine):
    app, router = FastAPI(), APIRouter(prefix="/more")
    idempotent = Idempotent(engine)
    words = {"payload_mismatch": {"status": 409, "title": "Another request"}}
    needed = idempotent(required=True, tenant=str, problems=words)
    app.post("/needed/{order}")(needed(pay_for))
    free = idempotent(pay)
    router.post("/free")(free)
    router.get("/free")(free)
    app.post("/query")(idempotent(header=None, query="key", required=True)(pay))
    app.post("/either")(idempotent(query="Idempotency-Key", required=True)(pay))
    app.post("/fields")(idempotent(payload=["amount"])(pay))
    app.post("/hidden", include_in_schema=False)(idempotent(pay))
    app.post("/bare")(pay)
    app.include_router(router)
    idempotent.init_app(app)
    async with served(app) as client:
        schema = (await client.get("/openapi.json")).json()
        assert (await client.get("/openapi.json")).json() == schema

    def header(operation):
        return [
            (each["name"], each["required"])
            for each in operation.get("parameters", ())
            if each["in"] == "header"
        ]

    def ours(operation):
        return {
            status
            for status, answer in operation["responses"].items()
            if "application/problem+json" in answer.get("content", {})
        }

    paths = schema["paths"]
    needed, free = paths["/needed/{order}"]["post"], paths["/more/free"]["post"]
    assert header(needed) == [("Idempotency-Key", True)]
    assert header(free) == [("Idempotency-Key", False)]
    assert header(paths["/query"]["post"]) == header(paths["/bare"]["post"]) == []
    (told,) = paths["/query"]["post"]["parameters"]
    assert (told["name"], told["in"], told["required"]) == ("key", "query", True)
    assert header(paths["/either"]["post"]) == [("Idempotency-Key", False)]
    assert [each["in"] for each in paths["/either"]["post"]["parameters"]] == ["header", "query"]
    assert ours(needed) == {"400", "401", "409", "413", "503"}
    assert ours(free) == ours(paths["/query"]["post"]) == {"400", "409", "413", "422", "503"}
    assert ours(paths["/fields"]["post"]) == ours(free) | {"415"}
    assert ours(paths["/more/free"]["get"]) == ours(paths["/bare"]["post"]) == set()
    assert needed["responses"]["409"]["description"].endswith("Another request")
    assert set(free["responses"]["422"]["content"]) == {
        "application/json",
        "application/problem+json",
    }
    assert set(schema["components"]["schemas"]["IdempotencyProblem"]["required"]) == {
        "type",
        "title",
        "status",
        "detail",
        "code",
    }
    told = schema["components"]["schemas"]["IdempotencyProblem"]["properties"]
    assert told["instance"] == {"type": "string", "format": "uri-reference"}
    assert "/hidden" not in paths


async def started(app: FastAPI) -> None:
    async with app.router.lifespan_context(app):
        pass


async def test_a_decorator_above_that_of_its_route_is_refused_at_the_start(engine):
    app, idempotent = FastAPI(), Idempotent(engine)
    idempotent.init_app(app)
    idempotent(app.post("/pay")(pay))
    with pytest.raises(ConfigError, match="pay is not protected: its route took it before"):
        await started(app)


async def test_a_decorator_on_a_route_of_other_methods_is_refused_at_the_start(engine):
    app, idempotent = FastAPI(), Idempotent(engine)
    idempotent.init_app(app)
    app.put("/pay")(idempotent(pay))
    with pytest.raises(ConfigError, match="it handles PUT, and methods= lists none"):
        await started(app)


async def test_functions_that_are_decorated_for_some_of_their_routes_are_fine(engine):
    app, idempotent = FastAPI(), Idempotent(engine)
    idempotent.init_app(app)
    decorated = idempotent(pay)
    app.get("/pay")(decorated)
    app.post("/pay")(decorated)
    app.post("/bare")(pay)
    idempotent(pay_for)  # of no route here
    app.mount("/inner", FastAPI())
    await started(app)


async def test_a_function_that_is_decorated_beneath_another_decorator_is_fine(engine):
    app, idempotent = FastAPI(), Idempotent(engine)
    idempotent.init_app(app)
    decorated = idempotent(pay)

    @wraps(decorated)
    async def wrapped(**values: Any) -> Any:
        return await decorated(**values)

    app.post("/v1")(pay)
    app.post("/v2")(wrapped)
    await started(app)


async def test_a_function_that_is_decorated_for_a_mounted_application_is_fine(engine):
    app, mounted, idempotent = FastAPI(), FastAPI(), Idempotent(engine)
    idempotent.init_app(app)
    app.post("/v1")(pay)
    mounted.post("/pay")(idempotent(pay))
    app.mount("/v2", mounted)
    await started(app)


async def test_a_decorator_above_a_route_of_a_mounted_application_is_refused(engine):
    app, mounted, idempotent = FastAPI(), FastAPI(), Idempotent(engine)
    idempotent.init_app(app)
    idempotent(mounted.post("/pay")(pay))
    app.mount("/v2", mounted)
    with pytest.raises(ConfigError, match="pay is not protected: its route took it before"):
        await started(app)


async def test_a_decorated_endpoint_that_only_reads_is_fine(engine):
    app, idempotent = FastAPI(), Idempotent(engine)
    idempotent.init_app(app)
    app.get("/pay")(idempotent(pay))
    await started(app)


async def test_that_a_method_is_not_protected_is_told_once_of_each_endpoint(engine, caplog):
    app, protect = FastAPI(), Idempotent(engine)(required=True)
    app.put("/pay")(protect(pay))
    app.put("/pay/{order}")(protect(pay_for))
    async with served(app) as client:
        for path in ("/pay", "/pay", "/pay/1", "/pay/2"):
            answer = await client.put(path, json={"amount": 3}, headers=keyed())
            assert answer.status_code == 200
    assert caplog.text.count(" pay handles PUT without protection") == 1
    assert caplog.text.count(" pay_for handles PUT without protection") == 1
    assert caplog.text.count("methods=['PATCH', 'POST', 'PUT']") == 2


async def test_an_endpoint_that_fastapi_does_not_call_says_what_it_needs(engine):
    decorated = Idempotent(engine)(pay)
    told = r"functools\.wraps.* the undecorated function"
    with pytest.raises(ConfigError, match=told):
        await decorated(Payment(amount=3))  # as a test calls it
    with pytest.raises(ConfigError, match=told):
        await decorated(payment=Payment(amount=3))  # as a decorator that hides the signature


async def test_a_method_that_a_middleware_protects_is_not_told_of(engine, caplog):
    app = FastAPI()
    app.put("/pay")(Idempotent(engine)(pay))
    async with served(IdempotencyMiddleware(app, engine, methods=["PUT"])) as client:
        for _ in range(2):
            answer = await client.put("/pay", json={"amount": 3}, headers=keyed())
    assert replayed(answer)
    assert "without protection" not in caplog.text


async def test_older_versions_of_fastapi_list_all_their_routes(engine, monkeypatch):
    app = FastAPI()
    idempotent = Idempotent(engine)
    app.post("/pay")(idempotent(pay))
    app.openapi()  # kept by the application, which needs what is taken away here
    idempotent.init_app(app)
    monkeypatch.delattr("fastapi.routing.iter_route_contexts", raising=False)
    assert "409" in app.openapi()["paths"]["/pay"]["post"]["responses"]


async def test_an_application_that_ends_closes_what_was_opened_for_it():
    told = []

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        told.append("begun")
        yield {"told": told}
        told.append("ended")

    app = FastAPI(lifespan=lifespan)
    idempotent = Idempotent("memory://")
    idempotent.init_app(app)

    @app.post("/")
    @idempotent
    async def tell(request: Request) -> list[str]:
        return request.state.told

    async with served(app) as client:
        assert (await client.post("/", headers=keyed())).json() == ["begun"]
    assert told == ["begun", "ended"]
    with pytest.raises(StoreUnavailable, match="closed"):
        await idempotent._integration.engine.execute("k", asyncio.sleep)


@pytest.mark.parametrize("known", [True, False])
def test_openapi_takes_parameters_that_are_written_elsewhere(engine, known):
    app = FastAPI()
    idempotent = Idempotent(engine)
    trace = {"$ref": "#/components/parameters/Trace"}
    own = {"$ref": "#/components/parameters/Key"}

    async def pay() -> str:
        return "paid"

    app.post("/pay", openapi_extra={"parameters": [trace, own]})(idempotent(pay))
    if known:
        made = app.openapi

        def with_components():
            schema = made()
            schema.setdefault("components", {})["parameters"] = {
                "Trace": {"name": "X-Trace", "in": "header"},
                "Key": {"name": "idempotency-key", "in": "header"},
            }
            return schema

        app.openapi = with_components
    idempotent.init_app(app)
    for _ in range(2):
        parameters = app.openapi()["paths"]["/pay"]["post"]["parameters"]
        assert parameters[0] == trace
        assert (own in parameters) is not known
        assert [each.get("name") for each in parameters].count("Idempotency-Key") == 1
