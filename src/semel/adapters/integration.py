"""How one protected request is handled on asyncio, whatever the framework.

`AsyncIntegration.begin` claims the request's key, or answers it. `AsyncExchange` records the end of
a request that runs, before the last of its answer leaves.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from time import monotonic
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from msgspec import Struct

from semel.aio import AsyncIdempotency
from semel.core.attempts import Attempt
from semel.core.decide import UnstoredResponse
from semel.engine.setup import Call
from semel.errors import ConfigError, IdempotencyError
from semel.events import logger
from semel.http.options import chosen
from semel.http.requests import HeaderLine, Request
from semel.http.rules import BODY, Operation, Rejected, RouteRules, Routing, TenantCheck
from semel.http.storing import Answer
from semel.stores.batching import AsyncSlots, running_loop
from semel.stores.thread_batching import Slots
from semel.sync import Idempotency

T = TypeVar("T")

LARGE: Final = 64 * 1024
"""Bytes from which on an answer is large: it is copied several times on its way to the store."""
LARGE_AT_ONCE: Final = 8
"""How many large answers an integration saves at the same time; the others wait for their turn."""

BEGIN_AT_ONCE: Final = 8
"""How many requests begin in one turn of an event loop; see `Turns`."""
BEGIN_EVERY: Final = 0.0005
"""Seconds: after a turn that took longer, one request begins for each of these."""
STUCK: Final = 1.0
"""Seconds after which it is assumed that no next turn was scheduled."""

UNSENT: Final = 30.0
"""Seconds after which an answer that nothing has begun to send is not waited for any longer."""

_LAST_REQUESTS: Final = 5.0
"""Seconds for which requests without a client may still run when the server stops."""


class AsyncIntegration:
    """An engine and the rules of the requests that come to it.

    A framework may have a class of its own: with another `exchange`, or more to do in a hook.
    """

    exchange: ClassVar[type[AsyncExchange]]

    def __init__(self, idempotency: AsyncIdempotency | str, options: dict[str, Any]) -> None:
        self.opened_here = isinstance(idempotency, str)
        self.tenants = TenantCheck()
        self.engines = AsyncEngines(idempotency)
        self.engine = engine = self.engines.first
        self.routing = Routing(
            resolved=engine.internals.setup.rules,
            key_pattern=engine.internals.setup.key_rules.pattern,
            **options,
        )

    def rules_for(self, options: dict[str, Any]) -> RouteRules:
        """Make the rules of one endpoint, for a decorator."""
        engine = self.engine
        return RouteRules(
            chosen(options), engine.internals.setup.rules, engine.internals.setup.key_rules.pattern
        )

    async def prepare(
        self, rules: RouteRules, request: Request, read: Callable[[], Awaitable[bytes]]
    ) -> Call | None:
        """Prepare the call of a request; None = it is not protected."""
        waiting, given = rules.identify(request), None
        try:
            while True:
                need = waiting.send(given)
                given = await read() if need is BODY else await self.awaited(need)
        except StopIteration as end:
            return self.call_of(rules, end.value)

    def call_of(self, rules: RouteRules, found: Operation | None) -> Call | None:
        """Return the call of the operation that a request was found to be."""
        if found is None:
            return None
        self.tenants.check(rules.choices)
        return Call(found.identity, found.fingerprint, rules.policy)

    async def begin(
        self, rules: RouteRules, request: Request, read: Callable[[], Awaitable[bytes]]
    ) -> AsyncExchange | Answer | None:
        """Claim the request's key: run it, answer it with this, or (None) let it pass."""
        try:
            call = await self.prepare(rules, request, read)
            if call is None:
                return None
            self.before_claim()
            here = self.engines.here()
            attempt = await here.engine.internals.begin(call)
            if attempt.replayed:
                return rules.replay(attempt.result, call.identity)
        except (IdempotencyError, Rejected) as error:
            return rules.rejection(error)
        return self.exchange(here, rules, call, attempt, request.raw)

    def before_claim(self) -> None:
        """Raise a ConfigError where a key must not be claimed; a hook of frameworks."""

    async def awaited(self, given: Any) -> Any:
        """Return what a function of the application returned, which may be async; a hook."""
        return await aio_awaited(given)

    async def close(self) -> None:
        """Close the engine that is used here, if it was opened here."""
        if self.opened_here:
            await self.engines.close()


class AsyncExchange(Struct, eq=False):
    """One request that runs: entered, then ended by its answer or by an error."""

    here: AsyncHere
    rules: RouteRules
    _call: Call
    _attempt: Attempt
    raw: object
    """The framework's own request."""
    ended: bool = False
    raises: bool = False
    """The answer was raised by the handler, as an error."""

    def never_began(self, error: BaseException) -> None:
        """Release the key: the request was interrupted before its handler could begin."""
        self.ended = True
        self.here.engine.internals.settle(self._call, error, self._attempt)

    def enter(self) -> None:
        """Become the current attempt of this context."""
        self._attempt.__enter__()

    async def answered(
        self, status: int, lines: Iterable[HeaderLine], body: bytes | None
    ) -> Answer | None:
        """Record an answer before its last byte leaves; returns what has to go out instead."""
        decision = self.rules.decide(status, lines)
        if decision != "store":
            self._leave()
            if decision == "forget":
                self.rules.log_redirect(status, self.raw)
            outcome = None if decision == "failure" else decision
            undone = UnstoredResponse(f"answered with {status}", outcome)
            await self.here.engine.internals.failed(self._call, self._attempt, undone)
            return None
        try:
            if body is None or len(body) < LARGE:
                await self._save(status, lines, body)
            else:
                await self._save_in_turn(status, lines, body)
        except IdempotencyError as error:  # another attempt took over: its answer counts
            return self.rules.rejection(error)
        return None

    async def _save_in_turn(self, status: int, lines: Iterable[HeaderLine], body: bytes) -> None:
        """Save a large answer, when few others are being saved."""
        try:
            turn = await self.here.large.get()
        except BaseException:
            # Interrupted before its turn: the effect is done, and a retry must not repeat it.
            with suppress(IdempotencyError):
                await self._save(status, lines, body)
            raise
        try:
            await self._save(status, lines, body)
        finally:
            self.here.large.give(turn)

    def _save(self, status: int, lines: Iterable[HeaderLine], body: bytes | None) -> Any:
        stored = self.rules.stored(status, lines, body)
        self._leave()  # Not before: an answer that cannot be packed is a failure, for `raised`.
        return self.here.engine.internals.succeeded(self._call, self._attempt, stored)

    async def unprotected(self) -> None:
        """Free the key: the answer goes out live, and nothing is stored of it."""
        self._leave()
        await self.here.engine.internals.failed(
            self._call, self._attempt, UnstoredResponse("a live stream", "forget")
        )

    async def raised(self, error: BaseException) -> None:
        """Record that the handler raised, as the policy says of failures."""
        self._leave()
        await self.here.engine.internals.failed(self._call, self._attempt, error)

    def _leave(self) -> None:
        self.ended = True
        self._attempt.__exit__(None, None, None)


AsyncIntegration.exchange = AsyncExchange


# --- the engines: one for each event loop, or one for all threads --------------------------------
#
# Both kinds are written by hand, for a loop has no counterpart on threads. They have the same
# names, so that the rest of an integration is written once.


class AsyncHere(NamedTuple):
    """What an integration has for one event loop."""

    engine: AsyncIdempotency
    large: AsyncSlots
    loop: asyncio.AbstractEventLoop
    turns: Turns


class AsyncEngines(dict[asyncio.AbstractEventLoop, AsyncHere]):
    """An engine belongs to one event loop; of those that are opened here, each loop has its own.

    A test client may run every request on another loop.
    """

    def __init__(self, idempotency: AsyncIdempotency | str) -> None:
        self._url = idempotency if isinstance(idempotency, str) else None
        engine = AsyncIdempotency(idempotency) if isinstance(idempotency, str) else idempotency
        if not isinstance(engine, AsyncIdempotency):
            raise ConfigError(
                f"an AsyncIdempotency or a URL is needed, not {type(engine).__name__}"
            )
        self.first = engine
        """Its settings make the rules."""
        self._unused = [engine]

    def here(self) -> AsyncHere:
        """Return what belongs to the running event loop."""
        return self[running_loop()]

    def __missing__(self, loop: asyncio.AbstractEventLoop) -> AsyncHere:
        # Loops run in threads of their own: each step here is atomic.
        here = AsyncHere(self._next(), AsyncSlots(LARGE_AT_ONCE), loop, Turns(loop))
        # An engine keeps its loop alive, so it is for us to let both go.
        for other in self.copy():
            if other.is_closed():
                self.pop(other, None)
        self[loop] = here
        return here

    def _next(self) -> AsyncIdempotency:
        if self._url is None:
            return self.first
        try:
            return self._unused.pop()
        except IndexError:
            return AsyncIdempotency(self._url)

    async def close(self) -> None:
        """Close the engine of the running event loop."""
        loop = running_loop()
        await self[loop].engine.close()
        del self[loop]


async def aio_awaited(given: Any) -> Any:
    """Return what a function of the application gave, which may be async."""
    return await given if inspect.isawaitable(given) else given


class Here(NamedTuple):
    """What an integration has for all threads."""

    engine: Idempotency
    large: Slots


class Engines:
    """One engine for all threads."""

    def __init__(self, idempotency: Idempotency | str) -> None:
        engine = Idempotency(idempotency) if isinstance(idempotency, str) else idempotency
        if not isinstance(engine, Idempotency):
            raise ConfigError(f"an Idempotency or a URL is needed, not {type(engine).__name__}")
        self.first = engine
        self._here = Here(engine, Slots(LARGE_AT_ONCE))

    def here(self) -> Here:
        """Return the engine, whatever the thread."""
        return self._here

    def close(self) -> None:
        """Close the engine."""
        self.first.close()


def awaited(given: Any) -> Any:
    """Return what a function of the application gave; one that is async cannot be awaited here."""
    if inspect.iscoroutine(given):
        given.close()
        raise ConfigError(
            "an async function needs an integration for asyncio; this one is for threads"
        )
    return given


# --- in the background ---------------------------------------------------------------------------
#
# On asyncio a request is a task of its own, which nobody's cancellation ends. It reads its answer
# to the end, and records that end before the last of it leaves. An answer too large to be kept is
# sent meanwhile, by the server's task: a client that disconnects ends only the sending. On threads
# the server reads the answer as it sends it, and closes it (`wsgi.StreamedAnswer`).


class Turns:
    """Lets about eight requests begin in each turn of an event loop, the next ones in the next.

    A store answers many claims at once. If all of their requests began in one turn, all would wait
    for their saves at the same time, each with its whole stack of the framework, and the garbage
    collector, which runs whenever objects have piled up, would follow them all. If only a few begin
    at a time, short requests end before the last ones begin. No request waits for another to end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since = 0.0
        """When this turn began."""
        self._begun = 0
        """How many requests have begun in it."""
        self._most = BEGIN_AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled: asyncio.Handle | None = None

    def take(self) -> asyncio.Future[None] | None:
        """Return what a request has to wait for before it begins; None = it may begin now."""
        now = monotonic()
        # The second case: an exception of a signal handler has struck before `_next` could begin.
        if not self._begun or now - self._since > STUCK:
            self._since = now
            self._schedule()
        if self._begun < self._most:
            self._begun += 1
            return None
        turn = self._loop.create_future()
        self._waiting.append(turn)
        return turn

    def _schedule(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()  # never two: twice as many would begin
        self._scheduled = self._loop.call_soon(self._next)

    def _next(self) -> None:
        try:
            now = monotonic()
            # A loop that is busy with other things has long turns: there, more begin in each.
            self._most = max(BEGIN_AT_ONCE, int((now - self._since) / BEGIN_EVERY))
            self._since, self._begun = now, 0
            while self._waiting and self._begun < self._most:
                turn = self._waiting[0]
                if not turn.done():  # else it was canceled
                    self._begun += 1
                    turn.set_result(None)
                self._waiting.popleft()  # last: interrupted before, it is only looked at again
        finally:
            if self._begun or self._waiting:
                self._schedule()


class Background:
    """The tasks that run, kept alive until they end.

    The caller awaits a future that the task itself resolves at its end. That is what
    `asyncio.shield` does, with fewer turns of the loop: a request that runs has one such task.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(
        self, request: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Task[T]:
        """Run a request on `loop`, which runs here; the caller ends or leaves it."""
        loop = asyncio.get_running_loop() if loop is None else loop
        task = loop.create_task(request)
        self._tasks.add(task)
        return task

    def end(self, task: asyncio.Task[Any]) -> None:
        """Forget a task that has ended."""
        self._tasks.discard(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Let a task run to its end although its client is gone; its error is only logged."""
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[Any]) -> None:
        self.end(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "request raised after its client had disconnected", exc_info=task.exception()
            )

    async def drain(self) -> None:
        """Wait for the last of them that run on this loop, but not for ever."""
        loop = asyncio.get_running_loop()
        if here := [task for task in self._tasks.copy() if task.get_loop() is loop]:
            await asyncio.wait(here, timeout=_LAST_REQUESTS)


class Flow(Struct, eq=False):
    """One request that runs, and the chunks of its answer: beyond a limit they go out at once.

    What sends them calls `finished`, however the sending ends. An answer may be dropped unsent: it
    is collected, sooner or later, or nothing has begun to send it in time.
    """

    limit: int
    _shield: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Is around all waiting that a cancellation must not end."""
    _size: int = 0
    _held: list[bytes] = []
    _out: asyncio.Queue[bytes | None] | None = None
    _left: bool = False
    """The answer is not sent any more."""
    _ended: bool = False
    _error: BaseException | None = None
    _early: Any = None
    """The answer that is sent while it is read."""
    _task: Any = None
    _ready: Any = None
    """The future that is done when an answer can be sent."""
    _unsent: Any = None
    """The timer that ends the waiting for an answer that is not sent."""

    # --- for the server's task ---------------------------------------------------------------

    async def answer(self, background: Background, request: Coroutine[Any, Any, Any]) -> Any:
        """Run the request, and return its answer as soon as it can be sent.

        A caller that is canceled waits for it: what a request uses must not be closed under it.
        """
        self._ready = asyncio.get_running_loop().create_future()
        task = self._task = background.begin(self._run(request))
        try:
            await self._ready
        except asyncio.CancelledError:
            background.leave(task)
            await self.finished()
            raise
        if self._out is None:
            background.end(task)
            return await task
        background.leave(task)
        early, self._early = self._early, None
        return early

    async def _sent(self, out: asyncio.Queue[bytes | None]) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            self._unsent.cancel()
            if self._left:
                raise TimeoutError(f"the response was dropped: not sent within {UNSENT:g} seconds")
            while (chunk := await out.get()) is not None:
                yield chunk
                if self._ended and out.empty():
                    break
            if self._error is not None:
                raise self._error
        finally:
            await self.finished()

    async def finished(self) -> None:
        """Leave the request, and wait for its end."""
        self.leave()
        with self._shield():
            await asyncio.wait((self._task,))

    def leave(self) -> None:
        """Note that the answer is not sent any more; it is still read to its end."""
        self._left = True
        if self._unsent is not None:
            self._unsent.cancel()
        if self._out is not None and not self._out.empty():
            self._out.get_nowait()  # the task may wait for room

    # --- for the request's own task ----------------------------------------------------------

    async def take(self, chunk: bytes, begun: Callable[[AsyncIterator[bytes]], Any]) -> None:
        """Take a chunk; beyond the limit `begun` makes the answer that is sent meanwhile."""
        self._size += len(chunk)
        if self._size > self.limit:
            # The caller may be canceled, and not yet have had the turn to leave.
            if self._out is None and not (self._left or self._ready.done()):
                await self._open(begun)
            # The newest one stays here: should it be the last, the end is recorded before.
            await self._put(b"".join(self._held))
            self._held.clear()
        self._held.append(chunk)

    async def _open(self, begun: Callable[[AsyncIterator[bytes]], Any]) -> None:
        # Nothing here keeps the answer: one that is dropped unsent is collected, which ends `_sent`
        # if it has begun. In a cycle of references (an exception makes one) that comes too late.
        self._out = asyncio.Queue(1)
        self._unsent = asyncio.get_running_loop().call_later(UNSENT, self.leave)
        sent = self._sent(self._out)
        await anext(sent)
        self._early = begun(sent)
        self._ready.set_result(None)

    @property
    def body(self) -> bytes | None:
        """All of the answer; None = it is too large."""
        return None if self._size > self.limit else b"".join(self._held)

    @property
    def is_open(self) -> bool:
        """The answer goes out while it is read."""
        return self._out is not None

    async def _run(self, request: Coroutine[Any, Any, Any]) -> Any:
        try:
            answer = await request
            await self._put(b"".join(self._held))
            self._end()
        except BaseException as error:
            if not self._end(error):
                raise
        else:
            return answer
        finally:
            if not self._ready.done():
                self._ready.set_result(None)

    def _end(self, error: BaseException | None = None) -> bool:
        """Let the sending end, or break with an error; False = there is no sending."""
        if self._out is None or self._left:
            return False
        self._ended, self._error = True, error
        if self._out.empty():
            self._out.put_nowait(None)
        return True

    async def _put(self, chunk: bytes) -> None:
        if self._out is not None and not self._left:
            await self._out.put(chunk)
