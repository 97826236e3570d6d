"""The reconciler for asyncio. Twin of `semel.repair.reconciler`: the same names in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import random
from typing import Self

from semel.aio import AsyncIdempotency
from semel.core.policy import Duration, seconds
from semel.repair.casework import Casework, Options, Report
from semel.repair.decisions import AsyncResolver, Audit
from semel.repair.desk import LEASE
from semel.repair.places import check_place
from semel.repair.steps import run_async
from semel.stores.base import AsyncStore

logger = logging.getLogger(__name__)


class AsyncReconciler:
    """Finds abandoned attempts and lets the resolver of their scope say what became of them.

    Use it with `async with` to run in a task every `every` seconds, or await `run_once()` from a
    job of your own. Resolvers may be async; plain functions are run in threads.

    `idempotency` is an engine, a store object or a URL (None: from the settings), and `resolvers`
    has a function for each scope. An attempt is looked at when it has been abandoned for
    `older_than` seconds. After an unknown outcome it is asked again, first after `backoff` seconds,
    `max_tries` times in all. A resolver has `lease` seconds. `name` and `audit` say who decides,
    and where that is written.
    """

    def __init__(
        self,
        idempotency: AsyncIdempotency | AsyncStore | str | None,
        resolvers: Mapping[str, AsyncResolver],
        *,
        older_than: Duration = 600.0,
        every: Duration = 60.0,
        max_tries: int = 5,
        backoff: Duration = 60.0,
        lease: Duration = LEASE,
        name: str | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._every = seconds("every", every)
        self._own: AsyncIdempotency | None = None
        if isinstance(idempotency, AsyncIdempotency):
            engine = idempotency
        else:
            check_place(idempotency)
            engine = self._own = AsyncIdempotency(idempotency)
        options = Options(
            older_than=older_than,
            max_tries=max_tries,
            backoff=backoff,
            lease=lease,
            name=name,
            audit=audit,
        )
        self._casework = Casework(engine, resolvers, options, asynchronous=True)
        self._one_at_a_time = asyncio.Lock()
        self._stops = 0
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def run_once(self, *, full: bool = False) -> Report:
        """Look once; `full` reads every running record instead of asking what is stuck."""
        stops = self._stops
        return await self._look(lambda: self._stops != stops, full=full)

    def start(self) -> None:
        """Look now, and again and again, in a task of its own."""
        if self._running is None:
            self._stopping.clear()
            self._running = asyncio.create_task(self._run_until_stopped(), name="semel-reconciler")

    async def stop(self) -> None:
        """Look no more; only the record that is being resolved is finished first.

        That holds for a `run_once()` in progress too; a later one looks again.
        """
        self._stops += 1
        running, self._running = self._running, None
        if running is not None:
            self._stopping.set()
            await running

    async def close(self) -> None:
        """Stop, and close what was opened here."""
        await self.stop()
        if self._own is not None:
            await self._own.close()

    async def _look(self, stopped: Callable[[], bool], *, full: bool = False) -> Report:
        async with self._one_at_a_time:
            return await run_async(self._casework.run(full=full, stopped=stopped))

    async def _run_until_stopped(self) -> None:
        while True:
            try:
                await self._look(self._stopping.is_set)
            except Exception:
                logger.exception("a reconciliation failed; it is tried again")
            # Jitter: many processes that start together should not all look together.
            pause = self._every * (0.75 + random() / 2)  # noqa: S311 - no secret
            try:
                await asyncio.wait_for(self._stopping.wait(), pause)
            except TimeoutError:
                continue
            return

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
