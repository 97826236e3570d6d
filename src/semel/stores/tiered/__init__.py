"""Redis in front, an SQL store behind: SQL decides, Redis only saves work.

The front alone answers two things: a replay of a finished record whose payload does not differ, for
at most `front_ttl` and never longer than SQL keeps the record; and "busy", as a hint that ends with
the lease. Everything else is SQL's answer. An empty, lost or silent Redis makes calls slower, never
wrong: after an error it is left alone, and tried again by one call after a pause that grows.

    a first execution    ask the front, claim in SQL; complete in SQL, tell the front
    a replay             ask the front
    a duplicate          ask the front, which may know that the key is busy

`forget` is the one verb that needs both: it raises if the front did not confirm.
"""

from __future__ import annotations

from semel.stores.tiered.aio import AsyncTieredStore
from semel.stores.tiered.store import TieredStore

__all__ = ["AsyncTieredStore", "TieredStore", "open_async_store", "open_store"]

open_store, open_async_store = TieredStore, AsyncTieredStore
