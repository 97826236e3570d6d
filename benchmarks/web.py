"""HTTP on Redis: requests per second over 32 connections, beside the bare application and peers.

The load generator is a bare asyncio protocol in a core of its own, with Redis; the server (uvicorn)
has the other core to itself, and is what limits.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from benchmarks import backends
from benchmarks.figures import OURS, Lane, Race, Role, Section, at_least, paired, version_of
from benchmarks.measuring import Effort

CONNECTIONS = 32
PAIRED = ("bare", "semel", "commands")
PAIRED_ROUNDS = 31
"""Of those alone that must be told apart finely."""
ROUNDS = 9
LAP = 0.3
"""Seconds that a lap should take."""
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_MMAP_THRESHOLD_": "4194304"}
"""Settings of the C library for all servers: they keep free memory. asyncio asks for 256 KB at each
read. Depending on what was imported, a small application else gets new pages for each request and
gives them back, for a quarter of its time: bare Starlette did, and the ratio to it swung."""
BARE = "bare"
BODY = b'{"account":"ann","amount":500,"currency":"EUR","order":"2024-000017"}'

LANES: dict[str, tuple[str, Role]] = {
    "bare": (BARE, "floor"),
    "semel": (OURS, "ours"),
    "commands": ("its two commands to Redis, and nothing else", "usual"),
    "decorator": ("semel, by its decorator", "usual"),
    "idemkit": ("idemkit", "alternative"),
    "asgi_idempotency_header": ("asgi-idempotency-header", "alternative"),
}
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "starlette": ("bare", "semel", "commands", "idemkit", "asgi_idempotency_header"),
    "fastapi": ("bare", "semel", "commands", "decorator", "idemkit", "asgi_idempotency_header"),
}
Samples: TypeAlias = dict[str, list[float]]
"""Of each lane, the rates of its rounds."""

LIMITS = {"starlette": (0.6, 1.15), "fastapi": (0.65, 2.0)}


def run(effort: Effort) -> list[Section]:
    """Race on both frameworks."""
    return [_framework(name, effort) for name in FRAMEWORKS]


def _framework(name: str, effort: Effort) -> Section:
    packages = {"idemkit": "idemkit", "asgi_idempotency_header": "asgi-idempotency-header"}
    lanes = [one for one in FRAMEWORKS[name] if one not in packages or version_of(packages[one])]
    with backends.redis_server() as redis, ExitStack() as stack:
        generator, server = _cores()
        backends.pin(redis.process.pid, generator)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, generator)
        try:
            ports = {
                lane: stack.enter_context(_served(name, lane, redis.url, server)) for lane in lanes
            }
            few = {lane: ports[lane] for lane in PAIRED}
            rest = {lane: port for lane, port in ports.items() if lane != "commands"}
            heart = _races(name, *asyncio.run(_race(few, effort, PAIRED_ROUNDS)))
            races = _races(name, *asyncio.run(_race(rest, effort, ROUNDS)))
        finally:
            os.sched_setaffinity(0, before)
    first, again = LIMITS[name]
    return Section(
        f"HTTP on Redis: {name}",
        "The servers keep free memory (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`). By "
        "default the bare Starlette application got new pages for each request and gave them back, "
        "which took a quarter of its time. What two commands to Redis leave of the bare rate is "
        "shown by a middleware that does nothing else.",
        paired(heart) + races,
        [
            at_least(8, f"{name}: first, to the bare rate", heart[0].ratio(OURS, BARE), first),
            at_least(8, f"{name}: replay, to the bare rate", heart[1].ratio(OURS, BARE), again),
        ],
        [f"{one}: not installed" for one in FRAMEWORKS[name] if one not in lanes],
    )


def _races(name: str, firsts: Samples, replays: Samples) -> list[Race]:
    return [
        Race(
            f"{kind}, {name}, {CONNECTIONS} connections",
            "/s",
            [Lane(*LANES[lane], taken) for lane, taken in samples.items()],
        )
        for kind, samples in (("first", firsts), ("replay", replays))
    ]


def _cores() -> tuple[set[int], set[int]]:
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]}, {cores[-1]}


@contextmanager
def _served(framework: str, lane: str, redis: str, cores: set[int]) -> Iterator[int]:
    """Start an application; gives its port."""
    command = [sys.executable, "-m", "benchmarks.web_server", framework, lane, redis]
    environment = {**os.environ, **KEEPS_MEMORY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            backends.pin(process.pid, cores)
            yield port
        finally:
            process.terminate()


async def _race(ports: dict[str, int], effort: Effort, rounds: int) -> tuple[Samples, Samples]:
    loads = {lane: Load(port) for lane, port in ports.items()}
    for load in loads.values():
        await load.connect(CONNECTIONS)
    counts = dict.fromkeys(loads, 4 * CONNECTIONS)
    firsts: Samples = {lane: [] for lane in loads}
    replays: Samples = {lane: [] for lane in loads}
    for number in range(-1, effort.rounds(rounds)):
        for lane in (
            *list(loads)[max(0, number) % len(loads) :],
            *list(loads)[: max(0, number) % len(loads)],
        ):
            keys = [f"{os.urandom(4).hex()}-{index:027d}" for index in range(counts[lane])]
            rates = [
                await loads[lane].lap(keys, replayed=again) for again in (False, lane != "bare")
            ]
            if number < 0:
                counts[lane] = counts[lane] if effort.smoke else int(min(rates) * LAP)
            else:
                firsts[lane].append(rates[0])
                replays[lane].append(rates[1])
    for load in loads.values():
        load.close()
    return firsts, replays


class Load:
    """Connections to one server, each with one request at a time."""

    def __init__(self, port: int, kind: type[Connection] | None = None) -> None:
        self._port = port
        self._kind = kind or Connection
        self._connections: list[Connection] = []

    async def connect(self, number: int) -> None:
        """Open the connections."""
        loop = asyncio.get_running_loop()
        for _ in range(number):
            _, connection = await loop.create_connection(self._kind, "127.0.0.1", self._port)
            self._connections.append(connection)

    async def lap(self, keys: Sequence[str], *, replayed: bool) -> float:
        """Send a request for each key; gives how many were answered in a second."""
        left = itertools.chain(keys)
        ends = [connection.begin(left) for connection in self._connections]
        start = time.perf_counter()
        for connection in self._connections:
            connection.next()
        await asyncio.gather(*ends)
        taken = time.perf_counter() - start
        marked = sum(connection.marked for connection in self._connections)
        if marked != (len(keys) if replayed else 0):
            raise AssertionError(f"{marked} of {len(keys)} answers were replays")
        return len(keys) / taken

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.transport.close()


def _is_whole(head: bytes, body: bytes) -> bool:
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    return len(body) >= int(length) if length else body.endswith(b"0\r\n\r\n")


class Connection(asyncio.Protocol):
    """One connection; reads just enough of an answer to know that it is whole."""

    transport: asyncio.Transport
    header = b"idempotency-key: %b\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def begin(self, keys: Iterator[str]) -> asyncio.Future[None]:
        """Get ready for a lap; the future tells of its end."""
        if self.transport.is_closing():
            raise ConnectionError("the server closed the connection between two laps")
        self._keys, self._read, self.marked = keys, b"", 0
        self._end = asyncio.get_running_loop().create_future()
        return self._end

    def next(self) -> None:
        """Send the next request, or end."""
        key = next(self._keys, None)
        if key is None:
            self._end.set_result(None)
            return
        self.transport.write(
            b"POST /payments HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"%bcontent-length: %d\r\n\r\n%b"
            % (self.header.replace(b"%b", key.encode()), len(BODY), BODY)
        )

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, blank, body = self._read.partition(b"\r\n\r\n")
        if not blank:
            return
        lowered = head.lower()
        if not lowered.startswith(b"http/1.1 201"):
            self._end.set_exception(AssertionError(head.decode()))
            return
        if not _is_whole(lowered, body):
            return
        self.marked += b"idempoten" in lowered and b"replay" in lowered
        self._read = b""
        self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        end: asyncio.Future[None] | None = getattr(self, "_end", None)
        if end is not None and not end.done():
            end.set_exception(exc or ConnectionError("the server closed the connection"))
