"""Carries calls to the nodes of a Redis Cluster, for asyncio: the twin of `cluster`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.exceptions import MovedError, SlotNotCoveredError

from semel.stores.redis.aio_transport import AsyncTransport, scan_step
from semel.stores.redis.cluster import PAUSE
from semel.stores.redis.delivery import Address, Attempt, Reply, means_old_map
from semel.stores.redis.failures import DRIVER_ERRORS
from semel.stores.redis.scripts import Argument
from semel.stores.redis.transport import RAW


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
        deadline = time.monotonic() + self._timeout / 2  # as long as clients repeat (see `clients`)
        return lambda: time.monotonic() < deadline

    async def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        await self._client.initialize()
        replies: list[Reply | Exception] = [None] * len(attempts)
        by_node: dict[str, tuple[ClusterNode, list[int]]] = {}
        for position, attempt in enumerate(attempts):
            try:
                node = self._node(attempt)
            except DRIVER_ERRORS as error:
                replies[position] = error
            else:
                by_node.setdefault(node.name, (node, []))[1].append(position)

        async def ask(node: ClusterNode, positions: list[int]) -> None:
            answers = await _ask_node(node, [attempts[position] for position in positions])
            for position, answer in zip(positions, answers, strict=True):
                replies[position] = answer

        await asyncio.gather(*(ask(node, positions) for node, positions in by_node.values()))
        if any(isinstance(reply, MovedError) for reply in replies):
            await self._read_map()
        elif any(means_old_map(reply) for reply in replies):
            await asyncio.sleep(PAUSE)
            await self._read_map()
        return replies

    def _node(self, attempt: Attempt) -> ClusterNode:
        if attempt.node is None:
            slot = self._client.keyslot(attempt.call.keys[0])
            # Not by get_node_from_slot: of a slot that nobody has it makes a KeyError.
            owners: list[ClusterNode] = self._client.nodes_manager.slots_cache.get(slot, [])
            if not owners:
                raise SlotNotCoveredError(f"slot {slot}")
            return owners[0]
        known: ClusterNode | None = self._client.get_node(*attempt.node)
        if known is not None:
            return known
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
            return (0, []) if found is None else await scan_step(found, cursor, pattern, count)

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
