"""The engine: it runs an operation once per key and replays the result to every duplicate.

    setup         settings, rules, and the preparing of a call
    outcomes      what the answers of a store mean for a call, and the events of it
    renewing      leases renewed, results saved late, claims given back
    runs          how one call is handled: claim, run, save
    facade        `Idempotency`: what users call
    marks, once, transactions    its further methods
    `colours`    the few primitives in which threads and asyncio differ

What waits is written for asyncio; `_sync` is generated from it (`make generate`).
"""
