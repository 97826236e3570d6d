"""SQLAlchemy 2: Session and Connection, AsyncSession and AsyncConnection.

Savepoints are SQLAlchemy's own, because a Session has to know which of its objects went with one.
The statements go to the driver's connection underneath: each driver's ways are known already. So a
statement that is interrupted (a cancelled task, a signal) is ours to report: SQLAlchemy closes the
connection, as it does after its own statements. An answer may still come on it.
"""

from __future__ import annotations

from typing import Any

from semel.stores.sql.verbs import Reply, Statement
from semel.transactions import families, troubles
from semel.transactions.links import AsyncNested, Nested, no_transaction
from semel.transactions.sqlite import AsyncSQLiteLink, SQLiteLink

_DIALECTS = {"mariadb": "mysql"}
"""Where SQLAlchemy has two names for what is one to us."""

_AUTOCOMMIT = "SQLAlchemy runs this connection in AUTOCOMMIT: give it another isolation level"


class SQLAlchemyLink:
    """A `Session` or a `Connection`."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.dialect = _dialect(given)

    def begin(self) -> Nested:
        """Open a savepoint of SQLAlchemy's."""
        given = self._given
        if not given.in_transaction():
            raise no_transaction("use `with session.begin():` around it")
        self._core = core = given if _is_core(given) else given.connection()
        self._driver = families.link_to(core.connection.driver_connection, asynchronous=False)
        if isinstance(self._driver, SQLiteLink):
            try:
                self._driver.ensure()
            except BaseException as error:
                self._close_if_interrupted(error)
                raise
        if not self._driver.joins():
            raise no_transaction(_AUTOCOMMIT)
        self._nested: Any = given.begin_nested()
        if core is not given:
            try:
                given.connection()  # only now a Session sets its savepoint
            except BaseException:
                self._nested.rollback()
                raise
        nested: Nested = self._nested
        return nested

    def execute(self, statement: Statement) -> Reply:
        """Run one statement on the driver's connection."""
        _check(self._nested, self._core)
        try:
            return self._driver.execute(statement)
        except BaseException as error:
            self._close_if_interrupted(error)
            raise

    def _close_if_interrupted(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self._core.invalidate()


class AsyncSQLAlchemyLink:
    """An `AsyncSession` or an `AsyncConnection`."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.dialect = _dialect(given)

    async def begin(self) -> AsyncNested:
        """Open a savepoint of SQLAlchemy's."""
        given = self._given
        if not given.in_transaction():
            raise no_transaction("use `async with session.begin():` around it")
        self._core = core = given if _is_core(given) else await given.connection()
        raw = (await core.get_raw_connection()).driver_connection
        self._driver = families.link_to(raw, asynchronous=True)
        if isinstance(self._driver, AsyncSQLiteLink):
            try:
                await self._driver.ensure()
            except BaseException as error:
                await self._close_if_interrupted(error)
                raise
        if not self._driver.joins():
            raise no_transaction(_AUTOCOMMIT)
        self._nested: Any = await given.begin_nested()
        if core is not given:
            try:
                await given.connection()  # only now a Session sets its savepoint
            except BaseException:
                await self._nested.rollback()
                raise
        nested: AsyncNested = self._nested
        return nested

    async def execute(self, statement: Statement) -> Reply:
        """Run one statement on the driver's connection."""
        _check(self._nested, self._core)
        try:
            return await self._driver.execute(statement)
        except BaseException as error:
            await self._close_if_interrupted(error)
            raise

    async def _close_if_interrupted(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            await self._core.invalidate()


def _check(nested: Any, core: Any) -> None:
    # After a commit the driver's connection may be another caller's already, by way of the pool.
    if not nested.is_active or core.invalidated:
        raise troubles.ended()


def _is_core(given: Any) -> bool:
    return hasattr(given, "exec_driver_sql")


def _dialect(given: Any) -> str:
    name: str = (given if _is_core(given) else given.get_bind()).dialect.name
    return _DIALECTS.get(name, name)
