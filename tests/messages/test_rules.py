"""Which operation a message is, and what becomes of it: the table of `semel.messages`."""

from __future__ import annotations

import pytest

from semel import (
    AttemptsExhausted,
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    Idempotency,
    InvalidKey,
    LeaseLost,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    Policy,
    PreviousFailure,
    RecordUnreadable,
    ResultUnavailable,
    RetryTransaction,
    SerializationError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    TooManyWaiting,
    ValueRejected,
    WaitTimeout,
)
from semel.messages import (
    JITTER,
    LONGEST,
    SOONEST,
    STORE_PAUSE,
    Ack,
    Fail,
    Later,
    Message,
    MessageRules,
    Reject,
)

DAY = 86400.0


def rules(options=(), *, framework_retries=False, not_done=(), engine=None, default="orders"):
    with Idempotency("memory://") as plain:
        setup = (engine or plain).internals.setup
        return MessageRules(
            dict(options),
            default_consumer=default,
            framework_retries=framework_retries,
            not_done=not_done,
            levels=setup.policies_of,
            resolved=setup.rules,
        )


# --- which operation a message is ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message", "key"),
    [
        ({}, Message(id="m-1"), "m-1"),
        ({}, Message(id="m-1", headers={"idempotency-key": "k-1"}), "k-1"),
        ({}, Message(id="m-1", headers={"Idempotency-Key": "k-1", "x": 1}), "k-1"),
        ({}, Message(headers={"idempotency-key": b"k-1"}), "k-1"),
        ({}, Message(id="m-1", headers={"other": "k-1"}), "m-1"),
        ({"key": "order:{body.number}"}, Message(id="m-1", body=b'{"number": 42}'), "order:42"),
        ({"key": "order:{body[number]}"}, Message(body={"number": 42}), "order:42"),
        ({"key": "{headers[tenant]}:{message.id}"}, Message("7", {"tenant": "a"}), "a:7"),
        ({"key": lambda message: message.headers["n"]}, Message("m-1", {"n": "9"}), "9"),
        ({"key": lambda message: message.body}, Message("m-1", body=b"9"), "9"),
        ({"missing": "digest"}, Message(id="m-1"), "m-1"),
    ],
)
def test_the_id_is_the_expression_else_the_header_else_the_brokers_own(options, message, key):
    assert rules(options).key_of(message) == key


@pytest.mark.parametrize(
    ("options", "message", "said"),
    [
        ({}, Message(), "no id"),
        ({}, Message(id=""), "no id"),
        ({}, Message(headers={"idempotency-key": 7}), "int, not a string"),
        ({}, Message(headers={"idempotency-key": b"\xff"}), "bytes that are no text"),
        # An expression that fails is never a reason to look for the id elsewhere.
        ({"key": "{body.number}"}, Message(id="m-1", body=b"{}"), "number"),
        ({"key": "{body.number}"}, Message(id="m-1", body=b"no json"), "not JSON"),
        ({"key": "{body.number}"}, Message(id="m-1", body=b"[" * 100_000), "not JSON"),
        ({"key": lambda message: message.headers["n"]}, Message(id="m-1"), "raised KeyError"),
        ({"key": lambda _: None}, Message(id="m-1"), "found no id"),
        (
            {"key": lambda _: 7},
            Message(id="m-1"),
            "^key= returned an int; return a string, such as",
        ),
        ({"key": lambda _: 7.5}, Message(id="m-1"), "^key= returned a float; return a string"),
        ({"key": lambda _: b"\xff"}, Message(id="m-1"), "what key= returned has bytes"),
    ],
)
def test_a_message_without_a_usable_id_is_refused_in_plain_words(options, message, said):
    with pytest.raises(InvalidKey, match=said):
        rules(options).key_of(message)


def test_a_digest_of_the_body_can_be_the_id():
    digested = rules({"missing": "digest"})
    first, same, other = (digested.key_of(Message(body=body)) for body in (b"a", b"a", b"b"))
    assert first == same != other


def test_what_is_compared_is_the_body_or_what_a_function_says():
    message = Message(id="m-1", headers={"n": 1}, body=b"body")
    assert rules().payload_of(message) == b"body"
    assert rules({"payload": lambda message: message.headers}).payload_of(message) == {"n": 1}
    with pytest.raises(SerializationError, match="payload= raised KeyError"):
        rules({"payload": lambda message: message.headers["m"]}).payload_of(message)


# --- options ---------------------------------------------------------------------------------


async def awaited(message):
    return message.id


class Awaited:
    async def __call__(self, message):
        return message.body


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"consumers": "mailer"}, "there is no option 'consumers'; known: consumer, key"),
        ({"consumer": 7}, "consumer must be a string"),
        ({"consumer": ""}, "consumer: the name is empty"),
        ({"consumer": "two words"}, "consumer: the name"),
        ({"consumer": "semel.audit"}, "consumer: .* is reserved"),
        ({"key": 7}, "key must be a template, a function or None; got 7"),
        ({"key": "{number}"}, "there is no argument 'number'; there are: message, headers, body"),
        ({"key": "fixed"}, "every call would have the same key"),
        ({"key": awaited}, "key must be a plain function"),
        ({"payload": Awaited()}, "payload must be a plain function"),
        ({"missing": "invent"}, "missing must be 'reject' or 'digest'; got 'invent'"),
        ({"payload": "body"}, "payload must be a function or None; got 'body'"),
        ({"policy": {"ttl": 5}}, "policy must be a Policy, not dict"),
        ({"dead_letters": "dead"}, "dead_letters must be True or False; got 'dead'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_handled(options, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        rules(options)


@pytest.mark.parametrize("consumer", ["", "x" * 300])
def test_the_name_of_each_consumer_of_an_engine_is_checked(consumer):
    with Idempotency("memory://") as engine:
        rules({"consumer": "mailer"}, engine=engine)  # with the same policy
        with pytest.raises(ConfigError, match="consumer: the name"):
            rules({"consumer": consumer}, engine=engine)


def test_a_consumer_is_needed():
    with pytest.raises(ConfigError, match=r"consumer must be a string.*got None"):
        rules(default=None)
    assert rules(default="queue").consumer == "queue"
    assert rules({"consumer": "mailer"}, default="queue").consumer == "mailer"


def test_a_message_that_is_done_is_remembered_for_thirty_days_unless_a_policy_says_otherwise():
    assert rules().policy.ttl == 30 * DAY
    assert rules({"policy": Policy(ttl=60)}).policy.ttl == 60
    with Idempotency("memory://", policy=Policy(ttl=70)) as engine:
        assert rules(engine=engine).policy.ttl == 70
    with Idempotency("memory://", scopes={"orders": Policy(ttl=80)}) as engine:
        assert rules(engine=engine).policy.ttl == 80
        assert rules({"consumer": "mailer"}, engine=engine).policy.ttl == 30 * DAY


def test_with_max_attempts_the_count_is_kept_as_long_as_the_record():
    assert rules({"policy": Policy(max_attempts=3)}).policy.failed_ttl == 30 * DAY
    longer = Policy(max_attempts=3, ttl=60, failed_ttl=600)
    assert rules({"policy": longer}).policy.failed_ttl == 600
    assert rules().policy.failed_ttl < DAY


def test_what_the_framework_raises_itself_is_not_done_beside_what_the_policy_names():
    policy = Policy(not_done=(KeyError,))
    assert rules({"policy": policy}, not_done=(OSError,)).policy.not_done == (KeyError, OSError)


# --- what becomes of a message -----------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [DuplicateRequest(), ResultUnavailable("it was too large")], ids=lambda e: e.code
)
def test_what_was_done_before_is_acknowledged(error):
    assert rules().verdict_without_run(error) == Ack(replayed=True, has_value=False)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ConcurrentRequest(retry_after=20.0), 20.0),
        (ConcurrentRequest(), SOONEST),
        (TooManyWaiting(retry_after=0.2), SOONEST),
        (WaitTimeout(retry_after=7.0), 7.0),
        (LeaseLost("lost"), SOONEST),
        (RetryTransaction("again"), SOONEST),
        (StoreUnavailable("away"), STORE_PAUSE),
        (StoreRefused("a wrong password"), STORE_PAUSE),
        (StoreFull("full"), STORE_PAUSE),
    ],
    ids=lambda value: getattr(value, "code", None),
)
@pytest.mark.parametrize("dead_letters", [True, False])
def test_a_problem_that_passes_is_never_a_reason_to_reject(error, seconds, dead_letters):
    verdict = rules({"dead_letters": dead_letters}).verdict_without_run(error)
    assert isinstance(verdict, Later)
    assert seconds <= verdict.seconds <= seconds * (1 + JITTER)
    assert verdict.reason == str(error)


@pytest.mark.parametrize(
    "error",
    [
        InvalidKey("no id"),
        SerializationError("a socket"),
        ValueRejected("too long"),
        PayloadMismatch(),
        PreviousFailure("ValueError", "no"),
        AttemptsExhausted(3),
        RecordUnreadable("of a later version"),
    ],
    ids=lambda error: error.code,
)
def test_a_problem_that_never_passes_is_a_reason_to_reject(error):
    assert rules().verdict_without_run(error) == Reject(str(error), error)


def test_what_is_held_is_rejected_where_dead_letters_go_somewhere_else_it_stays():
    held = OutcomeUnknown("nobody knows")
    assert rules({"dead_letters": True}).verdict_without_run(held) == Reject(str(held), held)
    assert rules().verdict_without_run(held) == Later(LONGEST, str(held), held)


@pytest.mark.parametrize("error", [ConfigError("wrong"), NestedCall("inside")])
def test_an_error_of_the_program_stops_the_consumer(error):
    with pytest.raises(type(error)):
        rules().verdict_without_run(error)
    with pytest.raises(type(error)):
        rules(framework_retries=True).verdict_of_failure(error, 1, "forget")


@pytest.mark.parametrize("framework_retries", [True, False])
@pytest.mark.parametrize("recorded", ["final", "unknown"])
def test_a_failure_recorded_as_final_or_unknown_is_rejected_and_not_retried(
    recorded, framework_retries
):
    error = ValueError("no such account")
    verdict = rules(framework_retries=framework_retries).verdict_of_failure(error, 1, recorded)
    assert isinstance(verdict, Reject)
    assert verdict.error is error
    assert "ValueError: no such account" in verdict.reason


@pytest.mark.parametrize("recorded", ["forget", "retryable", None])
def test_any_other_failure_is_the_frameworks_to_retry(recorded):
    error = ValueError("not yet")
    assert rules(framework_retries=True).verdict_of_failure(error, 9, recorded) == Fail(error)


def test_without_a_framework_a_failure_is_delivered_again_ever_later():
    error = ValueError("not yet")
    verdicts = [rules().verdict_of_failure(error, number, "forget") for number in (1, 2, 5, 9, 999)]
    assert [verdict.seconds for verdict in verdicts] == [1.0, 2.0, 16.0, 256.0, LONGEST]
    assert verdicts[0].reason == "its handler raised ValueError: not yet"


def test_without_a_framework_the_last_attempt_that_the_policy_allows_is_the_last():
    error = ValueError("never")
    limited = rules({"policy": Policy(max_attempts=3)})
    assert isinstance(limited.verdict_of_failure(error, 2, "forget"), Later)
    verdict = limited.verdict_of_failure(error, 3, "forget")
    assert isinstance(verdict, Reject)
    assert "failed 3 times" in verdict.reason


class Odd(Exception):
    """An error whose text cannot be had."""

    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [(Odd(), "Odd: (its text cannot be read)"), (ValueError("\udcff"), r"ValueError: \udcff")],
)
def test_an_error_with_an_odd_text_has_a_verdict_too(error, said):
    assert rules().verdict_of_failure(error, 1, None).reason == f"its handler raised {said}"
