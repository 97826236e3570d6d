"""Events: each one is really announced in its situation, told in one structured log record, and
heard by hooks that can never break a call."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from engines.facade import KINDS, Effect, World, never, wait_until
from semel import Idempotency, Policy, events
from semel.core.records import ClaimRequest, Identity, State
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    DuplicateRequest,
    IdempotencyError,
    LeaseLost,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    StoreUnavailable,
    WaitTimeout,
)
from semel.repair.decisions import Decision
from semel.testing import Refuse

KEY = "card-4242"
SECRET = "the password is hunter2"
IDENTITY = Identity("default", KEY)
SHORT = Policy(lease=0.3)


@pytest.fixture(params=KINDS)
def world(request, monkeypatch) -> Iterator[World]:
    monkeypatch.setattr("semel.engine.outcomes.SAVE_FOR", 0.1)
    with World(request.param, "memory://") as opened:
        yield opened


# --- every event in its situation ----------------------------------------------------------


SITUATIONS = {}


def announces(kind):
    """Says which event a situation ends with; the situation gives the fields to expect of it."""

    def note(situation):
        SITUATIONS[situation] = kind
        return situation

    return note


@announces(events.Ran)
def ran(idem):
    idem.execute(KEY, lambda: "paid")
    return {"number": 1, "size": len('"paid"')}


@announces(events.Replayed)
def replayed(idem):
    idem.execute(KEY, lambda: "paid")
    idem.execute(KEY, never)
    return {"number": 1, "waited": False}


@announces(events.Replayed)
def replayed_after_waiting(idem):
    effect = Effect().held()
    first = idem.start(KEY, effect)
    effect.wait_started()
    second = idem.start(KEY, never)
    wait_until(idem.sharers)
    effect.release()
    assert first.result() == second.result() == "done"
    return {"number": 1, "waited": True}


def while_it_runs(idem, policy, error):
    effect = Effect().held()
    first = idem.start(KEY, effect)
    effect.wait_started()
    with pytest.raises(error):
        idem.execute(KEY, never, policy=policy)
    effect.release()
    first.result()


@announces(events.RejectedBusy)
def rejected_busy(idem):
    while_it_runs(idem, Policy(concurrent="reject"), ConcurrentRequest)
    return {}


@announces(events.RejectedBusy)
def rejected_after_waiting(idem):
    while_it_runs(idem, Policy(wait_timeout=0.01), WaitTimeout)
    return {}


@announces(events.RejectedDuplicate)
def rejected_duplicate(idem):
    idem.execute(KEY, lambda: "paid")
    with pytest.raises(DuplicateRequest):
        idem.execute(KEY, never, policy=Policy(duplicate="reject"))
    return {"number": 1}


def failing(idem, **policy):
    with pytest.raises(ValueError, match=SECRET):
        idem.execute(KEY, Effect(raising=ValueError(SECRET)), policy=Policy(**policy))


@announces(events.Failed)
def failed(idem):
    failing(idem, failure="retryable")
    return {"number": 1, "verdict": "retryable", "error": "ValueError"}


@announces(events.FailureUndecided)
def failure_undecided(idem):
    failing(idem, failure=lambda error: 1 / 0)
    return {"number": 1, "verdict": "forget", "problem": "it raised ZeroDivisionError"}


@announces(events.Parked)
def parked(idem):
    failing(idem, abandoned="hold")
    return {"number": 1, "error": "ValueError"}


@announces(events.RejectedFailure)
def rejected_failure(idem):
    failing(idem, failure="final")
    with pytest.raises(PreviousFailure):
        idem.execute(KEY, never)
    return {"number": 1}


@announces(events.RejectedUnknown)
def rejected_unknown(idem):
    failing(idem, abandoned="hold")
    with pytest.raises(OutcomeUnknown):
        idem.execute(KEY, never)
    return {"number": 1}


@announces(events.RejectedExhausted)
def rejected_exhausted(idem):
    failing(idem)
    with pytest.raises(AttemptsExhausted):
        idem.execute(KEY, never, policy=Policy(max_attempts=1))
    return {"number": 1}


@announces(events.Mismatched)
def mismatched(idem):
    idem.execute(KEY, lambda: "paid", payload={"amount": 1})
    with pytest.raises(PayloadMismatch):
        idem.execute(KEY, never, payload={"amount": 2})
    return {}


@announces(events.TakenOver)
def taken_over(idem):
    idem.ask_store("claim", ClaimRequest(IDENTITY, b"somebody....", None, 0.001, 60.0))
    wait_until(lambda: idem.peek(KEY).abandoned)
    assert idem.execute(KEY, lambda: "paid") == "paid"
    return {"number": 2}


@announces(events.LostLease)
def lease_lost(idem):
    with pytest.raises(LeaseLost):
        idem.execute(KEY, lambda: idem.forget(KEY))
    return {"number": 1}


@announces(events.LostLease)
def lease_lost_by_a_failing_function(idem):
    def forgotten_and_failing():
        idem.forget(KEY)
        raise ValueError(SECRET)

    with pytest.raises(ValueError, match=SECRET):
        idem.execute(KEY, forgotten_and_failing)
    return {"number": 1}


@announces(events.LostLease)
def lease_lost_at_a_renewal(idem):
    def forgotten_and_long():
        idem.forget(KEY)
        wait_until(lambda: idem.told(events.LostLease))

    with pytest.raises(LeaseLost):
        idem.execute(KEY, forgotten_and_long, policy=SHORT)
    return {"number": 1}


@announces(events.LostLease)
def lease_in_danger(idem):
    idem.break_renewals()

    def long():
        wait_until(lambda: idem.told(events.LostLease))

    idem.execute(KEY, long, policy=SHORT)
    return {"number": 1}


@announces(events.RenewalFailed)
def renewal_failed(idem):
    idem.break_renewals(times=1)
    idem.execute(KEY, lambda: wait_until(idem.renewals_failed), policy=Policy(lease=1))
    return {"number": 1}


@announces(events.ResultOmitted)
def result_omitted(idem):
    idem.execute(KEY, lambda: "paid", policy=Policy(max_result_bytes=1))
    return {
        "number": 1,
        "reason": "it has 6 bytes, the policy keeps at most 1",
    }


@announces(events.ResultNotStored)
def result_not_stored(idem):
    idem.store.inject("complete", Refuse(), times=1000)
    assert idem.execute(KEY, lambda: "paid", policy=Policy(lease=2)) == "paid"
    return {"number": 1}


@announces(events.ResultStoredLate)
def result_stored_late(idem):
    result_not_stored(idem)
    idem.store.heal()
    wait_until(lambda: idem.told(events.ResultStoredLate))
    assert idem.execute(KEY, never) == "paid"
    return {"number": 1}


@announces(events.LostLease)
def refused_late(idem):
    result_not_stored(idem)
    idem.ask_store("forget", IDENTITY)
    idem.store.heal()
    wait_until(lambda: idem.told(events.LostLease))
    return {"number": 1}


@announces(events.StoreFailed)
def store_failed(idem):
    idem.store.inject("claim", Refuse())
    with pytest.raises(StoreUnavailable):
        idem.execute(KEY, never)
    return {"verb": "claim", "number": None}


@announces(events.StoreFailed)
def store_failed_at_the_save(idem):
    idem.store.inject("complete", Refuse())
    idem.execute(KEY, lambda: "paid")
    return {"verb": "complete", "number": 1}


@announces(events.StoreFailed)
def store_failed_at_a_failure(idem):
    idem.store.inject("fail", Refuse(OSError("not even ours")))
    failing(idem)
    return {"verb": "fail", "number": 1}


@announces(events.RanUnprotected)
def ran_unprotected(idem):
    idem.store.inject("claim", Refuse())
    outcome = idem.run(KEY, lambda: "paid", policy=Policy(store_error="open"))
    return {"number": outcome.attempt.number}


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_it_is_announced_and_logged_without_the_key_or_any_secret(world, situation, caplog):
    caplog.set_level(logging.DEBUG, logger="semel")
    idem = world.engine()
    kind, fields = SITUATIONS[situation], situation(idem)
    wait_until(lambda: idem.told(kind))
    told = idem.told(kind)[-1]
    assert told.identity == IDENTITY
    assert {name: getattr(told, name) for name in fields} == fields
    for event in tuple(idem.events):
        assert SECRET not in repr(event)

    logged = [record for record in caplog.records if record.semel == as_logged(told)]
    assert logged, "in the log as hooks hear of it"
    assert {record.levelno for record in logged} == {kind.level}
    assert 0 not in {event.number for event in tuple(idem.events)}, "the first attempt is 1"
    assert KEY not in caplog.text
    assert SECRET not in caplog.text


def as_logged(event):
    """The fields of an event's log record."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name != "identity"}
    return {
        "event": event.name,
        "scope": event.scope,
        "key_digest": event.identity.digest.hex(),
        **fields,
    }


def kinds_below(kind):
    for below in kind.__subclasses__():
        yield below
        yield from kinds_below(below)


VALUES = {"number": 1, "seconds": 0.5, "size": 3, "waited": True, "at": 1.5, "fence": 7}


@pytest.mark.parametrize(
    "kind",
    sorted({*kinds_below(events.Event)} - {Decision}, key=lambda kind: kind.__name__),
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("number", [1, None])
def test_an_event_and_its_log_line_say_the_same(kind, number, caplog):
    caplog.set_level(logging.DEBUG, logger="semel")
    names = [name for name in kind.__struct_fields__ if name != "identity"]
    fields = {name: VALUES.get(name, f"some-{name}") for name in names} | {"number": number}
    event = kind(identity=IDENTITY, **fields)
    events.log_event(event)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("semel", event.level)
    assert record.semel == as_logged(event)
    words = dict(word.split("=") for word in record.message.split()[1:])
    assert record.message.split()[0] == event.name
    assert words.pop("scope") == event.scope
    assert words.pop("key_digest") == event.key_digest
    assert words == {name: str(value) for name, value in fields.items() if value is not None}


OF_ENGINES = {kind for kind in events.Event.__subclasses__() if kind.__module__ == events.__name__}
"""A reconciler has decisions of its own, told and tested there."""


def test_every_event_has_its_situation():
    assert set(SITUATIONS.values()) == OF_ENGINES


def test_a_quiet_log_costs_no_record(world, caplog):
    caplog.set_level(logging.WARNING, logger="semel")
    idem = world.engine()
    idem.execute(KEY, lambda: "paid")
    idem.execute(KEY, never)
    assert [type(event) for event in idem.events] == [events.Ran, events.Replayed]
    assert caplog.records == []


# --- how loud ------------------------------------------------------------------------------

LEVELS = {
    logging.DEBUG: {events.Ran},
    logging.INFO: {
        events.Replayed,
        events.RejectedBusy,
        events.RejectedDuplicate,
        events.RejectedFailure,
        events.Failed,
    },
    logging.WARNING: {
        events.RejectedUnknown,
        events.RejectedExhausted,
        events.Mismatched,
        events.TakenOver,
        events.Parked,
        events.RenewalFailed,
        events.ResultStoredLate,
    },
    logging.ERROR: {
        events.FailureUndecided,
        events.LostLease,
        events.ResultOmitted,
        events.ResultNotStored,
        events.StoreFailed,
        events.RanUnprotected,
    },
}


def test_each_event_is_as_loud_as_it_is_serious():
    assert {kind.level for kind in OF_ENGINES} == LEVELS.keys()
    for level, kinds in LEVELS.items():
        assert {kind for kind in OF_ENGINES if kind.level == level} == kinds


def test_every_refusal_has_its_event():
    refusals = {
        ConcurrentRequest(): events.RejectedBusy,
        WaitTimeout(): events.RejectedBusy,
        DuplicateRequest(): events.RejectedDuplicate,
        PreviousFailure("E", "m"): events.RejectedFailure,
        OutcomeUnknown(): events.RejectedUnknown,
        AttemptsExhausted(1): events.RejectedExhausted,
        PayloadMismatch(): events.Mismatched,
    }
    for error, kind in refusals.items():
        assert isinstance(error, IdempotencyError)
        assert events.rejection(error, IDENTITY, 3) == kind(identity=IDENTITY, number=3)


def test_events_are_frozen_values():
    event = events.RejectedBusy(identity=IDENTITY)
    assert (event.name, event.scope) == ("RejectedBusy", "default")
    with pytest.raises(AttributeError):
        event.number = 2


# --- hooks ---------------------------------------------------------------------------------


def test_a_hook_that_raises_breaks_neither_the_call_nor_the_other_hooks(world, caplog):
    heard = []

    def broken(event):
        raise RuntimeError("the hook is ill")

    store = world.kind.open_store("memory://")
    engine = world.kind.engine(store, hooks=[broken, heard.append])
    assert world.kind.call(engine.execute, KEY, lambda: "paid") == "paid"
    assert world.kind.call(engine.execute, KEY, never) == "paid"
    world.kind.finish(engine.close)
    assert [type(event) for event in heard] == [events.Ran, events.Replayed]
    complaints = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.message for record in complaints] == [
        "a hook failed on Ran",
        "a hook failed on Replayed",
    ]
    assert KEY not in caplog.text


def test_a_hook_that_wants_to_end_the_program_ends_no_call(world, caplog):
    def leaving(event):
        sys.exit(3)

    store = world.kind.open_store("memory://")
    engine = world.kind.engine(store, hooks=[leaving])
    assert world.kind.call(engine.execute, KEY, lambda: "paid") == "paid"
    assert world.kind.call(engine.execute, KEY, never) == "paid"
    world.kind.finish(engine.close)
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "a hook failed on Ran",
        "a hook failed on Replayed",
    ]


class Leave:
    """Handlers of a signal: what a program that ends on SIGTERM has, and a limit of time."""

    def __call__(self, *_):
        sys.exit(3)

    def by_method(self, *_):
        sys.exit(3)


class TimeIsUp(Exception):
    """What Celery's soft time limit, and others of the kind, raise from a signal's handler."""


def time_is_up(*_):
    raise TimeIsUp


@pytest.mark.parametrize(
    ("handler", "raised"),
    [
        (lambda *_: sys.exit(3), SystemExit),
        (Leave().by_method, SystemExit),
        (Leave(), SystemExit),
        (partial(partial(Leave.by_method, None), "more"), SystemExit),
        (time_is_up, TimeIsUp),
    ],
    ids=["function", "method", "object", "partial", "time_limit"],
)
def test_what_a_signal_raises_during_a_hook_reaches_the_program_as_elsewhere(handler, raised):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Idempotency(
            "memory://", hooks=[lambda _: signal.raise_signal(signal.SIGUSR1)]
        ) as idem:
            with pytest.raises(raised):
                idem.execute(KEY, lambda: "paid")
            assert idem.peek(KEY).state is State.SUCCEEDED
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_hook_that_raises_does_not_hide_the_business_error(world):
    def broken(event):
        raise RuntimeError("the hook is ill")

    engine = world.kind.engine(world.kind.open_store("memory://"), hooks=[broken])
    with pytest.raises(ValueError, match=SECRET):
        world.kind.call(engine.execute, KEY, Effect(raising=ValueError(SECRET)))
    assert world.kind.call(engine.execute, KEY, lambda: "paid") == "paid"
    world.kind.finish(engine.close)
