"""Carries calls to the servers and replies back, for asyncio: the twin of `transport`.

All tasks share the lines to a server: see `Lanes` in `line`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from redis import exceptions as driver

from semel.errors import StoreError, StoreUnavailable
from semel.stores.loops import has_ended, only_loop
from semel.stores.redis.clients import clients_of
from semel.stores.redis.delivery import (
    Address,
    Attempt,
    Reply,
    answers_to,
    certain,
    deliver,
    never,
)
from semel.stores.redis.failures import DRIVER_ERRORS, translated
from semel.stores.redis.line import Lanes, Line
from semel.stores.redis.redis_py import close_client, primary_address, take_connection
from semel.stores.redis.repeating import (
    NOT_THE_PRIMARY,
    WITHOUT_SENTINEL,
    Repeating,
    follows_the_primary,
    unfit_server,
)
from semel.stores.redis.scripts import Call
from semel.stores.redis.transport import scan_command, scan_reply
from semel.stores.registry import SEARCH_SHARE

Answer = TypeVar("Answer")


class AsyncTransport(ABC):
    """What every kind of server has in common."""

    def __init__(self, client: Any, where: str, timeout: float, *, owned: bool = False) -> None:
        self.where = where
        self._client = client
        self._timeout = timeout
        self._owned = owned
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Awaitable[Answer]:
        """One call, one answer. An urgent one does not queue behind the others."""
        return self._call(call, urgent=urgent)

    async def _call(self, call: Call[Answer], *, urgent: bool) -> Answer:
        return certain((await self.call_many((call,), urgent=urgent))[0])

    async def call_many(
        self, calls: Sequence[Call[Answer]], *, urgent: bool = False, spent: float = 0.0
    ) -> list[Answer | StoreError]:
        """Many calls in one round trip (per node); each has its own answer."""
        if not calls:
            return []
        async with self._turn(spent):
            replies = await self._deliver(calls, urgent=urgent)
        return answers_to(calls, replies, self.where)

    @contextlib.asynccontextmanager
    async def _turn(self, spent: float = 0.0) -> AsyncIterator[None]:
        """One caller's turn: on the right loop, within the timeout."""
        self._loop = only_loop(self._loop, self.where)
        if self._closed:
            raise StoreUnavailable(f"the store at {self.where} was closed")
        with translated(self.where):
            async with asyncio.timeout(self._timeout - spent):
                yield

    async def _deliver(
        self, calls: Sequence[Call[Any]], *, urgent: bool
    ) -> list[Reply | Exception]:
        delivery = deliver(calls, self._may_redirect())
        attempts = next(delivery)
        while True:
            replies = await self._exchange(attempts, urgent=urgent)
            try:
                attempts = delivery.send(replies)
            except StopIteration as done:
                answers: list[Reply | Exception] = done.value
                return answers

    @abstractmethod
    def _may_redirect(self) -> Callable[[], bool]: ...

    @abstractmethod
    async def _exchange(
        self, attempts: Sequence[Attempt], *, urgent: bool
    ) -> list[Reply | Exception]:
        """Send one round trip."""

    @abstractmethod
    def _all_lanes(self) -> list[Lanes[Any]]:
        """The lines to every server that was ever asked."""

    async def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""
        ended = has_ended(self._loop, self.where)
        self._closed = True
        # Never used, nothing is open; and redis-py would make an event loop where none is running.
        if self._loop is not None and not ended:
            await self._close()

    async def _close(self) -> None:
        for lanes in self._all_lanes():
            await lanes.close()
        if self._owned:
            for client in clients_of(self._client):
                await close_client(client)

    def server_of(self, _key: bytes) -> str | None:
        """Name the server that has a key; None = there is only one."""
        return None

    @abstractmethod
    async def nodes(self) -> list[str]:
        """Names of the servers that hold keys, in an order that stays."""

    @abstractmethod
    async def scan(
        self, node: str, cursor: int, pattern: bytes, count: int
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN on one of the `nodes`."""


class AsyncServerTransport(AsyncTransport):
    """One server, or the primary that Sentinel names."""

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(client, where, timeout, **more)
        self._follows_the_primary = follows_the_primary(client)
        self._lanes = Lanes(
            _Pool(client.connection_pool),
            timeout / 2,
            self._make_good,
            self._answered_late if self._follows_the_primary else None,
        )
        self._asking_sentinel = asyncio.Lock()
        self._checks: set[asyncio.Task[None]] = set()

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Awaitable[Answer]:
        """One call, one answer: straight through a line that is open."""
        # Outside of any loop a verb may be prepared: so this question, which raises nothing.
        here = asyncio._get_running_loop() is self._loop  # noqa: SLF001 - has no other name
        line = self._lanes.ready() if here and not (urgent or self._closed) else None
        if line is None or (self._follows_the_primary and line.silent()):
            return super().call(call, urgent=urgent)
        return line.ask(call.wire(), call)

    def _make_good(self, answer: asyncio.Future[Answer], call: Call[Answer], since: float) -> None:
        """A call was not simply answered: the long way, from the start, knows what to do then."""
        long_way = self.call_many((call,), spent=monotonic() - since)
        task = asyncio.ensure_future(long_way)
        task.add_done_callback(partial(_hand_on, answer))
        answer.add_done_callback(lambda _: task.cancel())  # its caller may leave

    def _may_redirect(self) -> Callable[[], bool]:
        return never

    def _all_lanes(self) -> list[Lanes[Any]]:
        return [self._lanes]

    async def _exchange(
        self, attempts: Sequence[Attempt], *, urgent: bool
    ) -> list[Reply | Exception]:
        return await self._repeated([attempt.wire() for attempt in attempts], urgent=urgent)

    async def _repeated(
        self, commands: Sequence[bytes], *, urgent: bool = False
    ) -> list[Reply | Exception]:
        repeating = Repeating(self._timeout * SEARCH_SHARE)
        while True:
            try:
                return await self._ask(commands, urgent=urgent)
            except (driver.ConnectionError, driver.TimeoutError, OSError) as error:
                if self._closed:
                    raise
                await asyncio.sleep(repeating.pause_after(error))

    async def _ask(self, commands: Sequence[bytes], *, urgent: bool) -> list[Reply | Exception]:
        line = await self._lanes.open(urgent=urgent)
        if self._follows_the_primary:
            line = await self._confirmed(line, urgent=urgent)
        replies = await line.exchange(commands)
        unfit = unfit_server(replies)
        if unfit is not None:
            # Whoever connects anew may be led to a better one, or find this one ready.
            line.end(unfit)
            if self._follows_the_primary or unfit in replies:
                raise unfit
        return replies

    async def _confirmed(self, line: Line, *, urgent: bool) -> Line:
        """Give the line if its server is the primary for sure, else a new one."""
        async with self._asking_sentinel:
            while line.broken or line.silent():
                if not line.broken:
                    fresh = line.fresh()
                    await self._check(line)
                    if fresh and line.broken:
                        # redis-py connects to the old primary until the failover has ended.
                        raise line.broken
                line = await self._lanes.open(urgent=urgent)
            return line

    def _answered_late(self, line: Line) -> None:
        check = asyncio.ensure_future(self._check(line))
        self._checks.add(check)
        check.add_done_callback(partial(self._checked, line))

    def _checked(self, line: Line, check: asyncio.Task[None]) -> None:
        """Break a line whose check did not come to an end: its replies would be held for ever."""
        self._checks.discard(check)
        reason = None if check.cancelled() else check.exception()
        if check.cancelled() or reason is not None:
            error = driver.ConnectionError("it is not known whether the server is still primary")
            error.__cause__ = reason
            line.end(error)

    async def _check(self, line: Line) -> None:
        """Let the line be believed, or break it: its server may have been replaced."""
        named = await self._ask_sentinels()
        primary = named or self._client.connection_pool.master_address
        if primary == (line.connection.host, line.connection.port):
            line.believe(monotonic() + (WITHOUT_SENTINEL if named is None else 0.0))
        else:
            line.end(driver.ConnectionError(NOT_THE_PRIMARY))

    async def _ask_sentinels(self) -> Address | None:
        """Ask who is the primary; None when no Sentinel answers in time."""
        pool = self._client.connection_pool
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout / 2):
                for sentinel in pool.sentinel_manager.sentinels:
                    with contextlib.suppress(*DRIVER_ERRORS):
                        found = await sentinel.sentinel_get_master_addr_by_name(pool.service_name)
                        if found is not None:
                            return primary_address(pool.sentinel_manager, found)
        return None

    async def _close(self) -> None:
        for check in self._checks:
            check.cancel()
        await super()._close()

    async def nodes(self) -> list[str]:
        """There is one, and it needs no name."""
        return [""]

    async def scan(
        self,
        node: str,  # noqa: ARG002 - there is only one
        cursor: int,
        pattern: bytes,
        count: int,
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN."""
        async with self._turn():
            [reply] = await self._repeated([scan_command(cursor, pattern, count)])
            return scan_reply(reply)


def _hand_on(answer: asyncio.Future[Answer], task: asyncio.Task[list[Answer | StoreError]]) -> None:
    """Give the outcome of a task to whoever waits for the answer, if he still does."""
    if task.cancelled():
        answer.cancel()  # by a stranger, unless the caller has left
        return
    error = task.exception()
    [outcome] = [error] if error is not None else task.result()
    if answer.done():
        return
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


class _Pool:
    """A pool of redis-py's as a source of connections."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def borrow(self) -> Any:
        return await take_connection(self._pool)

    async def give_back(self, connection: Any) -> None:
        await self._pool.release(connection)
