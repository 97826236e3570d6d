"""Stores that break the law, each in one way, each as some library or some first draft does."""

from __future__ import annotations

import time

from msgspec.structs import replace

from contract.reference_store import DictStore
from contract.versioned_store import Table, VersionedStore
from semel.core import judge
from semel.core.records import (
    AUDIT_SCOPE,
    Busy,
    Claimed,
    ClaimRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    Mismatch,
    RenewRequest,
    ScanRequest,
    State,
    StuckRequest,
)
from semel.errors import RecordUnreadable
from semel.stores.memory import MemoryStore
from semel.testing.faults import VERBS


class Broken(DictStore):
    """Answers by the law, but where it has a method for a request: `on_claim` and so on."""

    lawful = DictStore.answer

    def answer(self, request):
        return getattr(self, f"on_{VERBS[type(request)]}", self.lawful)(request)


class BrokenListing(MemoryStore):
    """The same for requests that the small store does not answer."""

    lawful = MemoryStore.ask

    def ask(self, request):
        return getattr(self, f"on_{VERBS[type(request)]}", self.lawful)(request)


class CompleteIgnoresTheOwner(Broken):
    def on_complete(self, ask):
        record = self._records.get(ask.identity)
        return self.lawful(replace(ask, owner=record.owner) if record else ask)


class FailFreesWhoeverRuns(Broken):
    def on_fail(self, ask):
        record = self._records.get(ask.identity)
        return self.lawful(replace(ask, owner=record.owner) if record else ask)


class RenewRefusesAPassedLease(Broken):
    def on_renew(self, ask):
        record = self.get(ask.identity)
        return record is not None and not record.abandoned and self.lawful(ask)


class CompleteRefusesAPassedLease(Broken):
    def on_complete(self, ask):
        record = self.get(ask.identity)
        return not (record is not None and record.abandoned) and self.lawful(ask)


class ClaimChecksThenActs(Broken):
    def on_claim(self, ask):
        answer, record = judge.claim(self._records.get(ask.identity), ask, self._clock())
        time.sleep(0.001)  # a round trip between the check and the act
        if record is not None:
            self._records[ask.identity] = record
        return answer


class CompleteChecksThenActs(Broken):
    def on_complete(self, ask):
        record = judge.complete(self._records.get(ask.identity), ask, self._clock())
        time.sleep(0.05)  # a round trip between the check and the act
        if record is not None:
            self._records[ask.identity] = record
        return record is not None


class RepeatedClaimIsBusy(Broken):
    def on_claim(self, ask):
        record = self.get(ask.identity)
        if record is not None and record.state is State.PROCESSING and not record.abandoned:
            return Busy(record.lease_until - record.now)
        return self.lawful(ask)


class AnEndedOwnerIsGivenANewClaim(Broken):
    def on_claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None and record.retryable:
            self._records[ask.identity] = replace(record, owner=bytes(12))
        return self.lawful(ask)


class BusyHidesAMismatch(Broken):
    def on_claim(self, ask):
        answer = self.lawful(ask)
        record = self.get(ask.identity)
        if isinstance(answer, Mismatch) and record is not None and record.lease_until is not None:
            return Busy(record.lease_until - record.now)
        return answer


class SecondCompleteIsRefused(Broken):
    def on_complete(self, ask):
        record = self.get(ask.identity)
        return not (record is not None and record.outcome is not None) and self.lawful(ask)


class SecondCompleteOverwrites(Broken):
    def on_complete(self, ask):
        answer = self.lawful(ask)
        if answer:
            self._records[ask.identity] = replace(self._records[ask.identity], outcome=ask.result)
        return answer


class ExpiresOnlyByPurge(Broken):
    def on_get(self, ask):
        record = self._records.get(ask.identity)
        return record if record is None else replace(record, now=self._clock())


class RetentionStartsWithTheClaim(Broken):
    def on_complete(self, ask):
        answer = self.lawful(ask)
        record = self._records.get(ask.identity)
        if answer and record is not None:
            self._records[ask.identity] = replace(record, expires_at=record.created_at + ask.ttl)
        return answer


class FenceRestarts(Broken):
    def on_claim(self, ask):
        answer = self.lawful(ask)
        if isinstance(answer, Claimed):
            answer = replace(answer, fence=answer.number)
            self._records[ask.identity] = replace(self._records[ask.identity], fence=answer.fence)
        return answer


class FenceIsTheClock(Broken):
    def on_claim(self, ask):
        answer = self.lawful(ask)
        if isinstance(answer, Claimed):
            answer = replace(answer, fence=int(self._clock() * 1e6))
            self._records[ask.identity] = replace(self._records[ask.identity], fence=answer.fence)
        return answer


class TakeoverWeakensHold(Broken):
    def on_claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None and not ask.hold:
            self._records[ask.identity] = replace(record, hold=False)
        return self.lawful(ask)


class CallersHoldIsIgnored(Broken):
    def on_claim(self, ask):
        known = ask.identity in self._records
        return self.lawful(replace(ask, hold=False) if known else ask)


class RenewForgetsWhoRuns(Broken):
    def on_renew(self, ask):
        return self.lawful(replace(ask, run_info=ask.run_info or b""))


class ParkingDoesNotSayWhy(Broken):
    def on_renew(self, ask):
        return self.lawful(replace(ask, run_info=None) if ask.lease <= 0 else ask)


class ATakeoverNamesThePreviousProcess(Broken):
    def on_claim(self, ask):
        before = self._records.get(ask.identity)
        answer = self.lawful(ask)
        if isinstance(answer, Claimed) and before is not None:
            record = self._records[ask.identity]
            self._records[ask.identity] = replace(record, run_info=before.run_info)
        return answer


class ARepeatedClaimForgetsWhy(Broken):
    def on_claim(self, ask):
        answer = self.lawful(ask)
        if isinstance(answer, Claimed):
            record = self._records[ask.identity]
            self._records[ask.identity] = replace(record, run_info=ask.run_info)
        return answer


class WhoRanItStaysInASuccess(Broken):
    def on_complete(self, ask):
        before = self._records.get(ask.identity)
        answer = self.lawful(ask)
        if answer:
            record = self._records[ask.identity]
            self._records[ask.identity] = replace(record, run_info=before.run_info)
        return answer


class OnlySingleClaimsSayWhoRuns(Broken):
    def send(self, requests):
        if len(requests) > 1:
            requests = [
                replace(ask, run_info=b"") if isinstance(ask, ClaimRequest) else ask
                for ask in requests
            ]
        return super().send(requests)


class ListingsDoNotSayWhoRuns(BrokenListing):
    def on_stuck(self, ask):
        return [replace(record, run_info=b"") for record in self.lawful(ask)]


class ReplaceInterrupts(Broken):
    def on_claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None and ask.replace and record.lease_until is not None:
            self._records[ask.identity] = replace(record, lease_until=0.0)
        return self.lawful(ask)


class SupersededIsForgotten(Broken):
    def on_claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None:
            self._records[ask.identity] = replace(record, superseded=())
        return self.lawful(ask)


class OnlyTheOldestSupersededIsRefused(Broken):
    def on_claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None and ask.fingerprint in record.superseded[1:]:
            self._records[ask.identity] = replace(record, superseded=record.superseded[:1])
        return self.lawful(ask)


class PutForgetsSuperseded(Broken):
    def on_put(self, ask):
        record = self._records.get(ask.identity)
        if record is not None:
            self._records[ask.identity] = replace(record, superseded=())
        return self.lawful(ask)


class PayloadIsAlwaysErased(Broken):
    def on_fail(self, ask):
        return self.lawful(replace(ask, keep_fingerprint=False))


class AClaimThatNeverRanCounts(Broken):
    def on_fail(self, ask):
        return self.lawful(replace(ask, ran=True))


class ANumberIsGivenBackTwice(Broken):
    def on_fail(self, ask):
        ended = self._records[ask.identity].state is State.FAILED
        answer = self.lawful(ask)
        if answer and ended and not ask.ran:
            record = self._records[ask.identity]
            self._records[ask.identity] = replace(record, number=record.number - 1)
        return answer


class AReplacementIsCountedOn(Broken):
    def on_claim(self, ask):
        before = self._records.get(ask.identity)
        answer = self.lawful(ask)
        if isinstance(answer, Claimed) and before is not None and answer.number == 1:
            answer = replace(answer, number=before.number + 1)
            self._records[ask.identity] = replace(self._records[ask.identity], number=answer.number)
        return answer


class IdentitiesAreJoined(Broken):
    def on_claim(self, ask):
        identity = Identity("", f"{ask.identity.scope}:{ask.identity.key}")
        return self.lawful(replace(ask, identity=identity))


class CaseIsIgnored(Broken):
    def on_claim(self, ask):
        identity = Identity(ask.identity.scope, ask.identity.key.lower())
        return self.lawful(replace(ask, identity=identity))


class EmptyResultIsLost(Broken):
    def on_get(self, ask):
        record = self.lawful(ask)
        if record is not None and record.outcome is not None and not record.outcome.data:
            return replace(record, outcome=None)
        return record


class UpdatedAtStands(Broken):
    def on_get(self, ask):
        record = self.lawful(ask)
        return record if record is None else replace(record, updated_at=record.created_at)


class NothingIsKeptForNoTime(Broken):
    def on_touch(self, ask):
        return self.lawful(replace(ask, ttl=max(ask.ttl, 0.001)))


class TouchEndsWhatRuns(Broken):
    def on_touch(self, ask):
        return self.lawful(ask) or (ask.ttl == 0 and self.forget(ask.identity))


class PutOverwrites(Broken):
    def on_put(self, ask):
        self._records.pop(ask.identity, None)
        return self.lawful(ask)


class BatchAnswersInAnotherOrder(MemoryStore):
    def send(self, requests):
        return super().send(sorted(requests, key=lambda ask: ask.identity.digest))


class RequestsOfABatchDoNotSeeEachOther(Broken):
    """As a batch that reads all records before it writes any."""

    def send(self, requests):
        before = dict(self._records)
        answers = []
        for request in requests:
            after, self._records = self._records, dict(before)
            answers.append(self.answer(request))
            self._records = {**after, **self._records}
        return answers


class OnItems(VersionedStore):
    """A store of bytes, which can be damaged."""

    def __init__(self, clock):
        super().__init__(Table(), clock)

    def make_unreadable(self, identity):
        version, _ = self._table.read(identity.digest)
        self._table.write_if(identity.digest, version, b"something else")


class SendRaisesTheErrorOfOneRequest(OnItems):
    def send(self, requests):
        return [self._answer(request) for request in requests]


class TheUnreadableIsAbsent(OnItems):
    def _read(self, item):
        try:
            return super()._read(item)
        except RecordUnreadable:
            return None


class PrefixIsAPattern(BrokenListing):
    def on_scan(self, ask):
        return self.lawful(replace(ask, prefix=ask.prefix[:1]))


class PurgeTakesHeldRecords(BrokenListing):
    def on_purge(self, ask):
        gone = self.lawful(ask)
        if ask.abandoned_after is None:
            return gone
        stuck = self.lawful(StuckRequest(ask.abandoned_after))
        return gone + sum(self.lawful(ForgetRequest(record.identity)) for record in stuck)


class TheAuditTrailIsListed(BrokenListing):
    def on_scan(self, ask):
        page = self.lawful(ask)
        entries = self.lawful(replace(ask, scope=AUDIT_SCOPE)).records
        return page if ask.scope else replace(page, records=(*page.records, *entries))


class TheAuditTrailIsCounted(BrokenListing):
    def on_counts(self, ask):
        entries = self.lawful(ScanRequest(AUDIT_SCOPE)).records
        counted = self.lawful(ask)
        return replace(counted, succeeded=counted.succeeded + len(entries))


class PurgeCountsTheAuditTrail(BrokenListing):
    def on_purge(self, ask):
        before = len(self._records)
        self.lawful(ask)
        return before - len(self._records)


class PurgeLeavesTheAuditTrail(BrokenListing):
    def on_purge(self, ask):
        entries = [each for each in self._records if each.scope == AUDIT_SCOPE]
        gone = self.lawful(ask)
        for entry in entries:
            self._records.place(replace(entry, expires_at=entry.expires_at + 3600))
        return gone


class AdoptInterrupts(BrokenListing):
    def on_adopt(self, ask):
        record = self.lawful(GetRequest(ask.identity))
        if record is not None and record.state is State.PROCESSING:
            self.lawful(RenewRequest(ask.identity, record.owner, 0.0))
        return self.lawful(ask)


class AdoptForgetsTheHold(BrokenListing):
    def on_adopt(self, ask):
        record = self.lawful(ask)
        if record is not None:
            self._records.place(replace(record, hold=False))
        return record


class AdoptForgetsWhoRan(BrokenListing):
    def on_adopt(self, ask):
        record = self.lawful(ask)
        if record is not None:
            self._records.place(replace(record, run_info=b""))
        return record


class AdoptKeepsTheFence(BrokenListing):
    def on_adopt(self, ask):
        before = self.lawful(GetRequest(ask.identity))
        record = self.lawful(ask)
        return None if record is None else replace(record, fence=before.fence)


class ParkingRestartsTheAge(BrokenListing):
    def on_renew(self, ask):
        return self.lawful(replace(ask, lease=max(ask.lease, 0.0)))


class StuckIsUnsorted(BrokenListing):
    def on_stuck(self, ask):
        found = self.lawful(replace(ask, limit=1000))
        return sorted(found, key=lambda each: each.identity.key)[: ask.limit]
