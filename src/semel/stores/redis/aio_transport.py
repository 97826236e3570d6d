"""Carries calls to the servers and replies back, for asyncio: the twin of `transport`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.exceptions import MovedError, ResponseError

from semel.errors import ConfigError, StoreError
from semel.stores.redis.clients import clients_of
from semel.stores.redis.delivery import Address, Attempt, Reply, deliver, means_old_map
from semel.stores.redis.failures import DRIVER_ERRORS, translated
from semel.stores.redis.scripts import Argument, Call
from semel.stores.redis.transport import PAUSE, RAW, answers_to, never

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
        async with self._turn():
            reply = (await self._deliver((call,)))[0]
            if isinstance(reply, Exception):
                raise reply
        return call.read(reply)

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
            return await _scan_step(self._client, cursor, pattern, count)


class AsyncClusterTransport(AsyncTransport):
    """A cluster: each call goes to the node that has its slot.

    redis-py's own redirection may send ASKING on one connection and the command on another, which
    then bounces for ever; its pipeline fails as a whole when one node is down. So nodes are
    addressed here one by one.
    """

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(client, where, timeout, **more)
        self._newcomers: dict[Address, ClusterNode] = {}

    def _may_redirect(self) -> Callable[[], bool]:
        deadline = time.monotonic() + self._timeout
        return lambda: time.monotonic() < deadline

    async def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        await self._client.initialize()
        replies: list[Reply | Exception] = [None] * len(attempts)
        by_node: dict[ClusterNode, list[int]] = {}
        for position, attempt in enumerate(attempts):
            try:
                by_node.setdefault(self._node(attempt), []).append(position)
            except DRIVER_ERRORS as error:
                replies[position] = error

        async def ask(node: ClusterNode, positions: list[int]) -> None:
            answers = await _ask_node(node, [attempts[position] for position in positions])
            for position, answer in zip(positions, answers, strict=True):
                replies[position] = answer

        await asyncio.gather(*(ask(node, positions) for node, positions in by_node.items()))
        if any(isinstance(reply, MovedError) for reply in replies):
            await self._read_map()
        elif any(means_old_map(reply) for reply in replies):
            await asyncio.sleep(PAUSE)
            await self._read_map()
        return replies

    def _node(self, attempt: Attempt) -> ClusterNode:
        node: ClusterNode
        if attempt.node is None:
            slot = self._client.keyslot(attempt.call.keys[0])
            node = self._client.nodes_manager.get_node_from_slot(slot)
            return node
        node = self._client.get_node(*attempt.node)
        if node is not None:
            return node
        # A node that has no slot yet is in nobody's map, but ASK may name it.
        if attempt.node not in self._newcomers:
            settings = self._client.connection_kwargs
            self._newcomers[attempt.node] = ClusterNode(*attempt.node, **settings)
        return self._newcomers[attempt.node]

    async def _read_map(self) -> None:
        # If the map cannot be read now either, the error we have says more.
        with contextlib.suppress(*DRIVER_ERRORS):
            await self._client.nodes_manager.initialize()

    async def nodes(self) -> list[str]:
        """The primaries, by name."""
        async with self._turn():
            await self._client.initialize()
            return sorted(node.name for node in self._client.get_primaries())

    async def scan(
        self, node: str, cursor: int, pattern: bytes, count: int
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN; a primary that is gone has nothing more to tell."""
        async with self._turn():
            await self._client.initialize()
            found = self._client.get_node(node_name=node)
            return (0, []) if found is None else await _scan_step(found, cursor, pattern, count)

    async def close(self) -> None:
        """Close the client if it is ours, and the nodes it does not know of."""
        for node in self._newcomers.values():
            await node.disconnect()
        await super().close()


async def _ask_node(node: ClusterNode, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
    commands: list[PipelineCommand] = []
    for attempt in attempts:
        if attempt.asking:
            commands.append(_command("ASKING"))
        commands.append(_command(*attempt.command))
    try:
        await node.execute_pipeline(commands)
    except DRIVER_ERRORS as error:
        return [error] * len(attempts)
    return [command.result for command in commands if command.args[0] != "ASKING"]


def _command(*args: Argument) -> PipelineCommand:
    return PipelineCommand(0, *args, **RAW)


async def _scan_step(
    client: Any, cursor: int, pattern: bytes, count: int
) -> tuple[int, list[bytes]]:
    command = ("SCAN", cursor, "MATCH", pattern, "COUNT", count)
    following, keys = await client.execute_command(*command, **RAW)
    return int(following), list(keys)
