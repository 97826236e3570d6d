"""Drives a real store and the law side by side through a random history, and compares everything.

The model is `semel.core.judge` over one record. A store with a clock of its own cannot be asked
what time it judged at, so leases and retentions are minutes apart, an attempt is abandoned by
parking it, and times are compared with `tolerance`. A store on a fake clock is compared exactly,
and time moves on to the very edges.

A history is a list of numbers. Each one seeds one step, so that steps are as different as dice
make them (drawn one by one, they come in clumps that rarely abandon anything), and hypothesis can
still drop the steps that a failure does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random

import pytest
from hypothesis import note
from hypothesis import strategies as st
from msgspec.structs import replace

from semel.core import judge
from semel.core.records import (
    AdoptRequest,
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    Finished,
    Identity,
    Mismatch,
    PutRequest,
    Record,
    RenewRequest,
    State,
    TouchRequest,
)
from semel.testing import FakeClock, StoreDriver

histories = st.lists(st.integers(0, 2**31 - 1), min_size=20, max_size=60, unique=True)

OWNERS = [bytes([index]) * 12 for index in (0, 128, 255)]
PAYLOADS = [None, *(bytes([index]) * 16 for index in (0, 65, 255))]
RESULTS = [Encoded("json", b"1"), Encoded("json", b""), Encoded("raw", b"\x00\xff")]
LEASES = [100.0, 1_000.0]
TTLS = [500.0, 5_000.0]
RUN_INFOS = [b"", b"{}", b'{"by":"web-1:4711"}', b"\x00\xff" * 100]
LIMITS = [None, None, None, 1, 3]
PASSING = [0.000001, 100.0, 400.0, 500.0]

VERBS = {
    "claim": 8,
    "renew": 3,
    "complete": 2,
    "fail": 2,
    "put": 1,
    "touch": 1,
    "forget": 2,
    "adopt": 3,
}
"""How often each is sent: a life that ends at once never gets interesting."""

lives = count()


class StoreBesideTheLaw:
    """One record in a store, and the same record as the law has it."""

    def __init__(self, store: StoreDriver, clock: Callable[[], float], tolerance: float) -> None:
        self.store = store
        self.clock = clock
        self.tolerance = tolerance
        # Every history has a key of its own, so that one store can serve them all.
        self.key = Identity("life", str(next(lives)))
        self.model: Record | None = None
        self.fence = 0

    def live(self, history: list[int]) -> None:
        """Send one verb for each number; after each, answers and records must agree."""
        for seed in history:
            dice = Random(seed)
            (verb,) = dice.choices([*VERBS], [*VERBS.values()])
            getattr(self, verb)(dice)
            if isinstance(self.clock, FakeClock) and dice.random() < 0.2:
                self.clock.advance(dice.choice(PASSING))
                self.agree_on_record()

    # --- the verbs -----------------------------------------------------------------------

    def claim(self, dice):
        ask = ClaimRequest(
            self.key,
            dice.choice(OWNERS),
            dice.choice(PAYLOADS),
            dice.choice(LEASES),
            dice.choice(TTLS),
            hold=dice.random() < 0.3,
            replace=dice.random() < 0.5,
            max_attempts=dice.choice(LIMITS),
            run_info=dice.choice(RUN_INFOS),
        )
        note(f"{ask}")
        before = self.store.get(self.key)
        answer = self.send(dice, ask)
        expected, record = judge.claim(self.model, ask, self.clock())
        self.agree_on_claim(answer, expected)
        after = self.follow(record)
        match answer:
            case Claimed(number, fence):
                assert after is not None
                assert (after.owner, after.number, after.fence) == (ask.owner, number, fence)
            case Mismatch():
                assert unread(after) == unread(before), "a mismatch changed the record"

    def renew(self, dice):
        ask = RenewRequest(
            self.key,
            self.writer(dice),
            dice.choice([0.0, 0.0, *LEASES]),
            dice.choice([None, *RUN_INFOS]),
        )
        note(f"{ask}")
        self.agree_on_write(self.send(dice, ask), judge.renew(self.model, ask, self.clock()))

    def complete(self, dice):
        ask = CompleteRequest(self.key, self.writer(dice), dice.choice(RESULTS), dice.choice(TTLS))
        note(f"{ask}")
        self.agree_on_write(self.send(dice, ask), judge.complete(self.model, ask, self.clock()))

    def fail(self, dice):
        ask = FailRequest(
            self.key,
            self.writer(dice),
            dice.choice(RESULTS),
            retryable=dice.random() < 0.7,
            keep_fingerprint=dice.random() < 0.5,
            ttl=dice.choice(TTLS),
            ran=dice.random() < 0.8,
        )
        note(f"{ask}")
        self.agree_on_write(self.store.ask(ask), judge.fail(self.model, ask, self.clock()))

    def put(self, dice):
        ask = PutRequest(self.key, dice.choice(OWNERS), dice.choice(RESULTS), dice.choice(TTLS))
        note(f"{ask}")
        self.agree_on_write(self.send(dice, ask), judge.put(self.model, ask, self.clock()))

    def touch(self, dice):
        ask = TouchRequest(self.key, dice.choice(TTLS))
        note(f"{ask}")
        self.agree_on_write(self.store.ask(ask), judge.touch(self.model, ask, self.clock()))

    def forget(self, dice):
        note("forget")
        assert self.store.forget(self.key) is (judge.present(self.model, self.clock()) is not None)
        self.model = None
        assert self.store.get(self.key) is None
        # No clock stands still meanwhile; where no record is left, a fence is made of time.
        if isinstance(self.clock, FakeClock):
            self.clock.advance(0.001)

    def adopt(self, dice):
        if not self.store.offers(AdoptRequest):
            return
        ask = AdoptRequest(self.key, dice.choice(OWNERS), dice.choice(LEASES))
        note(f"{ask}")
        answer = self.store.ask(ask)
        expected = judge.adopt(self.model, ask, self.clock())
        assert timeless(answer) == timeless(expected)
        after = self.follow(expected)
        if answer is not None:
            assert unread(answer) == unread(after), "the answer is the record"

    def send(self, dice, request):
        """Send a request by itself or in a batch of one: the law is the same."""
        if dice.random() < 0.7:
            return self.store.ask(request)
        (answer,) = self.store.send([request])
        return answer

    def writer(self, dice):
        """Mostly the owner in the record: where only strangers write, nothing ever ends."""
        if self.model is None or dice.random() < 0.3:
            return dice.choice(OWNERS)
        return self.model.owner

    # --- what must agree -----------------------------------------------------------------

    def agree_on_claim(self, answer, expected):
        assert type(answer) is type(expected), f"{answer} where the law says {expected}"
        match answer, expected:
            case Claimed(), Claimed():
                assert (answer.number, answer.takeover) == (expected.number, expected.takeover)
            case Busy(owner=None), Busy():  # a hint of tiers: it may end before the lease
                assert 0 < answer.retry_after <= expected.retry_after + self.tolerance
            case Busy(), Busy():
                assert answer.retry_after == self.about(expected.retry_after)
            case Finished(), Finished():
                assert answer.remaining == self.about(expected.remaining)
                assert replace(answer, remaining=0, fence=0) == replace(
                    expected, remaining=0, fence=0
                )
            case _:
                assert answer == expected

    def agree_on_write(self, answer, record):
        assert answer is (record is not None)
        self.follow(record)

    def follow(self, record):
        """Take the model a step on; None is a verb that changed nothing."""
        before = judge.present(self.model, self.clock())
        if record is not None:
            self.model = record
        after = self.agree_on_record()
        if after is not None:
            self.agree_on_safety(before, after)
        return after

    def agree_on_record(self):
        record, expected = self.store.get(self.key), judge.present(self.model, self.clock())
        assert timeless(record) == timeless(expected)
        if record is not None:
            for time in ("created_at", "updated_at", "lease_until", "expires_at", "now"):
                moment = getattr(replace(expected, now=self.clock()), time)
                assert getattr(record, time) == self.about(moment), time
            assert (record.lease_until is None) is (record.state is not State.PROCESSING)
            assert (record.expires_at is None) is (record.state is State.PROCESSING)
        return record

    def agree_on_safety(self, before, after):
        """What must hold whatever the law says: the safety properties of the guarantees."""
        never_ran = (
            before is not None
            and (before.state, after.state) == (State.PROCESSING, State.FAILED)
            and after.number == before.number - 1
        )
        # By the law's own fences: those of the store are made of the store's time.
        new_attempt = before is None or (self.model.fence != before.fence and not never_ran)
        if before is not None:
            replaces = new_attempt and after.fingerprint != before.fingerprint
            assert (
                after.number - before.number in {0, 1}
                or never_ran
                or (replaces and after.number == 1)
            ), "attempts count up one by one"
            if not new_attempt and before.state is not State.PROCESSING:
                assert after.owner == before.owner, "what has ended changes hands by a new attempt"
                assert (after.state, after.outcome) == (before.state, before.outcome)
        if new_attempt or after.owner != before.owner:
            assert after.fence > self.fence, "a fence grows, also over forgetting"
        else:
            assert after.fence == self.fence
        self.fence = after.fence

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
