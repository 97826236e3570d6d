"""Carries calls to the servers and replies back, for asyncio: the twin of `transport`."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from semel.errors import ConfigError, StoreError
from semel.stores.redis.clients import clients_of
from semel.stores.redis.delivery import Attempt, Reply, answers_to, certain, deliver, never
from semel.stores.redis.failures import translated
from semel.stores.redis.scripts import Call
from semel.stores.redis.transport import RAW

Answer = TypeVar("Answer")


class AsyncTransport(ABC):
    """What every kind of server has in common."""

    def __init__(
        self,
        client: Any,
        where: str,
        timeout: float,
        *,
        gate: AbstractAsyncContextManager[None] | None = None,
        owned: bool = False,
    ) -> None:
        self.where = where
        self._client = client
        self._timeout = timeout
        self._gate = contextlib.nullcontext() if gate is None else gate
        self._owned = owned
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, call: Call[Answer]) -> Answer:
        """One call, one answer."""
        return certain((await self.call_many((call,)))[0])

    async def call_many(self, calls: Sequence[Call[Answer]]) -> list[Answer | StoreError]:
        """Many calls in one round trip (per node); each has its own answer."""
        if not calls:
            return []
        async with self._turn():
            replies = await self._deliver(calls)
        return answers_to(calls, replies, self.where)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One caller's turn: on the right loop, through the gate, within the timeout."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConfigError(
                f"the store at {self.where} belongs to another event loop; open one per loop"
            )
        with translated(self.where):
            async with self._gate, asyncio.timeout(self._timeout):
                yield

    async def _deliver(self, calls: Sequence[Call[Any]]) -> list[Reply | Exception]:
        delivery = deliver(calls, self._may_redirect())
        attempts = next(delivery)
        while True:
            replies = await self._exchange(attempts)
            try:
                attempts = delivery.send(replies)
            except StopIteration as done:
                answers: list[Reply | Exception] = done.value
                return answers

    @abstractmethod
    def _may_redirect(self) -> Callable[[], bool]: ...

    @abstractmethod
    async def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        """Send one round trip."""

    async def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""
        if self._owned:
            for client in clients_of(self._client):
                await client.aclose()

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

    def _may_redirect(self) -> Callable[[], bool]:
        return never

    async def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        if len(attempts) == 1:  # a pipeline of one costs twice a plain command
            try:
                return [await self._client.execute_command(*attempts[0].command, **RAW)]
            except ResponseError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        for attempt in attempts:
            pipeline.execute_command(*attempt.command, **RAW)
        replies: list[Reply | Exception] = await pipeline.execute(raise_on_error=False)
        return replies

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
            return await scan_step(self._client, cursor, pattern, count)


async def scan_step(
    client: Any, cursor: int, pattern: bytes, count: int
) -> tuple[int, list[bytes]]:
    """One SCAN command."""
    command = ("SCAN", cursor, "MATCH", pattern, "COUNT", count)
    following, keys = await client.execute_command(*command, **RAW)
    return int(following), list(keys)
