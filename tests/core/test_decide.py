"""What an engine does with each answer of a store and each end of a function."""

from __future__ import annotations

import pytest

from semel.core.codec import encode_failure
from semel.core.decide import (
    NothingRan,
    Reject,
    Verdict,
    Wait,
    decide,
    verdict,
    waited_too_long,
)
from semel.core.policy import Policy, resolve
from semel.core.records import (
    Abandoned,
    Busy,
    Claimed,
    Encoded,
    Exhausted,
    Finished,
    Mismatch,
    State,
)
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    SerializationError,
    WaitTimeout,
)

PLAIN = resolve()
GUARD = resolve(Policy(duplicate="reject", message="already on its way"))
IMPATIENT = resolve(Policy(concurrent="reject", message="one at a time"))
HELD = resolve(Policy(abandoned="hold"))

DONE = Finished(State.SUCCEEDED, Encoded("json/1", b"1"), 1, 77, 60.0)


def failed(outcome):
    return Finished(State.FAILED, outcome, 1, 77, 60.0)


def refusal(claim, rules=PLAIN):
    step = decide(claim, rules)
    assert isinstance(step, Reject)
    return step.error


# --- the answers of a store ----------------------------------------------------------------


@pytest.mark.parametrize("rules", [PLAIN, GUARD, IMPATIENT, HELD])
def test_a_claim_that_was_given_is_run(rules):
    claimed = Claimed(1, 77)
    assert decide(claimed, rules) is claimed


def test_a_success_is_replayed():
    assert decide(DONE, PLAIN) is DONE


def test_guard_mode_refuses_a_duplicate_with_the_message_of_its_policy():
    error = refusal(DONE, GUARD)
    assert isinstance(error, DuplicateRequest)
    assert str(error) == "already on its way"
    assert (
        str(refusal(DONE, resolve(Policy(duplicate="reject")))) == "this operation was done before"
    )


@pytest.mark.parametrize("rules", [PLAIN, GUARD])
def test_a_failure_for_good_is_told_with_its_type_and_message(rules):
    error = refusal(failed(encode_failure(ValueError("no such order"))), rules)
    assert isinstance(error, PreviousFailure)
    assert (error.type_name, error.message) == ("ValueError", "no such order")


def test_a_failure_without_a_description_is_still_a_failure():
    error = refusal(failed(None))
    assert isinstance(error, PreviousFailure)
    assert error.type_name == "Unknown"


def test_a_description_that_cannot_be_read_is_a_typed_error():
    with pytest.raises(SerializationError):
        decide(failed(Encoded("failure", b"\xff")), PLAIN)


def test_a_running_attempt_is_waited_for_or_refused_as_the_policy_says():
    assert decide(Busy(12.0), PLAIN) == Wait(12.0)
    assert decide(Busy(12.0), GUARD) == Wait(12.0)
    error = refusal(Busy(12.0), IMPATIENT)
    assert isinstance(error, ConcurrentRequest)
    assert (str(error), error.retry_after) == ("one at a time", 12.0)


def test_another_payload_is_refused_and_an_older_one_is_named_so():
    error = refusal(Mismatch())
    assert isinstance(error, PayloadMismatch)
    assert not error.superseded
    assert refusal(Mismatch(superseded=True)).superseded


def test_a_held_record_has_an_unknown_outcome():
    error = refusal(Abandoned(4))
    assert isinstance(error, OutcomeUnknown)
    assert "attempt 4" in str(error)


def test_no_attempts_left_is_an_error_that_counts_them():
    error = refusal(Exhausted(3))
    assert isinstance(error, AttemptsExhausted)
    assert error.number == 3


def test_patience_ends_with_a_timeout_and_in_guard_mode_with_a_refusal():
    assert isinstance(waited_too_long(PLAIN, 5.0), WaitTimeout)
    error = waited_too_long(GUARD, 5.0)
    assert isinstance(error, ConcurrentRequest)
    assert (str(error), error.retry_after) == ("already on its way", 5.0)


# --- the end of a function -----------------------------------------------------------------


def rules_for(failure=None, abandoned="takeover", not_done=()):
    words = {} if failure is None else {"failure": failure}
    return resolve(Policy(abandoned=abandoned, not_done=not_done, **words))


@pytest.mark.parametrize(("abandoned", "default"), [("takeover", "forget"), ("hold", "unknown")])
class TestVerdict:
    def test_says_by_default_what_is_safe(self, abandoned, default):
        assert verdict(ValueError(), rules_for(abandoned=abandoned)) == Verdict(default)

    @pytest.mark.parametrize("failure", ["forget", "retryable", "final", "unknown"])
    def test_follows_the_policy(self, abandoned, default, failure):
        assert verdict(ValueError(), rules_for(failure, abandoned)) == Verdict(failure)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit()])
    def test_of_an_interruption_is_the_default_whatever_the_policy_says(
        self, abandoned, default, error
    ):
        assert verdict(error, rules_for("final", abandoned)) == Verdict(default)

    def test_of_a_function_is_taken(self, abandoned, default):
        def by_kind(error):
            return "final" if isinstance(error, KeyError) else "retryable"

        rules = rules_for(by_kind, abandoned)
        assert verdict(KeyError(), rules) == Verdict("final")
        assert verdict(ValueError(), rules) == Verdict("retryable")

    @pytest.mark.parametrize("nonsense", ["nonsense", None, 3, [], {}])
    def test_of_a_function_that_talks_nonsense_is_the_default(self, abandoned, default, nonsense):
        said = verdict(ValueError(), rules_for(lambda _: nonsense, abandoned))
        assert said == Verdict(default, "it answered none of forget, retryable, final, unknown")

    def test_of_a_function_that_raises_is_the_default(self, abandoned, default):
        def broken(error):
            raise RuntimeError("the judge is ill")

        said = verdict(ValueError(), rules_for(broken, abandoned))
        assert said == Verdict(default, "it raised RuntimeError")

    def test_of_a_coroutine_that_nobody_began_is_forget(self, abandoned, default):
        error = ConfigError("a coroutine")
        assert verdict(error, rules_for("final", abandoned)) == Verdict("final")
        error.nothing_ran = True
        assert verdict(error, rules_for("final", abandoned)) == Verdict("forget")

    def test_of_what_proves_that_nothing_happened_is_forget(self, abandoned, default):
        rules = rules_for("final", abandoned, not_done=(ConnectionRefusedError, KeyboardInterrupt))
        assert verdict(ConnectionRefusedError(), rules) == Verdict("forget")
        assert verdict(KeyboardInterrupt(), rules) == Verdict("forget")
        assert verdict(ConnectionError(), rules) == Verdict("final")


@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_where_nothing_ran_the_key_is_free_whatever_the_policy_says(abandoned):
    assert verdict(NothingRan(), rules_for("final", abandoned)) == Verdict("forget")
