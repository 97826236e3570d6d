"""Both engines against a model: random lives of two keys, with faults, each answer predicted."""

from __future__ import annotations

import logging
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import run_state_machine_as_test

from engines.facade import Stop
from proof.engine_lives import LIVES, live
from proof.engine_machine import Case, EnginesBesideTheModel, Tasks, Threads, TroubleError
from proof.engine_model import RAN, REPLAYED
from semel import (
    ConcurrentRequest,
    DuplicateRequest,
    PayloadMismatch,
    StoreUnavailable,
    WaitTimeout,
)
from semel.core import judge
from semel.core.attempts import Leases
from semel.engine.outcomes import Outcomes

pytestmark = pytest.mark.usefixtures("not_measured")

STEPS = 50

COMMON = {
    *(RAN, REPLAYED, TroubleError, Stop, StoreUnavailable),
    *(ConcurrentRequest, DuplicateRequest, PayloadMismatch, WaitTimeout),
}
"""What no hundred lives can miss; for every answer, also the rarest, there is a life in `LIVES`."""


@pytest.fixture(autouse=True)
def _without_logs(caplog):
    """Thousands of faults are on purpose; `tests/test_events.py` proves what is logged."""
    caplog.set_level(logging.CRITICAL, logger="semel")


@pytest.fixture(autouse=True)
def _timers_by_hand(monkeypatch):
    """However slow the machine is, the timer looks for doubtful claims only when a rule says so."""
    monkeypatch.setattr("semel.core.attempts.SLOWEST_RETRY", 1e6)


@pytest.fixture(params=[Threads, Tasks])
def machine(request):
    """A machine for each kind of engine, with a tally of its own."""

    class Machine(EnginesBesideTheModel):
        kind = request.param
        met: ClassVar[Counter[object]] = Counter()

    return Machine


@pytest.mark.parametrize("answer", LIVES, ids=lambda answer: getattr(answer, "__name__", answer))
def test_an_engine_gives_each_answer_in_the_life_that_leads_to_it(machine, answer):
    live(machine, LIVES[answer])
    assert machine.met[answer] == 1


@pytest.mark.parametrize("seed", [14119380])
def test_a_call_that_was_once_answered_otherwise_is_as_the_model_says(machine, seed):
    live(machine, [lambda life: life.call(case=Case.by_dice(seed))])


def test_an_engine_answers_every_life_as_the_model_does(machine):
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=STEPS))
    assert machine.met.keys() <= LIVES.keys(), "an answer has no life that surely leads to it"
    assert machine.met.keys() >= COMMON, "these lives have proved less than they should"


def never_different(_one, _other):
    return False


def never_for_good(_record):
    return False


HELD: list[object] = []


def held(*arguments, **_):
    """Do nothing, and hold the call: one that is gone leads nothing, which would mend the bug."""
    HELD.append(arguments)


def no_doubt(_leases, _ask, now):
    return now


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (judge, "_differ", never_different),
        (judge, "_ended_for_good", never_for_good),
        (Outcomes, "_pass_on", held),
        (Leases, "doubt", no_doubt),
    ],
)
def test_a_broken_engine_is_found_out(machine, monkeypatch, where, name, broken):
    monkeypatch.setattr(where, name, broken)
    HELD.clear()
    # Flaky, where the garbage collector mends what was broken: a call that is gone leads nothing.
    with pytest.raises((AssertionError, FlakyFailure)):
        run_state_machine_as_test(
            machine,
            # Nobody reads the shortest life of a failure that is wanted.
            settings=settings(
                phases=(Phase.generate,),
                stateful_step_count=STEPS,
                report_multiple_bugs=False,
                database=None,
            ),
        )
