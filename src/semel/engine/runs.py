"""The way of one call on asyncio: claim, run, save.

An interrupted step is done again in the background, because every verb is safe to send twice.
"""

from __future__ import annotations

import math
from _thread import get_ident
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from types import CoroutineType
from typing import Any, TypeVar
from weakref import ref

from msgspec import UNSET, UnsetType

from semel.attempts import Attempt
from semel.core.codec import encode_failure
from semel.core.decide import Reject, Wait, decide
from semel.core.leases import RENEWALS_PER_LEASE, Lease
from semel.core.records import Claimed, Encoded, Finished
from semel.core.settings import BYPASSED
from semel.engine.colours.leaders import LATE, NoTimer
from semel.engine.colours.tasks import (
    Polling,
    background,
    cancellations,
    finished,
    heed,
    ready,
    sleep,
    unawaited,
)
from semel.engine.outcomes import (
    RENEWAL_LOOK,
    SavePatience,
    as_first_told,
    came_late,
    heard,
    pauses,
)
from semel.engine.renewing import AsyncKeeper
from semel.engine.setup import CLOSED, Call
from semel.errors import (
    IdempotencyError,
    StoreError,
    StoreUnavailable,
    ValueRejected,
    raise_about,
)
from semel.events import logger
from semel.stores.base import AsyncNotifying, AsyncWatch

T = TypeVar("T")


class AsyncRunner(AsyncKeeper):
    """Runs calls; the doors are in `AsyncIdempotency`."""

    # --- the way of one call -------------------------------------------------------------

    async def _run(
        self, call: Call, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any
    ) -> Attempt[T]:
        """Run once per key; the attempt has the result."""
        attempt: Attempt[T] | None = None
        value: T | UnsetType = UNSET
        # Two handlers: what interrupts the first of them is met by the second.
        try:
            try:
                attempt = await self._begin(call)
                if attempt.replayed:
                    return attempt
                with attempt:
                    value = await finished(fn(*args, **kwargs))
                    if isinstance(value, CoroutineType):
                        given, value = value, UNSET
                        value = unawaited(given, call.identity)
                attempt.result = await self._succeeded(call, attempt, value)
            except BaseException as error:
                if attempt is not None and value is UNSET:
                    await self._failed(call, attempt, error)
                raise
        except BaseException as error:
            self._settle(call, error, attempt, value)
            raise
        return attempt

    def _begin(self, call: Call) -> Awaitable[Attempt]:
        """Become the one that runs, or get the answer of the one that did."""
        if self._disabled or BYPASSED.get():
            return ready(self._unprotected(call))
        self._home.check(call.identity)
        patience = self._patience(call)
        forgets = self._flights.forgets
        if forgets.any:
            call.generation = forgets.generation(call.identity)
        remembered = None if self._cache is None else self._remembered(call)
        if remembered is not None:
            return ready(self._replayed(call, remembered, waited=False))
        end = math.inf if patience is None else monotonic() + patience
        place = call.place
        if place is None or self._flights.lead(place, call):
            return self._lead(call, place, end)
        if self._waiting.elsewhere is None:
            return self._follow(call, place, patience, end)
        return self._follow_counted(call, place, patience, end)

    async def _follow_counted(
        self, call: Call, place: Hashable, patience: float | None, end: float
    ) -> Attempt:
        """Follow, if one more call may wait; else ask the store, which may have the answer."""
        try:
            if self._waiting.join(call, self._waiting.elsewhere):
                return await self._follow(call, place, patience, end)
        finally:
            self._waiting.leave(call)
        call.shares = False
        return await self._lead(call, None, end)

    async def _follow(
        self, call: Call, place: Hashable, patience: float | None, end: float
    ) -> Attempt:
        """Wait for the execution that runs in this process; lead if it ends without an answer."""
        given = await self._flights.join(place, call, patience)
        if given == LATE:
            self._out_of_patience(call, 0.0)
        if isinstance(given, Finished):
            return self._replayed(call, given, waited=True)
        if isinstance(given, StoreError):
            return self._without_store(call, given)
        return await self._lead(call, place, end)

    async def _lead(self, call: Call, place: Hashable | None, end: float) -> Attempt:
        """Ask the store, and do what it says; pass the answer to the calls that wait for it."""
        waited = False
        try:
            answer = await self._ask(call)
            if type(answer) is Wait:
                waited = True
                answer = await self._wait_counted(call, answer, end)
            if type(answer) is Finished:
                return self._found(call, place, answer, waited=waited)
        except StoreError as error:
            if self._closed:  # no answer for the calls of other engines on this store
                self._pass_on(call)
            else:
                self._share(call, error)
            return self._without_store(call, error)
        except BaseException as error:
            self._settle(call, error)
            if isinstance(error, IdempotencyError) and error.key_digest is None:
                raise_about(error, call.identity)  # a store does not know whom it answers
            raise
        return answer

    async def _ask(self, call: Call) -> Attempt | Finished | Wait:
        """Ask the store once what to do."""
        ask = call.ask(self._owners.next())
        before = cancellations(self._home)
        late: tuple[Claimed, ...] = ()
        call.asked = ask  # First: whatever interrupts this call from now on gives it back.
        self._leases.claiming[ask.owner] = get_ident(), ref(call)
        # In this order: `close` sets it first, and then waits for the claims that are noted.
        if self._closed:
            self._not_claiming(call, ask)
            raise StoreUnavailable(CLOSED)
        while True:
            sent = monotonic()
            try:
                answer = await self._store.claim(ask)
                heed(before)
                step = decide(answer, call.rules)
                if type(step) is Claimed:
                    spent = monotonic() - sent
                    if spent > ask.lease / RENEWALS_PER_LEASE and came_late(ask, late, spent):
                        late += (step,)
                        continue
                    if late:
                        step = as_first_told(step, late)
                    return self._started(call, ask.owner, step, sent)
            except IdempotencyError as error:
                if isinstance(error, NoTimer):
                    background(self._tasks, partial(self._disown, ask))
                elif isinstance(error, StoreUnavailable):
                    # The answer is lost, the claim perhaps not: the timer gives it back.
                    self._remind(self._timer, self._leases.doubt(ask, monotonic()))
                self._not_claiming(call, ask)
                raise
            self._not_claiming(call, ask)
            if type(step) is Reject:
                self._refuse(call, step.error, step.number)
            return step

    async def _wait_counted(self, call: Call, busy: Wait, end: float) -> Attempt | Finished:
        """Wait, if one more call may."""
        try:
            if not self._waiting.join(call, self._waiting.elsewhere):
                self._too_many(call, busy.retry_after)
            return await self._wait(call, busy, end)
        finally:
            self._waiting.leave(call)

    async def _wait(self, call: Call, busy: Wait, end: float) -> Attempt | Finished:
        """Ask again when something may have changed, until there is an answer."""
        waits = pauses(call.rules)
        left = self._left(call, busy, end)
        with self._watched(call) as watch:
            while True:
                pause = watch.pause(next(waits))
                ended = await watch.wait(min(pause, busy.retry_after, left))
                known = heard(ended, busy, call)
                if known is not None:
                    return self._judged(call, known)
                answer = await self._ask(call)
                if type(answer) is not Wait:
                    return answer
                busy, left = answer, self._left(call, answer, end)

    def _watched(self, call: Call) -> AbstractContextManager[AsyncWatch]:
        if isinstance(self._store, AsyncNotifying):
            return self._store.watch(call.identity)
        return Polling()

    # --- the end of one call -------------------------------------------------------------

    async def _succeeded(self, call: Call, attempt: Attempt, value: T) -> T:
        """Tell the store the result; the caller gets it even if the store cannot be told yet."""
        lease = attempt.lease
        if lease is None:
            return value
        before = cancellations(self._home)
        try:
            kept = self._kept(call, attempt, value)
            if lease not in self._leases:
                # Refused by the store already, or inherited through a fork: not ours to save.
                self._lost(call, lease)
            lease.ending = True
            result = kept.encoded
            try:
                saved = await self._store.complete(
                    call.identity, lease.owner, result, call.rules.ttl
                )
            except Exception as error:  # noqa: BLE001 - the effect is done: the caller gets it
                await self._save(call, attempt, lease, result, error)
            else:
                self._saved(call, attempt, lease, result, saved=saved)
        except BaseException as interruption:
            # Ordinary exceptions too: a worker's soft time limit may raise at any line.
            if not isinstance(interruption, IdempotencyError):
                # By `partial`: a closure would cost every call a cell for each of these values.
                again = partial(self._save_again, call, attempt, lease, value)
                background(self._tasks, partial(self._quietly, again), lease)
            raise
        heed(before)
        if kept.interruption is not None:
            # The result is saved; now the interruption may reach the caller.
            raise kept.interruption
        return kept.value

    async def _failed(self, call: Call, attempt: Attempt, error: BaseException) -> None:
        """Record a failure; never raises, so that the business error reaches the caller."""
        lease = attempt.lease
        if lease is None:
            return
        recording = partial(self._record_failure, call, lease, error)
        if not isinstance(error, Exception):
            # Cancelled or interrupted: the caller is freed at once.
            background(self._tasks, recording, lease)
            return
        before = cancellations(self._home)
        try:
            await recording()
        except BaseException:  # interrupted, for a recording raises nothing by itself
            background(self._tasks, recording, lease)
            raise
        heed(before)

    def _settle(
        self,
        call: Call,
        error: BaseException,
        attempt: Attempt | None = None,
        value: object | UnsetType = UNSET,
    ) -> None:
        """End what an interrupted call left open: its claim, its attempt, its lead.

        It finds out by itself what that is. Where all has ended it does nothing, so it may come
        twice.
        """
        if attempt is not None and attempt.running:
            attempt.__exit__(None, None, None)
        ask, lease = call.asked, call.lease
        if ask is not None and (lease is None or lease.owner != ask.owner or not lease.entered):
            # Nothing has run.
            if lease is not None:
                self._leases.drop(lease)
            background(self._tasks, partial(self._disown, ask))
            self._not_claiming(call, ask)
        elif lease is not None and lease in self._leases and lease.ends_here:
            if attempt is None or value is UNSET:
                recording = partial(self._record_failure, call, lease, error)
                background(self._tasks, recording, lease)
            else:
                again = partial(self._save_again, call, attempt, lease, value)
                background(self._tasks, partial(self._quietly, again), lease)
        if lease is None or not lease.handed_over:
            self._pass_on(call)

    async def _quietly(self, step: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Nobody is left to be told; the events tell."""
        try:
            await step()
        except IdempotencyError:
            logger.debug("a step that was done again ended with an error", exc_info=True)

    async def _save_again(self, call: Call, attempt: Attempt, lease: Lease, value: object) -> None:
        """Save from the start, wherever it was interrupted: every step may be done twice."""
        await self._save(call, attempt, lease, self._kept(call, attempt, value).encoded)

    async def _save(
        self,
        call: Call,
        attempt: Attempt,
        lease: Lease,
        result: Encoded,
        error: Exception | None = None,
    ) -> None:
        """Tell the store the result, until it knows or the timer takes over."""
        lease.ending = True
        patience = SavePatience(call.rules, monotonic())
        while True:
            smaller = None if error is None else self._without_value(lease, result, error)
            if smaller is not None:
                result = smaller
            elif error is not None:
                self._store_failed(lease, "complete", error)
                if isinstance(error, ValueRejected):
                    self._rejected_for_good(lease, error)
                    self._pass_on(call)
                    return
                pause = patience.pause(monotonic())
                if pause is None:
                    self._not_stored(call, lease, result, error)
                    return
                await sleep(pause)
            try:
                saved = await self._store.complete(
                    call.identity, lease.owner, result, call.rules.ttl
                )
            except Exception as again:  # noqa: BLE001 - it is tried again, or left to the timer
                error = again
            else:
                self._saved(call, attempt, lease, result, saved=saved)
                return

    async def _park(self, call: Call, lease: Lease) -> bool:
        """Let the key show at once that nobody knows the outcome; False when it was replaced.

        A renewal that is on its way is waited for: it would come later, and the key look busy.
        """
        lease.stop()
        end = monotonic() + call.rules.store_timeout
        while lease.renewing and monotonic() < end:
            await sleep(RENEWAL_LOOK)
        lease.park_again = lease.renewing
        return await self._store.renew(call.identity, lease.owner, 0.0)

    async def _record_failure(self, call: Call, lease: Lease, error: BaseException) -> None:
        """Tell the store of the failure; if it cannot be told, the lease ends by itself."""
        decision = self._verdict(call, lease, error)
        final = decision == "final"
        once_more = True
        while True:
            try:
                if lease not in self._leases:
                    recorded = False
                elif decision == "unknown":
                    recorded = await self._park(call, lease)
                else:
                    lease.ending = True
                    recorded = await self._store.fail(
                        call.identity,
                        lease.owner,
                        encode_failure(error),
                        retryable=not final,
                        keep_fingerprint=decision != "forget",
                        ttl=call.rules.ttl if final else call.rules.failed_ttl,
                    )
            except Exception as failure:  # noqa: BLE001 - the business error must reach the caller
                self._store_failed(lease, "fail", failure)
                if once_more and not isinstance(failure, IdempotencyError):
                    once_more = False  # no error of a store's: a signal handler's comes only once
                    continue
            else:
                self._announce_failure(lease, decision, error, recorded=recorded)
            break
        self._leases.drop(lease)
        self._pass_on(call)
