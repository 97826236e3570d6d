"""Requests that run on in the background, and answers that are sent while they are read.

On asyncio a request is a task of its own, which nobody's cancellation ends. It reads its answer to
the end, and records that end before the last of it leaves. An answer too large to be kept is sent
meanwhile, by the server's task: a client who goes away ends only the sending. On threads the server
reads the answer as it sends it, and closes it (`StreamedAnswer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, Self, TypeVar

from semel.adapters._sync.integration import Exchange
from semel.events import logger
from semel.http.messages import HeaderLine

T = TypeVar("T")

_LAST_REQUESTS: Final = 5.0
"""Seconds that requests which nobody waits for may take to end when the server stops."""


class Background:
    """The tasks that run, kept alive until they end.

    The caller awaits a future that the task itself resolves at its end. That is what
    `asyncio.shield` does, with fewer turns of the loop: a request that runs has one such task.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, request: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a request; the caller ends or leaves it."""
        task = asyncio.get_running_loop().create_task(request)
        self._tasks.add(task)
        return task

    def end(self, task: asyncio.Task[Any]) -> None:
        """Forget a task that has ended."""
        self._tasks.discard(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Let a task go on for which nobody waits any more; an error of it is only logged."""
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[Any]) -> None:
        self.end(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a request whose client had gone raised", exc_info=task.exception())

    async def drain(self) -> None:
        """Wait for the last of them, but not for ever."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_REQUESTS)


class Flow:
    """One request that runs, and the chunks of its answer: beyond a limit they go out at once.

    `shield` is around all waiting that a cancellation must not end.
    """

    __slots__ = (
        "_early",
        "_ended",
        "_error",
        "_held",
        "_left",
        "_out",
        "_ready",
        "_shield",
        "_size",
        "_task",
        "limit",
    )

    def __init__(
        self, limit: int, shield: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.limit, self._shield = limit, shield
        self._size = 0
        self._held: list[bytes] = []
        self._out: asyncio.Queue[bytes | None] | None = None
        self._left = self._ended = False
        self._error: BaseException | None = None
        self._early: Any = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- for the server's task ---------------------------------------------------------------

    async def answer(self, background: Background, request: Coroutine[Any, Any, Any]) -> Any:
        """Run the request, and return its answer as soon as it can be sent.

        A caller that is cancelled waits for it: what a request uses must not be closed under it.
        """
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
        """Tell that nobody sends the answer any more; it is read to its end all the same."""
        self._left = True
        if self._out is not None and not self._out.empty():
            self._out.get_nowait()  # the task may wait for room

    # --- for the request's own task ----------------------------------------------------------

    async def take(self, chunk: bytes, begun: Callable[[AsyncIterator[bytes]], Any]) -> None:
        """Take a chunk; beyond the limit `begun` makes the answer that is sent meanwhile."""
        self._size += len(chunk)
        if self._size > self.limit:
            # The caller may be cancelled, and not yet have had the turn to leave.
            if self._out is None and not (self._left or self._ready.done()):
                await self._open(begun)
            # The newest one stays here: should it be the last, the end is recorded before.
            await self._put(b"".join(self._held))
            self._held.clear()
        self._held.append(chunk)

    async def _open(self, begun: Callable[[AsyncIterator[bytes]], Any]) -> None:
        # Nothing here keeps the answer: one that is dropped unsent is collected, which ends `_sent`
        # if it has begun.
        self._out = asyncio.Queue(1)
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


# --- on threads ----------------------------------------------------------------------------------


def close(chunks: object) -> None:
    """Close what an application gave, if it can be closed."""
    closing = getattr(chunks, "close", None)
    if closing is not None:
        closing()


def up_to(limit: int, chunks: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Read the chunks of an answer: what was read, and whether that is all of it."""
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        limit -= len(chunk)
        if limit < 0:
            return held, False
    return held, True


class Sent:
    """An answer on its way out; what the application gave is closed after it."""

    def __init__(self, chunks: Iterable[bytes], source: object) -> None:
        self._chunks, self._source = chunks, source

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        """Close what the application gave."""
        close(self._source)


class StreamedAnswer:
    """An answer too large to be kept, sent as it comes; its end is recorded before the last of it.

    A client who goes away does not end it: `close`, which every server calls, reads on to the end.
    So does its own end, for one that never reaches a server: a function of Flask's `after_request`
    may put another answer in its place, and a key that nobody ends would be held for ever.
    """

    def __init__(
        self,
        exchange: Exchange,
        status: int,
        lines: list[HeaderLine],
        chunks: Iterator[bytes],
        source: object,
    ) -> None:
        self._exchange, self._status, self._lines = exchange, status, lines
        self._chunks, self._source = chunks, source
        self._ahead: bytes | None = None
        self._ahead = self._next()

    def __del__(self) -> None:
        if self._ahead is not None:
            with suppress(Exception):  # it is recorded, and nobody is left to be told
                self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        chunk = self._ahead
        if chunk is None:
            raise StopIteration
        self._ahead = self._next()
        return chunk

    def close(self) -> None:
        """Read what is left, and close what the application gave."""
        try:
            while self._ahead is not None:
                self._ahead = self._next()
        finally:
            close(self._source)

    def _next(self) -> bytes | None:
        try:
            chunk = next(self._chunks, None)
        except BaseException as error:
            self._ahead = None
            self._exchange.raised(error)
            raise
        if chunk is None:
            self._exchange.answered(self._status, self._lines, None)
        return chunk
