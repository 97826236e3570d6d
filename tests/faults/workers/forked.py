"""A process that forks: `forked.py ORDERS` (JSON).

kind, url, ledger, policy as for operation.py, and `when`:

connected   after its first call; then parent and child ask for the same keys at the same time
running     inside the function; both return from it
dying       inside the function; the parent is killed, the child stays

`fork` is "seen" (os.fork) or "unseen": by C code, which calls none of Python's hooks.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from common import effect, tell, wait

from semel import AsyncIdempotency, Idempotency, LeaseLost, Policy, current_attempt

sys.path.append(str(Path(__file__).parents[2]))
from unseen import unseen_fork

ORDERS = json.loads(sys.argv[1])
KEYS = [f"key-{number}" for number in range(20)]
POLICY = Policy(**ORDERS.get("policy", {}))
fork = {"seen": os.fork, "unseen": unseen_fork}[ORDERS["fork"]]


def act(key: str) -> str:
    effect(ORDERS["ledger"], key)
    return current_attempt().owner.hex()


def open_databases() -> int:
    """How many SQLite files this process has open (where the system tells)."""
    folder = Path("/proc/self/fd")
    files = [os.path.realpath(file) for file in folder.iterdir()] if folder.exists() else []
    return sum(".db" in file for file in files)


def connected() -> None:
    engine = Idempotency(ORDERS["url"])
    engine.execute("first", lambda: None)
    wait()
    child = fork()
    inherited = open_databases()
    owners = [engine.execute(key, lambda key=key: act(key)) for key in KEYS]
    own = engine.execute(f"{os.getpid()}", lambda: act("own"))
    tell(owners=owners, own=own, inherited=inherited)
    engine.close()
    if child:
        os.waitpid(child, 0)


async def connected_async() -> None:
    engine = AsyncIdempotency(ORDERS["url"])

    async def act_async(key: str) -> str:
        return act(key)

    async def use() -> None:
        inherited = open_databases()
        owners = [await engine.execute(key, lambda key=key: act_async(key)) for key in KEYS]
        own = await engine.execute(f"{os.getpid()}", lambda: act_async("own"))
        tell(owners=owners, own=own, inherited=inherited)
        await engine.close()

    await engine.execute("first", lambda: asyncio.sleep(0))
    await asyncio.to_thread(wait)
    child = fork()
    if child == 0:
        asyncio._set_running_loop(None)  # as asyncio's own hook does
        asyncio.run(use())  # the loop is the parent's
        os._exit(0)
    await use()
    await asyncio.to_thread(os.waitpid, child, 0)


def running() -> None:
    engine = Idempotency(ORDERS["url"], policy=POLICY)

    def work() -> str:
        effect(ORDERS["ledger"], "k")
        child = fork()
        if child:
            os.waitpid(child, 0)
            wait()
        return "the parent's" if child else "the child's"

    try:
        tell(result=engine.execute("k", work))
    except LeaseLost:
        tell(error="LeaseLost")
    engine.close()


def fork_and_die() -> None:
    effect(ORDERS["ledger"], "k")
    parent = os.getpid()
    if fork():
        time.sleep(600)  # until it is killed
    os.kill(parent, signal.SIGKILL)
    wait()


def dying() -> None:
    engine = Idempotency(ORDERS["url"], policy=POLICY)
    try:
        engine.execute("k", fork_and_die)
    except LeaseLost:
        tell(error="LeaseLost")
    engine.close()


async def dying_async() -> None:
    async def work() -> None:
        fork_and_die()
        os._exit(0)  # the loop is the parent's

    await AsyncIdempotency(ORDERS["url"], policy=POLICY).execute("k", work)


if __name__ == "__main__":
    programs = {
        ("threads", "connected"): connected,
        ("asyncio", "connected"): lambda: asyncio.run(connected_async()),
        ("threads", "running"): running,
        ("threads", "dying"): dying,
        ("asyncio", "dying"): lambda: asyncio.run(dying_async()),
    }
    programs[ORDERS["kind"], ORDERS["when"]]()
