"""A process of the storm: `tiered_storm.py ORDERS` (JSON); it ends when its standard input does.

kind, front, behind    the tiered store
ledger                 the file of effects
outages                the file of those who have met an outage of the front, by process
keys                   how many keys a round has; all processes go through the same rounds

Tells, as JSON: the rounds it finished, and its errors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from semel import AsyncIdempotency, Idempotency, Policy, open_async_store, open_store

ORDERS = json.loads(sys.argv[1])
CALLERS = 8

UNHURRIED = 60.0
PATIENT = Policy(lease=5 * UNHURRIED)
"""Redis is what fails here: a machine that is busy must not make SQL, or a lease, fail as well."""

errors: list[str] = []
over = threading.Event()


def write(where: str, line: object) -> None:
    """Add a line to one of the files, in one write."""
    file = os.open(ORDERS[where], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


class Noting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write("outages", os.getpid())


def effect(key: str) -> str:
    """What must be done once."""
    write("ledger", key)
    time.sleep(0.003)
    return f"result of {key}"


def keys_of(number: int) -> list[str]:
    keys = [f"{number}:{index}" for index in range(ORDERS["keys"])] * 2
    random.shuffle(keys)
    return keys


def check(key: str, result: object) -> None:
    if result != f"result of {key}":
        errors.append(f"{key}: {result!r}")


def by_threads() -> int:
    store = open_store(ORDERS["front"], behind=ORDERS["behind"], timeout=UNHURRIED)
    number = 0
    with Idempotency(store, policy=PATIENT) as idem, ThreadPoolExecutor(CALLERS) as threads:

        def call(key: str) -> None:
            try:
                check(key, idem.execute(key, lambda: effect(key)))
            except Exception as error:
                errors.append(f"{key}: {error!r}")

        while not over.is_set():
            list(threads.map(call, keys_of(number)))
            number += 1
    store.close()
    return number


async def by_tasks() -> int:
    store = open_async_store(ORDERS["front"], behind=ORDERS["behind"], timeout=UNHURRIED)
    number = 0
    async with AsyncIdempotency(store, policy=PATIENT) as idem:
        free = asyncio.Semaphore(CALLERS)

        async def call(key: str) -> None:
            async def run() -> str:
                return await asyncio.to_thread(effect, key)

            async with free:
                try:
                    check(key, await idem.execute(key, run))
                except Exception as error:
                    errors.append(f"{key}: {error!r}")

        while not over.is_set():
            await asyncio.gather(*(call(key) for key in keys_of(number)))
            number += 1
    await store.close()
    return number


def wait_for_the_end() -> None:
    sys.stdin.read()
    over.set()


breaker = logging.getLogger("semel.stores.tiered.front")
breaker.addHandler(Noting(logging.WARNING))
threading.Thread(target=wait_for_the_end, daemon=True).start()
rounds = by_threads() if ORDERS["kind"] == "threads" else asyncio.run(by_tasks())
print(json.dumps({"rounds": rounds, "errors": errors}))
