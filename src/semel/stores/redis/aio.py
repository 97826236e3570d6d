"""The Redis store for asyncio.

This module is thin on purpose: `commands` says what to send, `replies` how to read the answer,
`listing` what to ask next, and the transport sends it (`tasks`, `cluster`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis, RedisCluster

from semel.core.records import ClaimRequest, CompleteRequest, Identity, RenewRequest, Request
from semel.errors import StoreError, StoreRefused
from semel.stores.base import AsyncStore
from semel.stores.listening import AsyncListener, AsyncWatch
from semel.stores.redis.clients import cluster_name, server_name, wrong_client
from semel.stores.redis.cluster import AsyncClusterTransport
from semel.stores.redis.commands import (
    LARGE,
    Command,
    Commands,
    KeyLayout,
    ScanStep,
    is_large,
    is_urgent,
    rejections,
    with_rejections,
)
from semel.stores.redis.listing import Listing, Nodes, Steps
from semel.stores.redis.redis_py import check
from semel.stores.redis.retry import certain
from semel.stores.redis.subscriber import AsyncRedisSubscriber, RedisListeners
from semel.stores.redis.tasks import AsyncServerTransport, AsyncTransport
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT

T = TypeVar("T")


class AsyncRedisStore(AsyncStore):
    """Keeps records in Redis or Valkey: one server, Sentinel or a cluster.

    `client` is a `redis.asyncio.Redis` or `redis.asyncio.RedisCluster` of the application, which
    also closes it. It belongs to the first event loop that uses it.
    """

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.keys = KeyLayout(prefix)
        """Where the records are."""
        self._commands = Commands(self.keys)
        self._listing = Listing(self._commands)
        self.transport = _transport(client, timeout)
        """What sends commands to the servers; a tier in front of SQL sends its own by it."""
        self._listeners = RedisListeners(self.transport, AsyncListener, AsyncRedisSubscriber)

    def __repr__(self) -> str:
        return f"<AsyncRedisStore {self.transport.where} prefix={self.keys.prefix!r}>"

    def ask(self, request: Request[T]) -> Awaitable[T]:
        """Answer one request."""
        asked: Request[Any] = request
        # Claims and completes, which every first execution sends, are never urgent.
        short: Command[Any] | None = None
        if type(asked) is ClaimRequest:
            short = self._commands.claim(asked)
        elif type(asked) is CompleteRequest and len(asked.result.data) < LARGE:
            short = self._commands.complete(asked)
        if short is not None:
            answer: Awaitable[T] = self.transport.ask(short)
            return answer
        if is_large(request):
            return self._ask_large(request)
        command = self._commands.command(request)
        if command is None:
            return self._run(self._listing.steps(request))
        return self.transport.ask(command, urgent=is_urgent(request))

    async def _ask_large(self, large: Request[T]) -> T:
        request: Request[Any] = large
        if not isinstance(request, CompleteRequest) or request.ttl <= 0:
            return certain((await self.send([large]))[0])
        limits = await self.transport.send(self._commands.limits_of([request]))
        [rejected] = rejections([request], limits, self.transport.where)
        if rejected is not None:
            raise rejected
        _, ended = await self.transport.send(self._commands.upload(request))
        if ended is None or isinstance(ended, StoreRefused):
            # The server is full, its slot is on the move, or the user lacks a permission.
            _, ended = await self.transport.send(self._commands.without_upload(request))
        answer: T = certain(ended)
        return answer

    async def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests about single records, in one round trip; large values cost another.

        If the server is down, that is raised, for all of them; a lost node of a cluster is the
        error of those requests that it would have answered.
        """
        limits = await self.transport.send(self._commands.limits_of(requests))
        rejected = rejections(requests, limits, self.transport.where)
        fitting = [ask for ask, error in zip(requests, rejected, strict=True) if error is None]
        answers = await self.transport.send(
            self._commands.batch(fitting),
            urgent=all(isinstance(request, RenewRequest) for request in fitting),
        )
        return with_rejections(answers, rejected)

    async def diagnose(self) -> list[str]:
        """Return what the server's settings put at risk."""
        return await self.transport.ask(self._commands.diagnose())

    async def close(self) -> None:
        """Release what this store opened itself."""
        for listener in self._listeners.take_all():
            await listener.close()
        await self.transport.close()

    def watch(self, identity: Identity) -> AsyncWatch:
        """Listen for the end of the record's running attempt."""
        channel = self.keys.record(identity)
        return AsyncWatch(self._listeners.listener(channel), channel)

    def server_of(self, identity: Identity) -> str | None:
        """Name the node of a cluster that has the record, as far as is known."""
        return self.transport.server_of(self.keys.record(identity))

    async def _run(self, steps: Steps[T]) -> T:
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                result: T = done.value
                return result
            match step:
                case Nodes():
                    answer = await self.transport.nodes()
                case ScanStep():
                    answer = await self.transport.scan(step)
                case commands:
                    answer = await self.transport.send(commands)


def _transport(client: Any, timeout: float) -> AsyncTransport:
    if isinstance(client, AsyncTransport):
        return client  # opened by URL
    check()
    if isinstance(client, RedisCluster):
        return AsyncClusterTransport(lambda: client, cluster_name(client), timeout)
    if isinstance(client, Redis):
        return AsyncServerTransport(client, server_name(client), timeout)
    raise wrong_client(
        client, "AsyncRedisStore", "redis.asyncio.Redis or redis.asyncio.RedisCluster"
    )
