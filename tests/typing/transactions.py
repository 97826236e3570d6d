# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What mypy and pyright must say of transactions; nothing here is ever run."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import assert_type

from sqlalchemy.orm import Session, sessionmaker

from semel import AsyncIdempotency, Attempt, Idempotency


@contextmanager
def begin() -> Iterator[sqlite3.Connection]:
    yield sqlite3.connect("shop.db")


@asynccontextmanager
async def begin_async() -> AsyncIterator[str]:
    yield ""


def of_threads(idem: Idempotency, connection: sqlite3.Connection) -> None:
    with idem.transaction(connection, "k", payload=1, table="t") as attempt:
        assert_type(attempt, Attempt)
    with idem.transactions(connection, ["a", "b"]) as attempts:
        assert_type(attempts, dict[str, Attempt])
    with idem.transaction(connection, "k", returns=str) as typed:
        assert_type(typed, Attempt[str])
        typed.result = 5  # type: ignore[assignment]
    assert_type(idem.run_transaction(begin, "k", changes, retries=1), int)
    idem.run_transaction(sessionmaker[Session]().begin, "k", lambda session: session.flush())
    idem.run_transaction(begin, "k", count_text)  # type: ignore[misc]


async def of_tasks(idem: AsyncIdempotency) -> None:
    async with idem.transaction(object(), "k") as attempt:
        assert_type(attempt, Attempt)
    async with idem.transactions(object(), ["a"]) as attempts:
        assert_type(attempts, dict[str, Attempt])
    async with idem.transaction(object(), "k", returns=str) as typed:
        assert_type(typed.result, str)
    assert_type(await idem.run_transaction(begin_async, "k", counted), int)


def changes(connection: sqlite3.Connection) -> int:
    return connection.total_changes


def count_text(text: str) -> int:
    return len(text)


async def counted(text: str) -> int:
    return len(text)
