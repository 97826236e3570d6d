"""Many requests at once: a few begin in each turn of the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextvars import ContextVar, copy_context

import pytest

from adapters.asgi_serving import eventually
from interrupting import TimeLimit, Trace
from semel import AsyncIdempotency, Policy
from semel.adapters import integration
from semel.adapters.asgi import IdempotencyMiddleware
from semel.adapters.integration import BEGIN_AT_ONCE, BEGIN_EVERY, STUCK, Turns

NAMES = [f"/{number}" for number in range(3 * BEGIN_AT_ONCE)]
request_id: ContextVar[str] = ContextVar("request_id")


class Crowd:
    """An application, and requests to it that all come in one turn of the event loop."""

    def __init__(self, engine: AsyncIdempotency) -> None:
        self.begun: list[str] = []
        self.ids: dict[str, str] = {}
        self.go = asyncio.Event()
        self.app = IdempotencyMiddleware(self._application, engine)

    async def _application(self, scope, receive, send) -> None:
        name = scope["path"]
        self.begun.append(name)
        self.ids[name] = request_id.get()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": name.encode()})

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

    async def counts(self, number: int, each_turn: Callable[[], None] = lambda: None) -> list[int]:
        """Return how many begin in each turn, from the first that begins to the last of so many."""
        counts = []
        while len(self.begun) < number:
            before = len(self.begun)
            each_turn()
            await asyncio.sleep(0)
            counts.append(len(self.begun) - before)
        return list(itertools.dropwhile(lambda count: not count, counts))

    async def first_turn(self) -> None:
        """Return when the first of the requests have begun."""
        while not self.begun:  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)


class Clock:
    """Stands still: on a busy machine a turn may be long, and more would begin in the next."""

    now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(integration, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
async def crowd():
    async with AsyncIdempotency("memory://") as engine:
        yield Crowd(engine)


async def test_a_few_requests_begin_in_each_turn_and_none_waits_for_another_to_end(crowd):
    asked = [crowd.ask(name) for name in NAMES]
    assert await crowd.counts(len(NAMES)) == [BEGIN_AT_ONCE, 0, BEGIN_AT_ONCE, BEGIN_AT_ONCE]
    assert crowd.begun == NAMES
    crowd.go.set()
    assert await asyncio.gather(*asked) == [name.encode() for name in NAMES]


async def test_a_request_that_begins_in_a_later_turn_has_the_context_of_its_own(crowd):
    crowd.go.set()
    await asyncio.gather(*map(crowd.ask, NAMES))
    assert crowd.ids == {name: f"id of {name}" for name in NAMES}


@pytest.mark.parametrize("policy", [Policy(), Policy.payment()])
async def test_a_request_that_is_cancelled_before_its_turn_gives_its_key_back(policy):
    async with AsyncIdempotency("memory://", policy=policy) as engine:
        crowd = Crowd(engine)
        *others, last = [crowd.ask(name) for name in NAMES]
        await crowd.first_turn()
        assert NAMES[-1] not in crowd.begun
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
        crowd.go.set()
        await asyncio.gather(*others)
        assert crowd.begun == NAMES[:-1]
        await eventually(lambda: not engine.internals.in_background)
        assert await crowd.ask(NAMES[-1]) == NAMES[-1].encode()
        assert crowd.begun == NAMES


async def test_a_cancelled_request_takes_no_place_in_the_next_turn(crowd):
    asked = [crowd.ask(name) for name in NAMES]
    await crowd.first_turn()
    for waiting in asked[BEGIN_AT_ONCE:-1]:
        waiting.cancel()
    crowd.go.set()
    await asyncio.wait(asked)
    assert crowd.begun == [*NAMES[:BEGIN_AT_ONCE], NAMES[-1]]


async def test_after_long_turns_more_requests_begin(crowd, clock):
    names = [f"/{number}" for number in range(6 * BEGIN_AT_ONCE)]
    asked = [crowd.ask(name) for name in names]
    counts = await crowd.counts(
        len(names), lambda: clock.wait((2 * BEGIN_AT_ONCE + 0.5) * BEGIN_EVERY)
    )
    assert max(counts) == 2 * BEGIN_AT_ONCE
    crowd.go.set()
    await asyncio.gather(*asked)


async def test_turns_that_are_free_again_let_the_next_request_begin_at_once(crowd):
    crowd.go.set()
    await asyncio.gather(*map(crowd.ask, NAMES))
    turns = crowd.app._integration.engines.here().turns
    await asyncio.sleep(0)
    assert turns.take() is None


# --- exceptions of signal handlers -----------------------------------------------------------------


def full_turns() -> tuple[Turns, list[asyncio.Future[None]]]:
    """Return turns that are taken, and what others wait for."""
    turns = Turns(asyncio.get_running_loop())
    taken = [turns.take() for _ in NAMES]
    assert taken[:BEGIN_AT_ONCE] == [None] * BEGIN_AT_ONCE
    return turns, taken[BEGIN_AT_ONCE:]


async def test_an_exception_at_any_step_of_a_turn_leaves_nobody_waiting(clock):
    seen = Trace()
    seen.run(full_turns()[0]._next)
    assert {Turns._next.__code__, Turns._schedule.__code__} <= {code for code, _, _ in seen.steps}
    for step in seen.steps:
        turns, waiting = full_turns()
        # The turn that the first of them scheduled is the one that is interrupted.
        turns._scheduled.cancel()
        with pytest.raises(TimeLimit):
            Trace(step, TimeLimit()).run(turns._next)
        clock.wait(STUCK * 2)
        turns.take()  # the next request
        for _ in NAMES:
            await asyncio.sleep(0)
        assert all(turn.done() for turn in waiting), step


async def test_a_turn_that_only_took_long_is_not_counted_twice(clock):
    counted = []

    class Counted(Turns):
        def _next(self) -> None:
            counted.append(self)
            super()._next()

    turns = Counted(asyncio.get_running_loop())
    turns.take()
    clock.wait(STUCK * 2)
    turns.take()  # which may think that the next turn was never scheduled
    await asyncio.sleep(0)
    assert counted == [turns]
