"""Responses of Django that are sent while their streams are read.

Django closes a response when its client has gone, and with it the stream and the request: under a
view whose stream is still read. So closing waits for the reading, and only on the loop: the thread
that closes is the one of which a stream asks its rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from copy import copy
from functools import cache, partial
from typing import Any

from asgiref.sync import AsyncToSync, sync_to_async

from semel.adapters.streaming import Flow


async def read_on(response: Any, flow: Flow) -> None:
    """Read the stream of a response to its end; beyond the flow's limit it goes out meanwhile."""
    ended: Future[None] = Future()
    loop = asyncio.get_running_loop()

    def begun(chunks: AsyncIterator[bytes]) -> Any:
        # A thread that waits for this view goes on from here: who needs one asks for another.
        AsyncToSync.executors.current = None
        sent = copy(response)
        sent.__class__ = _waiting(response.__class__)
        sent.semel_flow = flow
        sent.streaming_content = chunks
        # The list is the same one: what belongs to the response is closed when this one is.
        _put_off(response._resource_closers, ended, partial(loop.call_soon_threadsafe, flow.leave))
        return sent

    try:
        async for chunk in response.streaming_content:
            await flow.take(chunk, begun)
    finally:
        if flow.is_open:
            await sync_to_async(ended.set_result)(None)


@cache
def _waiting(kind: Any) -> type:
    """Make the class of responses that, when they are sent no longer, wait for their request."""

    class Sent(kind):  # type: ignore[misc]  # of whatever class the view's response is
        semel_flow: Flow

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for part in super().__aiter__():
                    yield part
            finally:
                await self.semel_flow.finished()

    return Sent


def _put_off(
    closers: list[Callable[[], object]], ended: Future[None], leave: Callable[[], object]
) -> None:
    """Let none of the closers run before the end of the reading.

    It has come already, unless the client has gone before the first chunk: nobody waits then.
    """

    def first() -> None:
        waiting = closers[1:]
        del closers[1:]  # Django, which goes through the list, goes no further
        for closer in waiting:
            ended.add_done_callback(partial(_close, closer))
        leave()

    closers.insert(0, first)


def _close(closer: Callable[[], object], _: Future[None]) -> None:
    closer()
