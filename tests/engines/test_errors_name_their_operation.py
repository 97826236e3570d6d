"""Every error of a call says which operation it is about: its scope, and the digest of its key."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import shlex
import threading
import traceback
import weakref

import pytest

from engines.facade import Effect, never, wait_until
from semel import (
    AsyncIdempotency,
    AttemptsExhausted,
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    Idempotency,
    IdempotencyError,
    InvalidKey,
    LeaseLost,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    Policy,
    PreviousFailure,
    RecordUnreadable,
    ResultUnavailable,
    SerializationError,
    StoreUnavailable,
    WaitTimeout,
    current_attempt,
    events,
    open_store,
)
from semel.core.records import ClaimRequest, Identity
from semel.testing import FaultyStore, Refuse

KEY = "card-4242"
SCOPE = "payments"
IDENTITY = Identity(SCOPE, KEY)
SAID = f"[scope={SCOPE} key_digest={IDENTITY.digest.hex()}]"


def execute(idem, fn=never, **policy):
    return idem.execute(KEY, fn, scope=SCOPE, policy=Policy(**policy))


def failing(idem, **policy):
    with pytest.raises(ValueError, match="no money"):
        execute(idem, Effect(raising=ValueError("no money")), **policy)


def broken(idem, error, verb="claim"):
    idem.store.inject(verb, Refuse(error), times=100)


class Foreign:
    """A codec that only its writer knows."""

    name = "foreign"

    def encode(self, value, context, hint):
        return repr(value).encode()

    def decode(self, data, context, hint):
        return data.decode()


SITUATIONS = {}


def ends_with(kind):
    """Says which error a situation ends with."""

    def note(situation):
        SITUATIONS[situation] = kind
        return situation

    return note


@ends_with(StoreUnavailable)
def the_store_is_away(idem):
    broken(idem, StoreUnavailable("away"))
    execute(idem)


@ends_with(RecordUnreadable)
def the_record_is_damaged(idem):
    broken(idem, RecordUnreadable("cut short"))
    execute(idem)


@ends_with(ConfigError)
def the_store_has_no_table(idem):
    broken(idem, ConfigError("no table"))
    execute(idem)


@ends_with(StoreUnavailable)
def the_engine_is_closed(idem):
    idem.close()
    execute(idem)


@ends_with(NestedCall)
def the_attempt_asks_for_its_own_key(idem):
    execute(idem, lambda: execute(idem))


@ends_with(ConfigError)
def the_payload_is_missing(idem):
    execute(idem, payload_required=True)


@ends_with(SerializationError)
def the_payload_cannot_be_compared(idem):
    idem.execute(KEY, never, scope=SCOPE, payload=object())


@ends_with(PayloadMismatch)
def the_payload_is_another(idem):
    idem.execute(KEY, lambda: 1, scope=SCOPE, payload=1)
    idem.execute(KEY, never, scope=SCOPE, payload=2)


@ends_with(DuplicateRequest)
def duplicates_are_rejected(idem):
    execute(idem, lambda: 1)
    execute(idem, duplicate="reject")


def while_it_runs(idem, **policy):
    effect = Effect().held()
    running = idem.start(KEY, effect, scope=SCOPE)
    effect.wait_started()
    try:
        execute(idem, **policy)
    finally:
        effect.release()
        running.result()


@ends_with(ConcurrentRequest)
def it_runs_elsewhere(idem):
    while_it_runs(idem, concurrent="reject")


@ends_with(WaitTimeout)
def it_runs_too_long(idem):
    while_it_runs(idem, wait_timeout=0.01)


@ends_with(PreviousFailure)
def it_failed_before(idem):
    failing(idem, failure="final")
    execute(idem)


@ends_with(AttemptsExhausted)
def no_attempt_is_left(idem):
    failing(idem)
    execute(idem, max_attempts=1)


@ends_with(OutcomeUnknown)
def nobody_knows_what_happened(idem):
    failing(idem, abandoned="hold")
    execute(idem)


@ends_with(LeaseLost)
def its_record_was_removed(idem):
    execute(idem, lambda: idem.forget(KEY, scope=SCOPE))


@ends_with(LeaseLost)
def it_looks_at_its_lease(idem):
    def run():
        idem.forget(KEY, scope=SCOPE)
        wait_until(lambda: idem.told(events.LostLease))
        current_attempt().check()

    execute(idem, run, lease=0.3)


@ends_with(ResultUnavailable)
def its_result_was_too_large(idem):
    execute(idem, lambda: "large", max_result_bytes=1)
    execute(idem)


@ends_with(ResultUnavailable)
def its_result_cannot_be_read(idem):
    execute(idem, lambda: "text", codec=Foreign())
    execute(idem)


@ends_with(DuplicateRequest)
def a_replayed_result_is_set(idem):
    execute(idem, lambda: 1)
    idem.run(KEY, never, scope=SCOPE).attempt.result = 2


@ends_with(StoreUnavailable)
def peek_without_a_store(idem):
    broken(idem, StoreUnavailable("away"), "get")
    idem.peek(KEY, scope=SCOPE)


@ends_with(StoreUnavailable)
def forget_without_a_store(idem):
    broken(idem, StoreUnavailable("away"), "forget")
    idem.forget(KEY, scope=SCOPE)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_an_error_names_its_scope_and_key_digest(memory_world, situation):
    idem = memory_world.engine()
    with pytest.raises(SITUATIONS[situation]) as raised:
        situation(idem)
    error = raised.value
    assert (error.scope, error.key_digest) == (SCOPE, IDENTITY.digest.hex())
    assert str(error).endswith(SAID)
    assert KEY not in str(error)
    assert SAID not in error.text
    assert str(error).startswith(error.text)
    for travelled in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301 - our own
        assert str(travelled) == str(error)
        assert vars(travelled) == vars(error)


def test_every_event_of_a_rejected_call_names_the_same_digest(memory_world):
    idem = memory_world.engine()
    with pytest.raises(OutcomeUnknown) as raised:
        nobody_knows_what_happened(idem)
    assert {event.key_digest for event in idem.events} == {raised.value.key_digest}


# --- marks -----------------------------------------------------------------------------------

ONE = {
    "check": ("get", ()),
    "exists": ("get", ()),
    "get_result": ("get", ()),
    "ttl": ("get", ()),
    "set": ("put", ()),
    "set_result": ("put", (1,)),
    "refresh": ("touch", ()),
    "delete": ("forget_many", ()),
    "do": ("claim", (lambda: None,)),
}


@pytest.mark.parametrize("method", ONE)
def test_a_mark_without_a_store_names_its_operation(memory_world, method):
    idem = memory_world.engine()
    verb, more = ONE[method]
    broken(idem, StoreUnavailable("away"), verb)
    ask = getattr(idem.engine.marks, method)
    with pytest.raises(StoreUnavailable) as raised:
        memory_world.kind.finish(ask, KEY, *more, scope=SCOPE)
    assert str(raised.value) == f"away {SAID}"


def test_a_mark_that_is_not_there_names_its_operation(memory_world):
    marks = memory_world.engine().engine.marks
    with pytest.raises(ResultUnavailable) as raised:
        memory_world.kind.finish(marks.get_result, KEY, scope=SCOPE)
    assert str(raised.value).endswith(SAID)


def test_a_mark_that_cannot_be_kept_names_its_operation(memory_world):
    marks = memory_world.engine().engine.marks
    with pytest.raises(SerializationError) as raised:
        memory_world.kind.finish(marks.set_result, KEY, object(), scope=SCOPE)
    assert str(raised.value).endswith(SAID)


def test_a_batch_of_marks_that_fails_as_a_whole_names_no_single_one(memory_world):
    idem = memory_world.engine()
    for verb in ("get_many", "forget_many"):
        broken(idem, StoreUnavailable("away"), verb)
    for ask in (idem.engine.marks.check_many, idem.engine.marks.delete_many):
        with pytest.raises(StoreUnavailable) as raised:
            memory_world.kind.finish(ask, [KEY, "other"], scope=SCOPE)
        assert (raised.value.scope, raised.value.key_digest) == (None, None)
        assert str(raised.value) == "away"


def test_one_of_many_marks_that_is_rejected_is_named(memory_world):
    idem = memory_world.engine()
    shared = StoreUnavailable("rejected")
    answers = [True, shared]

    def half(asks):
        assert len(asks) == len(answers)
        return answers

    async def half_async(asks):
        return half(asks)

    idem.store.send = half if memory_world.name == "threads" else half_async
    with pytest.raises(StoreUnavailable) as raised:
        memory_world.kind.finish(idem.engine.marks.set_many, ["other", KEY], scope=SCOPE)
    assert str(raised.value) == f"rejected {SAID}"
    assert str(shared) == "rejected"


def test_clearing_names_the_mark_that_could_not_be_removed(memory_world):
    idem = memory_world.engine()
    memory_world.kind.finish(idem.engine.marks.set, KEY, scope=SCOPE)
    broken(idem, StoreUnavailable("away"), "touch")
    with pytest.raises(StoreUnavailable) as raised:
        memory_world.kind.finish(idem.engine.marks.clear, "card-", scope=SCOPE)
    assert str(raised.value) == f"away {SAID}"


# --- whose error it is -----------------------------------------------------------------------


def test_an_error_of_the_function_reaches_the_caller_as_it_is(memory_world):
    own = StoreUnavailable("of another system")
    with pytest.raises(StoreUnavailable) as raised:
        execute(memory_world.engine(), Effect(raising=own))
    assert raised.value is own
    assert str(own) == "of another system"


def test_the_error_of_a_call_inside_another_names_the_inner_one(memory_world):
    idem = memory_world.engine()
    idem.execute("inner", lambda: 1)
    with pytest.raises(DuplicateRequest) as raised:
        execute(idem, lambda: idem.execute("inner", never, policy=Policy(duplicate="reject")))
    assert (raised.value.scope, raised.value.key_digest) == (
        "default",
        Identity("default", "inner").digest.hex(),
    )


def test_a_key_that_cannot_be_used_names_no_operation(memory_world):
    with pytest.raises(InvalidKey) as raised:
        memory_world.engine().execute("two words", never, scope=SCOPE)
    assert (raised.value.scope, raised.value.key_digest) == (None, None)


def test_a_store_that_raises_one_error_for_all_does_not_mix_up_operations(memory_world):
    idem = memory_world.engine()
    shared = StoreUnavailable("away")
    shared.add_note("looked at twice")
    broken(idem, shared)
    raised = {}
    for key in ("a", "b"):
        with pytest.raises(StoreUnavailable) as caught:
            idem.execute(key, never)
        raised[key] = caught.value
    assert {key: error.key_digest for key, error in raised.items()} == {
        key: Identity("default", key).digest.hex() for key in ("a", "b")
    }
    assert shared.key_digest is None
    raised["a"].add_note("this one is mine")
    assert raised["b"].__notes__ == shared.__notes__ == ["looked at twice"]


def test_each_caller_of_a_shared_execution_gets_an_error_of_its_own(memory_world):
    idem = memory_world.engine()
    asked, answer = threading.Event(), threading.Event()

    def away():
        asked.set()
        assert answer.wait(60)

    idem.store.before["claim"] = away
    broken(idem, StoreUnavailable("away"))
    first = idem.start(KEY, never, scope=SCOPE)
    assert asked.wait(60)
    others = [idem.start(KEY, never, scope=SCOPE) for _ in range(3)]
    wait_until(lambda: idem.sharers() == len(others))
    answer.set()
    errors = [call.exception(60) for call in (first, *others)]
    assert [str(error) for error in errors] == [f"away {SAID}"] * 4
    assert len({id(error) for error in errors}) == len(errors)
    assert idem.commands("claim") == 1, "they shared one"


def test_the_cause_and_the_traceback_of_an_error_are_kept(memory_world):
    cause = OSError("the cable")
    error = ConfigError("no table")
    error.__cause__ = cause
    idem = memory_world.engine()
    broken(idem, error)
    with pytest.raises(ConfigError) as raised:
        execute(idem)
    shown = "".join(traceback.format_exception(raised.value))
    assert raised.value.__cause__ is cause
    assert shown.count("ConfigError: no table") == 1
    assert "testing/faults.py" in shown, "where it was raised"


def test_an_error_raised_while_another_is_handled_says_so():
    store = FaultyStore(open_store("memory://"))
    store.inject("claim", Refuse(ConfigError("no table")))
    idem = Idempotency(store)

    def handle():
        try:
            return 1 / 0
        except ZeroDivisionError:
            return idem.execute(KEY, never)

    with pytest.raises(ConfigError) as raised:
        handle()
    assert type(raised.value.__context__) is ZeroDivisionError
    assert "ZeroDivisionError" in "".join(traceback.format_exception(raised.value))


# --- the outcome that nobody knows ---------------------------------------------------------


def test_a_handler_that_raised_is_not_called_abandoned(memory_world):
    idem = memory_world.engine()
    failing(idem, abandoned="hold")
    with pytest.raises(OutcomeUnknown) as raised:
        execute(idem)
    assert raised.value.text == (
        "attempt 1 may have taken effect: its function raised ValueError in this "
        "process, and its record is held"
    )
    assert idem.told(events.RejectedUnknown)[-1].number == 1


def test_what_another_process_did_is_told_as_far_as_it_is_known(memory_world):
    failing(memory_world.engine(), abandoned="hold")
    with pytest.raises(OutcomeUnknown) as raised:
        execute(memory_world.engine())
    assert raised.value.text == (
        "attempt 1 may have taken effect: its function raised, or its process stopped, "
        "and its record is held"
    )


def test_the_ending_of_an_earlier_attempt_is_not_told_of_a_later_one(memory_world):
    idem = memory_world.engine()
    failing(idem, abandoned="hold")
    idem.forget(KEY, scope=SCOPE)
    failing(idem)  # attempt 1, which may run again
    ask = ClaimRequest(IDENTITY, b"somebody....", None, 0.001, 60.0, hold=True)
    idem.ask_store("claim", ask)  # attempt 2, whose process stops
    wait_until(lambda: idem.peek(KEY, scope=SCOPE).abandoned)
    with pytest.raises(
        OutcomeUnknown, match="attempt 2 may have taken effect: its function raised, or"
    ):
        execute(idem)


def test_an_engine_remembers_only_so_many_endings(memory_world, monkeypatch):
    monkeypatch.setattr("semel.engine.outcomes.ENDINGS_KEPT", 2)
    idem = memory_world.engine()
    told = []
    for key in ("a", "b", "c"):
        with pytest.raises(ValueError, match="no"):
            idem.execute(key, Effect(raising=ValueError("no")), policy=Policy(abandoned="hold"))
    for key in ("a", "b", "c"):
        with pytest.raises(OutcomeUnknown) as raised:
            idem.execute(key, never)
        told.append("ValueError" in str(raised.value))
    assert told == [False, False, True]


def test_the_error_has_the_command_that_decides(memory_world):
    idem = memory_world.engine()
    odd = "it's $HOME"
    scope = odd.replace(" ", "")
    with pytest.raises(ValueError, match="no"):
        idem.execute(
            KEY, Effect(raising=ValueError("no")), scope=scope, policy=Policy(abandoned="hold")
        )
    with pytest.raises(OutcomeUnknown) as raised:
        idem.execute(KEY, never, scope=scope)
    command, instead, retryable = re.findall(r"`([^`]+)`", str(raised.value))
    digest = Identity(scope, KEY).digest.hex()
    words = ["semel", "resolve", "--digest", scope, digest, "--succeeded", "JSON"]
    assert shlex.split(command) == words
    assert shlex.split(instead) == ["--failed", "TEXT"]
    assert shlex.split(retryable) == ["--retryable"]


def test_a_wrong_scope_shows_nothing_of_the_inside_in_its_traceback(memory_world):
    with pytest.raises(InvalidKey) as raised:
        memory_world.engine().execute(KEY, never, scope="two words")
    assert raised.value.__context__ is None


def test_an_unknown_outcome_without_an_operation_names_no_command():
    assert str(OutcomeUnknown("nobody knows")) == "nobody knows"


def test_the_plain_text_of_an_error_has_no_operation():
    assert IdempotencyError("odd").text == "odd"


# --- and keeps nothing alive -----------------------------------------------------------------


class Request:
    """What a caller has at hand while it asks, such as the body of a request."""


@pytest.fixture
def without_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_what_a_rejected_caller_held_is_free_at_once():
    def ask():
        request = Request()
        with pytest.raises(DuplicateRequest):
            execute(idem, duplicate="reject")
        return weakref.ref(request)

    with Idempotency("memory://") as idem:
        execute(idem, lambda: "paid")
        assert ask()() is None


@pytest.mark.usefixtures("without_collector")
async def test_what_a_rejected_async_caller_held_is_free_at_once():
    async def pay():
        return "paid"

    async def ask():
        request = Request()
        with pytest.raises(DuplicateRequest):
            await execute(idem, pay, duplicate="reject")
        return weakref.ref(request)

    async with AsyncIdempotency("memory://") as idem:
        await execute(idem, pay)
        assert (await ask())() is None
