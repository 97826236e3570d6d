"""An application whose tasks begin at once, as `asyncio.eager_task_factory` of Python 3.12 does it."""

from __future__ import annotations

import asyncio
import contextlib


def _ended(loop, coroutine, **_):
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
    ended = loop.create_future()
    ended.set_result(None)
    return ended


@contextlib.contextmanager
def tasks_that_end_at_once():
    """Only for what ends without waiting for anything: it has ended before its task is given."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_ended)
    try:
        yield
    finally:
        loop.set_task_factory(None)
