"""Sends commands to the nodes of a Redis Cluster, for threads and for asyncio.

This module finds the node for each command, and reads the cluster's map again when it is old. What
is sent again, and why, is decided in `retry`.

redis-py's own cluster pipeline asks the server for the keys of every script call, fails as a whole
when one node is down, and cannot be bounded in time; its redirection for asyncio may send ASKING on
one connection and the command on another, which then bounces for ever. So nodes are addressed here
one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import MovedError, SlotNotCoveredError

from semel.core.process import ForkAware, follow_forks
from semel.stores.redis import tasks
from semel.stores.redis.commands import ScanStep, pack
from semel.stores.redis.errors import DRIVER_ERRORS
from semel.stores.redis.redis_py import (
    give_back_to_node,
    hang_up_nodes,
    read_map,
    read_map_async,
    watch,
)
from semel.stores.redis.replies import read_scan
from semel.stores.redis.retry import Address, Reply, Sending, means_old_map
from semel.stores.redis.tasks import AsyncTransport
from semel.stores.redis.threads import Connections, Transport
from semel.stores.urls import SEARCH_SHARE

ASKING = pack(("ASKING",))

PAUSE = 0.05
"""Between a lost node and the next look at the cluster's map."""


class _RoundTrip:
    """Which node gets which commands, and the replies as they come."""

    def __init__(self, sendings: Sequence[Sending], node_of: Callable[[Sending], Any]) -> None:
        self._sendings = sendings
        self.replies: list[Reply | Exception] = [None] * len(sendings)
        self.by_node: dict[str, tuple[Any, list[int]]] = {}
        """Each node, and the positions of what goes there."""
        for position, sending in enumerate(sendings):
            try:
                node = node_of(sending)
            except DRIVER_ERRORS as error:
                self.replies[position] = error
            else:
                self.by_node.setdefault(node.name, (node, []))[1].append(position)

    def commands(self, positions: Sequence[int]) -> list[bytes]:
        """What one node is sent."""
        commands: list[bytes] = []
        for position in positions:
            sending = self._sendings[position]
            if sending.asking:
                commands.append(ASKING)
            commands.append(sending.packed())
        return commands

    def answered(self, positions: Sequence[int], replies: Sequence[Reply | Exception]) -> None:
        """One node answered."""
        rest = iter(replies)
        for position in positions:
            if self._sendings[position].asking:
                next(rest)
            self.replies[position] = next(rest)

    def failed(self, positions: Sequence[int], error: Exception) -> None:
        """One node did not answer."""
        for position in positions:
            self.replies[position] = error

    def pause_before_map(self) -> float | None:
        """After which seconds a new map may help; None when the map was right."""
        if any(isinstance(reply, MovedError) for reply in self.replies):
            return 0.0  # another node has a slot now
        return PAUSE if any(means_old_map(reply) for reply in self.replies) else None

    def lost_node(self) -> str | None:
        """Name a node that has failed: it is the last one to be asked for the new map."""
        for name, (_, positions) in self.by_node.items():
            if means_old_map(self.replies[positions[0]]):
                return name
        return None


class _Map(ABC):
    """Which node has which key: what both kinds of transport know."""

    client: Any
    _redirect_share = SEARCH_SHARE

    def _node(self, sending: Sending) -> Any:
        if sending.node is None:
            # Not by get_node_from_slot: of a slot that nobody has it makes a KeyError, on asyncio.
            owner = self._owner(sending.command.keys[0])
            if owner is None:
                raise SlotNotCoveredError("no server has the slot of this key")
            return owner
        # A node that has no slot yet is in nobody's map, but ASK may name it.
        return self.client.get_node(*sending.node) or self._newcomer(sending.node)

    @abstractmethod
    def _newcomer(self, address: Address) -> Any:
        """Return the node at an address that is on no map."""

    def _owner(self, key: bytes) -> Any:
        owners = self.client.nodes_manager.slots_cache.get(self.client.keyslot(key))
        return owners[0] if owners else None

    def server_of(self, key: bytes) -> str:
        """Name the node that has a key; empty when nobody is known to have it."""
        owner = self._owner(key)
        return "" if owner is None else owner.name


# --- threads ---------------------------------------------------------------------------------


class ClusterTransport(_Map, Transport, ForkAware):
    """A cluster: each command goes to the node that has its slot."""

    def __init__(self, connect: Callable[[], Any], where: str, timeout: float, **more: Any) -> None:
        super().__init__(where, timeout, **more)
        self._connect = connect
        self._client: Any = None
        self.after_fork_in_child()
        self._newcomers: dict[Address, Any] = {}
        self._connections_of: dict[str, Connections] = {}
        self._maps_read = 0
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Take new locks: no thread here will release one that the parent's threads hold."""
        self._lock = threading.Lock()
        self._reading_map = threading.Lock()

    @property
    def client(self) -> Any:
        """The cluster client; made on first use, because making it asks the cluster for its map."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
        return self._client

    def _exchange(self, sendings: Sequence[Sending]) -> list[Reply | Exception]:
        trip = _RoundTrip(sendings, self._node)
        for node, positions in trip.by_node.values():
            try:
                replies = self._connections(node).exchange(trip.commands(positions))
            except DRIVER_ERRORS as error:
                trip.failed(positions, error)
            else:
                trip.answered(positions, replies)
        pause = trip.pause_before_map()
        if pause is not None:
            time.sleep(pause)
            self._read_map(trip.lost_node())
        return trip.replies

    def _newcomer(self, address: Address) -> Any:
        node = redis.cluster.ClusterNode(*address)  # type: ignore[no-untyped-call]  # left so
        return self._newcomers.setdefault(address, node)

    def connector_of(self, key: bytes) -> tuple[str, Any]:
        """Name the node that has a key, and the pool that connects to it."""
        owner = self._owner(key)
        return ("", None) if owner is None else (owner.name, self._pool(owner))

    def _pool(self, node: Any) -> Any:
        pool = self.client.get_redis_connection(node).connection_pool
        watch(pool)
        return pool

    def _connections(self, node: Any) -> Connections:
        pool = self._pool(node)
        known = self._connections_of.get(node.name)
        if known is not None and known.pool is pool:
            return known
        # A new map may bring a new pool for a node.
        fresh = self._connections_of[node.name] = Connections(pool, keep=self._owned)
        if known is not None:
            known.close()
        return fresh

    def _read_map(self, lost: str | None) -> None:
        known = self._maps_read
        with self._reading_map:
            if self._maps_read != known:
                return  # somebody has looked since
            self._maps_read += 1
            # If the map cannot be read now either, the error we have says more.
            with contextlib.suppress(*DRIVER_ERRORS):
                read_map(self.client.nodes_manager, lost)

    def nodes(self) -> list[str]:
        """The primaries, by name."""
        with self._turn():
            return sorted(node.name for node in self.client.get_primaries())

    def scan(self, step: ScanStep) -> tuple[int, list[bytes]]:
        """Make one step of SCAN; a primary that is gone has no more keys."""
        with self._turn():
            found = self.client.get_node(node_name=step.node)
            if found is None:
                return 0, []
            [reply] = self._connections(found).exchange([step.packed()])
            return read_scan(reply)

    def close(self) -> None:
        """Close the client if it is ours, and the nodes it does not know of."""
        self._closed = True
        for connections in tuple(self._connections_of.values()):
            connections.close()
        for node in self._newcomers.values():
            self._pool(node).disconnect()
        if self._owned and self._client is not None:
            self._client.disconnect_connection_pools()  # which close() of 5.0.0 leaves open


# --- asyncio ---------------------------------------------------------------------------------


class AsyncClusterTransport(_Map, AsyncTransport):
    """A cluster: each command goes to the node that has its slot."""

    def __init__(self, connect: Callable[[], Any], where: str, timeout: float, **more: Any) -> None:
        super().__init__(connect(), where, timeout, **more)
        self._newcomers: dict[Address, ClusterNode] = {}
        self._connections_of: dict[str, tuple[ClusterNode, tasks.Connections]] = {}
        self._first_map = tasks.SharedTask[None]()
        self._reading_map = asyncio.Lock()
        self._maps_read = 0

    async def _exchange(
        self, sendings: Sequence[Sending], *, urgent: bool
    ) -> list[Reply | Exception]:
        await self._know_map()
        trip = _RoundTrip(sendings, self._node)

        async def ask(node: ClusterNode, positions: list[int]) -> None:
            try:
                connection = await self._connections(node).open(urgent=urgent)
                replies = await connection.exchange(trip.commands(positions))
            except DRIVER_ERRORS as error:
                trip.failed(positions, error)
            else:
                trip.answered(positions, replies)

        await asyncio.gather(*(ask(node, positions) for node, positions in trip.by_node.values()))
        pause = trip.pause_before_map()
        if pause is not None:
            await asyncio.sleep(pause)
            await self._read_map(trip.lost_node())
        return trip.replies

    def _newcomer(self, address: Address) -> ClusterNode:
        if address not in self._newcomers:
            self._newcomers[address] = ClusterNode(*address, **self.client.connection_kwargs)
        return self._newcomers[address]

    def connector_of(self, key: bytes) -> tuple[str, Any]:
        """Name the node that has a key, and what connects to it."""
        owner = self._owner(key)
        return ("", None) if owner is None else (owner.name, owner)

    def _connections(self, node: ClusterNode) -> tasks.Connections:
        known = self._connections_of.get(node.name)
        if known is not None and known[0] is node:
            return known[1]
        # A new map may bring a new object for a node, and close the old one.
        fresh = tasks.Connections(_NodePool(node), self._timeout / 2)
        self._connections_of[node.name] = node, fresh
        return fresh

    async def _know_map(self) -> None:
        """Read the map of the cluster, unless it is known; all who wait for it share one task."""
        if not self._owned:
            await self.client.initialize()
        elif not self.client.nodes_manager.slots_cache:
            # To find a node that answers may take longer than one caller has.
            await self._first_map.join(self._read_first_map)

    async def _read_first_map(self) -> None:
        """Read the map from the first node that answers.

        Not by the client itself: it asks one listed node after another, and then a node of its own
        choice for a list of commands that nobody needs here; a frozen one holds it up for long.
        """
        manager = self.client.nodes_manager
        listed = manager.startup_nodes
        await hang_up_nodes(listed.values())
        manager.startup_nodes = await _first_to_answer(listed)
        try:
            await manager.initialize()
        except BaseException:
            manager.startup_nodes = listed
            raise

    async def _read_map(self, lost: str | None) -> None:
        known = self._maps_read
        async with self._reading_map:
            if self._maps_read != known:
                return  # somebody has looked since
            self._maps_read += 1
            # If the map cannot be read now either, the error we have says more.
            with contextlib.suppress(*DRIVER_ERRORS):
                await read_map_async(self.client.nodes_manager, lost)

    async def nodes(self) -> list[str]:
        """The primaries, by name."""
        async with self._turn():
            await self._know_map()
            return sorted(node.name for node in self.client.get_primaries())

    async def scan(self, step: ScanStep) -> tuple[int, list[bytes]]:
        """Make one step of SCAN; a primary that is gone has no more keys."""
        async with self._turn():
            await self._know_map()
            found = self.client.get_node(node_name=step.node)
            if found is None:
                return 0, []
            connection = await self._connections(found).open()
            return read_scan(await connection.ask(step.packed()))

    async def _close(self) -> None:
        await self._first_map.close()
        for _, connections in self._connections_of.values():
            await connections.close()
        nodes = list(self._newcomers.values())
        if self._owned:
            # The client would not close them: it does not know that there is a map.
            manager = self.client.nodes_manager
            nodes += [*manager.nodes_cache.values(), *manager.startup_nodes.values()]
        await asyncio.gather(*(node.disconnect() for node in nodes))


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


class _NodePool:
    """A node of redis-py's cluster client for asyncio, with the methods of its pools."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node

    async def get_connection(self, *_command: str) -> Any:
        return self._node.acquire_connection()

    async def release(self, connection: Any) -> None:
        give_back_to_node(self._node, connection)
