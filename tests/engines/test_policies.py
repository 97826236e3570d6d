"""Every field of a policy does what it says, in both engines."""

from __future__ import annotations

import os
import threading
import time

import pytest

from engines.facade import Effect, Stop, World, never, wait_until
from semel import (
    AttemptsExhausted,
    ConcurrentRequest,
    DuplicateRequest,
    EncryptedCodec,
    OutcomeUnknown,
    PayloadMismatch,
    Policy,
    PreviousFailure,
    ResultUnavailable,
    State,
    StoreUnavailable,
    WaitTimeout,
    events,
)
from semel.core.decide import NothingRan
from semel.core.records import ClaimRequest, Identity
from semel.testing import Refuse

GUARD = Policy(duplicate="reject", message="already on its way")
HOLD = Policy(abandoned="hold")
KEY = Identity("default", "k")


@pytest.fixture
def idem(memory_world):
    return memory_world.engine()


def fails(idem, error, **options):
    with pytest.raises(type(error)):
        idem.execute("k", Effect(raising=error), **options)


class Running:
    """An attempt that runs in another process (on another engine) until it is released."""

    def __init__(self, world, **options) -> None:
        self.effect = Effect().held()
        self.engine = world.engine()
        self.result = self.engine.start("k", self.effect, **options)
        self.effect.wait_started()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.effect.release()
        self.result.result()


# --- duplicate -----------------------------------------------------------------------------


def test_replay_gives_the_first_result_again(idem):
    assert idem.execute("k", lambda: [1]) == [1]
    assert idem.execute("k", never, policy=Policy(duplicate="replay")) == [1]


def test_reject_refuses_a_duplicate_with_the_message(idem):
    assert idem.execute("k", lambda: 1, policy=GUARD) == 1
    for method in (idem.execute, idem.consume):
        with pytest.raises(DuplicateRequest, match="already on its way"):
            method("k", never, policy=GUARD)
    assert idem.execute("k", never) == 1, "the record is unchanged"


def test_guard_mode_lets_a_failed_one_run_again(idem):
    fails(idem, ValueError(), policy=GUARD)
    assert idem.execute("k", lambda: 1, policy=GUARD) == 1


@pytest.mark.parametrize("where", ["the same engine", "another engine"])
def test_guard_mode_waits_a_little_for_a_running_one_and_then_rejects(memory_world, where):
    with Running(memory_world) as first:
        idem = first.engine if where == "the same engine" else memory_world.engine()
        began = time.monotonic()
        with pytest.raises(ConcurrentRequest, match="already on its way"):
            idem.execute("k", never, policy=GUARD)
        assert time.monotonic() - began > 0.29, "a short wait first"


def test_guard_mode_rejects_as_duplicate_what_ends_while_it_waits(memory_world):
    idem = memory_world.engine()
    with Running(memory_world) as first:
        waiting = idem.start("k", never, policy=Policy(duplicate="reject", wait_timeout=30))
        wait_until(lambda: idem.commands("claim") > 1)
        first.effect.release()
        with pytest.raises(DuplicateRequest):
            waiting.result()


# --- concurrent, waiting -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the same engine", "another engine"])
def test_reject_refuses_a_running_one_at_once_and_tells_when_to_come_back(memory_world, where):
    policy = Policy(concurrent="reject", lease=20, message="one at a time")
    with Running(memory_world, policy=policy) as first:
        idem = first.engine if where == "the same engine" else memory_world.engine()
        with pytest.raises(ConcurrentRequest, match="one at a time") as refusal:
            idem.execute("k", never, policy=policy)
        assert 0 < refusal.value.retry_after <= 20


@pytest.mark.parametrize("where", ["the same engine", "another engine"])
@pytest.mark.parametrize("timeout", [0, 0.05])
def test_waiting_ends_with_its_timeout(memory_world, where, timeout):
    with Running(memory_world) as first:
        idem = first.engine if where == "the same engine" else memory_world.engine()
        with pytest.raises(WaitTimeout) as refusal:
            idem.execute("k", never, policy=Policy(wait_timeout=timeout))
        assert isinstance(refusal.value, TimeoutError)


def test_waiting_without_a_timeout_ends_with_the_result(memory_world):
    idem = memory_world.engine()
    with Running(memory_world) as first:
        waiting = idem.start(
            "k", never, policy=Policy(wait_interval=0.001, wait_interval_max=0.002)
        )
        wait_until(lambda: idem.commands("claim") > 5)
        first.effect.release()
        assert waiting.result() == "done"


def test_the_pause_between_two_questions_grows_to_its_bound(memory_world):
    idem = memory_world.engine()
    with Running(memory_world):
        with pytest.raises(WaitTimeout):
            idem.execute("k", never, policy=Policy(wait_interval=0.2, wait_timeout=0.1))
        assert idem.commands("claim") == 2, "one at the start, one at the end of the patience"


# --- failure -------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["forget", lambda error: "forget"])
def test_forget_lets_any_payload_run_next(idem, failure):
    policy = Policy(failure=failure, failed_ttl=50, ttl=5000)
    fails(idem, ValueError(), payload=1, policy=policy)
    record = idem.peek("k")
    assert (record.state, record.retryable, record.fingerprint) == (State.FAILED, True, None)
    assert 40 < record.remaining <= 50
    outcome = idem.run("k", lambda: 2, payload=2, policy=policy)
    assert (outcome.value, outcome.attempt.number) == (2, 2)


@pytest.mark.parametrize("failure", ["retryable", lambda error: "retryable"])
def test_retryable_lets_the_same_payload_run_next(idem, failure):
    policy = Policy(failure=failure, failed_ttl=50, ttl=5000)
    fails(idem, ValueError(), payload=1, policy=policy)
    assert 40 < idem.peek("k").remaining <= 50
    with pytest.raises(PayloadMismatch):
        idem.execute("k", never, payload=2)
    assert idem.execute("k", lambda: 1, payload=1) == 1


@pytest.mark.parametrize("failure", ["final", lambda error: "final"])
def test_final_is_answered_with_the_failure(idem, failure):
    policy = Policy(failure=failure, failed_ttl=50, ttl=5000)
    fails(idem, ValueError("no such order"), policy=policy)
    assert 4990 < idem.peek("k").remaining <= 5000
    for method in (idem.execute, idem.run, idem.consume):
        with pytest.raises(PreviousFailure, match="no such order") as refusal:
            method("k", never)
        assert refusal.value.type_name == "ValueError"


@pytest.mark.parametrize("failure", ["unknown", lambda error: "unknown"])
def test_unknown_parks_the_record(idem, failure):
    policy = Policy(failure=failure, abandoned="hold")
    fails(idem, ValueError(), policy=policy)
    record = idem.peek("k")
    assert (record.state, record.abandoned, record.hold) == (State.PROCESSING, True, True)
    for method in (idem.execute, idem.consume):
        with pytest.raises(OutcomeUnknown):
            method("k", never)


def test_unknown_without_hold_is_taken_over_by_the_next(idem):
    fails(idem, ValueError(), policy=Policy(failure="unknown"))
    assert idem.peek("k").abandoned
    with pytest.raises(OutcomeUnknown):
        idem.execute("k", never, policy=HOLD)
    assert idem.execute("k", lambda: 1) == 1
    assert len(idem.told(events.TakenOver)) == 1


def test_the_function_of_the_policy_sees_the_exception(idem):
    seen = []
    error = ValueError("the one")
    fails(idem, error, policy=Policy(failure=lambda given: seen.append(given) or "final"))
    assert seen == [error]


@pytest.mark.parametrize("nonsense", [lambda error: "nonsense", lambda error: 1 / 0])
def test_a_bad_function_of_the_policy_hides_nothing_and_decides_nothing(idem, nonsense):
    fails(idem, ValueError(), policy=Policy(failure=nonsense))
    assert idem.told(events.FailureUndecided)[0].verdict == "forget"
    assert idem.told(events.Failed)[0].verdict == "forget"
    assert idem.execute("k", lambda: 1) == 1


def test_under_hold_a_bad_function_of_the_policy_lets_nobody_run_again(idem, caplog):
    policy = Policy(abandoned="hold", failure=lambda error: 1 / 0)
    fails(idem, ValueError(), policy=policy)
    assert idem.told(events.FailureUndecided)[0].verdict == "unknown"
    assert "problem=it raised ZeroDivisionError" in caplog.text
    with pytest.raises(OutcomeUnknown):
        idem.execute("k", never, policy=policy)


def test_under_hold_a_failure_is_unknown_unless_it_proves_that_nothing_happened(idem):
    policy = Policy(abandoned="hold", not_done=ConnectionRefusedError)
    fails(idem, ConnectionRefusedError(), policy=policy)
    assert idem.peek("k").state is State.FAILED
    fails(idem, ValueError(), policy=policy)
    with pytest.raises(OutcomeUnknown, match="attempt 2"):
        idem.execute("k", never, policy=policy)


@pytest.mark.parametrize(("abandoned", "state"), [("takeover", "FAILED"), ("hold", "PROCESSING")])
def test_an_interruption_is_recorded_as_the_abandoned_policy_says(idem, abandoned, state):
    policy = Policy(abandoned=abandoned, failure="final")
    fails(idem, Stop(), policy=policy)
    wait_until(lambda: idem.told(events.Failed) or idem.told(events.Parked))
    record = idem.peek("k")
    assert record.state.name == state
    if abandoned == "takeover":
        assert idem.execute("k", lambda: 1, policy=policy) == 1
    else:
        with pytest.raises(OutcomeUnknown):
            idem.execute("k", never, policy=policy)


# --- abandoned -----------------------------------------------------------------------------


def abandon(idem, *, hold):
    ask = ClaimRequest(KEY, b"somebody....", None, 0.001, 60.0, hold)
    idem.ask_store("claim", ask)
    wait_until(lambda: idem.peek("k").abandoned)


def test_takeover_runs_what_was_abandoned(idem):
    abandon(idem, hold=False)
    outcome = idem.run("k", lambda: 1)
    assert (outcome.value, outcome.attempt.number) == (1, 2)


@pytest.mark.parametrize(("written", "asked"), [(True, "takeover"), (False, "hold")])
def test_hold_of_either_side_keeps_it_for_a_resolver(idem, written, asked):
    abandon(idem, hold=written)
    with pytest.raises(OutcomeUnknown, match="attempt 1 may have taken effect"):
        idem.execute("k", never, policy=Policy(abandoned=asked))
    assert idem.forget("k"), "a person decides"
    assert idem.execute("k", lambda: 1) == 1


# --- mismatch ------------------------------------------------------------------------------

LOOSE = Policy(mismatch="replace")


def test_strict_refuses_another_payload_while_running_and_after(memory_world):
    idem = memory_world.engine()
    with Running(memory_world, payload=1):
        with pytest.raises(PayloadMismatch) as refusal:
            idem.execute("k", never, payload=2)
        assert not refusal.value.superseded
    with pytest.raises(PayloadMismatch):
        idem.execute("k", never, payload=2)
    assert idem.execute("k", never, payload=1) == "done"
    assert idem.execute("k", never) == "done", "no payload, nothing to compare"


def test_loose_replaces_and_refuses_a_late_retry_of_the_old_one(idem):
    assert idem.execute("k", lambda: "Ann", payload="Ann", policy=LOOSE) == "Ann"
    assert idem.execute("k", lambda: "Bob", payload="Bob", policy=LOOSE) == "Bob"
    assert idem.execute("k", never, payload="Bob", policy=LOOSE) == "Bob"
    with pytest.raises(PayloadMismatch, match="replaced by a newer one") as refusal:
        idem.execute("k", never, payload="Ann", policy=LOOSE)
    assert refusal.value.superseded


def test_loose_waits_for_a_running_one_and_never_interrupts_it(memory_world):
    idem = memory_world.engine()
    with Running(memory_world, payload=1, policy=LOOSE) as first:
        with pytest.raises(ConcurrentRequest):
            idem.execute(
                "k", never, payload=2, policy=Policy(mismatch="replace", concurrent="reject")
            )
        second = idem.start("k", lambda: "second", payload=2, policy=LOOSE)
        wait_until(lambda: idem.commands("claim") > 2)
        assert not second.done()
        first.effect.release()
        assert first.result.result() == "done"
        assert second.result() == "second"


# --- store_error ---------------------------------------------------------------------------


def test_closed_fails_and_runs_nothing(idem):
    idem.store.inject("claim", Refuse(), times=2)
    for method in (idem.execute, idem.consume):
        with pytest.raises(StoreUnavailable, match="the connection was cut"):
            method("k", never)
    assert idem.store.fired("claim") == 2


def test_open_runs_unprotected_and_says_so(idem):
    idem.store.inject("claim", Refuse(), times=3)
    policy = Policy(store_error="open")
    outcome = idem.run("k", lambda: "paid", policy=policy)
    assert (outcome.value, outcome.replayed, outcome.attempt.protected) == ("paid", False, False)
    assert idem.consume("k", lambda: 1, policy=policy) is True
    with pytest.raises(ValueError, match="unwrapped"):
        idem.execute("k", Effect(raising=ValueError("unwrapped")), policy=policy)
    assert len(idem.told(events.RanUnprotected)) == 3
    assert idem.peek("k") is None
    assert idem.run("k", lambda: "now", policy=policy).attempt.protected


def test_a_store_that_fails_is_told_to_all_who_share_the_question(idem):
    arrived, may_go = [], threading.Event()
    idem.store.before["claim"] = lambda: (arrived.append(1), may_go.wait(60))
    idem.store.inject("claim", Refuse())
    first = idem.start("k", never)
    wait_until(lambda: arrived)
    others = [idem.start("k", never) for _ in range(3)]
    wait_until(lambda: idem.sharers() == 3)
    unprotected = idem.start("k", lambda: "ran", policy=Policy(store_error="open"))
    wait_until(lambda: idem.sharers() == 4)
    may_go.set()
    for call in (first, *others):
        with pytest.raises(StoreUnavailable):
            call.result()
    assert unprotected.result() == "ran"
    assert idem.commands("claim") == 1


# --- ttl, attempts -------------------------------------------------------------------------


def test_a_result_is_kept_for_its_ttl_from_its_end(idem):
    idem.execute("k", lambda: 1, policy=Policy(ttl=50))
    assert 40 < idem.peek("k").remaining <= 50
    idem.consume("c", lambda: 1, ttl=60, policy=Policy(ttl=50))
    assert 50 < idem.peek("c").remaining <= 60


def test_after_its_ttl_it_is_a_first_request_again(idem):
    assert idem.execute("k", lambda: 1, policy=Policy(ttl=0.001)) == 1
    wait_until(lambda: idem.peek("k") is None)
    outcome = idem.run("k", lambda: 2)
    assert (outcome.value, outcome.replayed) == (2, False)


def test_after_failed_ttl_a_failure_is_forgotten_altogether(idem):
    fails(idem, ValueError(), payload=1, policy=Policy(failure="retryable", failed_ttl=0.001))
    wait_until(lambda: idem.peek("k") is None)
    assert idem.run("k", lambda: 2, payload=2).attempt.number == 1


def test_attempts_end_with_their_limit(idem):
    policy = Policy(max_attempts=2)
    fails(idem, ValueError(), policy=policy)
    fails(idem, ValueError(), policy=policy)
    with pytest.raises(AttemptsExhausted) as refusal:
        idem.execute("k", never, policy=policy)
    assert refusal.value.number == 2
    assert idem.execute("k", lambda: 1, policy=Policy(max_attempts=None)) == 1
    assert idem.execute("k", never, policy=policy) == 1, "done is done"


def test_an_attempt_of_which_nothing_ran_does_not_count(idem):
    policy = Policy(max_attempts=1, failure="final", abandoned="hold")
    for _ in range(2):
        fails(idem, NothingRan(), policy=policy)
    assert idem.run("k", lambda: 1, policy=policy).attempt.number == 1


# --- results -------------------------------------------------------------------------------


def test_a_result_beyond_the_limit_reaches_its_caller_and_nobody_else(idem):
    policy = Policy(max_result_bytes=10)
    value = "x" * 100
    assert idem.execute("k", lambda: value, policy=policy) is value
    with pytest.raises(ResultUnavailable, match="102 bytes, the policy keeps at most 10"):
        idem.execute("k", never, policy=policy)
    assert idem.consume("k", never) is False, "it was done"


SEALED = EncryptedCodec(keys={"2026": os.urandom(32)}, primary="2026")


def test_each_codec_replays_what_it_wrote(world):
    value = {"card": "4242", "at": (1, None, b"\x00")}
    codecs = {"json/1": "json", "msgpack/1": "msgpack", "aesgcm/1+json/1": SEALED}
    for name, codec in codecs.items():
        idem, key = world.engine(policy=Policy(codec=codec)), name.partition("/")[0]
        assert idem.execute(key, lambda: value) == value
        assert idem.peek(key).outcome.codec == name
        assert world.engine(policy=Policy(codec=codec)).execute(key, never) == value


def test_a_call_reads_with_its_own_codec_first(idem, memory_world):
    other = EncryptedCodec(keys={"2027": os.urandom(32)}, primary="2027")
    assert other.name == SEALED.name
    engine = memory_world.engine(policy=Policy(codec=other))
    assert engine.execute("k", lambda: 1, policy=Policy(codec=SEALED)) == 1
    assert engine.execute("k", never, policy=Policy(codec=SEALED)) == 1
    with pytest.raises(ResultUnavailable, match="a key not known here"):
        engine.execute("k", never)


def test_results_of_an_earlier_codec_are_read_as_long_as_it_is_named(memory_world):
    before = memory_world.engine(policy=Policy(codec=SEALED))
    assert before.execute("k", lambda: 1) == 1
    assert memory_world.engine(codecs=[SEALED]).execute("k", never) == 1
    with pytest.raises(ResultUnavailable, match="which is not known here"):
        memory_world.engine().execute("k", never)


def test_an_encrypted_result_is_in_no_dump_of_the_store(
    kind, tmp_path, redis_of_this_worker, redis_url
):
    secret = "the secret of card 4242"
    with World(kind, f"sqlite:///{tmp_path / 'semel.db'}") as world:
        plain, sealed = world.engine(), world.engine(policy=Policy(codec=SEALED))
        plain.execute("plain", lambda: "seen in the clear")
        assert sealed.execute("k", lambda: secret) == secret
        assert sealed.execute("k", never) == secret
    dump = b"".join(path.read_bytes() for path in tmp_path.glob("semel.db*"))
    assert b"seen in the clear" in dump, "the dump holds what is stored"
    assert b"4242" not in dump

    with World(kind, redis_url) as world:  # emptied: earlier tests may have left their own
        world.engine(policy=Policy(codec=SEALED)).execute("k", lambda: secret)
    with redis_of_this_worker.client() as client:
        stored = [client.dump(name) for name in client.scan_iter()]
        client.flushall()
    assert stored
    assert b"4242" not in b"".join(stored)


# --- presets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "days"),
    [
        (Policy.http(), 10 / 24 / 60),
        (Policy.messages(), 30),
        (Policy.job(), 1),
        (Policy.payment(), 3),
        (Policy.coupon(), 7),
    ],
)
def test_each_preset_keeps_its_records(idem, policy, days):
    idem.execute("k", lambda: 1, payload=1, policy=policy)
    assert days * 86400 - 10 < idem.peek("k").remaining <= days * 86400


def test_a_payment_compares_payloads_and_is_held_after_a_failure(idem):
    policy = Policy.payment()
    idem.execute("paid", lambda: 1, payload={"amount": 1}, policy=policy)
    with pytest.raises(PayloadMismatch):
        idem.execute("paid", never, payload={"amount": 2}, policy=policy)
    fails(idem, TimeoutError(), payload=1, policy=policy)
    with pytest.raises(OutcomeUnknown):
        idem.execute("k", never, payload=1, policy=policy)


# --- consume -------------------------------------------------------------------------------


def test_consume_keeps_only_that_it_was_done(idem):
    assert idem.consume("k", object) is True
    assert idem.told(events.ResultOmitted) == []
    assert idem.execute("k", never) is None
    assert idem.told(events.Ran)[0].size == len(b"null")
