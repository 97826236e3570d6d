"""Programs that fork while an attempt runs; `test_forking.py` starts them and reads their report.

    python forking.py threads|asyncio URL url|object seen|unseen

An unseen fork is one of C code, which calls none of Python's hooks. A program prints one JSON
object: what the parent and what the child saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from semel import (
    AsyncIdempotency,
    Idempotency,
    LeaseLost,
    Policy,
    current_attempt,
    open_async_store,
    open_store,
)

sys.path.append(str(Path(__file__).parents[1]))
from unseen import unseen_fork

LEASE = 0.6
KEYS = 5
FORKS = {"seen": os.fork, "unseen": unseen_fork}


def report(write: int, **seen: object) -> None:
    os.write(write, json.dumps(seen).encode())


def owner(record) -> str:
    return record.owner.hex()


def threads(url: str, by: str, fork: str) -> None:
    given = url if by == "url" else open_store(url)
    idem = Idempotency(given, policy=Policy(lease=LEASE), cache=5 if by == "url" else 0)
    idem.execute("before", lambda: "before")
    read, write = os.pipe()
    mine: dict[str, object] = {}

    def work():
        if FORKS[fork]() == 0:
            idem.peek("k")
            mine.update(
                in_child=True,
                inherited=len(idem.internals.leases),
                timer=idem.internals.renewer.timer._thread,
            )
            return "the child's"
        os.wait()
        mine["in_child"] = False
        # Another lease's time: only the parent's renewals keep the key.
        time.sleep(LEASE * 1.5)
        mine["abandoned"] = idem.peek("k").abandoned
        return "the parent's"

    try:
        result = idem.execute("k", work)
    except LeaseLost:
        result = "lease lost"
    side = "child" if mine["in_child"] else "parent"
    owners = []
    for number in range(KEYS):
        idem.execute(f"{side}-{number}", lambda: number)  # noqa: B023 - run at once
        owners.append(owner(idem.peek(f"{side}-{number}")))
    seen = {"result": result, "owners": owners, "replay": idem.execute("before", lambda: "again")}
    if mine["in_child"]:
        running = idem.peek("k")
        state = running and running.state.name
        report(write, inherited=mine["inherited"], timer=mine["timer"], running=state, **seen)
        idem.close()
        os._exit(0)
    stored = idem.execute("k", lambda: "again")
    idem.close()
    os.close(write)  # so that a child without a report is an end of file, not a wait
    child = json.loads(os.read(read, 100_000))
    print(
        json.dumps(
            {"parent": {"abandoned": mine["abandoned"], "stored": stored, **seen}, "child": child}
        )
    )


async def some_calls(idem: AsyncIdempotency, side: str) -> dict[str, object]:
    owners = []

    async def fn():
        return "again"

    for number in range(KEYS):
        await idem.execute(f"{side}-{number}", fn)
        owners.append(owner(await idem.peek(f"{side}-{number}")))
    return {"owners": owners, "replay": await idem.execute("before", fn)}


async def in_child(idem: AsyncIdempotency, context, attempt, write: int) -> None:
    await idem.peek("k")
    inherited, timer = len(idem.internals.leases), idem.internals.renewer.timer._handle
    attempt.result = "the child's"
    try:
        await context.__aexit__(None, None, None)
        result = "saved"
    except LeaseLost:
        result = "lease lost"
    running = await idem.peek("k")
    seen = await some_calls(idem, "child")
    state = running and running.state.name
    report(write, inherited=inherited, timer=timer, running=state, result=result, **seen)
    await idem.close()


async def tasks(url: str, by: str, fork: str) -> None:
    given = url if by == "url" else open_async_store(url)
    idem = AsyncIdempotency(given, policy=Policy(lease=LEASE), cache=5 if by == "url" else 0)

    async def before():
        return "before"

    await idem.execute("before", before)
    read, write = os.pipe()
    context = idem.attempt("k")
    attempt = await context.__aenter__()
    assert current_attempt() is attempt
    if FORKS[fork]() == 0:
        try:
            asyncio._set_running_loop(None)  # as asyncio's own hook does
            asyncio.run(in_child(idem, context, attempt, write))
        except BaseException as error:
            report(write, error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    await asyncio.to_thread(os.wait)
    await asyncio.sleep(LEASE * 1.5)
    abandoned = (await idem.peek("k")).abandoned
    attempt.result = "the parent's"
    await context.__aexit__(None, None, None)
    stored = await idem.execute("k", before)
    seen = await some_calls(idem, "parent")
    await idem.close()
    os.close(write)  # so that a child without a report is an end of file, not a wait
    child = json.loads(os.read(read, 100_000))
    parent = {"abandoned": abandoned, "stored": stored, "result": attempt.result, **seen}
    print(json.dumps({"parent": parent, "child": child}))


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "threads":
        threads(*arguments)
    else:
        asyncio.run(tasks(*arguments))
