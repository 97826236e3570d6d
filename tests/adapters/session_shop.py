"""A shop whose orders are rows of a database, served by endpoints with `session=`, of every kind.

What an endpoint does is written once, for a plain `Session`: an `AsyncSession` runs it with
`run_sync`, and a `def` endpoint calls it. Annotations are values here: FastAPI reads them.
"""

import contextlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, Response
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from adapters.asgi_serving import served
from semel import Idempotency
from semel.adapters import fastapi, starlette
from transactions.kinds import sqlalchemy_url
from transactions.transfers import connect, dialect_of, query

DRIVERS = {
    "sqlite": ("pysqlite", "aiosqlite"),
    "postgresql": ("psycopg", "asyncpg"),
    "mysql": ("pymysql", "asyncmy"),
}


class Kind(NamedTuple):
    """A kind of endpoint."""

    framework: str
    is_async: bool
    depends: bool = False
    """A dependency opens the session."""

    def __str__(self) -> str:
        opener = "dependency" if self.depends else "factory"
        return f"{self.framework}-{'async' if self.is_async else 'sync'}-{opener}"


KINDS = [
    Kind("fastapi", False),
    Kind("fastapi", True),
    Kind("fastapi", False, depends=True),
    Kind("fastapi", True, depends=True),
    Kind("starlette", False),
    Kind("starlette", True),
]


def order(session: Session) -> None:
    session.execute(text("INSERT INTO orders VALUES (1)"))


class Shop:
    """One database, and endpoints of one kind."""

    def __init__(self, url: str, kind: Kind, *, create: bool = True, **engine: Any) -> None:
        self.url, self.kind = url, kind
        plain, awaited = DRIVERS[dialect_of(url)]
        options = {"poolclass": NullPool} | engine
        if kind.is_async:
            self.engine: Any = create_async_engine(sqlalchemy_url(url, awaited), **options)
            self.maker: Any = async_sessionmaker(self.engine)
        else:
            self.engine = create_engine(sqlalchemy_url(url, plain), **options)
            self.maker = sessionmaker(self.engine)
        if create:
            self.query("CREATE TABLE orders (number INTEGER)")

    def query(self, sql: str) -> list[Any]:
        with contextlib.closing(connect(self.url)) as connection:
            return query(connection, sql)

    def orders(self) -> int:
        return len(self.query("SELECT number FROM orders"))

    def records(self) -> list[Any]:
        """The states of the records that are committed."""
        with Idempotency(self.url) as idem:
            idem.peek("any")
        return [row[0] for row in self.query("SELECT status FROM idempotent_record")]

    # --- endpoints ---------------------------------------------------------------------------

    def endpoint(self, action: Callable[[Session], Any]) -> Any:
        """The plain function."""
        if self.kind.framework == "starlette":
            if self.kind.is_async:

                async def pay(request: Request, session: AsyncSession) -> Any:
                    return await session.run_sync(action)
            else:

                def pay(request: Request, session: Session) -> Any:  # type: ignore[misc]
                    return action(session)
        elif self.kind.depends:
            if self.kind.is_async:

                async def pay(db: Annotated[AsyncSession, Depends(self.opened_async)]) -> Any:  # type: ignore[misc]
                    return await db.run_sync(action)
            else:

                def pay(db: Annotated[Session, Depends(self.opened)]) -> Any:  # type: ignore[misc]
                    return action(db)
        elif self.kind.is_async:

            async def pay(session: AsyncSession) -> Any:  # type: ignore[misc]
                return await session.run_sync(action)
        else:

            def pay(session: Session) -> Any:  # type: ignore[misc]
                return action(session)

        return pay

    before: Callable[[Session], Any] = staticmethod(lambda session: None)
    """What the dependency does before the endpoint."""

    def opened(self) -> Any:
        with self.maker() as session:
            self.before(session)
            yield session

    async def opened_async(self) -> Any:
        async with self.maker() as session:
            await session.run_sync(self.before)
            yield session

    def app(self, action: Callable[[Session], Any], idempotency: Any = None, **options: Any) -> Any:
        """An application with one endpoint."""
        framework = fastapi if self.kind.framework == "fastapi" else starlette
        idempotent = framework.Idempotent(idempotency or self.url)
        options = {"session": "db" if self.kind.depends else self.maker} | options
        pay = idempotent(**options)(self.endpoint(action))
        if self.kind.framework == "fastapi":
            app: Any = FastAPI()
            app.api_route("/pay", methods=["GET", "POST"], response_class=Response)(pay)
        else:
            app = Starlette(routes=[Route("/pay", pay, methods=["GET", "POST"])])
        idempotent.init_app(app)
        return app

    @contextlib.asynccontextmanager
    async def serving(self, action: Callable[[Session], Any], *args: Any, **options: Any) -> Any:
        """Serve it; gives a client."""
        async with served(self.app(action, *args, **options)) as client:
            yield client

    async def close(self) -> None:
        if self.kind.is_async:
            await self.engine.dispose()
        else:
            self.engine.dispose()
