"""Carries calls to the servers and replies back, for threads.

This module sends. `call` and `call_many` are the whole seam between the store and redis-py: what
is sent again, and why, is decided in `delivery` and `repeating`; what errors mean is said in
`failures`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from redis import exceptions as driver

from semel.errors import StoreError, StoreUnavailable
from semel.stores.redis.clients import clients_of
from semel.stores.redis.delivery import Attempt, Reply, answers_to, certain, deliver, never
from semel.stores.redis.failures import DRIVER_ERRORS, translated
from semel.stores.redis.gate import Gate, OpenGate
from semel.stores.redis.repeating import Repeating, follows_the_primary, unfit_server
from semel.stores.redis.scripts import Call, packed
from semel.stores.redis.wires import SentinelWires, Wires
from semel.stores.registry import SEARCH_SHARE

Answer = TypeVar("Answer")

_OPEN: Final = OpenGate()


class Transport(ABC):
    """What every kind of server has in common."""

    def __init__(
        self,
        where: str,
        timeout: float,
        *,
        gate: Gate | None = None,
        owned: bool = False,
    ) -> None:
        self.where = where
        self._timeout = timeout
        self._gate: Gate | OpenGate = _OPEN if gate is None else gate
        self._owned = owned
        self._closed = False

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Answer:
        """One call, one answer. An urgent one does not wait at the gate."""
        return certain(self.call_many((call,), urgent=urgent)[0])

    def call_many(
        self, calls: Sequence[Call[Answer]], *, urgent: bool = False
    ) -> list[Answer | StoreError]:
        """Many calls in one round trip (per node); each has its own answer."""
        if not calls:
            return []
        if self._closed:
            raise StoreUnavailable(f"the store at {self.where} was closed")
        with translated(self.where):
            replies = self._deliver(calls, urgent=urgent)
        return answers_to(calls, replies, self.where)

    def _deliver(self, calls: Sequence[Call[Any]], *, urgent: bool) -> list[Reply | Exception]:
        delivery = deliver(calls, self._may_redirect())
        attempts = next(delivery)
        gate = _OPEN if urgent else self._gate
        place = gate.take()
        try:
            while True:
                attempts = delivery.send(self._exchange(attempts))
        except StopIteration as done:
            replies: list[Reply | Exception] = done.value
            return replies
        finally:
            gate.give(place)

    @abstractmethod
    def _may_redirect(self) -> Callable[[], bool]: ...

    @abstractmethod
    def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        """Send one round trip."""

    @abstractmethod
    def close(self) -> None:
        """Close what was opened for this transport; a client of the application stays open."""

    def server_of(self, _key: bytes) -> str | None:
        """Name the server that has a key; None = there is only one."""
        return None

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
        pool = client.connection_pool
        self._wires = (
            SentinelWires(pool, keep=self._owned, patience=timeout / 2)
            if follows_the_primary(client)
            else Wires(pool, keep=self._owned)
        )

    def call(self, call: Call[Answer], *, urgent: bool = False) -> Answer:
        """One call, one answer: straight through, while the server simply answers."""
        if self._closed:
            return super().call(call, urgent=urgent)
        gate = _OPEN if urgent else self._gate
        try:
            place = gate.take()
            try:
                reply = self._wires.ask(call.wire())
            finally:
                gate.give(place)
            if not isinstance(reply, Exception):
                return call.read(reply)
        except DRIVER_ERRORS:
            pass
        # It did not simply answer: the long way, from the start, knows what to do then.
        return super().call(call, urgent=urgent)

    def _may_redirect(self) -> Callable[[], bool]:
        return never

    def _exchange(self, attempts: Sequence[Attempt]) -> list[Reply | Exception]:
        return self._repeated([attempt.wire() for attempt in attempts])

    def _repeated(self, commands: Sequence[bytes]) -> list[Reply | Exception]:
        repeating = Repeating(self._timeout * SEARCH_SHARE)
        while True:
            try:
                return self._ask(commands)
            except (driver.ConnectionError, driver.TimeoutError, OSError) as error:
                time.sleep(repeating.pause_after(error))

    def _ask(self, commands: Sequence[bytes]) -> list[Reply | Exception]:
        replies = self._wires.exchange(commands)
        if unfit_server(replies) is not None:
            # Whoever connects anew may be led to a better one. Where that is certain, behind a
            # Sentinel, and where a server is still loading, redis-py has raised it already.
            self._wires.drop()
        return replies

    def close(self) -> None:
        """Close the client if it is ours."""
        self._closed = True
        self._wires.close()
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
        with translated(self.where):
            place = self._gate.take()
            try:
                [reply] = self._repeated([scan_command(cursor, pattern, count)])
            finally:
                self._gate.give(place)
            return scan_reply(reply)


def scan_command(cursor: int, pattern: bytes, count: int) -> bytes:
    """One SCAN command."""
    return packed(("SCAN", cursor, "MATCH", pattern, "COUNT", count))


def scan_reply(reply: Reply | Exception) -> tuple[int, list[bytes]]:
    """Read where to go on, and the keys found."""
    if isinstance(reply, Exception):
        raise reply
    following, keys = reply
    return int(following), list(keys)
