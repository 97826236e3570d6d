"""A process that asks for random keys, again and again: `contender.py ORDERS` (JSON).

kind, url, ledger as for operation.py, and:

results     the file where each answer is noted
keys        how many keys there are
executions  how many calls this process makes
seed        of its choices
policy      fields of the policy
die         "before claim", "after being claimed", "after complete": killed there, or null
at          ... when it comes there for this time

Never killed between an effect and its save: what must not happen twice then could.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys

from common import append, effect, wait
from deadly import AsyncDeadlyStore, DeadlyStore

from semel import AsyncIdempotency, Idempotency, Policy, open_async_store, open_store

ORDERS = json.loads(sys.argv[1])
POLICY = Policy(**ORDERS["policy"])
KILLED = (ORDERS["die"], ORDERS["at"])

choice = random.Random(ORDERS["seed"])


def keys() -> list[str]:
    return [f"key-{choice.randrange(ORDERS['keys'])}" for _ in range(ORDERS["executions"])]


def act(key: str) -> str:
    effect(ORDERS["ledger"], key)
    return f"{key}-by-{os.getpid()}"


def note(key: str, result: str) -> None:
    append(ORDERS["results"], f"{key} {result}")


def main_of_threads() -> None:
    store = DeadlyStore(open_store(ORDERS["url"]), *KILLED)
    with Idempotency(store, policy=POLICY) as engine:
        wait()
        for key in keys():
            note(key, engine.execute(key, lambda key=key: act(key)))
    store.close()


async def main_of_asyncio() -> None:
    store = AsyncDeadlyStore(open_async_store(ORDERS["url"]), *KILLED)

    async def act_async(key: str) -> str:
        return act(key)

    async with AsyncIdempotency(store, policy=POLICY) as engine:
        wait()
        for key in keys():
            note(key, await engine.execute(key, lambda key=key: act_async(key)))
    await store.close()


if __name__ == "__main__":
    if ORDERS["kind"] == "threads":
        main_of_threads()
    else:
        asyncio.run(main_of_asyncio())
