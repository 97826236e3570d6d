"""What transactional mode asks of a caller's connection, and savepoints made by SQL.

A link speaks to one connection for one block. It never begins, commits or rolls back the
transaction itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any, Final, Protocol

from semel.errors import ConfigError
from semel.stores.sql.verbs import Reply, Statement

_names: Final = count(1)
"""A savepoint's name means something to one connection alone."""


class Nested(Protocol):
    """A savepoint, which a framework may keep an account of."""

    def commit(self) -> object:
        """Release it: what was done since belongs to the transaction."""
        ...

    def rollback(self) -> object:
        """Undo what was done since."""
        ...


class Link(ABC):
    """A caller's connection, for threads."""

    dialect: str
    """sqlite, postgresql or mysql."""

    @abstractmethod
    def begin(self) -> Nested:
        """Open a savepoint, or raise a ConfigError when no transaction is open."""

    @abstractmethod
    def execute(self, statement: Statement) -> Reply:
        """Run one statement, in the caller's transaction."""


class AsyncNested(Protocol):
    """`Nested`, awaited."""

    async def commit(self) -> object: ...
    async def rollback(self) -> object: ...


class AsyncLink(ABC):
    """`Link`, awaited."""

    dialect: str

    @abstractmethod
    async def begin(self) -> AsyncNested: ...

    @abstractmethod
    async def execute(self, statement: Statement) -> Reply: ...


class _Name:
    """The statements of one savepoint."""

    def __init__(self) -> None:
        name = f"semel_{next(_names)}"
        self.opening = command(f"SAVEPOINT {name}")
        self.releasing = command(f"RELEASE SAVEPOINT {name}")
        self.undoing = command(f"ROLLBACK TO SAVEPOINT {name}")


class Savepoint:
    """A savepoint made by SQL, which all three databases spell alike."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._name = _Name()

    def open(self) -> None:
        self._link.execute(self._name.opening)

    def commit(self) -> None:
        """Release it; an error says that its transaction has ended."""
        self._link.execute(self._name.releasing)

    def rollback(self) -> None:
        """Undo what was done since, and forget it."""
        self._link.execute(self._name.undoing)
        self._link.execute(self._name.releasing)


class AsyncSavepoint:
    """`Savepoint`, awaited."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._name = _Name()

    async def open(self) -> None:
        await self._link.execute(self._name.opening)

    async def commit(self) -> None:
        """Release it; an error says that its transaction has ended."""
        await self._link.execute(self._name.releasing)

    async def rollback(self) -> None:
        """Undo what was done since, and forget it."""
        await self._link.execute(self._name.undoing)
        await self._link.execute(self._name.releasing)


class _Plain(ABC):
    """A driver's own connection, judged by its state."""

    way_in: str
    """How a transaction is begun on it, for the error when none is open."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether a transaction is open; the autocommit flag says nothing about that."""

    def joins(self) -> bool:
        """Whether a savepoint can be relied on; most servers reject it outside a transaction."""
        return True

    def _check(self) -> None:
        if not self.in_transaction():
            raise no_transaction(self.way_in)


class PlainLink(_Plain, Link):
    """A driver's connection for threads."""

    def begin(self) -> Nested:
        self._check()
        savepoint = Savepoint(self)
        savepoint.open()
        return savepoint


class AsyncPlainLink(_Plain, AsyncLink):
    """A driver's connection for asyncio."""

    async def begin(self) -> AsyncNested:
        self._check()
        savepoint = AsyncSavepoint(self)
        await savepoint.open()
        return savepoint


def command(sql: str) -> Statement:
    """Make a statement without values whose answer nobody reads."""
    return Statement(sql, (), writes=True)


def question(sql: str, *values: object) -> Statement:
    """Make a statement that is asked for its rows."""
    return Statement(sql, values, writes=False)


def no_transaction(way_in: str) -> ConfigError:
    """Say that a transaction is needed, and how to begin one."""
    return ConfigError(
        "idem.transaction() writes its record in your own transaction, and none is open on this "
        f"connection; {way_in}"
    )
