"""The engine inside, and how one call is handled on asyncio: claim, run, save.

An interrupted step is done again in the background, because every verb is safe to send twice.
"""

from __future__ import annotations

import math
from _thread import get_ident
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from types import CoroutineType
from typing import Any, Self, TypeVar
from weakref import ref

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from semel.core.attempts import RENEWALS_PER_LEASE, Attempt, Lease, innermost
from semel.core.codec import encode_failure
from semel.core.decide import NothingRan, Reject, Wait, decide, named
from semel.core.process import notice_fork
from semel.core.records import (
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Finished,
    GetRequest,
    Mismatch,
)
from semel.core.settings import BYPASSED
from semel.engine.colours.leaders import LATE, NoTimer
from semel.engine.colours.tasks import (
    LoopGuard,
    background,
    can_go_on,
    cancellations,
    drain,
    finished,
    raise_if_cancelled,
    ready,
    shared_runs_of,
    sleep,
    start_beside,
    unawaited,
)
from semel.engine.outcomes import (
    CLOSING_LOOK,
    RENEWAL_LOOK,
    STORED_LOOK,
    Outcomes,
    SaveBackoff,
    as_first_told,
    came_late,
    claim_request,
    known_digest,
    pauses,
    remind,
)
from semel.engine.renewing import AsyncRenewer
from semel.engine.setup import CLOSED, Call, Digests
from semel.errors import (
    IdempotencyError,
    StoreError,
    StoreUnavailable,
    ValueRejected,
    raise_about,
)
from semel.events import logger
from semel.stores.base import AsyncStore, AsyncWatch
from semel.stores.urls import open_async_store

T = TypeVar("T")


class Polling:
    """How to wait for a store that cannot notify: sleep, and ask again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was asked of the store."""

    def pause(self, planned: float) -> float:
        """No message will come: ask as often as planned."""
        return planned

    async def wait(self, seconds: float) -> bool:
        """Sleep."""
        await sleep(seconds)
        return False


class AsyncRuns(Outcomes[AsyncStore]):
    """The engine inside: it runs calls. `AsyncIdempotency` is what users see of it.

    Integrations, repair and the command line of semel use the names without an underscore.
    """

    def reset(self) -> None:
        """Begin with nothing running; also in a forked child, where nothing is."""
        super().reset()
        self.loop_guard = LoopGuard()
        self.shared_runs = shared_runs_of(self.store, self.loop_guard)
        self.renewer = AsyncRenewer(self.store, self.leases, self.lease_events, self.announce)

    def after_fork(self) -> None:
        """Continue in a forked child, with a store of its own."""
        # The parent goes on using its connections: ours are left alone, unclosed, and not used.
        self._inherited = self.store
        if self.owns_store:
            self.store = self.setup.opened(open_async_store, None)
        if self.cache is not None:
            self.cache.clear()
        self.renewer.retire()
        self.reset()

    # --- how one call is handled ---------------------------------------------------------

    async def run(
        self, call: Call, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any
    ) -> Attempt[T]:
        """Run once per key; the attempt has the result."""
        attempt: Attempt[T] | None = None
        value: T | UnsetType = UNSET
        # Two handlers: what interrupts the first of them is met by the second.
        try:
            try:
                attempt = await self.begin(call)
                if attempt.replayed:
                    return attempt
                with attempt:
                    value = await finished(fn(*args, **kwargs))
                    if isinstance(value, CoroutineType):
                        given, value = value, UNSET
                        value = unawaited(given, call.identity)
                attempt.result = await self.succeeded(call, attempt, value)
            except BaseException as error:
                if attempt is not None and value is UNSET:
                    await self.failed(call, attempt, error)
                raise
        except BaseException as error:
            self.settle(call, error, attempt, value)
            raise
        return attempt

    def begin(self, call: Call) -> Awaitable[Attempt]:
        """Become the one that runs, or get the answer of the one that did."""
        notice_fork()
        if self.setup.disabled or BYPASSED.get():
            return ready(Attempt(call.identity, protected=False))
        self.loop_guard.check(call.identity)
        limit = call.rules.wait_timeout
        if self.closed or innermost() is not None:
            limit = self._wait_limit(call)
        forgets = self.shared_runs.forgets
        if forgets.any:
            call.generation = forgets.generation(call.identity)
        remembered = None if self.cache is None else self._remembered(call)
        if remembered is not None:
            return ready(self._replayed(call, remembered, waited=False))
        end = math.inf if limit is None else monotonic() + limit
        if not (call.keeps_value and call.rules.waits):
            return self._lead(call, end)
        place = call.shared_as = call.identity, call.fingerprint, call.generation
        if self.shared_runs.lead(place, call):
            return self._lead(call, end)
        if self.waiting.elsewhere is None:
            return self._follow(call, place, limit, end)
        return self._follow_counted(call, place, limit, end)

    async def _follow_counted(
        self, call: Call, place: Hashable, limit: float | None, end: float
    ) -> Attempt:
        """Follow, if one more call may wait; else ask the store, which may have the answer."""
        try:
            if self.waiting.join(call, self.waiting.elsewhere):
                return await self._follow(call, place, limit, end)
        finally:
            self.waiting.leave(call)
        call.shared_as = None
        return await self._lead(call, end)

    async def _follow(
        self, call: Call, place: Hashable, limit: float | None, end: float
    ) -> Attempt:
        """Wait for the execution that runs in this process; lead if it ends without an answer."""
        reply = await self.shared_runs.join(place, call, limit)
        if reply == LATE:
            self._wait_timed_out(call, 0.0)
        if isinstance(reply, Finished):
            return self._replayed(call, reply, waited=True)
        if isinstance(reply, StoreError):
            return self._without_store(call, reply)
        return await self._lead(call, end)

    async def _lead(self, call: Call, end: float) -> Attempt:
        """Ask the store, and do what it says; pass the answer to the calls that wait for it."""
        waited = False
        try:
            answer = await self._claim(call)
            if type(answer) is Wait:
                waited = True
                try:
                    if not self.waiting.join(call, self.waiting.elsewhere):
                        self.too_many(call, answer.retry_after)
                    answer = await self._wait(call, answer, end)
                finally:
                    self.waiting.leave(call)
            if type(answer) is Finished:
                return self._found(call, answer, waited=waited)
        except StoreError as error:
            if self.closed:  # no answer for the calls of other engines on this store
                self._pass_on(call)
            else:
                self._share(call, error)
            return self._without_store(call, error)
        except BaseException as error:
            self.settle(call, error)
            if isinstance(error, IdempotencyError) and error.key_digest is None:
                raise_about(error, call.identity)  # a store does not know whom it answers
            raise
        return answer

    async def _claim(self, call: Call) -> Attempt | Finished | Wait:  # noqa: C901 - one question
        """Ask the store once what to do."""
        if monotonic() >= self.leases.look_at and await self._is_overdue(call):
            return self._wait_here(call)
        setup = self.setup
        digest, *others = await self.digests(call) if setup.rotates else setup.digests(call)
        request = claim_request(call, self.owners.next(), digest)
        late: tuple[Claimed, ...] = ()
        call.open_claim = request  # First: whatever interrupts this call from now on gives it back.
        self.leases.claiming[request.owner] = get_ident(), ref(call)
        # In this order: `close` sets it first, and then waits for the claims that are noted.
        if self.closed:
            self._not_claiming(call, request)
            raise StoreUnavailable(CLOSED)
        while True:
            sent = monotonic()
            try:
                asked = self.store.ask(request)
                before = cancellations(self.loop_guard, asked)
                answer = await asked
                if self.timed:
                    call.store_seconds += monotonic() - sent
                raise_if_cancelled(before)
                if others and type(answer) is Mismatch:
                    call.open_claim = request = replace(request, fingerprint=others.pop(0))
                    continue
                step = answer if type(answer) is Claimed else decide(answer, call.rules)
                if type(step) is Claimed:
                    spent = monotonic() - sent
                    if spent > request.lease / RENEWALS_PER_LEASE and came_late(
                        request, late, spent
                    ):
                        late += (step,)
                        continue
                    if step.number > 1 and self.leases.is_overdue(call.identity, monotonic()):
                        # The lease of an attempt that runs here ended while this was under way.
                        await self.renewer.give_back(request)
                        self._not_claiming(call, request)
                        return self._wait_here(call)
                    first = as_first_told(step, late) if late else step
                    return self._started(call, request.owner, first, sent)
            except IdempotencyError as error:
                self._claim_failed(call, request, error)
                raise
            self._not_claiming(call, request)
            if type(step) is Reject:
                self.reject(call, step.error, step.number)
            return step

    async def _is_overdue(self, call: Call) -> bool:
        """Whether an attempt of the key still runs here, or is being saved, without its lease.

        Its lease may have ended while the store was down. A claim would take it over: the function
        would run twice at the same time, and the result of the first could not be saved.
        """
        if call.rules.max_attempts is not None:
            # A claim that could not be given back must not count: nothing has run.
            for request in self.leases.doubts(call.identity):
                await self.renewer.give_back(request)
        return self.leases.is_overdue(call.identity, monotonic())

    async def digests(self, call: Call) -> Digests:
        """Return the fingerprints to claim with, one after the other, while secrets are rotated."""
        digests = self.setup.digests(call)
        if not call.rules.replace:
            return digests
        return known_digest(digests, await self.store.ask(GetRequest(call.identity)))

    def _claim_failed(self, call: Call, request: ClaimRequest, error: IdempotencyError) -> None:
        """Release a claim that no call can use."""
        if isinstance(error, NoTimer):
            background(self.in_background, partial(self.renewer.give_back, request))
        elif isinstance(error, StoreUnavailable):
            # The answer is lost, the claim perhaps not: the timer gives it back.
            remind(self.renewer.timer, self.leases.doubt(request, monotonic()))
        self._not_claiming(call, request)

    async def _wait(self, call: Call, busy: Wait, end: float) -> Attempt | Finished:
        """Ask again when something may have changed, until there is an answer."""
        waits = pauses(call.rules)
        left = self._left(call, busy, end)
        held_until = -math.inf
        with self._watched(call) as watch:
            while True:
                planned = min(watch.pause(next(waits)), busy.retry_after, left)
                ask_at = monotonic() + planned
                if await watch.wait(planned):
                    # Anyone may have sent the message: however many come, they cost one question
                    # per `wait_interval`. The first is asked at once.
                    held = min(held_until, ask_at) - monotonic()
                    if held > 0:
                        await sleep(held)
                    held_until = monotonic() + call.rules.wait_interval
                answer = await self._claim(call)
                if type(answer) is not Wait:
                    return answer
                busy, left = answer, self._left(call, answer, end)

    def _watched(self, call: Call) -> AbstractContextManager[AsyncWatch]:
        watch = self.store.watch(call.identity)
        return Polling() if watch is None else watch

    # --- the end of one call -------------------------------------------------------------

    async def succeeded(self, call: Call, attempt: Attempt, value: T) -> T:
        """Save the result; the caller gets it even if it cannot be saved yet."""
        lease = attempt.lease
        if lease is None:
            return value
        notice_fork()
        before = cancellations(self.loop_guard)
        try:
            kept = self.result_to_store(call, attempt, value)
            if lease not in self.leases:
                # Refused by the store already, or inherited through a fork: not ours to save.
                self._lost(call, lease)
            lease.ending = True
            result = kept.encoded
            sent = monotonic() if self.timed else 0.0
            try:
                saved = await self.store.ask(
                    CompleteRequest(call.identity, lease.owner, result, call.rules.ttl)
                )
            except Exception as error:  # noqa: BLE001 - the effect is done: the caller gets it
                if self.timed:
                    call.store_seconds += monotonic() - sent
                await self._save(call, attempt, lease, result, error)
            else:
                if self.timed:
                    call.store_seconds += monotonic() - sent
                self._saved(call, attempt, lease, result, saved=saved)
        except BaseException as interruption:
            # Ordinary exceptions too: a worker's soft time limit may raise at any line.
            if not isinstance(interruption, IdempotencyError):
                # By `partial`: a closure would cost every call a cell for each of these values.
                again = partial(self._save_again, call, attempt, lease, value)
                background(self.in_background, partial(self._quietly, again), lease)
            raise
        raise_if_cancelled(before)
        if kept.interruption is not None:
            # The result is saved; now the interruption may reach the caller.
            raise kept.interruption
        return kept.value

    async def stored(self, lease: Lease) -> bool | None:
        """Wait until the store has the result of an attempt (True) or has refused it (False).

        None: the engine was closed before there was an answer.
        """
        end = math.inf
        while lease in self.leases and monotonic() < end:
            await sleep(STORED_LOOK)
            if self.closed:  # which tries to save it, too, for a time of its own
                end = min(end, monotonic() + CLOSING_LOOK)
        return None if lease in self.leases else lease.stored

    async def failed(self, call: Call, attempt: Attempt, error: BaseException) -> None:
        """Record a failure; never raises, so that the business error reaches the caller."""
        lease = attempt.lease
        if lease is None:
            return
        notice_fork()
        if not lease.entered:  # interrupted before its function began: nothing has failed
            self.settle(call, error, attempt)
            return
        recording = partial(self._record_failure, call, lease, error)
        if not isinstance(error, Exception):
            # Cancelled or interrupted: the caller is freed at once.
            background(self.in_background, recording, lease)
            return
        before = cancellations(self.loop_guard)
        try:
            await recording()
        except BaseException:  # interrupted, for a recording raises nothing by itself
            background(self.in_background, recording, lease)
            raise
        raise_if_cancelled(before)

    def settle(
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
        request, lease = call.open_claim, call.lease
        if request is not None and (
            lease is None or lease.owner != request.owner or not lease.entered
        ):
            # Nothing has run.
            if lease is not None:
                self.leases.drop(lease)
            background(self.in_background, partial(self.renewer.give_back, request))
            self._not_claiming(call, request)
        elif lease is not None and lease in self.leases and lease.ends_here:
            if attempt is None or value is UNSET:
                recording = partial(self._record_failure, call, lease, error)
                background(self.in_background, recording, lease)
            else:
                again = partial(self._save_again, call, attempt, lease, value)
                background(self.in_background, partial(self._quietly, again), lease)
        if lease is None or not lease.handed_over:
            self._pass_on(call)

    async def _quietly(self, step: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Suppress semel's errors: no caller is left, and the events say what happened."""
        try:
            await step()
        except IdempotencyError:
            logger.debug("repeated step failed", exc_info=True)

    async def _save_again(self, call: Call, attempt: Attempt, lease: Lease, value: object) -> None:
        """Save from the start, wherever it was interrupted: every step may be done twice."""
        if lease.unsaved is None:
            kept = self.result_to_store(call, attempt, value)
            await self._save(call, attempt, lease, kept.encoded)
        else:
            self._pass_on(call)  # It was left to the timer, which saves it alone.

    async def _save(
        self,
        call: Call,
        attempt: Attempt,
        lease: Lease,
        result: Encoded,
        error: Exception | None = None,
    ) -> None:
        """Save the result, until the store has it or the timer takes over."""
        lease.ending = True
        backoff = SaveBackoff(call.rules, monotonic())
        while True:
            smaller = (
                None if error is None else self.lease_events.without_value(lease, result, error)
            )
            if smaller is not None:
                result = smaller
            elif error is not None:
                self.lease_events.store_failed(lease, "complete", error)
                if isinstance(error, ValueRejected):
                    self.lease_events.rejected_for_good(lease, error)
                    self._pass_on(call)
                    return
                pause = backoff.pause(monotonic())
                if pause is None:
                    self._not_stored(call, lease, result, error)
                    return
                await sleep(pause)
            saved: bool | None = None
            sent = monotonic()
            try:
                saved = await self.store.ask(
                    CompleteRequest(call.identity, lease.owner, result, call.rules.ttl)
                )
            except Exception as again:  # noqa: BLE001 - it is tried again, or left to the timer
                error = again
            if self.timed:
                call.store_seconds += monotonic() - sent
            if saved is not None:
                self._saved(call, attempt, lease, result, saved=saved)
                return

    async def _park(self, call: Call, lease: Lease, error: BaseException) -> bool:
        """Mark the outcome as unknown at once; False when another attempt has replaced this one.

        A renewal that is on its way is waited for: it would come later, and the key look busy.
        """
        lease.stop()
        lease.why = named(error)
        end = monotonic() + call.rules.store_timeout
        while lease.renewing and monotonic() < end:
            await sleep(RENEWAL_LOOK)
        lease.park_again = lease.renewing
        return await self.store.ask(lease.parking)

    async def _record_failure(self, call: Call, lease: Lease, error: BaseException) -> None:
        """Record the failure; if that is impossible, the lease ends by itself."""
        if lease.failure is None:  # else it is recorded, and what came after was interrupted
            await self._tell_failure(call, lease, error)
        self.leases.drop(lease)
        self._pass_on(call)

    async def _tell_failure(self, call: Call, lease: Lease, error: BaseException) -> None:
        decision = self._verdict(call, lease, error)
        final = decision == "final"
        once_more = True
        while True:
            try:
                if lease not in self.leases:
                    recorded = False
                elif decision == "unknown":
                    recorded = await self._park(call, lease, error)
                else:
                    lease.ending = True
                    recorded = await self.store.fail(
                        call.identity,
                        lease.owner,
                        encode_failure(error, None if final else call.rules.max_attempts),
                        retryable=not final,
                        keep_fingerprint=decision != "forget",
                        ttl=call.rules.ttl if final else call.rules.failed_ttl,
                        ran=not isinstance(error, NothingRan),
                    )
            except Exception as failure:  # noqa: BLE001 - the business error must reach the caller
                self.lease_events.store_failed(lease, "fail", failure)
                if once_more and not isinstance(failure, IdempotencyError):
                    once_more = False  # no error of a store's: a signal handler's comes only once
                    continue
            else:
                lease.failure = decision if recorded else None
                self._announce_failure(lease, decision, error, recorded=recorded)
            break

    # --- the end of the engine -----------------------------------------------------------

    async def close(self, timeout: float) -> None:  # noqa: ASYNC109 - twin of a thread's
        """Take no new calls, and close after those that run."""
        notice_fork()
        self.closed = True
        end = monotonic() + timeout
        own = self.held_here()
        claims = self.claiming_here()
        if own or claims:
            # Waiting here would hold up the very function, or claim, that is waited for.
            self._closing = start_beside(
                partial(self.close_after, own, claims, end), partial(self.close_after, (), (), end)
            )
        else:
            await self.close_after((), (), end)

    async def close_after(self, own: Sequence[Lease], claims: Sequence[bytes], end: float) -> None:
        """Close after these attempts, while they can go on, and after the others until `end`."""
        while can_go_on(self.leases.running(own)) or self.leases.claims(claims):
            await sleep(0.01)
        while monotonic() < end and (self.leases.running() or self.leases.claims()):
            await sleep(0.01)
        await drain(self.in_background, max(0.0, end - monotonic()))
        await self.renewer.stop()
        await self.renewer.save_all(end)
        if self.owns_store:
            await self.store.close()
