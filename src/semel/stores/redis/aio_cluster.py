"""Sends commands to the nodes of a Redis Cluster, for asyncio: the twin of `cluster`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.cluster import ClusterNode
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import MovedError, SlotNotCoveredError

from semel.stores.redis.cluster import ASKING, PAUSE, silent_node
from semel.stores.redis.commands import scan_command
from semel.stores.redis.errors import DRIVER_ERRORS
from semel.stores.redis.redis_py import close_nodes, give_back_to_node, read_map_async
from semel.stores.redis.replies import read_scan
from semel.stores.redis.retry import Address, Reply, Sending, means_old_map
from semel.stores.redis.tasks import AsyncTransport, Connections


class AsyncClusterTransport(AsyncTransport):
    """A cluster: each command goes to the node that has its slot.

    redis-py's own redirection may send ASKING on one connection and the command on another, which
    then bounces for ever; its pipeline fails as a whole when one node is down. So nodes are
    addressed here one by one.
    """

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(client, where, timeout, **more)
        self._newcomers: dict[Address, ClusterNode] = {}
        self._connections_of: dict[str, Connections[_Node]] = {}
        self._first_map: asyncio.Task[None] | None = None
        self._reading_map = asyncio.Lock()
        self._maps_read = 0

    def _may_redirect(self) -> Callable[[], bool]:
        deadline = time.monotonic() + self._timeout / 2  # as long as clients repeat (see `clients`)
        return lambda: time.monotonic() < deadline

    async def _exchange(
        self, sendings: Sequence[Sending], *, urgent: bool
    ) -> list[Reply | Exception]:
        await self._know_map()
        replies: list[Reply | Exception] = [None] * len(sendings)
        by_node: dict[str, tuple[ClusterNode, list[int]]] = {}
        for position, sending in enumerate(sendings):
            try:
                node = self._node(sending)
            except DRIVER_ERRORS as error:
                replies[position] = error
            else:
                by_node.setdefault(node.name, (node, []))[1].append(position)

        async def ask(node: ClusterNode, positions: list[int]) -> None:
            asked = [sendings[position] for position in positions]
            answers = await _ask_node(self._connections(node), asked, urgent=urgent)
            for position, answer in zip(positions, answers, strict=True):
                replies[position] = answer

        await asyncio.gather(*(ask(node, positions) for node, positions in by_node.values()))
        lost = silent_node(by_node, replies)
        if any(isinstance(reply, MovedError) for reply in replies):
            await self._read_map(lost)
        elif any(means_old_map(reply) for reply in replies):
            await asyncio.sleep(PAUSE)
            await self._read_map(lost)
        return replies

    def _node(self, sending: Sending) -> ClusterNode:
        if sending.node is None:
            slot = self._client.keyslot(sending.command.keys[0])
            # Not by get_node_from_slot: of a slot that nobody has it makes a KeyError.
            owners: list[ClusterNode] = self._client.nodes_manager.slots_cache.get(slot, [])
            if not owners:
                raise SlotNotCoveredError(f"slot {slot}")
            return owners[0]
        known: ClusterNode | None = self._client.get_node(*sending.node)
        if known is not None:
            return known
        # A node that has no slot yet is in nobody's map, but ASK may name it.
        if sending.node not in self._newcomers:
            settings = self._client.connection_kwargs
            self._newcomers[sending.node] = ClusterNode(*sending.node, **settings)
        return self._newcomers[sending.node]

    def server_of(self, key: bytes) -> str:
        """Name the node that has a key; empty when nobody is known to have it."""
        owner = self._owner(key)
        return "" if owner is None else owner.name

    def connector_of(self, key: bytes) -> tuple[str, Any]:
        """Name the node that has a key, and what connects to it."""
        owner = self._owner(key)
        return ("", None) if owner is None else (owner.name, owner)

    def _owner(self, key: bytes) -> ClusterNode | None:
        owners = self._client.nodes_manager.slots_cache.get(self._client.keyslot(key))
        return owners[0] if owners else None

    def _connections(self, node: ClusterNode) -> Connections[_Node]:
        connections = self._connections_of.get(node.name)
        if connections is None or connections.source.node is not node:
            # A new map may bring a new object for a node, and close the old one.
            connections = self._connections_of[node.name] = Connections(
                _Node(node), self._timeout / 2
            )
        return connections

    def _all_connections(self) -> list[Connections[Any]]:
        return list(self._connections_of.values())

    async def _know_map(self) -> None:
        """Read the map of the cluster, unless it is known; all who wait for it share one task."""
        if not self._owned:
            await self._client.initialize()
        elif not self._client.nodes_manager.slots_cache:
            if self._first_map is None:
                self._first_map = asyncio.create_task(self._read_first_map())
                self._first_map.add_done_callback(self._first_map_read)
            reading = self._first_map
            try:
                # Shielded: to find a node that answers may take longer than one caller has.
                await asyncio.shield(reading)
            except asyncio.CancelledError:
                if self._closed and reading.cancelled():
                    raise Disconnected("the store was closed") from None  # nobody cancelled this
                raise

    async def _read_first_map(self) -> None:
        """Read the map from the first node that answers.

        Not by the client itself: it asks one listed node after another, and then a node of its own
        choice for a list of commands that nobody needs here; a frozen one holds it up for long.
        """
        manager = self._client.nodes_manager
        listed = manager.startup_nodes
        manager.startup_nodes = await _first_to_answer(listed)
        try:
            await manager.initialize()
        except BaseException:
            manager.startup_nodes = listed
            raise

    def _first_map_read(self, reading: asyncio.Task[None]) -> None:
        self._first_map = None
        if not reading.cancelled():
            reading.exception()  # raised to those who wait; if nobody does any more, to nobody

    async def _read_map(self, lost: str | None) -> None:
        known = self._maps_read
        async with self._reading_map:
            if self._maps_read != known:
                return  # somebody has looked since
            self._maps_read += 1
            # If the map cannot be read now either, the error we have says more.
            with contextlib.suppress(*DRIVER_ERRORS):
                await read_map_async(self._client.nodes_manager, lost)

    async def nodes(self) -> list[str]:
        """The primaries, by name."""
        async with self._turn():
            await self._know_map()
            return sorted(node.name for node in self._client.get_primaries())

    async def scan(
        self, node: str, cursor: int, pattern: bytes, count: int
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN; a primary that is gone has nothing more to tell."""
        async with self._turn():
            await self._know_map()
            found = self._client.get_node(node_name=node)
            if found is None:
                return 0, []
            connection = await self._connections(found).open()
            return read_scan(await connection.ask(scan_command(cursor, pattern, count)))

    async def _close(self) -> None:
        if self._first_map is not None:
            self._first_map.cancel()
            await asyncio.wait((self._first_map,))
        await super()._close()
        if self._owned:
            # The client would not: it was never told that there is a map.
            await close_nodes(self._client.nodes_manager, ("nodes_cache", "startup_nodes"))
        for node in self._newcomers.values():
            await node.disconnect()


async def _first_to_answer(nodes: dict[str, ClusterNode]) -> dict[str, ClusterNode]:
    """The node that answers first; all of them when none does: then the client says why."""
    asking = {
        asyncio.ensure_future(node.execute_command("CLUSTER", "SLOTS")): name
        for name, node in nodes.items()
    }
    found = nodes
    try:
        for asked in asyncio.as_completed(asking):
            with contextlib.suppress(*DRIVER_ERRORS):
                await asked
                break
        answered = [name for task, name in asking.items() if _succeeded(task)]
        found = {name: nodes[name] for name in answered[:1]} or nodes
    finally:
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        for name, node in nodes.items():
            if name not in found:
                await node.disconnect()
    return found


def _succeeded(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class _Node:
    """A node of redis-py's cluster client as a source of connections."""

    def __init__(self, node: ClusterNode) -> None:
        self.node = node

    async def borrow(self) -> Any:
        connection = self.node.acquire_connection()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]  # redis-py leaves it so
        except BaseException:
            give_back_to_node(self.node, connection)
            raise
        return connection

    async def give_back(self, connection: Any) -> None:
        give_back_to_node(self.node, connection)


async def _ask_node(
    connections: Connections[_Node], sendings: Sequence[Sending], *, urgent: bool
) -> list[Reply | Exception]:
    commands: list[bytes] = []
    for sending in sendings:
        if sending.asking:
            commands.append(ASKING)
        commands.append(sending.packed())
    try:
        replies = await (await connections.open(urgent=urgent)).exchange(commands)
    except DRIVER_ERRORS as error:
        return [error] * len(sendings)
    pairs = zip(commands, replies, strict=True)
    return [reply for command, reply in pairs if command is not ASKING]
