"""Which sessions, engines and endpoints go together: a mistake is told when it is decorated."""

from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from starlette.requests import Request

from semel import AsyncIdempotency, ConfigError, Idempotency
from semel.adapters import fastapi, starlette

maker = sessionmaker()
async_maker = async_sessionmaker()


def opened():
    yield None


async def opened_async():
    yield None


async def pay(session: AsyncSession): ...
def plain_pay(session: Session): ...
def without(): ...
def unannotated(session): ...
def two(one: Session, other: Session): ...
async def wrong_kind(session: Session): ...
def plain_wrong_kind(session: AsyncSession): ...
def depending(db: Annotated[Session, Depends(opened)]): ...
def depending_by_default(db: Session = Depends(opened)): ...  # noqa: B008 - FastAPI's older way


@pytest.mark.parametrize(
    ("session", "endpoint", "told"),
    [
        (scoped_session(maker), plain_pay, "not a scoped session"),
        (async_scoped_session(async_maker, id), pay, "not a scoped session"),
        (Session(), plain_pay, "all requests would share that one"),
        (create_engine("sqlite://"), plain_pay, r"pass sessionmaker\(engine\)"),
        (create_async_engine("sqlite+aiosqlite://"), pay, r"pass sessionmaker\(engine\)"),
        (5, plain_pay, "or the name of the parameter .* got int"),
        (opened, plain_pay, r"opened is a dependency.* Depends\(opened\) on a parameter"),
        (opened_async, pay, "opened_async is a dependency"),
        (pay, pay, "pay is a dependency"),
        (maker, pay, "pay is async def, so .* AsyncSession: pass session= an async_sessionmaker"),
        (async_maker, plain_pay, "plain_pay is def, so .* Session: pass session= a plain"),
        (sessionmaker(class_=AsyncSession), plain_pay, "is def, so its session is a Session"),
        (maker, without, "no parameter for its session: it needs one such as `session: Session`"),
        (maker, two, "more than one parameter for its session"),
        (async_maker, wrong_kind, "an AsyncSession, not a Session"),
        (maker, plain_wrong_kind, "a Session, not an AsyncSession"),
        (maker, depending, "name its parameter, session='db'"),
        (maker, depending_by_default, "name its parameter, session='db'"),
        ("session", depending, "no parameter for its session: .* `session: Session`"),
        ("session", plain_pay, "no dependency opens the session of plain_pay"),
    ],
)
def test_a_mistake_is_told_when_an_endpoint_is_decorated(session, endpoint, told):
    idempotent = fastapi.Idempotent("sqlite:///never.db")
    with pytest.raises(ConfigError, match=told):
        idempotent(session=session)(endpoint)


def test_what_can_be_used_is_accepted():
    idempotent = fastapi.Idempotent("sqlite:///never.db", session=maker)
    idempotent(plain_pay)
    idempotent(unannotated)
    idempotent(session=Session)(plain_pay)
    idempotent(session=async_maker)(pay)
    idempotent(session=sessionmaker(class_=AsyncSession))(pay)
    idempotent(session="db")(depending)
    idempotent(session="db")(depending_by_default)
    idempotent(session=None)(without)


def test_a_bad_session_for_all_endpoints_is_told_when_the_decorator_is_made():
    with pytest.raises(ConfigError, match="opened is a dependency"):
        fastapi.Idempotent("sqlite:///never.db", session=opened)


def test_starlette_has_no_dependencies():
    def paying(request: Request, db: Session): ...

    with pytest.raises(ConfigError, match="or pass the sessionmaker as session="):
        starlette.Idempotent("sqlite:///never.db")(session="db")(paying)


async def test_an_engine_of_the_other_kind_is_refused():
    with Idempotency("memory://") as plain:
        idempotent = fastapi.Idempotent(plain)
        with pytest.raises(ConfigError, match="pay has a session that is an AsyncSession, which"):
            idempotent(session=async_maker)(pay)
        with pytest.raises(ConfigError, match="without needs an AsyncIdempotency or a URL"):
            idempotent(without)
    async with AsyncIdempotency("memory://") as awaited:
        with pytest.raises(ConfigError, match="which goes with an Idempotency; a URL in its"):
            fastapi.Idempotent(awaited)(session=maker)(plain_pay)


def test_the_session_is_no_parameter_of_the_request():
    app, idempotent = FastAPI(), fastapi.Idempotent("sqlite:///never.db")

    def pay_for(order: int, session: Session, more: str = "") -> Any: ...

    app.post("/given/{order}")(idempotent(session=maker)(pay_for))
    app.post("/injected")(idempotent(session="db")(depending))
    idempotent.init_app(app)
    paths = app.openapi()["paths"]
    names = [each["name"] for each in paths["/given/{order}"]["post"]["parameters"]]
    assert names == ["order", "more", "Idempotency-Key"]
    assert "requestBody" not in paths["/given/{order}"]["post"]
    assert [each["name"] for each in paths["/injected"]["post"]["parameters"]] == [
        "Idempotency-Key"
    ]
