"""Carries calls to the servers and replies back, for threads.

This module sends. `call` and `call_many` are the whole seam between the store and redis-py: what
is sent again, and why, is decided in `delivery`; what errors mean is said in `failures`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from redis.client import NEVER_DECODE
from redis.exceptions import ResponseError

from semel.errors import StoreError
from semel.stores.redis.clients import clients_of
from semel.stores.redis.delivery import Attempt, Reply, answers_to, certain, deliver, never
from semel.stores.redis.failures import translated
from semel.stores.redis.scripts import Argument, Call

Answer = TypeVar("Answer")

RAW: dict[str, Any] = {NEVER_DECODE: True}
"""Records are bytes: a client with decode_responses=True must not try to read them as text."""


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
        return certain(self.call_many((call,))[0])

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
