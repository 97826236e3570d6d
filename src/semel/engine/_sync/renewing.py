# Generated from engine/renewing.py by `make generate`: change that file instead.
"""The timer of an engine: leases are renewed, results saved late, unwanted claims given back.

It works while the callers are busy or gone, and knows nothing of calls: only leases.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from time import monotonic

from msgspec.structs import replace

from semel import events
from semel.core.attempts import GIVING_BACK, Lease, Leases
from semel.core.process import notice_fork
from semel.core.records import Busy, Claimed, ClaimRequest, CompleteRequest
from semel.engine.colours.threads import Timer
from semel.engine.outcomes import (
    GIVEN_BACK,
    OUTAGES,
    UNWANTED_TTL,
    LeaseEvents,
    as_store_error,
    given_back,
    remind,
    unwanted,
)
from semel.errors import StoreError, ValueRejected
from semel.stores.base import Store


class Renewer:
    """Renews leases, saves results late, and gives back unwanted claims."""

    def __init__(
        self,
        store: Store,
        leases: Leases,
        lease_events: LeaseEvents,
        announce: events.Announcer,
    ) -> None:
        self._store = store
        self._leases = leases
        self._events = lease_events
        self._announce = announce
        self.timer = Timer(self.tick)
        self.watch = Timer(self._report_lost)
        self._timers: dict[Hashable, Timer] = {}
        """Of each server, where a store has several."""

    def retire(self) -> None:
        """Renew nothing any more: what is known here belongs to another process, or to a test."""
        self._leases = Leases()

    def stop(self) -> None:
        """End the timers and wait for what they are doing."""
        self.timer.stop()
        self.watch.stop()
        for timer in self._timers.values():
            timer.stop()

    def save_all(self, end: float) -> None:
        """Save the unsaved results, and give back the claims in doubt, until `end`."""
        for lease, request in self._leases.unsaved():
            if not self._save_late(lease, request) and monotonic() >= end:
                break  # The store is away and the time is over: the leases end by themselves.
        self._give_back_doubtful(math.inf, end)

    def tick(self) -> float:
        """Renew the leases that are due and save unsaved results; return when to run again."""
        notice_fork()  # after which nothing is due here
        again = math.inf
        # A server that hangs must not delay renewals on the others.
        for server, at in self._leases.place(self._store.server_of).items():
            again = min(again, remind(self._timer_of(server), at))
        self._serve(None)
        doubt = self._leases.next_doubt()
        if doubt < math.inf:  # nor must claims that a busy store does not take back
            again = min(again, remind(self._timer_of(GIVING_BACK), doubt))
        return min(again, self._leases.next_renewal())

    def _timer_of(self, server: Hashable) -> Timer:
        """The timer of one of the store's servers, beside that of the engine."""
        if server not in self._timers:
            self._timers[server] = Timer(partial(self._tick_beside, server))
        return self._timers[server]

    def _tick_beside(self, server: Hashable) -> float:
        """Do for one server what `tick` does; return when to run again."""
        notice_fork()
        if server == GIVING_BACK:
            self._give_back_doubtful(monotonic(), math.inf)
            return self._leases.next_doubt()
        self._serve(server)
        return self._leases.next_renewal(server)

    def _serve(self, server: Hashable) -> None:
        """Renew the leases that are due on a server, and save its unsaved results."""
        # What was lost and then renewed after all can be lost again.
        remind(self.watch, self._leases.next_danger())
        for lease in self._leases.orphans(server):
            self._release(lease)
        for chunk in self._leases.due(monotonic(), server):
            for lease in chunk:
                lease.renewing = True
            try:
                # Looked at after the mark: what is stopped from now on waits for its answer.
                self._renew([lease for lease in chunk if not lease.stopped])
            finally:
                for lease in chunk:
                    lease.renewing = False
            for lease in chunk:
                if lease.park_again:
                    self._park_again(lease)
        # Nothing else, however much of it there is, may hold up the next renewals.
        until = self._leases.next_renewal(server)
        for lease, request in self._leases.unsaved():
            if lease.server == server:
                self._save_late(lease, request)
                if monotonic() >= until:
                    break

    def _report_lost(self) -> float:
        """Report leases that were not renewed in time; return when to look again."""
        notice_fork()
        for lease in self._leases.newly_lost(monotonic()):
            self._events.announce(events.LostLease, lease)
        return self._leases.next_danger()

    def _release(self, lease: Lease) -> None:
        """End the lease of a call that was interrupted even while it cleaned up.

        Nobody knows whether the function has run to its end: the policy says what happens next.
        """
        self._leases.drop(lease)
        try:
            released = self._store.ask(lease.parking)
        except Exception as error:  # noqa: BLE001 - not renewed any more, it ends by itself
            self._events.store_failed(lease, "renew", error)
        else:
            if released:
                self._events.announce(events.Parked, lease, error=lease.why)
            else:
                self._events.lost(lease)

    def _give_back_doubtful(self, now: float, until: float) -> None:
        for claim in self._leases.doubtful(now):
            if not self.give_back(claim):
                return
            if monotonic() >= until:
                return

    def _renew(self, leases: list[Lease]) -> None:
        """Renew these leases by one `send`; what it raises is the answer of each of them."""
        if not leases:
            return
        sent = monotonic()
        answers: list[bool | StoreError]
        try:
            answers = self._store.send([lease.renewal for lease in leases])
        except Exception as error:  # noqa: BLE001 - whatever it is, the next renewal may succeed
            answers = [as_store_error(error)] * len(leases)
        for lease, answer in zip(leases, answers, strict=True):
            self._events.renewed(lease, answer, sent)

    def _park_again(self, lease: Lease) -> None:
        """The renewal may have come after the parking: the key would look busy."""
        try:
            self._store.ask(lease.parking)
        except Exception as error:  # noqa: BLE001 - the lease ends by itself
            self._events.store_failed(lease, "fail", error)

    def _save_late(self, lease: Lease, request: CompleteRequest) -> bool:
        """Try once more to save a result; False = the store is still not to be reached."""
        try:
            saved = self._store.ask(request)
        except Exception as error:  # noqa: BLE001 - it is tried again at the next tick
            smaller = self._events.without_value(lease, request.result, error)
            if smaller is not None:
                lease.unsaved = replace(request, result=smaller)
                return self._save_late(lease, lease.unsaved)
            self._events.store_failed(lease, "complete", error)
            if isinstance(error, ValueRejected):
                self._events.rejected_for_good(lease, error)
                return True
            self._leases.put_off(lease, monotonic())
            return False
        lease.stored = saved  # First: whoever waits for it looks when the lease is gone.
        self._leases.drop(lease)
        self._events.announce(events.ResultStoredLate if saved else events.LostLease, lease)
        return True

    def give_back(self, request: ClaimRequest) -> bool:
        """Release an unwanted claim, if it was granted; False = no answer."""
        # Asking again shows it; a first command that comes late is rejected: its owner has ended.
        try:
            answer = self._store.ask(unwanted(request))
            if isinstance(answer, Claimed):
                self._store.fail(
                    request.identity,
                    request.owner,
                    GIVEN_BACK,
                    retryable=True,
                    # An earlier attempt's payload is still compared; its own is not: nothing ran.
                    keep_fingerprint=answer.number > 1,
                    # Nor is the count of earlier attempts forgotten before its time.
                    ttl=max(request.ttl, UNWANTED_TTL) if answer.number > 1 else UNWANTED_TTL,
                    ran=False,
                )
        except Exception as error:  # noqa: BLE001 - the caller ends by what interrupted it
            self._announce(
                events.StoreFailed(identity=request.identity, verb="claim", error=str(error))
            )
            # What no outage explains may fail for ever: each try begins the lease anew.
            outage = isinstance(error, OUTAGES)
            again = self._leases.doubt if outage else self._leases.not_found
            remind(self.timer, again(request, monotonic()))
            return False
        if isinstance(answer, Busy) and answer.owner is None:
            # An open transaction has the record, and the claim may still wait there for its end.
            remind(self.timer, self._leases.doubt(request, monotonic()))
        elif given_back(answer):
            self._leases.settled(request)
        else:
            # Had it been applied, this would be its record. It may be late, and must not be granted
            # when the record that is in its way now has gone.
            remind(self.timer, self._leases.not_found(request, monotonic()))
        return True
