"""A process that runs one operation, step by step: `operation.py ORDERS` (JSON).

kind        threads or asyncio
url         where the records are
ledger      the file of effects
key         of the operation
steps       what its function does:
                effect  do what must be done once
                wait    tell the parent, and wait for it
                block   the same, but in the event loop's own thread
                lost    tell whether the lease was lost
                check   `attempt.check()`
policy      fields of its policy
clock       seconds by which this process's wall clock is off
die         "before claim", "after complete", ...: killed there
on_sigterm  seconds for `close()`, which SIGTERM starts
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time

ORDERS = json.loads(sys.argv[1])

real_time = time.time
if ORDERS.get("clock"):
    # Before the import: a store may keep the function it reads the clock with.
    time.time = lambda: real_time() + ORDERS["clock"]

from common import effect, tell, wait  # noqa: E402 - see above
from deadly import AsyncDeadlyStore, DeadlyStore  # noqa: E402 - see above

from semel import (  # noqa: E402 - see above
    AsyncIdempotency,
    Idempotency,
    Policy,
    current_attempt,
    open_async_store,
    open_store,
)

STEPS = {
    "effect": lambda: effect(ORDERS["ledger"], ORDERS["key"]),
    "wait": wait,
    "block": wait,
    "lost": lambda: tell(lost=current_attempt().lost),
    "check": lambda: current_attempt().check(),
}
POLICY = Policy(**ORDERS.get("policy", {}))
CLOSING = ORDERS.get("on_sigterm")


def report(outcome) -> None:
    tell(result=outcome.value, replayed=outcome.replayed, number=outcome.attempt.number)


def run_steps() -> str:
    for step in ORDERS["steps"]:
        STEPS[step]()
    return f"done by {os.getpid()}"


async def run_steps_async() -> str:
    for step in ORDERS["steps"]:
        if step == "wait":
            await asyncio.to_thread(wait)
        else:
            STEPS[step]()
    return f"done by {os.getpid()}"


def main_of_threads() -> None:
    store = DeadlyStore(open_store(ORDERS["url"]), ORDERS.get("die"))
    engine = Idempotency(store)

    def close_on_sigterm() -> None:
        signal.sigwait([signal.SIGTERM])
        engine.close(timeout=CLOSING)
        tell(closed=True)

    if CLOSING is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=close_on_sigterm).start()
    try:
        report(engine.run(ORDERS["key"], run_steps, policy=POLICY))
    except Exception as error:
        tell(error=type(error).__name__)
    store.close()


async def main_of_asyncio() -> None:
    store = AsyncDeadlyStore(open_async_store(ORDERS["url"]), ORDERS.get("die"))
    engine = AsyncIdempotency(store)
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        await engine.close(timeout=CLOSING)
        tell(closed=True)

    if CLOSING is not None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: closing.append(loop.create_task(close())))
    try:
        report(await engine.run(ORDERS["key"], run_steps_async, policy=POLICY))
    except Exception as error:
        tell(error=type(error).__name__)
    await asyncio.gather(*closing)
    await store.close()


if __name__ == "__main__":
    if ORDERS["kind"] == "threads":
        main_of_threads()
    else:
        asyncio.run(main_of_asyncio())
