"""Requests on asyncio, in tasks of their own, whose answers may be sent while they are read.

The task of a request reads its answer to the end, and records that end before the last of it
leaves. An answer too large to be kept is sent meanwhile, by the server's task: a client who goes
away ends only the sending.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from semel.adapters.aside import Aside


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

    async def answer(self, aside: Aside, request: Coroutine[Any, Any, Any]) -> Any:
        """Run the request, and give its answer as soon as it can be sent.

        Whoever is cancelled waits for it: what belongs to a request must not be closed under it.
        """
        task = self._task = aside.begin(self._run(request))
        try:
            await self._ready
        except asyncio.CancelledError:
            aside.leave(task)
            await self.finished()
            raise
        if self._out is None:
            aside.end(task)
            return await task
        aside.leave(task)
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
            # Whoever waits may be cancelled, and not yet have had the turn to leave.
            if self._out is None and not (self._left or self._ready.done()):
                await self._open(begun)
            # The newest one stays here: should it be the last, the end is recorded before.
            await self._put(b"".join(self._held))
            self._held.clear()
        self._held.append(chunk)

    async def _open(self, begun: Callable[[AsyncIterator[bytes]], Any]) -> None:
        # Nobody here keeps the answer: whoever puts it aside, unsent, lets it go, and `_sent` hears
        # of that if it has begun.
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
        """Let the sending end, or break with an error; False = nobody hears of it."""
        if self._out is None or self._left:
            return False
        self._ended, self._error = True, error
        if self._out.empty():
            self._out.put_nowait(None)
        return True

    async def _put(self, chunk: bytes) -> None:
        if self._out is not None and not self._left:
            await self._out.put(chunk)
