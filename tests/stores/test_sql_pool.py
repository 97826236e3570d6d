"""The pool of connections to a server by itself: a place that was taken comes back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import psycopg
import pytest

from interrupting import TimeLimit
from semel.errors import ConfigError, StoreUnavailable
from semel.stores.sql.aio import AsyncExecutor, AsyncPool
from semel.stores.sql.errors import Deadline
from semel.stores.sql.postgres import errors
from semel.stores.sql.verbs import Operation, Reply, Statement


def pool_of(connect):
    """A pool with one place."""
    return AsyncPool(connect, errors, "nowhere", max_size=1)


class Session:
    """A connection to nowhere."""

    dead = lost = False
    idle_since = 0.0
    slot = None

    def __init__(self, *, idle=True, trouble=None):
        self.idle = idle
        self.ends = []
        """The deadline of each loan."""
        self._trouble = trouble

    def begin(self, deadline):
        self.ends.append(deadline)

    async def execute(self, statement):
        return Reply([], 0)

    async def close(self):
        if self._trouble is not None:
            raise self._trouble


def opening(session):
    async def connect(deadline):
        return session

    return pool_of(connect)


async def test_a_connection_that_cannot_be_opened_takes_no_place():
    async def connect(deadline):
        raise psycopg.OperationalError("refused")

    pool = pool_of(connect)
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError, match="refused"):
            await pool.take(Deadline(0.01))


async def test_a_connection_whose_opening_is_cancelled_takes_no_place():
    begun = []

    async def connect(deadline):
        begun.append(deadline)
        await asyncio.Event().wait()

    pool = pool_of(connect)
    for count in (1, 2):
        taking = asyncio.create_task(pool.take(Deadline(0.01)))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait((taking,))
        assert taking.cancelled()
        assert len(begun) == count, "it waited for a place"


async def test_a_connection_that_cannot_be_used_again_gives_its_place_back():
    pool = opening(Session(idle=False))
    for _ in range(2):
        await pool.give_back(await pool.take(Deadline(0.01)))


async def test_a_connection_that_cannot_be_closed_gives_its_place_back():
    pool = opening(Session(idle=False, trouble=OSError("gone")))
    for _ in range(2):
        session = await pool.take(Deadline(0.01))
        with pytest.raises(OSError, match="gone"):
            await pool.give_back(session)


async def test_every_loan_of_a_connection_has_its_own_deadline():
    session = Session()
    pool = opening(session)
    deadlines = [Deadline(10.0), Deadline(20.0)]
    for deadline in deadlines:
        await pool.give_back(await pool.take(deadline))
    lent = await pool.take_open(Deadline(30.0))
    assert lent is session
    assert session.ends[:2] == deadlines
    assert len(session.ends) == 3


async def test_a_connection_is_borrowed_when_the_server_gives_none_and_for_no_other_reason():
    error = psycopg.OperationalError("too many connections")

    async def connect(deadline):
        raise error

    pool = pool_of(connect)
    spare = opening(Session())
    await spare.give_back(await spare.take(Deadline(1.0)))
    pool.spares = (spare,)
    async with pool.lend(Deadline(1.0)) as session:
        assert isinstance(session, Session)
    error = TimeLimit()
    with pytest.raises(TimeLimit):
        async with pool.lend(Deadline(1.0)):
            pytest.fail("the exception of a signal handler was swallowed")


async def test_requests_of_a_batch_wait_once_for_a_connection():
    pool = opening(Session())
    await pool.take(Deadline(1.0))
    executor = Executor(pool, SimpleNamespace(ensured=True), 0.01)
    with pytest.raises(StoreUnavailable, match="all 1 connections") as exhausted:
        await executor.run_one(Operation(lambda: iter([Statement("SELECT 1", (), writes=False)])))
    assert errors.fails_every_request(exhausted.value)
    assert not errors.fails_every_request(ConfigError("no table"))


class Executor(AsyncExecutor):
    """Runs operations on a table that is there."""

    rules = errors

    async def migrate(self, columns):
        raise NotImplementedError

    async def prepare(self, deadline):
        """It is there."""


async def test_operations_that_are_run_together_share_the_time_of_one_call():
    session = Session()
    executor = Executor(opening(session), SimpleNamespace(ensured=True), 10.0)
    operation = Operation(one_statement)
    assert await executor.run_each([operation] * 3) == ["answered"] * 3
    assert len(session.ends) == 3
    assert len(set(map(id, session.ends))) == 1


def one_statement():
    yield Statement("SELECT 1", (), writes=False)
    return "answered"
