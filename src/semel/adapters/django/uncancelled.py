"""Requests on threads of a server for asyncio, which nobody's cancellation ends.

Django cancels a request whose client goes away. A thread cannot be cancelled, but all that it waits
for on the loop is: below a middleware that knows no asyncio, that is the view itself, which would
go on behind the back of its own record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from asgiref.sync import async_to_sync, sync_to_async

from semel.adapters.django.bodies import inner, is_asgi
from semel.adapters.streaming import Background

_BACKGROUND: Final = Background()


def uncancelled(request: Any, run: Callable[[], Any]) -> Any:
    """Run a request on this thread, to its end."""
    if not is_asgi(inner(request)) or _runs_a_loop():
        return run()
    return async_to_sync(_background)(run)


def _runs_a_loop() -> bool:
    """Tell whether this thread is a loop's own: what holds up the loop, nobody cancels there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _background(run: Callable[[], Any]) -> Any:
    # What waits here is cancelled; the task that runs on the thread, which waits for it, is not.
    task = _BACKGROUND.begin(sync_to_async(run)())
    task.add_done_callback(_BACKGROUND.end)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        _BACKGROUND.leave(task)
        await asyncio.wait((task,))
        with suppress(Exception):  # it is recorded, and nobody is left to be told
            # Nobody sends it: what is left of a large one is read now, not by the collector.
            await sync_to_async(task.result().close)()
        raise
