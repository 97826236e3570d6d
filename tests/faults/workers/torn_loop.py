"""A process whose event loop is torn down during a save: `torn_loop.py ORDERS` (JSON).

url, ledger, policy as for operation.py. The task is cancelled after its effect, while the result
is on its way to the store, and nobody closes the engine: the save ends with the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from common import effect, tell

from semel import AsyncIdempotency, Policy, open_async_store
from semel.core.records import CompleteRequest
from semel.testing import AsyncFaultyStore

ORDERS = json.loads(sys.argv[1])


class StuckSaves(AsyncFaultyStore):
    """Never gets as far as saving a result."""

    def __init__(self, store) -> None:
        super().__init__(store)
        self.saving = asyncio.Event()

    async def ask(self, request):
        if isinstance(request, CompleteRequest):
            self.saving.set()
            await asyncio.Event().wait()
        return await super().ask(request)


async def main() -> None:
    store = StuckSaves(open_async_store(ORDERS["url"]))
    engine = AsyncIdempotency(store)

    async def work() -> None:
        effect(ORDERS["ledger"], "k")

    task = asyncio.create_task(engine.execute("k", work, policy=Policy(**ORDERS["policy"])))
    await store.saving.wait()
    store.saving.clear()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await store.saving.wait()  # the save goes on in the background
    tell(left=len(engine.internals.in_background))


asyncio.run(main())
