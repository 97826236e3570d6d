"""A process that makes payments and ends none of them: `payments.py ORDERS` (JSON).

kind     threads or asyncio
url      where the records are
options  of the store: `behind`
keys     of the payments
claims   "one by one", "at once", or "in one batch"
lease    of each payment, in seconds

It tells `running` when all of them run, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading

from batched import AsyncBatchedStore, BatchedStore
from common import tell

from semel import AsyncIdempotency, Idempotency, Policy, open_async_store, open_store

ORDERS = json.loads(sys.argv[1])
KEYS = ORDERS["keys"]
OPTIONS = {
    "scope": "payments",
    "payload": {"amount": 5},
    "policy": Policy.payment(lease=ORDERS["lease"]),
}
ONE_BY_ONE = ORDERS["claims"] == "one by one"
IN_ONE_BATCH = ORDERS["claims"] == "in one batch"


def main_of_threads() -> None:
    store = open_store(ORDERS["url"], **ORDERS["options"])
    engine = Idempotency(BatchedStore(store, len(KEYS)) if IN_ONE_BATCH else store)
    running: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def pay() -> None:
        running.put(True)
        threading.Event().wait()

    for key in KEYS:
        threading.Thread(target=engine.execute, args=(key, pay), kwargs=OPTIONS).start()
        if ONE_BY_ONE:
            running.get(timeout=60)
    if not ONE_BY_ONE:
        for _ in KEYS:
            running.get(timeout=60)
    tell(running=True)


async def main_of_asyncio() -> None:
    store = open_async_store(ORDERS["url"], **ORDERS["options"])
    engine = AsyncIdempotency(AsyncBatchedStore(store, len(KEYS)) if IN_ONE_BATCH else store)
    running: asyncio.Queue[bool] = asyncio.Queue()

    async def pay() -> None:
        running.put_nowait(True)
        await asyncio.Event().wait()

    payments = []
    for key in KEYS:
        payments.append(asyncio.ensure_future(engine.execute(key, pay, **OPTIONS)))
        if ONE_BY_ONE:
            await asyncio.wait_for(running.get(), 60)
    if not ONE_BY_ONE:
        for _ in KEYS:
            await asyncio.wait_for(running.get(), 60)
    tell(running=True)
    await asyncio.gather(*payments)


if __name__ == "__main__":
    if ORDERS["kind"] == "threads":
        main_of_threads()
    else:
        asyncio.run(main_of_asyncio())
