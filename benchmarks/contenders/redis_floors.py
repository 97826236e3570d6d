"""What lies under semel on Redis: the same scripts with nothing around them, and a bare GET."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis

from benchmarks.contenders.commands import Command, large_redis_commands, redis_commands
from benchmarks.measuring import (
    AsyncGo,
    Contender,
    Go,
    Kind,
    Place,
    TaskContender,
    ThreadContender,
)
from semel.stores.redis import commands as scripts

PIPELINE = 128

PACK: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment] # its stub: one


def _load(url: str) -> None:
    with closing(redis.Redis.from_url(url)) as client:
        for script in (scripts.CLAIM, scripts.END, scripts.END_LARGE):
            client.script_load(script.text)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 6379)


# --- one connection for all callers ------------------------------------------------------


class Line(asyncio.Protocol):
    """One connection, one future for each command; what is sent together leaves together."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._leaving: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            self._waiting.popleft().set_result(reply)

    def send(self, command: Command) -> asyncio.Future[Any]:
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(PACK(command))
        reply = self._loop.create_future()
        self._waiting.append(reply)
        return reply

    def _flush(self) -> None:
        self.transport.write(b"".join(self._leaving))
        self._leaving.clear()


@asynccontextmanager
async def _bare_protocol(place: Place) -> AsyncIterator[AsyncGo]:
    _load(place.url)
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(Line, *_address(place.url))

    async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
        commands = redis_commands(keys, place.work.result, "bare:")
        rest = iter(commands)

        async def first() -> None:
            for claim, complete in rest:
                await line.send(claim)
                await line.send(complete)

        async def replay() -> None:
            for claim, _ in rest:
                await line.send(claim)

        caller = first if kind == "first" else replay
        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        seconds = time.perf_counter() - start
        _check(await line.send(commands[0][0]))
        return seconds

    yield go
    line.transport.close()


def _check(reply: Any) -> None:
    """After a lap, every claim is answered with the stored result."""
    if not (isinstance(reply, list) and reply[0] in {b"finished", b"large"}):
        raise AssertionError(f"a floor got {reply!r}")


BARE_PROTOCOL: TaskContender = Contender(
    "bare asyncio protocol, the same scripts", "floor", _bare_protocol, works=False
)


# --- a pipeline: no callers at all -------------------------------------------------------


@asynccontextmanager
async def _raw_pipeline(place: Place) -> AsyncIterator[AsyncGo]:
    _load(place.url)
    line = socket.create_connection(_address(place.url))
    reader = hiredis.Reader()

    def exchange(commands: Sequence[Command]) -> None:
        line.sendall(b"".join(map(PACK, commands)))
        for _ in commands:
            while reader.gets() is False:
                reader.feed(line.recv(65536))

    async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
        del callers
        commands = redis_commands(keys, place.work.result, "raw:")
        start = time.perf_counter()
        for begin in range(0, len(commands), PIPELINE):
            chunk = commands[begin : begin + PIPELINE]
            exchange([claim for claim, _ in chunk])
            if kind == "first":
                exchange([complete for _, complete in chunk])
        return time.perf_counter() - start

    yield go
    line.close()


RAW_PIPELINE: TaskContender = Contender(
    f"raw RESP pipeline of {PIPELINE}, the same scripts", "usual", _raw_pipeline, works=False
)


# --- redis-py, one caller ----------------------------------------------------------------


@contextmanager
def _evalsha(place: Place) -> Iterator[Go]:
    _load(place.url)
    with closing(redis.Redis.from_url(place.url)) as client:

        def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del callers
            if len(place.work.result) >= scripts.LARGE:
                return large(keys, kind)
            commands = redis_commands(keys, place.work.result, "evalsha:")
            asked = chain.from_iterable(commands) if kind == "first" else (c for c, _ in commands)
            calls = [command[1:] for command in asked]  # behind the word EVALSHA
            start = time.perf_counter()
            for sha, count, *arguments in calls:
                client.evalsha(str(sha), int(count), *arguments)
            seconds = time.perf_counter() - start
            sha, count, *arguments = commands[0][0][1:]
            _check(client.evalsha(str(sha), int(count), *arguments))
            return seconds

        def large(keys: Sequence[str], kind: Kind) -> float:
            made = large_redis_commands(keys, place.work.result, "evalsha:")
            send: Callable[..., Any] = client.execute_command
            calls = [first if kind == "first" else replay for first, replay in made]
            start = time.perf_counter()
            for command in chain.from_iterable(calls):
                send(*command)
            seconds = time.perf_counter() - start
            _check(send(*calls[0][0]))
            return seconds

        yield go


EVALSHA: ThreadContender = Contender(
    "redis-py evalsha of the same scripts", "floor", _evalsha, works=False
)


@contextmanager
def _get(place: Place) -> Iterator[Go]:
    with closing(redis.Redis.from_url(place.url)) as client:

        def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del callers, kind
            for key in keys:
                client.set(f"get:{key}", place.work.result, ex=3600)
            names = [f"get:{key}" for key in keys]
            start = time.perf_counter()
            for name in names:
                client.get(name)
            return time.perf_counter() - start

        yield go


GET: ThreadContender = Contender(
    "redis-py GET of the result", "floor", _get, kinds=("replay",), works=False
)


@contextmanager
def _ping(place: Place) -> Iterator[Go]:
    with closing(redis.Redis.from_url(place.url)) as client:

        def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del callers, kind
            start = time.perf_counter()
            for _ in keys:
                client.ping()
            return time.perf_counter() - start

        yield go


PING: ThreadContender = Contender("redis-py PING: one bare round trip", "usual", _ping, works=False)
