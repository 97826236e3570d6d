"""Bugs to plant in the engine: a simulator that finds none of them proves nothing.

Each is a mistake that somebody could make in the real code, written as a replacement of one method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from semel.core.cache import FinishedCache
from semel.core.codec import encode_failure
from semel.core.leases import DANGER, Lease, Leases
from semel.core.records import FAILED, SUCCEEDED, Finished
from semel.engine import runs
from semel.engine.colours.leaders import LATE
from semel.engine.colours.tasks import Flights
from semel.engine.outcomes import Answers
from semel.engine.renewing import AsyncKeeper
from semel.engine.runs import AsyncRunner
from semel.errors import StoreError

_record_failure = AsyncRunner._record_failure
_kept = Answers._kept


async def _nothing(*_: object, **__: object) -> None:
    pass


async def _tidy_up_only(self: AsyncRunner, step: Any) -> None:
    call, _, lease, _ = step.args
    self._leases.drop(lease)
    self._pass_on(call)


async def _settle_without_asking(self: AsyncRunner, ask: Any) -> bool:
    self._leases.settled(ask)
    return True


async def _lead_without_a_claim(
    self: AsyncRunner, call: Any, place: Any, patience: float | None, _: float
) -> Any:
    given = await self._flights.join(place, call, patience)
    if given == LATE:
        self._out_of_patience(call, 0.0)
    if isinstance(given, Finished):
        return self._replayed(call, given, waited=True)
    if isinstance(given, StoreError):
        return self._without_store(call, given)
    return self._unprotected(call)


def _notice_quietly(self: Leases, moment: float) -> list[Lease]:
    for lease in self._running.values():
        lease.told_lost = lease.told_lost or moment >= lease.until - lease.seconds * DANGER
    return []


async def _share_then_record(self: AsyncRunner, call: Any, lease: Any, error: Any) -> None:
    self._share(call, Finished(FAILED, encode_failure(error), lease.number, 0, 1.0))
    await _record_failure(self, call, lease, error)


async def _wait_without_asking(self: AsyncRunner, call: Any, busy: Any, end: float) -> Any:
    await asyncio.sleep(min(1e6, self._left(call, busy, end)))
    self._left(call, busy, end)


def _share_before_saving(self: AsyncRunner, call: Any, attempt: Any, value: Any) -> Any:
    kept = _kept(self, call, attempt, value)
    self._share(call, Finished(SUCCEEDED, kept.encoded, attempt.number, attempt.fence, 60.0))
    return kept


def _cache_before_saving(self: AsyncRunner, call: Any, attempt: Any, value: Any) -> Any:
    kept = _kept(self, call, attempt, value)
    if self._cache is not None:
        finished = Finished(SUCCEEDED, kept.encoded, attempt.number, attempt.fence, 60.0)
        self._remember(self._cache, call, finished)
    return kept


def _any_payload(self: FinishedCache, identity: Any, _: object, now: float, generation: int) -> Any:
    entry = self._entries.get(identity)
    return None if entry is None or entry[2] <= now or entry[3] != generation else entry[1]


@dataclass(frozen=True)
class Bug:
    """A bug, and how many seeds it took to find it when it was planted first."""

    seeds: int
    replaces: list[tuple[Any, str, Callable[..., Any]]]

    @property
    def within(self) -> int:
        """How many seeds it may take: other plans find it sooner or later."""
        return 50 + 5 * self.seeds


PLANTED: dict[str, Bug] = {
    "a save that was interrupted is not done again": Bug(21, [(AsyncRunner, "_quietly", _nothing)]),
    "a save that was interrupted is given up": Bug(176, [(AsyncRunner, "_quietly", _tidy_up_only)]),
    "a claim whose answer was lost is not given back": Bug(
        21, [(AsyncKeeper, "_disown", _settle_without_asking)]
    ),
    "a slow claim is not made again before its function runs": Bug(
        77, [(runs, "came_late", lambda *_: False)]
    ),
    "a caller that is given the lead runs without a claim": Bug(
        8, [(AsyncRunner, "_follow", _lead_without_a_claim)]
    ),
    "callers that wait get the failure of the one that ran": Bug(
        17, [(AsyncRunner, "_record_failure", _share_then_record)]
    ),
    "a caller that waits never asks the store again": Bug(
        1, [(AsyncRunner, "_wait", _wait_without_asking)]
    ),
    "the lead of a cancelled call is not passed on": Bug(
        1, [(Answers, "_pass_on", lambda *_: None), (Flights, "pass_on", lambda *_: None)]
    ),
    "a lease that has passed is not noticed": Bug(
        1,
        [
            (Lease, "lost_at", lambda self, _: self.refused),
            (Leases, "newly_lost", _notice_quietly),
        ],
    ),
    "a result is shared before the store has agreed": Bug(
        1, [(Answers, "_kept", _share_before_saving)]
    ),
    "a result is cached before the store has agreed": Bug(
        23, [(Answers, "_kept", _cache_before_saving)]
    ),
    "the local cache ignores the payload": Bug(8, [(FinishedCache, "get", _any_payload)]),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant one of them."""
    with ExitStack() as stack:
        for owner, method, replacement in PLANTED[name].replaces:
            stack.enter_context(patch.object(owner, method, replacement))
        yield
