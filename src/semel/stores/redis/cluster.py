"""Sends commands to the nodes of a Redis Cluster, for threads.

This module finds the node for each command and reads the cluster's map anew when it is old. What is
sent again, and why, is decided in `retry`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis.exceptions import MovedError

from semel.stores.redis.clients import new_node
from semel.stores.redis.commands import pack, scan_command
from semel.stores.redis.errors import DRIVER_ERRORS, translated
from semel.stores.redis.redis_py import read_map
from semel.stores.redis.replies import read_scan
from semel.stores.redis.retry import Address, Reply, Sending, means_old_map
from semel.stores.redis.threads import Connections, Transport

ASKING = pack(("ASKING",))

PAUSE = 0.05
"""Between a lost node and the next look at the cluster's map."""


class ClusterTransport(Transport):
    """A cluster: each command goes to the node that has its slot.

    redis-py's own cluster pipeline asks the server for the keys of every script call, and its
    redirections cannot be bounded in time, so nodes are addressed here one by one.
    """

    def __init__(self, connect: Callable[[], Any], where: str, timeout: float, **more: Any) -> None:
        super().__init__(where, timeout, **more)
        self._connect = connect
        self._client: Any = None
        self._lock = threading.Lock()
        self._newcomers: dict[Address, Any] = {}
        self._connections_of: dict[str, Connections] = {}
        self._reading_map = threading.Lock()
        self._maps_read = 0

    @property
    def client(self) -> Any:
        """The cluster client; made on first use, because making it asks the cluster for its map."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
        return self._client

    def _may_redirect(self) -> Callable[[], bool]:
        deadline = time.monotonic() + self._timeout / 2  # as long as clients repeat (see `clients`)
        return lambda: time.monotonic() < deadline

    def _exchange(self, sendings: Sequence[Sending]) -> list[Reply | Exception]:
        replies: list[Reply | Exception] = [None] * len(sendings)
        by_node: dict[str, tuple[Any, list[int]]] = {}
        for position, sending in enumerate(sendings):
            try:
                node = self._node(sending)
            except DRIVER_ERRORS as error:
                replies[position] = error
            else:
                by_node.setdefault(node.name, (node, []))[1].append(position)
        for node, positions in by_node.values():
            answers = self._ask_node(node, [sendings[position] for position in positions])
            for position, answer in zip(positions, answers, strict=True):
                replies[position] = answer
        lost = silent_node(by_node, replies)
        if any(isinstance(reply, MovedError) for reply in replies):
            self._read_map(lost)
        elif any(means_old_map(reply) for reply in replies):
            time.sleep(PAUSE)
            self._read_map(lost)
        return replies

    def _node(self, sending: Sending) -> Any:
        if sending.node is None:
            slot = self.client.keyslot(sending.command.keys[0])
            return self.client.nodes_manager.get_node_from_slot(slot)
        known = self.client.get_node(*sending.node)
        if known is not None:
            return known
        # A node that has no slot yet is in nobody's map, but ASK may name it.
        return self._newcomers.setdefault(sending.node, new_node(*sending.node))

    def server_of(self, key: bytes) -> str:
        """Name the node that has a key; empty when nobody is known to have it."""
        owner = self._owner(key)
        return "" if owner is None else owner.name

    def connector_of(self, key: bytes) -> tuple[str, Any]:
        """Name the node that has a key, and the pool that connects to it."""
        owner = self._owner(key)
        if owner is None:
            return "", None
        return owner.name, self.client.get_redis_connection(owner).connection_pool

    def _owner(self, key: bytes) -> Any:
        owners = self.client.nodes_manager.slots_cache.get(self.client.keyslot(key))
        return owners[0] if owners else None

    def _ask_node(self, node: Any, sendings: Sequence[Sending]) -> list[Reply | Exception]:
        commands: list[bytes] = []
        for sending in sendings:
            if sending.asking:
                commands.append(ASKING)
            commands.append(sending.packed())
        try:
            replies = self._connections(node).exchange(commands)
        except DRIVER_ERRORS as error:
            return [error] * len(sendings)
        pairs = zip(commands, replies, strict=True)
        return [reply for command, reply in pairs if command is not ASKING]

    def _connections(self, node: Any) -> Connections:
        pool = self.client.get_redis_connection(node).connection_pool
        connections = self._connections_of.get(node.name)
        if connections is None or connections.pool is not pool:
            # A new map may bring a new pool for a node.
            fresh, old = Connections(pool, keep=self._owned), connections
            connections = self._connections_of[node.name] = fresh
            if old is not None:
                old.close()
        return connections

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
        with translated(self.where):
            return sorted(node.name for node in self.client.get_primaries())

    def scan(self, node: str, cursor: int, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
        """One step of SCAN; a primary that is gone has nothing more to tell."""
        with translated(self.where):
            place = self._limit.take()
            try:
                found = self.client.get_node(node_name=node)
                if found is None:
                    return 0, []
                [reply] = self._connections(found).exchange([scan_command(cursor, pattern, count)])
            finally:
                self._limit.give(place)
            return read_scan(reply)

    def close(self) -> None:
        """Close the client if it is ours, and the nodes it does not know of."""
        self._closed = True
        for connections in tuple(self._connections_of.values()):
            connections.close()
        for node in self._newcomers.values():
            self.client.get_redis_connection(node).close()
        if self._owned and self._client is not None:
            self._client.close()


def silent_node(
    by_node: Mapping[str, tuple[Any, list[int]]], replies: Sequence[Reply | Exception]
) -> str | None:
    """Name a node that has failed: it is the last one to be asked for the new map."""
    for name, (_, positions) in by_node.items():
        if means_old_map(replies[positions[0]]):
            return name
    return None
