"""The reconciler for threads. Twin of `semel.repair.aio`: the same names in the same order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from random import random
from typing import Self

from semel.core.policy import Duration, seconds
from semel.repair.casework import Casework, Options, Report
from semel.repair.decisions import Audit, Resolver
from semel.repair.desk import LEASE
from semel.repair.places import check_place
from semel.repair.steps import run
from semel.stores.base import Store
from semel.sync import Idempotency

logger = logging.getLogger(__name__)


class Reconciler:
    """Finds abandoned attempts and lets the resolver of their scope say what became of them.

    Use it as a context manager to run in a thread every `every` seconds, or call `run_once()` from
    a job of your own. Any number of reconcilers may work on one store.

    `idempotency` is an engine, a store object or a URL (None: from the settings), and `resolvers`
    has a function for each scope. An attempt is looked at when it has been abandoned for
    `older_than` seconds. After an unknown outcome it is asked again, first after `backoff` seconds,
    `max_tries` times in all. A resolver has `lease` seconds. `name` and `audit` say who decides,
    and where that is written.

    Examples:
        >>> Reconciler(idem, {"payments": lambda record: Succeeded("ch_42")}).run_once().resolved
        0
    """

    def __init__(
        self,
        idempotency: Idempotency | Store | str | None,
        resolvers: Mapping[str, Resolver],
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
        self._own: Idempotency | None = None
        if isinstance(idempotency, Idempotency):
            engine = idempotency
        else:
            check_place(idempotency)
            engine = self._own = Idempotency(idempotency)
        options = Options(
            older_than=older_than,
            max_tries=max_tries,
            backoff=backoff,
            lease=lease,
            name=name,
            audit=audit,
        )
        self._casework = Casework(engine, resolvers, options, asynchronous=False)
        self._one_at_a_time = threading.Lock()
        self._stops = 0
        self._stopping = threading.Event()
        self._running: threading.Thread | None = None

    def run_once(self, *, full: bool = False) -> Report:
        """Look once; `full` reads every running record instead of asking what is stuck."""
        stops = self._stops
        return self._look(lambda: self._stops != stops, full=full)

    def start(self) -> None:
        """Look now, and again and again, in a thread of its own."""
        if self._running is None:
            self._stopping.clear()
            running = threading.Thread(
                target=self._run_until_stopped, name="semel-reconciler", daemon=True
            )
            try:
                running.start()
            except BaseException:
                self._stopping.set()  # an interruption may have come after the thread began
                raise
            self._running = running

    def stop(self) -> None:
        """Look no more; only the record that is being resolved is finished first.

        That holds for a `run_once()` in progress too; a later one looks again.
        """
        self._stops += 1
        running, self._running = self._running, None
        if running is not None:
            self._stopping.set()
            running.join()

    def close(self) -> None:
        """Stop, and close what was opened here."""
        self.stop()
        if self._own is not None:
            self._own.close()

    def _look(self, stopped: Callable[[], bool], *, full: bool = False) -> Report:
        with self._one_at_a_time:
            return run(self._casework.run(full=full, stopped=stopped))

    def _run_until_stopped(self) -> None:
        while True:
            try:
                self._look(self._stopping.is_set)
            except Exception:
                logger.exception("a reconciliation failed; it is tried again")
            # Jitter: many processes that start together should not all look together.
            if self._stopping.wait(self._every * (0.75 + random() / 2)):  # noqa: S311 - no secret
                return

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
