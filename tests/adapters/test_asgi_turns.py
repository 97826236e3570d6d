"""Many requests at once: a few begin in each turn of the event loop."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, copy_context

import pytest

from adapters.asgi_serving import eventually
from semel import AsyncIdempotency
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.integration import BEGIN_AT_ONCE

NAMES = [f"/{number}" for number in range(3 * BEGIN_AT_ONCE)]
request_id: ContextVar[str] = ContextVar("request_id")


class Crowd:
    """An application, and requests to it that all come in one turn of the event loop."""

    def __init__(self, engine: AsyncIdempotency) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.ids: dict[str, str] = {}
        self.go = asyncio.Event()
        self.app = IdempotencyMiddleware(self._application, engine)

    async def _application(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        name = scope["path"]
        self.begun.append(name)
        self.ids[name] = request_id.get()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": name.encode()})
        self.ended.append(name)

    def ask(self, name: str) -> asyncio.Task[bytes]:
        """Send a request, in a context that knows its id."""
        context = copy_context()
        context.run(request_id.set, f"id of {name}")
        return asyncio.get_running_loop().create_task(self._answer(name), context=context)

    async def _answer(self, name: str) -> bytes:
        sent = []

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            sent.append(message)

        headers = [(b"idempotency-key", name.encode())]
        scope = {"type": "http", "method": "POST", "path": name, "headers": headers}
        await self.app(scope, receive, send)
        return sent[-1]["body"]

    async def first_turn(self) -> None:
        """Return when the first of the requests have begun."""
        while not self.begun:  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)


@pytest.fixture
async def crowd():
    async with AsyncIdempotency("memory://") as engine:
        yield Crowd(engine)


async def test_a_few_requests_begin_in_each_turn_and_none_waits_for_another_to_end(crowd):
    asked = [crowd.ask(name) for name in NAMES]
    counts = []
    while len(crowd.begun) < len(NAMES):  # none of them can end before
        before = len(crowd.begun)
        await asyncio.sleep(0)
        counts.append(len(crowd.begun) - before)
    assert max(counts) == BEGIN_AT_ONCE
    assert crowd.begun == NAMES
    crowd.go.set()
    assert await asyncio.gather(*asked) == [name.encode() for name in NAMES]


async def test_a_request_that_begins_in_a_later_turn_has_the_context_of_its_own(crowd):
    crowd.go.set()
    await asyncio.gather(*map(crowd.ask, NAMES))
    assert crowd.ids == {name: f"id of {name}" for name in NAMES}


async def test_a_request_that_is_cancelled_before_it_begins_runs_to_its_end(crowd):
    *others, last = [crowd.ask(name) for name in NAMES]
    await crowd.first_turn()
    assert NAMES[-1] not in crowd.begun
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    crowd.go.set()
    await asyncio.gather(*others)
    await eventually(lambda: len(crowd.ended) == len(NAMES))
    assert await crowd.ask(NAMES[-1]) == NAMES[-1].encode()  # the answer of the cancelled one
    assert crowd.begun == NAMES


async def test_a_server_that_stops_waits_for_requests_that_have_not_begun(crowd):
    words, told = asyncio.Queue(), asyncio.Queue()
    life = asyncio.create_task(crowd.app({"type": "lifespan"}, words.get, told.put))
    await words.put({"type": "lifespan.startup"})
    await told.get()
    names = [f"/{number}" for number in range(100 * BEGIN_AT_ONCE)]  # for many turns
    asked = [crowd.ask(name) for name in names]
    await crowd.first_turn()
    for request in asked:
        request.cancel()
    crowd.go.set()
    await words.put({"type": "lifespan.shutdown"})
    await told.get()
    await life
    assert sorted(crowd.ended) == sorted(names)
    await asyncio.wait(asked)
