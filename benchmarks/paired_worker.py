"""One of the two sides of `benchmarks.paired`: runs laps with whichever semel it imports.

It uses public names only, so that it runs with other versions of semel. Each line that it reads is
a lap to run, as JSON; it answers with the calls per second of time, and of its own computing time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from semel import AsyncIdempotency, Idempotency, open_async_store, open_store

RESULT = {"order": 1, "paid": "12.50", "lines": ["a", "b", "c"]}
REPLAYED = 200
"""Keys that replays take turns with."""


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    kinds: dict[str, type[Threads | Tasks]] = {
        "threads": Threads,
        "tasks": Tasks,
        "fastapi": FastAPI,
    }
    side = kinds[asked["kind"]](**asked["with"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        began = time.process_time()
        calls, seconds = side.run(json.loads(line))
        computed = time.process_time() - began
        print(json.dumps([calls / seconds, calls / computed]), flush=True)
    side.close()


def keys(verb: str) -> Iterator[str]:
    """Yield a new key for each first execution, or the few that are replayed."""
    mine = f"{os.getpid()}-{time.time_ns()}"
    if verb == "first":
        return map(f"{mine}-{{}}".format, itertools.count())  # threads may share it
    return itertools.cycle([f"{mine}-{number}" for number in range(REPLAYED)])


class Threads:
    """So many threads that execute one call after the other."""

    def __init__(self, verb: str, callers: int, **where: Any) -> None:
        self._store = open_store(**where)
        self._engine = Idempotency(self._store)
        self._keys = keys(verb)
        self._callers = callers
        if verb == "replay":
            for _ in range(REPLAYED):
                self._engine.execute(next(self._keys), lambda: RESULT)

    def run(self, seconds: float) -> tuple[int, float]:
        counts = [0] * self._callers
        began = time.perf_counter()
        end = began + seconds

        def call(mine: int) -> None:
            execute, following = self._engine.execute, self._keys
            while time.perf_counter() < end:
                execute(next(following), lambda: RESULT)
                counts[mine] += 1

        if self._callers == 1:
            call(0)
        else:
            threads = [threading.Thread(target=call, args=[n]) for n in range(self._callers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return sum(counts), time.perf_counter() - began

    def close(self) -> None:
        self._engine.close()
        self._store.close()


class Tasks:
    """So many tasks that execute one call after the other."""

    def __init__(self, verb: str, callers: int, **where: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._store = open_async_store(**where)
        self._engine = AsyncIdempotency(self._store)
        self._keys = keys(verb)
        self._callers = callers
        self._loop.run_until_complete(self._open())
        if verb == "replay":
            self._loop.run_until_complete(self._some(REPLAYED))

    async def _open(self) -> None:
        engine = self._engine

        async def effect() -> dict[str, Any]:
            return RESULT

        async def call(key: str) -> None:
            await engine.execute(key, effect)

        self._call = call

    async def _some(self, number: int) -> None:
        for _ in range(number):
            await self._call(next(self._keys))

    def run(self, seconds: float) -> tuple[int, float]:
        return self._loop.run_until_complete(self._lap(seconds))

    async def _lap(self, seconds: float) -> tuple[int, float]:
        count = 0
        began = time.perf_counter()
        end = began + seconds

        async def call() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await self._call(next(self._keys))
                count += 1

        await asyncio.gather(*(call() for _ in range(self._callers)))
        return count, time.perf_counter() - began

    def close(self) -> None:
        async def end() -> None:
            await self._engine.close()
            await self._store.close()

        self._loop.run_until_complete(end())
        self._loop.close()


class FastAPI(Tasks):
    """So many tasks that send requests to an application in this process."""

    async def _open(self) -> None:
        from fastapi import FastAPI as Application

        from semel.adapters.fastapi import Idempotent

        app = Application()
        idempotent = Idempotent(self._engine)
        idempotent.init_app(app)

        @app.post("/orders")
        @idempotent
        async def order() -> dict[str, Any]:
            return RESULT

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def call(key: str) -> None:
            scope: dict[str, Any] = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": "POST",
                "scheme": "http",
                "path": "/orders",
                "raw_path": b"/orders",
                "query_string": b"",
                "root_path": "",
                "headers": [
                    (b"host", b"shop"),
                    (b"content-type", b"application/json"),
                    (b"content-length", b"2"),
                    (b"idempotency-key", key.encode()),
                ],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 80),
            }
            status = 0

            async def send(message: dict[str, Any]) -> None:
                nonlocal status
                status = message.get("status", status)

            await app(scope, receive, send)  # type: ignore[arg-type]  # Starlette's are mutable
            if status != 200:
                raise RuntimeError(f"the application answered {status}")

        self._call = call


if __name__ == "__main__":
    main()
