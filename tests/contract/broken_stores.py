"""Stores that break the law, each in one way, each as some library or some first draft does."""

from __future__ import annotations

import time

from msgspec.structs import replace

from contract.reference_store import DictStore
from semel.core import judge
from semel.core.records import Busy, Claimed, CompleteRequest, Identity, Mismatch, State
from semel.stores.memory import MemoryStore


class CompleteIgnoresTheOwner(DictStore):
    def complete(self, identity, owner, result, ttl):
        record = self._records.get(identity)
        return super().complete(identity, record.owner if record else owner, result, ttl)


class FailFreesWhoeverRuns(DictStore):
    def fail(self, identity, owner, error, **terms):
        record = self._records.get(identity)
        return super().fail(identity, record.owner if record else owner, error, **terms)


class RenewRefusesAPassedLease(DictStore):
    def renew(self, identity, owner, lease):
        record = self.get(identity)
        return record is not None and not record.abandoned and super().renew(identity, owner, lease)


class CompleteRefusesAPassedLease(DictStore):
    def complete(self, identity, owner, result, ttl):
        record = self.get(identity)
        if record is not None and record.abandoned:
            return False
        return super().complete(identity, owner, result, ttl)


class ClaimChecksThenActs(DictStore):
    def claim(self, ask):
        answer, record = judge.claim(self._records.get(ask.identity), ask, self._clock())
        time.sleep(0.001)  # a round trip between the check and the act
        if record is not None:
            self._records[ask.identity] = record
        return answer


class CompleteChecksThenActs(DictStore):
    def complete(self, identity, owner, result, ttl):
        ask = CompleteRequest(identity, owner, result, ttl)
        record = judge.complete(self._records.get(identity), ask, self._clock())
        time.sleep(0.05)  # a round trip between the check and the act
        if record is not None:
            self._records[identity] = record
        return record is not None


class RepeatedClaimIsBusy(DictStore):
    def claim(self, ask):
        record = self.get(ask.identity)
        if record is not None and record.state is State.PROCESSING and not record.abandoned:
            return Busy(record.lease_until - record.now)
        return super().claim(ask)


class AnEndedOwnerIsGivenANewClaim(DictStore):
    def claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None and record.retryable:
            self._records[ask.identity] = replace(record, owner=bytes(12))
        return super().claim(ask)


class BusyHidesAMismatch(DictStore):
    def claim(self, ask):
        answer = super().claim(ask)
        record = self.get(ask.identity)
        if isinstance(answer, Mismatch) and record is not None and record.lease_until is not None:
            return Busy(record.lease_until - record.now)
        return answer


class SecondCompleteIsRefused(DictStore):
    def complete(self, identity, owner, result, ttl):
        record = self.get(identity)
        done = record is not None and record.outcome is not None
        return not done and super().complete(identity, owner, result, ttl)


class SecondCompleteOverwrites(DictStore):
    def complete(self, identity, owner, result, ttl):
        answer = super().complete(identity, owner, result, ttl)
        if answer:
            self._records[identity] = replace(self._records[identity], outcome=result)
        return answer


class ExpiresOnlyByPurge(DictStore):
    def get(self, identity):
        record = self._records.get(identity)
        return record if record is None else replace(record, now=self._clock())


class RetentionStartsWithTheClaim(DictStore):
    def complete(self, identity, owner, result, ttl):
        answer = super().complete(identity, owner, result, ttl)
        record = self._records.get(identity)
        if answer and record is not None:
            self._records[identity] = replace(record, expires_at=record.created_at + ttl)
        return answer


class FenceRestarts(DictStore):
    def claim(self, ask):
        answer = super().claim(ask)
        if isinstance(answer, Claimed):
            answer = replace(answer, fence=answer.number)
            self._records[ask.identity] = replace(self._records[ask.identity], fence=answer.fence)
        return answer


class FenceIsTheClock(DictStore):
    def claim(self, ask):
        answer = super().claim(ask)
        if isinstance(answer, Claimed):
            answer = replace(answer, fence=int(self._clock() * 1e6))
            self._records[ask.identity] = replace(self._records[ask.identity], fence=answer.fence)
        return answer


class TakeoverWeakensHold(DictStore):
    def claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None and not ask.hold:
            self._records[ask.identity] = replace(record, hold=False)
        return super().claim(ask)


class CallersHoldIsIgnored(DictStore):
    def claim(self, ask):
        known = ask.identity in self._records
        return super().claim(replace(ask, hold=False) if known else ask)


class ReplaceInterrupts(DictStore):
    def claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None and ask.replace and record.lease_until is not None:
            self._records[ask.identity] = replace(record, lease_until=0.0)
        return super().claim(ask)


class SupersededIsForgotten(DictStore):
    def claim(self, ask):
        record = self._records.get(ask.identity)
        if record is not None:
            self._records[ask.identity] = replace(record, superseded=())
        return super().claim(ask)


class PayloadIsAlwaysErased(DictStore):
    def fail(self, identity, owner, error, **terms):
        return super().fail(identity, owner, error, **terms | {"keep_fingerprint": False})


class AClaimThatNeverRanCounts(DictStore):
    def fail(self, identity, owner, error, **terms):
        return super().fail(identity, owner, error, **terms | {"ran": True})


class ANumberIsGivenBackTwice(DictStore):
    def fail(self, identity, owner, error, **terms):
        ended = self._records[identity].state is State.FAILED
        answer = super().fail(identity, owner, error, **terms)
        if answer and ended and not terms["ran"]:
            record = self._records[identity]
            self._records[identity] = replace(record, number=record.number - 1)
        return answer


class AReplacementIsCountedOn(DictStore):
    def claim(self, ask):
        before = self._records.get(ask.identity)
        answer = super().claim(ask)
        if isinstance(answer, Claimed) and before is not None and answer.number == 1:
            answer = replace(answer, number=before.number + 1)
            self._records[ask.identity] = replace(self._records[ask.identity], number=answer.number)
        return answer


class IdentitiesAreJoined(DictStore):
    def claim(self, ask):
        identity = Identity("", f"{ask.identity.scope}:{ask.identity.key}")
        return super().claim(replace(ask, identity=identity))


class CaseIsIgnored(DictStore):
    def claim(self, ask):
        identity = Identity(ask.identity.scope, ask.identity.key.lower())
        return super().claim(replace(ask, identity=identity))


class EmptyResultIsLost(DictStore):
    def get(self, identity):
        record = super().get(identity)
        if record is not None and record.outcome is not None and not record.outcome.data:
            return replace(record, outcome=None)
        return record


class UpdatedAtStands(DictStore):
    def get(self, identity):
        record = super().get(identity)
        return record if record is None else replace(record, updated_at=record.created_at)


class NothingIsKeptForNoTime(DictStore):
    def touch(self, identity, ttl):
        return super().touch(identity, max(ttl, 0.001))


class TouchEndsWhatRuns(DictStore):
    def touch(self, identity, ttl):
        return super().touch(identity, ttl) or (ttl == 0 and self.forget(identity))


class PutOverwrites(DictStore):
    def put(self, identity, result, ttl, *, owner):
        self._records.pop(identity, None)
        return super().put(identity, result, ttl, owner=owner)


class BatchAnswersInAnotherOrder(MemoryStore):
    def claim_many(self, asks):
        return super().claim_many(sorted(asks, key=lambda ask: ask.identity.digest))


class PrefixIsAPattern(MemoryStore):
    def scan(self, *, prefix="", **terms):
        return super().scan(prefix=prefix[:1], **terms)


class PurgeTakesHeldRecords(MemoryStore):
    def purge(self, *, limit=1000, abandoned_after=None):
        gone = super().purge(limit=limit, abandoned_after=abandoned_after)
        if abandoned_after is None:
            return gone
        stuck = self.stuck(older_than=abandoned_after)
        return gone + sum(self.forget(record.identity) for record in stuck)


class AdoptInterrupts(MemoryStore):
    def adopt(self, identity, owner, lease):
        record = self.get(identity)
        if record is not None and record.state is State.PROCESSING:
            self.renew(identity, record.owner, 0.0)
        return super().adopt(identity, owner, lease)


class AdoptForgetsTheHold(MemoryStore):
    def adopt(self, identity, owner, lease):
        record = super().adopt(identity, owner, lease)
        if record is not None:
            self._shelf.place(replace(record, hold=False))
        return record


class AdoptKeepsTheFence(MemoryStore):
    def adopt(self, identity, owner, lease):
        before = self.get(identity)
        record = super().adopt(identity, owner, lease)
        return None if record is None else replace(record, fence=before.fence)


class ParkingRestartsTheAge(MemoryStore):
    def renew(self, identity, owner, lease):
        return super().renew(identity, owner, max(lease, 0.0))


class StuckIsUnsorted(MemoryStore):
    def stuck(self, *, older_than=0.0, limit=100):
        return sorted(super().stuck(older_than=older_than), key=lambda each: each.identity.key)[
            :limit
        ]
