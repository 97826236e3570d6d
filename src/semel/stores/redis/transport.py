"""Carries calls to the servers and replies back, for threads.

This module sends. `call` and `call_many` are the whole seam between the store and redis-py: what
is sent again, and why, is decided in `delivery`; what errors mean is said in `failures`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from redis.client import NEVER_DECODE
from redis.cluster import ClusterNode
from redis.exceptions import MovedError, ResponseError

from semel.errors import StoreError
from semel.stores.redis.clients import clients_of, new_node
from semel.stores.redis.delivery import Address, Attempt, Reply, deliver, means_old_map
from semel.stores.redis.failures import DRIVER_ERRORS, failure, translated
from semel.stores.redis.scripts import Argument, Call

Answer = TypeVar("Answer")

RAW: dict[str, Any] = {NEVER_DECODE: True}
"""Records are bytes: a client with decode_responses=True must not try to read them as text."""

PAUSE = 0.05
"""Between a lost node and the next look at the cluster's map."""


class Transport(ABC):
    """What every kind of server has in common."""

    def __init__(
        self,
        where: str,
        timeout: float,
        *,
        gate: AbstractContextManager[None] | None = None,
        owned: bool = False,
    ) -> None:
        self.where = where
        self._timeout = timeout
        self._gate = contextlib.nullcontext() if gate is None else gate
        self._owned = owned

    def call(self, call: Call[Answer]) -> Answer:
        """One call, one answer."""
        with translated(self.where):
            reply = self._deliver((call,))[0]
            if isinstance(reply, Exception):
                raise reply
        return call.read(reply)

    def call_many(self, calls: Sequence[Call[Answer]]) -> list[Answer | StoreError]:
        """Many calls in one round trip (per node); each has its own answer."""
        if not calls:
            return []
        with translated(self.where):
            replies = self._deliver(calls)
        return answers_to(calls, replies, self.where)

    def _deliver(self, calls: Sequence[Call[Any]]) -> list[Reply | Exception]:
        delivery = deliver(calls, self._may_redirect())
        attempts = next(delivery)
        try:
            with self._gate:
                while True:
                    attempts = delivery.send(self._exchange(attempts))
        except StopIteration as done:
            replies: list[Reply | Exception] = done.value
            return replies

    @abstractmethod
    def _may_redirect(self) -> Callable[[], bool]: ...

    @abstractmethod
    def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        """Send one round trip."""

    @abstractmethod
    def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""

    @abstractmethod
    def nodes(self) -> list[str]:
        """Names of the servers that hold keys, in an order that stays."""

    @abstractmethod
    def scan(self, node: str, cursor: int, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
        """One step of SCAN on one of the `nodes`."""


class ServerTransport(Transport):
    """One server, or the primary that Sentinel names."""

    def __init__(self, client: Any, where: str, timeout: float, **more: Any) -> None:
        super().__init__(where, timeout, **more)
        self._client = client

    def _may_redirect(self) -> Callable[[], bool]:
        return never

    def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        if len(attempts) == 1:  # a pipeline of one costs twice a plain command
            try:
                return [self._client.execute_command(*attempts[0].command, **RAW)]
            except ResponseError as error:
                return [error]
        return pipelined(self._client, [attempt.command for attempt in attempts])

    def close(self) -> None:
        """Close the client if it is ours."""
        if self._owned:
            for client in clients_of(self._client):
                client.close()

    def nodes(self) -> list[str]:
        """There is one, and it needs no name."""
        return [""]

    def scan(
        self,
        node: str,  # noqa: ARG002 - there is only one
        cursor: int,
        pattern: bytes,
        count: int,
    ) -> tuple[int, list[bytes]]:
        """One step of SCAN."""
        with translated(self.where), self._gate:
            return scan_step(self._client, cursor, pattern, count)


class ClusterTransport(Transport):
    """A cluster: each call goes to the node that has its slot.

    redis-py's own cluster pipeline asks the server for the keys of every script call, and its
    redirections cannot be bounded in time, so nodes are addressed here one by one.
    """

    def __init__(self, connect: Callable[[], Any], where: str, timeout: float, **more: Any) -> None:
        super().__init__(where, timeout, **more)
        self._connect = connect
        self._client: Any = None
        self._lock = threading.Lock()
        self._newcomers: dict[Address, ClusterNode] = {}

    @property
    def client(self) -> Any:
        """The cluster client; made on first use, because making it asks the cluster for its map."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
        return self._client

    def _may_redirect(self) -> Callable[[], bool]:
        deadline = time.monotonic() + self._timeout
        return lambda: time.monotonic() < deadline

    def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        replies: list[Reply | Exception] = [None] * len(attempts)
        by_node: dict[Any, list[int]] = {}
        for position, attempt in enumerate(attempts):
            try:
                by_node.setdefault(self._node(attempt), []).append(position)
            except DRIVER_ERRORS as error:
                replies[position] = error
        for node, positions in by_node.items():
            answers = self._ask_node(node, [attempts[position] for position in positions])
            for position, answer in zip(positions, answers, strict=True):
                replies[position] = answer
        if any(isinstance(reply, MovedError) for reply in replies):
            self._read_map()
        elif any(means_old_map(reply) for reply in replies):
            time.sleep(PAUSE)
            self._read_map()
        return replies

    def _node(self, attempt: Attempt) -> Any:
        if attempt.node is None:
            slot = self.client.keyslot(attempt.call.keys[0])
            return self.client.nodes_manager.get_node_from_slot(slot)
        known = self.client.get_node(*attempt.node)
        if known is not None:
            return known
        # A node that has no slot yet is in nobody's map, but ASK may name it.
        return self._newcomers.setdefault(attempt.node, new_node(*attempt.node))

    def _ask_node(self, node: Any, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        commands: list[tuple[Argument, ...]] = []
        for attempt in attempts:
            if attempt.asking:
                commands.append(("ASKING",))
            commands.append(attempt.command)
        try:
            replies = pipelined(self.client.get_redis_connection(node), commands)
        except DRIVER_ERRORS as error:
            return [error] * len(attempts)
        pairs = zip(commands, replies, strict=True)
        return [reply for command, reply in pairs if command[0] != "ASKING"]

    def _read_map(self) -> None:
        # If the map cannot be read now either, the error we have says more.
        with contextlib.suppress(*DRIVER_ERRORS):
            self.client.nodes_manager.initialize()

    def nodes(self) -> list[str]:
        """The primaries, by name."""
        with translated(self.where):
            return sorted(node.name for node in self.client.get_primaries())

    def scan(self, node: str, cursor: int, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
        """One step of SCAN; a primary that is gone has nothing more to tell."""
        with translated(self.where), self._gate:
            found = self.client.get_node(node_name=node)
            if found is None:
                return 0, []
            return scan_step(self.client.get_redis_connection(found), cursor, pattern, count)

    def close(self) -> None:
        """Close the client if it is ours, and the nodes it does not know of."""
        for node in self._newcomers.values():
            if node.redis_connection is not None:
                node.redis_connection.close()
        if self._owned and self._client is not None:
            self._client.close()


def pipelined(client: Any, commands: Sequence[tuple[Argument, ...]]) -> list[Reply | Exception]:
    """Send commands in one round trip to one server."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command, **RAW)
    replies: list[Reply | Exception] = pipeline.execute(raise_on_error=False)
    return replies


def scan_step(client: Any, cursor: int, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
    """One SCAN command."""
    command = ("SCAN", cursor, "MATCH", pattern, "COUNT", count)
    following, keys = client.execute_command(*command, **RAW)
    return int(following), list(keys)


def answers_to(
    calls: Sequence[Call[Answer]], replies: Sequence[Reply | Exception], where: str
) -> list[Answer | StoreError]:
    """Read each reply; what cannot be read is that member's error alone."""
    answers: list[Answer | StoreError] = []
    for call, reply in zip(calls, replies, strict=True):
        try:
            answers.append(
                failure(reply, where) if isinstance(reply, Exception) else call.read(reply)
            )
        except StoreError as unreadable:
            answers.append(unreadable)
    return answers


def never() -> bool:
    """For `deliver`: there is nowhere else to go."""
    return False
