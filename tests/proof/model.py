"""A state machine that drives a real store and the law side by side, and compares everything.

The model is `semel.core.judge` over a dict. A store with a clock of its own cannot be asked what
time it judged at, so leases and retentions are minutes apart, an attempt is abandoned by parking
it, and times are compared with `tolerance`. A store on a fake clock is compared exactly, and time
moves on to the very edges.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from msgspec.structs import replace

from semel.core import judge
from semel.core.records import (
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Finished,
    Identity,
    Mismatch,
    PutRequest,
    Record,
    RenewRequest,
    State,
)
from semel.testing import FakeClock, StoreDriver

owners = st.sampled_from([bytes([index]) * 12 for index in (0, 7, 128, 255)])
payloads = st.sampled_from([None, *(bytes([index]) * 16 for index in (0, 65, 255))])
results = st.builds(Encoded, st.sampled_from(["json", "raw"]), st.binary(max_size=3))
leases = st.sampled_from([100.0, 1_000.0])
leases_or_park = st.sampled_from([0.0, 100.0, 1_000.0])
ttls = st.sampled_from([500.0, 5_000.0])
limits = st.sampled_from([None, 1, 2, 3, 5])
names = st.sampled_from(["a", "b"])
lives = count()


class StoreAgainstTheLaw(RuleBasedStateMachine):
    """Random verbs by several owners; after each one, answers and records must agree."""

    def __init__(self, store: StoreDriver, clock: Callable[[], float], tolerance: float) -> None:
        super().__init__()
        self.store = store
        self.clock = clock
        self.tolerance = tolerance
        # Every run has keys of its own, so that one store can serve them all.
        self.scope = f"life:{next(lives)}"
        self.model: dict[Identity, Record] = {}
        self.fences: dict[Identity, int] = {}

    # --- the verbs -----------------------------------------------------------------------

    @rule(
        name=names,
        owner=owners,
        payload=payloads,
        lease=leases,
        ttl=ttls,
        hold=st.booleans(),
        loose=st.booleans(),
        limit=limits,
    )
    def claim(self, *, name, owner, payload, lease, ttl, hold, loose, limit):
        ask = ClaimRequest(self.key(name), owner, payload, lease, ttl, hold, loose, limit)
        before = self.store.get(ask.identity)
        answer = self.store.claim(ask)
        expected, record = judge.claim(self.model.get(ask.identity), ask, self.clock())
        self.agree_on_claim(answer, expected)
        after = self.follow(ask.identity, record)
        match answer:
            case Claimed(number, fence):
                assert after is not None
                assert (after.owner, after.number, after.fence) == (owner, number, fence)
            case Mismatch():
                assert unread(after) == unread(before), "a mismatch changed the record"

    @rule(name=names, owner=owners, lease=leases_or_park)
    def renew(self, name, owner, lease):
        key = self.key(name)
        answer = self.store.renew(key, owner, lease)
        record = judge.renew(self.model.get(key), RenewRequest(key, owner, lease), self.clock())
        self.agree_on_write(answer, key, record)

    @rule(name=names, owner=owners, result=results, ttl=ttls)
    def complete(self, name, owner, result, ttl):
        key = self.key(name)
        answer = self.store.complete(key, owner, result, ttl)
        ask = CompleteRequest(key, owner, result, ttl)
        self.agree_on_write(answer, key, judge.complete(self.model.get(key), ask, self.clock()))

    @rule(
        name=names,
        owner=owners,
        error=results,
        retryable=st.booleans(),
        keep_fingerprint=st.booleans(),
        ttl=ttls,
    )
    def fail(self, *, name, owner, error, retryable, keep_fingerprint, ttl):
        key = self.key(name)
        terms = {"retryable": retryable, "keep_fingerprint": keep_fingerprint, "ttl": ttl}
        answer = self.store.fail(key, owner, error, **terms)
        record = judge.fail(self.model.get(key), owner, error, **terms, now=self.clock())
        self.agree_on_write(answer, key, record)

    @rule(name=names, owner=owners, result=results, ttl=ttls)
    def put(self, name, owner, result, ttl):
        key = self.key(name)
        answer = self.store.put(key, result, ttl, owner=owner)
        ask = PutRequest(key, owner, result, ttl)
        self.agree_on_write(answer, key, judge.put(self.model.get(key), ask, self.clock()))

    @rule(name=names, ttl=ttls)
    def touch(self, name, ttl):
        key = self.key(name)
        answer = self.store.touch(key, ttl)
        self.agree_on_write(answer, key, judge.touch(self.model.get(key), ttl, self.clock()))

    # Rarely: a life that is cut short too often never gets interesting.
    @rule(name=names, meant=st.integers(0, 4).map(lambda dice: dice == 0))
    def forget(self, name, meant):
        if meant:
            key = self.key(name)
            known = judge.present(self.model.pop(key, None), self.clock())
            assert self.store.forget(key) is (known is not None)
            assert self.store.get(key) is None
            self.a_moment_passes()

    @precondition(lambda self: isinstance(self.clock, FakeClock))
    @rule(seconds=st.sampled_from([0.000001, 100.0, 400.0, 500.0, 900.0, 5_000.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        for key in self.model:
            self.agree_on_record(key)

    def a_moment_passes(self):
        """No clock stands still while a record is forgotten; a fence is made of that moment."""
        if isinstance(self.clock, FakeClock):
            self.clock.advance(0.001)

    # --- what must agree -----------------------------------------------------------------

    def agree_on_claim(self, answer, expected):
        assert type(answer) is type(expected), f"{answer} where the law says {expected}"
        match answer, expected:
            case Claimed(), Claimed():
                assert (answer.number, answer.takeover) == (expected.number, expected.takeover)
            case Busy(), Busy():
                assert answer.retry_after == self.about(expected.retry_after)
            case Finished(), Finished():
                assert answer.remaining == self.about(expected.remaining)
                assert replace(answer, remaining=0, fence=0) == replace(
                    expected, remaining=0, fence=0
                )
            case _:
                assert answer == expected

    def agree_on_write(self, answer, key, record):
        assert answer is (record is not None)
        self.follow(key, record)

    def follow(self, key, record):
        """Take the model a step on; None is a verb that changed nothing."""
        before = judge.present(self.model.get(key), self.clock())
        if record is not None:
            self.model[key] = record
        after = self.agree_on_record(key)
        if after is not None:
            self.agree_on_safety(key, before, after)
        return after

    def agree_on_record(self, key):
        record, expected = self.store.get(key), judge.present(self.model.get(key), self.clock())
        assert timeless(record) == timeless(expected)
        if record is not None:
            for time in ("created_at", "updated_at", "lease_until", "expires_at", "now"):
                moment = getattr(replace(expected, now=self.clock()), time)
                assert getattr(record, time) == self.about(moment), time
            assert (record.lease_until is None) is (record.state is not State.PROCESSING)
            assert (record.expires_at is None) is (record.state is State.PROCESSING)
        return record

    def agree_on_safety(self, key, before, after):
        """What must hold whatever the law says: the safety properties of the guarantees."""
        new_attempt = before is None or after.number != before.number
        if before is not None:
            assert after.number - before.number in {0, 1}, "attempts count up one by one"
            if not new_attempt:
                assert after.owner == before.owner, "only a new attempt changes the owner"
                if before.state is not State.PROCESSING:
                    assert (after.state, after.outcome) == (before.state, before.outcome)
        if new_attempt:
            assert after.fence > self.fences.get(key, 0), "a fence grows, also over forgetting"
        else:
            assert after.fence == self.fences[key]
        self.fences[key] = after.fence

    # --- helpers -------------------------------------------------------------------------

    def key(self, name):
        return Identity(self.scope, name)

    def about(self, moment):
        return moment if moment is None else pytest.approx(moment, rel=0, abs=self.tolerance)


def unread(record):
    """A record without the moment it was read at."""
    return record if record is None else replace(record, now=0.0)


def timeless(record):
    """A record without what only its store can know."""
    if record is None:
        return None
    return replace(
        record,
        fence=0,
        created_at=0.0,
        updated_at=0.0,
        now=0.0,
        lease_until=None,
        expires_at=None,
    )
