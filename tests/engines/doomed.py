"""A program that claims a key, says so, and never ends by itself: `doomed.py KIND URL ABANDONED`."""

from __future__ import annotations

import asyncio
import sys
import time

from semel import AsyncIdempotency, Idempotency, Policy

KEY = "order:1"
LEASE = 0.5


def work() -> None:
    print("running", flush=True)
    time.sleep(600)


async def work_async() -> None:
    print("running", flush=True)
    await asyncio.sleep(600)


def main(kind: str, url: str, abandoned: str) -> None:
    policy = Policy(lease=LEASE, abandoned=abandoned)
    if kind == "threads":
        Idempotency(url).execute(KEY, work, policy=policy)
    else:
        asyncio.run(AsyncIdempotency(url).execute(KEY, work_async, policy=policy))


if __name__ == "__main__":
    main(*sys.argv[1:])
