"""The starts of a message's handler, counted outside of its transaction, where nothing undoes it.

The law: a start is counted before its handler is called, and taken back only if the database, not
the handler, ended the transaction.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Final

from semel.core.attempts import Attempt, Lease
from semel.core.codec import encode_failure
from semel.core.policy import changed
from semel.core.records import PROCESSING
from semel.core.stop import Stop
from semel.engine.colours.tasks import background, sleep
from semel.engine.runs import AsyncRuns
from semel.engine.setup import Call
from semel.errors import StoreError, StoreUnavailable
from semel.transactions import db_errors

MOST_LOSSES: Final = 10
"""How often in a row a handler may lose the connection of its transaction without being counted:
one that loses it each time breaks it itself."""

PAUSE: Final = 1.0
"""Seconds after which a store that did not answer is asked again."""

_TAKEN_BACK: Final = tuple(
    encode_failure(
        StoreUnavailable(
            f"not counted: the connection of the transaction was lost, {losses} times in a row"
            if losses
            else "not counted: the database rolled the transaction back"
        )
    )
    for losses in range(MOST_LOSSES + 1)
)
"""What a record says after starts that are not counted, by how many in a row lost a connection."""


class AsyncStart:
    """One start of a handler in a transaction, counted outside of it, where nothing undoes it.

    The record itself has the count. It is claimed as for an ordinary attempt, and the transaction
    goes on with that claim: what it commits is the end of the record. If it is rolled back, also by
    the end of the process, the record is as before the transaction: claimed, and counted.
    """

    def __init__(self, runs: AsyncRuns, call: Call, stopping: Stop) -> None:
        # What was rolled back has not happened, so nothing is held.
        rules = changed(call.rules, abandoned="takeover", concurrent="reject")
        self._runs = runs
        self._in_transaction = call
        self._stopping = stopping
        self._call = Call(
            call.identity, call.fingerprint, rules, call.returns, keeps_value=call.keeps_value
        )
        self._lease: Lease | None = None
        self._losses = 0
        """How many starts in a row have lost their connection before this one."""

    async def begin(self) -> Attempt | None:
        """Count the start; returns the attempt of a message that was done before."""
        if self._runs.setup.bypassing():
            return None
        with suppress(StoreError):  # the claim meets it again, and the policy decides
            before = await self._runs.store.get(self._call.identity)
            if before is not None and before.outcome in _TAKEN_BACK:
                self._losses = _TAKEN_BACK.index(before.outcome)
        attempt = await self._runs.begin(self._call)
        if attempt.replayed:
            return attempt
        if attempt.lease is not None:  # else the policy lets it run unprotected
            # Not renewed: the transaction has the record, and keeps all others from it.
            attempt.lease.stop()
            self._lease = attempt.lease
            self._in_transaction.counted = attempt
        return None

    @property
    def counted(self) -> bool:
        """Whether the record has counted it."""
        return self._lease is not None

    def enter(self) -> None:
        """Note that the handler is called now."""
        if self._lease is not None:
            self._lease.entered = True

    def leave(self) -> None:
        """Note that the handler has not been called, or that its transaction is repeated."""
        if self._lease is not None:
            self._lease.entered = False

    def end(self) -> None:
        """Forget the start: its record has ended, or is another attempt's."""
        if self._lease is not None:
            self._runs.leases.drop(self._lease)

    def interrupted(self, error: BaseException) -> None:
        """Return the claim if the handler was not called; else record its failure."""
        if self._lease is not None and self._lease.entered:
            background(self._runs.in_background, partial(self.fail, error), self._lease)
        else:
            self._runs.settle(self._call, error)

    async def fail(self, error: BaseException) -> Lease | None:
        """Record the failure of the handler; None = the store has no such start."""
        lease = self._lease
        if lease is None:
            return None
        try:
            rolled_back = await self._rolled_back(lease)
        except Exception as unreadable:  # noqa: BLE001 - it stays counted, and its lease ends
            self._runs.lease_events.store_failed(lease, "fail", unreadable)
            self.end()
            return lease
        if not rolled_back:
            self.end()
            return None
        await self._runs.failed(self._call, Attempt(lease.identity, lease=lease), error)
        return lease

    async def take_back(self, *, lost: bool) -> bool:
        """Count the start no longer, as soon as the store is back; False = it has to count.

        `lost` says that it lost its connection, which a handler may do to itself. The start stays
        counted if the consumer, or the engine, stops before the store is back.
        """
        losses = self._losses + lost
        if losses > MOST_LOSSES:
            return False
        lease, end, pause = self._lease, monotonic() + self._call.rules.lease, 0.0
        try:
            while lease is not None and not await self._taken_back(lease, losses, end, pause):
                pause = PAUSE
        finally:
            self.end()  # also if this is canceled: the engine's `close` must not wait for it
        return True

    async def _taken_back(self, lease: Lease, losses: int, end: float, pause: float) -> bool:
        """Try it once, after a pause; False = the store has to be back first."""
        try:
            await sleep(pause)
            if await self._rolled_back(lease):
                await self._runs.store.fail(
                    lease.identity,
                    lease.owner,
                    _TAKEN_BACK[losses],
                    retryable=True,
                    keep_fingerprint=True,
                    ttl=self._call.rules.failed_ttl,
                    ran=False,
                )
        except Exception as error:  # noqa: BLE001 - also a worker's time limit: it comes again
            self._runs.lease_events.store_failed(lease, "fail", error)
            # The server may not have noticed that a connection is gone which has the record.
            locked = db_errors.is_locked(error) and monotonic() >= end
            stopping = self._runs.closed or self._stopping.is_set()
            return locked or stopping or not isinstance(error, StoreUnavailable)
        return True

    async def _rolled_back(self, lease: Lease) -> bool:
        """Whether the record is as it was before the transaction; held, it was committed inside."""
        record = await self._runs.store.get(lease.identity)
        return (
            record is not None
            and record.state is PROCESSING
            and record.owner == lease.owner
            and not record.hold
        )
