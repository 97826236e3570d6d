"""The twin of `sources`, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol, TypeAlias

import psycopg

from semel.errors import StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.loops import has_ended, only_loop
from semel.stores.sql.postgres.aio_sessions import AsyncSession, OwnAsyncSession
from semel.stores.sql.postgres.lending import exhausted, is_old, just_used, leave_alone
from semel.stores.sql.postgres.patience import BECAME_REPLICA, Patience
from semel.stores.sql.postgres.settings import Settings


class AsyncSource(Protocol):
    """What an executor asks for connections."""

    place: str
    """The name of the database, for error messages."""

    def lend(self, patience: Patience) -> AbstractAsyncContextManager[AsyncSession]:
        """Lend a connection for one call."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


Connect: TypeAlias = Callable[[Settings, Patience], Awaitable[OwnAsyncSession]]
"""How a connection is opened, for a call with this patience."""


class AsyncOwnPool:
    """Connections that are opened when they are needed, and kept for the next call.

    Not psycopg_pool's: that connects in the background, so that a caller does not learn why it
    cannot. Its workers do not outlive a fork, and keep an event loop that is torn down from ending.
    """

    def __init__(
        self, settings: Settings, connect: Connect, spare: AsyncOwnPool | None = None
    ) -> None:
        """`spare` lends an idle connection when this pool cannot open one of its own."""
        self.place = settings.place
        self.spare = spare
        self._settings = settings
        self._connect = connect
        self._closed = False
        self._start()
        follow_forks(self)

    def _start(self) -> None:
        self._seats = asyncio.Semaphore(self._settings.max_size)
        self._free: deque[OwnAsyncSession] = deque()
        """The one that was used last is used next, so that the others become old."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def lend(self, patience: Patience) -> AsyncLoan:
        """Lend a connection that was not hung up meanwhile, as far as one can know."""
        return AsyncLoan(self, patience)

    async def take(self, patience: Patience) -> OwnAsyncSession:
        """Take a connection out, or open one."""
        seat = await self._take_seat(patience)
        try:
            session = await self._take() or await self._connect(self._settings, patience)
        except BaseException:
            self._leave_seat(seat)
            raise
        session.seat = seat
        session.end_waits_at(patience.deadline)
        return session

    async def take_open(self, patience: Patience) -> OwnAsyncSession | None:
        """Take a connection out, if one is open that nobody uses."""
        if self._seats.locked():
            return None
        seat = await self._seats.acquire()  # one is free: it is not waited for
        session = None
        try:
            session = await self._take()
        finally:
            if session is None:
                self._leave_seat(seat)
            else:
                session.seat = seat
                session.end_waits_at(patience.deadline)
        return session

    async def give_back(self, session: OwnAsyncSession) -> None:
        """Keep a connection for the next call, if it can serve one."""
        seat, session.seat = session.seat, None
        try:
            await self._keep(session)
        finally:
            self._leave_seat(seat)

    async def close(self) -> None:
        """Close the connections; those that are lent out, when they come back."""
        # Of a loop that has ended, what cannot be closed without it is gone already.
        gone = (RuntimeError,) if has_ended(self._loop, self.place) else ()
        self._closed = True
        with suppress(IndexError):
            while True:
                session = self._free.pop()
                with suppress(*gone):
                    await session.close()

    async def _take_seat(self, patience: Patience) -> object:
        if self._closed:
            raise StoreUnavailable(f"the store on {self.place} was closed")
        self._loop = only_loop(self._loop, self.place)
        if not self._seats.locked():
            return await self._seats.acquire()  # one is free: no need for a timer
        try:
            async with asyncio.timeout(patience.left):
                return await self._seats.acquire()
        except TimeoutError:
            raise exhausted(self._settings) from None

    def _leave_seat(self, _seat: object) -> None:
        self._seats.release()

    async def _take(self) -> OwnAsyncSession | None:
        with suppress(IndexError):  # none is left
            while True:
                session = self._free.pop()
                if just_used(session) or not session.dead:
                    return session
                await session.close()
        return None

    async def _keep(self, session: OwnAsyncSession) -> None:
        if self._closed or not session.idle:
            await session.close()
            return
        session.idle_since = time.monotonic()
        self._free.append(session)
        with suppress(IndexError):
            while len(self._free) > self._settings.min_size and is_old(self._free[0]):
                await self._free.popleft().close()

    def before_fork(self) -> None:
        """Do nothing: nothing is left half done that the child would see."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Start with no connection: these sockets are the parent's."""
        leave_alone(self._free)
        self._start()


class AsyncLoan:
    """A connection on loan for the time of a `async with` block.

    Not a generator: every call goes through here.
    """

    __slots__ = ("_patience", "_pool", "_session")

    def __init__(self, pool: AsyncOwnPool, patience: Patience) -> None:
        self._pool = pool
        self._patience = patience

    async def __aenter__(self) -> AsyncSession:
        try:
            self._session = await self._pool.take(self._patience)
        except psycopg.Error:
            # The server may have no connection left to give, and one that is open may be idle.
            if not await self._borrow():
                raise
        return self._session

    async def _borrow(self) -> bool:
        pool = self._pool.spare
        session = None if pool is None else await pool.take_open(self._patience)
        if pool is None or session is None:
            return False
        self._pool, self._session = pool, session
        return True

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, BECAME_REPLICA):
            await self._session.close()
        await self._pool.give_back(self._session)
