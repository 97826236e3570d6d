"""The service on Redis beside a bare endpoint, the proxy, and what a waiting start takes.

A pair is a start and a finish of a new key; beside it stand two requests to a bare Starlette
endpoint. The load generator has a core of its own, with Redis; the server (uvicorn) has the other
core to itself, and is what limits, except where one process of Python sends all pairs in batches.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import backends, web
from benchmarks.figures import OURS, Lane, Race, Section
from benchmarks.measuring import Effort
from semel import AsyncIdempotency

CALLERS = 128
ROUNDS = 15
LAP = 0.3
"""Seconds that a lap should take."""
WAITING = 500

BARE = "two requests to a bare endpoint"
BATCHED = "semel, by the batched Python client"
VERBS = "semel, by the five verbs"
WITHOUT_KEY = "without a key"


def run(effort: Effort) -> list[Section]:
    """Measure pairs, the proxy, and waiting starts."""
    with backends.redis_server() as redis, ExitStack() as stack:
        generator, server = web._cores()  # noqa: SLF001 - as the web's own benchmark does it
        backends.pin(redis.process.pid, generator)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, generator)
        try:
            bare = stack.enter_context(web._served("starlette", "bare", redis.url, server))  # noqa: SLF001
            service = stack.enter_context(_semel(server, "serve", "--store", redis.url))
            proxy = stack.enter_context(
                _semel(
                    server,
                    *("proxy", "--store", redis.url, "--upstream", f"http://127.0.0.1:{bare}"),
                )
            )
            races = [
                asyncio.run(_pairs(bare, service.port, effort)),
                asyncio.run(_through_the_proxy(proxy.port, effort)),
            ]
            waiting = asyncio.run(_waiting(service, effort.count(WAITING, 10)))
        finally:
            os.sched_setaffinity(0, before)
    return [
        Section(
            "The service on Redis",
            "A pair is a start and a finish of a new key, or a claim and a complete. In the "
            "batched client, the callers of one process share requests.",
            races[:1],
        ),
        Section("The proxy on Redis", "In front of a bare Starlette endpoint.", races[1:]),
        Section("Starts that wait for another attempt", "In the service.", waiting),
    ]


class Running:
    """A command of semel that serves."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("semel"))
        self.pid = process.pid
        self.port = int(line.split("http://127.0.0.1:")[1].split()[0])

    @property
    def memory(self) -> int:
        """Bytes of memory that it has."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def files(self) -> int:
        """Files and connections that it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - links that lead nowhere


@contextmanager
def _semel(cores: set[int], *words: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "semel", *words, "--port", "0"]
    environment = {**os.environ, **web.KEEPS_MEMORY}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            running = Running(process)
            backends.pin(process.pid, cores)
            yield running
        finally:
            process.terminate()


# --- pairs -----------------------------------------------------------------------------------


async def _pairs(bare: int, service: int, effort: Effort) -> Race:
    callers = effort.callers((CALLERS,))[0]
    floor, verbs = web.Load(bare), VerbLoad(service)
    await floor.connect(callers)
    await verbs.connect(callers)
    samples: dict[str, list[float]] = {BARE: [], BATCHED: [], VERBS: []}
    async with AsyncIdempotency(f"semel+http://127.0.0.1:{service}") as idem:

        async def batched(keys: Sequence[str]) -> float:
            left = iter(keys)

            async def caller() -> None:
                for key in left:
                    await idem.execute(key, _nothing)

            start = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(callers)))
            return len(keys) / (time.perf_counter() - start)

        async def two_requests(keys: Sequence[str]) -> float:
            return await floor.lap([*keys, *keys], replayed=False) / 2

        laps = {BARE: two_requests, BATCHED: batched, VERBS: verbs.pairs}
        counts = dict.fromkeys(laps, 2 * callers)
        for number in range(-1, effort.rounds(ROUNDS)):
            for name, lap in laps.items():
                rate = await lap(_new_keys(counts[name]))
                if number >= 0:
                    samples[name].append(rate)
                elif not effort.smoke:
                    counts[name] = max(2 * callers, int(rate * LAP))
    floor.close()
    verbs.close()
    lanes = [
        Lane(BATCHED, "ours", samples[BATCHED]),
        Lane(VERBS, "usual", samples[VERBS]),
        Lane(BARE, "floor", samples[BARE]),
    ]
    return Race(f"pairs of start and finish, {callers} callers", "/s", lanes)


async def _nothing() -> str:
    return "done"


def _new_keys(count: int) -> list[str]:
    return [f"{os.urandom(4).hex()}-{index:027d}" for index in range(count)]


class VerbConnection(asyncio.Protocol):
    """Starts and finishes keys, one after the other, as a client in any language does."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._read = b""
        self.answer: asyncio.Future[dict[str, object]] | None = None

    async def post(self, verb: str, **fields: object) -> dict[str, object]:
        """Send one verb, and return its answer."""
        body = json.dumps(fields).encode()
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(
            b"POST /v1/%b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (verb.encode(), len(body), body)
        )
        return await self.answer

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, blank, body = self._read.partition(b"\r\n\r\n")
        if not blank or self.answer is None:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._read = b""
            self.answer.set_result(json.loads(body))

    async def pairs(self, keys: Iterator[str]) -> None:
        """Start and finish each key."""
        for key in keys:
            started = await self.post("start", scope="bench", key=key, payload={"amount": 500})
            assert started["status"] == "run", started
            owner = started["owner"]
            stored = await self.post("finish", scope="bench", key=key, owner=owner, result="done")
            assert stored["status"] == "stored", stored


class VerbLoad:
    """Connections to the service."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections: list[VerbConnection] = []

    async def connect(self, number: int) -> None:
        """Open the connections."""
        loop = asyncio.get_running_loop()
        for _ in range(number):
            _, made = await loop.create_connection(VerbConnection, "127.0.0.1", self._port)
            self.connections.append(made)

    async def pairs(self, keys: Sequence[str]) -> float:
        """Start and finish each key; returns how many in a second."""
        left = itertools.chain(keys)
        start = time.perf_counter()
        await asyncio.gather(*(each.pairs(left) for each in self.connections))
        return len(keys) / (time.perf_counter() - start)

    def close(self) -> None:
        """Close the connections."""
        for each in self.connections:
            each.transport.close()


# --- the proxy -------------------------------------------------------------------------------


class WithoutKey(web.Connection):
    """Sends requests that the proxy only forwards."""

    header = b""


async def _through_the_proxy(port: int, effort: Effort) -> Race:
    loads = {OURS: web.Load(port), WITHOUT_KEY: web.Load(port, WithoutKey)}
    samples: dict[str, list[float]] = {name: [] for name in loads}
    for load in loads.values():
        await load.connect(web.CONNECTIONS)
    count, rate = 4 * web.CONNECTIONS, 0.0
    for number in range(-1, effort.rounds(ROUNDS)):
        for name, load in loads.items():
            rate = await load.lap(_new_keys(count), replayed=False)
            if number >= 0:
                samples[name].append(rate)
        if number < 0 and not effort.smoke:
            count = max(count, int(rate * LAP))
    for load in loads.values():
        load.close()
    lanes = [
        Lane(OURS, "ours", samples[OURS]),
        Lane(WITHOUT_KEY, "floor", samples[WITHOUT_KEY]),
    ]
    return Race(f"new keys, {web.CONNECTIONS} connections", "/s", lanes)


# --- waiting ---------------------------------------------------------------------------------


async def _waiting(service: Running, count: int) -> list[Race]:
    load = VerbLoad(service.port)
    await load.connect(1)
    first = load.connections[0]
    started = await first.post("start", scope="bench", key="busy")
    await asyncio.sleep(1)  # what the laps left behind is closed
    memory, files = service.memory, service.files
    await load.connect(count)
    waits = [
        asyncio.ensure_future(each.post("start", scope="bench", key="busy", wait=25))
        for each in load.connections[1:]
    ]
    await asyncio.sleep(2)
    held, opened = (service.memory - memory) / 1024 / count, (service.files - files) / count
    await first.post("finish", scope="bench", key="busy", owner=started["owner"], result=1)
    assert all(answer["status"] == "done" for answer in await asyncio.gather(*waits))
    load.close()
    return [
        Race("memory of each", "KB", [Lane(OURS, "ours", [held])], more_is_better=False),
        Race("connections of each", "", [Lane(OURS, "ours", [opened])], more_is_better=False),
    ]
