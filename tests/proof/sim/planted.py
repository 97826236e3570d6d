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

from semel.core.attempts import DANGER, Attempt, Lease, Leases
from semel.core.cache import FinishedCache
from semel.core.codec import encode_failure
from semel.core.records import FAILED, SUCCEEDED, Finished
from semel.engine import runs
from semel.engine.colours.leaders import LATE
from semel.engine.colours.tasks import SharedRuns
from semel.engine.outcomes import Outcomes
from semel.engine.renewing import AsyncRenewer
from semel.engine.runs import AsyncRuns
from semel.errors import StoreError

_record_failure = AsyncRuns._record_failure
_result_to_store = Outcomes.result_to_store


async def _nothing(*_: object, **__: object) -> None:
    pass


async def _tidy_up_only(self: AsyncRuns, step: Any) -> None:
    call, _, lease, _ = step.args
    self.leases.drop(lease)
    self._pass_on(call)


async def _settle_without_asking(self: AsyncRenewer, ask: Any) -> bool:
    self._leases.settled(ask)
    return True


async def _lead_without_a_claim(
    self: AsyncRuns, call: Any, place: Any, patience: float | None, _: float
) -> Any:
    given = await self.shared_runs.join(place, call, patience)
    if given == LATE:
        self._wait_timed_out(call, 0.0)
    if isinstance(given, Finished):
        return self._replayed(call, given, waited=True)
    if isinstance(given, StoreError):
        return self._without_store(call, given)
    return Attempt(call.identity, protected=False)


def _notice_quietly(self: Leases, moment: float) -> list[Lease]:
    for lease in self._running.values():
        lease.reported_lost = lease.reported_lost or moment >= lease.until - lease.seconds * DANGER
    return []


async def _share_then_record(self: AsyncRuns, call: Any, lease: Any, error: Any) -> None:
    self._share(call, Finished(FAILED, encode_failure(error), lease.number, 0, 1.0))
    await _record_failure(self, call, lease, error)


async def _wait_without_asking(self: AsyncRuns, call: Any, busy: Any, end: float) -> Any:
    await asyncio.sleep(min(1e6, self._left(call, busy, end)))
    self._left(call, busy, end)


def _share_before_saving(self: AsyncRuns, call: Any, attempt: Any, value: Any) -> Any:
    kept = _result_to_store(self, call, attempt, value)
    self._share(call, Finished(SUCCEEDED, kept.encoded, attempt.number, attempt.fence, 60.0))
    return kept


def _cache_before_saving(self: AsyncRuns, call: Any, attempt: Any, value: Any) -> Any:
    kept = _result_to_store(self, call, attempt, value)
    if self.cache is not None:
        finished = Finished(SUCCEEDED, kept.encoded, attempt.number, attempt.fence, 60.0)
        self._remember(self.cache, call, finished)
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
    "a save that was interrupted is not done again": Bug(21, [(AsyncRuns, "_quietly", _nothing)]),
    "a save that was interrupted is given up": Bug(176, [(AsyncRuns, "_quietly", _tidy_up_only)]),
    "a claim whose answer was lost is not given back": Bug(
        21, [(AsyncRenewer, "give_back", _settle_without_asking)]
    ),
    "a slow claim is not made again before its function runs": Bug(
        77, [(runs, "came_late", lambda *_: False)]
    ),
    "a caller that is given the lead runs without a claim": Bug(
        8, [(AsyncRuns, "_follow", _lead_without_a_claim)]
    ),
    "callers that wait get the failure of the one that ran": Bug(
        17, [(AsyncRuns, "_record_failure", _share_then_record)]
    ),
    "a caller that waits never asks the store again": Bug(
        1, [(AsyncRuns, "_wait", _wait_without_asking)]
    ),
    "the lead of a cancelled call is not passed on": Bug(
        1, [(Outcomes, "_pass_on", lambda *_: None), (SharedRuns, "pass_on", lambda *_: None)]
    ),
    "a lease that has passed is not noticed": Bug(
        1,
        [
            (Lease, "lost_at", lambda self, _: self.rejected),
            (Leases, "newly_lost", _notice_quietly),
        ],
    ),
    "a result is shared before the store has agreed": Bug(
        1, [(Outcomes, "result_to_store", _share_before_saving)]
    ),
    "a result is cached before the store has agreed": Bug(
        23, [(Outcomes, "result_to_store", _cache_before_saving)]
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
