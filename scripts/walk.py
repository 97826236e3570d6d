"""Show which files one call passes through: `make walk`, on private servers of its own.

For a first execution on Redis (threads), and for a request to FastAPI on PostgreSQL (asyncio), both
warmed up, it prints the files of semel that were entered, how often the call went from one file to
another, and how many frames of semel were on the stack at most.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from fastapi import FastAPI

import semel
from semel import AsyncIdempotency, Idempotency
from semel.adapters.fastapi import Idempotent
from servers.postgres import postgres_server
from servers.redis import redis_server

SOURCE = str(Path(semel.__file__).parent) + "/"


class Walk:
    """The functions of semel that were entered, in order, and the depth of the stack."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.switches = 0
        self.depth = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call: the profile function of the interpreter."""
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(SOURCE):
            return
        self.files[name] = self.files.get(name, 0) + 1
        self.switches += name != self._last
        self._last = name
        self.depth = max(self.depth, sum(1 for _ in own_frames(frame)))

    def show(self, title: str) -> None:
        """Print the walk."""
        print(f"{title}: {len(self.files)} files, {self.switches} switches, stack {self.depth}")
        for name, entered in self.files.items():
            print(f"  {entered:4}  {name.removeprefix(SOURCE)}")


def own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of semel from here outward."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            yield frame
        frame = frame.f_back


@contextmanager
def walked() -> Iterator[Walk]:
    """Note what is entered inside this block."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def threads_on_redis() -> Walk:
    """Walk through one first execution."""
    with redis_server() as server, Idempotency(server.url) as idem:

        def charge(number: int) -> dict[str, int]:
            return idem.execute(f"order-{number}", lambda: {"paid": number})

        charge(1)
        with walked() as walk:
            charge(2)
        return walk


async def fastapi_on_postgres(url: str) -> Walk:
    """Walk through one first request."""
    async with AsyncIdempotency(url) as idem:
        app = FastAPI()
        idempotent = Idempotent(idem)
        idempotent.init_app(app)

        @app.post("/orders")
        @idempotent
        async def order() -> dict[str, bool]:
            return {"ordered": True}

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:

            async def send(key: str) -> None:
                answer = await client.post("/orders", headers={"Idempotency-Key": key})
                answer.raise_for_status()

            await send("warm-up")
            with walked() as walk:
                await send("order-2")
        return walk


def main(show: Callable[[Walk, str], None] = Walk.show) -> None:
    """Walk twice."""
    show(threads_on_redis(), "threads on Redis")
    with postgres_server() as server:
        show(asyncio.run(fastapi_on_postgres(server.url())), "FastAPI on async PostgreSQL")


if __name__ == "__main__":
    main()
