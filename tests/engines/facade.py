"""One way to drive both engines, so that the same test text proves both.

A `World` opens engines, each on a store object of its own, as if each were another process
(`memory://` has one store behind them all). An engine for asyncio lives on a loop in a thread; what
a test gives it is a plain function, run in a thread that inherits its context.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from semel import AsyncIdempotency, Idempotency, open_async_store, open_store
from semel.core.records import Record
from semel.testing import AsyncFaultyStore, FaultyStore, Refuse
from semel.testing.faults import VERBS
from stores.postgres_given import always_in_batches

PATIENCE = 60.0
"""How long a test waits for what must happen; only a failure ever waits that long."""

MANY = 2000
"""More threads, or faults, than any test needs."""

KINDS = ("threads", "asyncio")


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


async def until(condition: Callable[[], object]) -> None:
    """`wait_until`, awaited."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def never() -> None:
    """A function that nobody may run."""
    raise AssertionError("this ran, and must not")


class Stop(BaseException):
    """Stands for KeyboardInterrupt and its kind, which would end an event loop."""


def open_batching(url: str, **options: Any) -> Any:
    """Open a store for asyncio; what would go together in a crowd does so here with one caller."""
    store: Any = open_async_store(url, **options)
    return always_in_batches(store) if getattr(store, "_batcher", None) is not None else store


class Effect:
    """A function whose runs are counted outside the library; it can be held while it runs."""

    def __init__(self, result: object = "done", *, raising: BaseException | None = None) -> None:
        self.result = result
        self.raising = raising
        self.runs = 0
        self._counting = threading.Lock()
        self._started = threading.Event()
        self._may_end = threading.Event()
        self._may_end.set()

    def held(self) -> Effect:
        """Let it not end until it is released."""
        self._may_end.clear()
        return self

    def release(self) -> None:
        self._may_end.set()

    def wait_started(self) -> None:
        assert self._started.wait(PATIENCE), "it never ran"

    def __call__(self) -> Any:
        with self._counting:
            self.runs += 1
        self._started.set()
        assert self._may_end.wait(PATIENCE), "it was never released"
        if self.raising is not None:
            raise self.raising
        return self.result


class Gate:
    """Where somebody is held up until the test says so."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE), "it was never opened"

    def wait(self) -> None:
        assert self._reached.wait(PATIENCE), "nothing came"

    def open(self) -> None:
        self._open.set()


class Steered(FaultyStore):
    """A faulty store whose next call of a verb, or its answer, can be held up."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        self.twice: set[str] = set()

    def _meet(self, verb: str, apply: Any, /, *args: Any, **kwargs: Any) -> Any:
        hold_up = self.before.pop(verb, None)
        if hold_up is not None:
            hold_up()
        answer = super()._meet(verb, apply, *args, **kwargs)
        hold_answer = self.after.pop(verb, None)
        if hold_answer is not None:
            hold_answer()
        return apply(*args, **kwargs) if verb in self.twice else answer


class AsyncSteered(AsyncFaultyStore):
    """The same for asyncio."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        self.twice: set[str] = set()

    async def _meet(self, verb: str, apply: Any, /, *args: Any, **kwargs: Any) -> Any:
        hold_up = self.before.pop(verb, None)
        if hold_up is not None:
            await asyncio.to_thread(hold_up)
        answer = await super()._meet(verb, apply, *args, **kwargs)
        hold_answer = self.after.pop(verb, None)
        if hold_answer is not None:
            await asyncio.to_thread(hold_answer)
        return await apply(*args, **kwargs) if verb in self.twice else answer


class Driven:
    """An engine of either kind, by plain calls; what happens to it is in `events`."""

    def __init__(self, kind: Threads | Loop, store: Steered | AsyncSteered, **options: Any) -> None:
        self.events: list[Any] = []
        self.store = store
        self._kind = kind
        self.engine: Any = kind.engine(store, hooks=[self.events.append], **options)

    def execute(self, key: str, fn: Callable[[], Any], **options: Any) -> Any:
        return self._kind.call(self.engine.execute, key, fn, **options)

    def run(self, key: str, fn: Callable[[], Any], **options: Any) -> Any:
        return self._kind.call(self.engine.run, key, fn, **options)

    def consume(self, key: str, fn: Callable[[], Any], **options: Any) -> bool:
        return self._kind.call(self.engine.consume, key, fn, **options)

    def start(self, key: str, fn: Callable[[], Any], **options: Any) -> Future[Any]:
        """`execute` in a thread or task of its own."""
        return self._kind.start(self.engine.execute, key, fn, **options)

    def start_consuming(self, key: str, fn: Callable[[], Any], **options: Any) -> Future[Any]:
        return self._kind.start(self.engine.consume, key, fn, **options)

    def peek(self, key: str, **options: Any) -> Record | None:
        return self._kind.finish(self.engine.peek, key, **options)

    def forget(self, key: str, **options: Any) -> bool:
        return self._kind.finish(self.engine.forget, key, **options)

    def close(self, **options: Any) -> None:
        self._kind.finish(self.engine.close, **options)

    def ask_store(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Ask the store behind the faults."""
        return self._kind.finish(getattr(self.store.store, verb), *args, **kwargs)

    def break_renewals(self, times: int = MANY) -> None:
        """Let the next renewals fail."""
        if not self.store.calls:
            # A claim that takes long because it has to connect would be renewed before it runs.
            self.peek("connected")
        self.store.inject("renew", Refuse(), times=times)  # also those in a batch

    def renewals_failed(self) -> int:
        return self.store.fired("renew")

    def commands(self, *verbs: str) -> int:
        """How many calls of these verbs (of all) the store has got."""
        return sum(not verbs or call.verb in verbs for call in self.store.calls)

    def sharers(self) -> int:
        """How many calls wait for an execution in this process."""
        waiting = self.engine.internals.shared_runs._leaders._waiting
        return sum(len(leaders) for leaders in tuple(waiting.values()))

    def told(self, kind: type) -> list[Any]:
        """The events of this kind so far."""
        return [event for event in tuple(self.events) if isinstance(event, kind)]


def intercepted(store: Any, verb: str, answer: Callable[[Any, Any], Any]) -> None:
    """Let `answer` answer a store's requests of a verb: it gets the store's own `ask`, and each."""
    ask = store.ask

    def ask_or_answer(request: Any) -> Any:
        return answer(ask, request) if VERBS[type(request)] == verb else ask(request)

    store.ask = ask_or_answer


def held_up(engine: Driven, verb: str) -> Gate:
    """Hold the next answer to a command up, after the store has applied it."""
    gate, store = Gate(), engine.store.store

    async def slow(ask: Any, request: Any) -> Any:
        answer = await ask(request)
        del store.ask
        await asyncio.to_thread(gate)
        return answer

    def slow_thread(ask: Any, request: Any) -> Any:
        answer = ask(request)
        del store.ask
        gate()
        return answer

    is_async = isinstance(engine.engine, AsyncIdempotency)
    intercepted(store, verb, slow if is_async else slow_thread)
    return gate


class Threads:
    """Drives engines for threads."""

    open_store = staticmethod(open_store)
    engine = Idempotency
    steered = Steered

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MANY)

    def call(self, method: Any, key: str, fn: Callable[[], Any], **options: Any) -> Any:
        return method(key, fn, **options)

    def start(self, method: Any, key: str, fn: Callable[[], Any], **options: Any) -> Future[Any]:
        return self._pool.submit(method, key, fn, **options)

    def finish(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    def close(self) -> None:
        self._pool.shutdown()


class Loop:
    """Drives engines for asyncio, on a loop in a thread of its own."""

    open_store = staticmethod(open_batching)
    engine = AsyncIdempotency
    steered = AsyncSteered

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(MANY))
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, method: Any, key: str, fn: Callable[[], Any], **options: Any) -> Any:
        return self.start(method, key, fn, **options).result(PATIENCE)

    def start(self, method: Any, key: str, fn: Callable[[], Any], **options: Any) -> Future[Any]:
        async def in_a_thread() -> Any:
            return await asyncio.to_thread(fn)

        return asyncio.run_coroutine_threadsafe(method(key, in_a_thread, **options), self.loop)

    def finish(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop).result(PATIENCE)

    def close(self) -> None:
        self.finish(self.loop.shutdown_default_executor)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class World:
    """Engines of one kind on one place where records are kept; `options` open its stores."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.name = kind
        self.url = url
        self._options = options
        self.kind: Threads | Loop = Threads() if kind == "threads" else Loop()
        self._open: list[Driven] = []
        self._stores: list[Any] = []

    def engine(self, **options: Any) -> Driven:
        """Open an engine that shares nothing with the others but the records."""
        return self.engine_on(self.kind.steered(self._store()), **options)

    def engine_on(self, store: Steered | AsyncSteered, **options: Any) -> Driven:
        """Open another engine on the same store object."""
        made = Driven(self.kind, store, **options)
        self._open.append(made)
        return made

    def _store(self) -> Any:
        if not self._stores or not self.url.startswith("memory:"):
            self._stores.append(self.kind.open_store(self.url, **self._options))
        return self._stores[-1]

    def close(self) -> None:
        for engine in self._open:
            engine.store.heal()
            engine.close(timeout=1)
        for store in self._stores:
            self.kind.finish(store.close)
        self.kind.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
