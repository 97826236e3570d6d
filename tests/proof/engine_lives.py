"""Lives told step by step, one for each answer of the model: none is left to chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from engines.facade import Stop
from proof.engine_machine import Case, EnginesBesideTheModel, TroubleError
from proof.engine_model import (
    ENDED,
    LEASE,
    RAISES,
    RAN,
    REFUSED,
    REPLAYED,
    REPLY_LOST,
    STOPS,
    SUCCEEDS,
    Terms,
)
from semel import (
    AttemptsExhausted,
    ConcurrentRequest,
    DuplicateRequest,
    LeaseLost,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    StoreUnavailable,
    WaitTimeout,
)
from semel.events import LostLease, ResultStoredLate

Step: TypeAlias = Callable[[EnginesBesideTheModel], None]

PLAIN = Terms(
    hold=False,
    replace=False,
    guard=False,
    rejects=False,
    patient=False,
    failure=None,
    max_attempts=None,
)
CASE = Case(
    engine=0,
    method="execute",
    key="a",
    payload=None,
    terms=PLAIN,
    ending=SUCCEEDS,
    claim_fault=None,
    end_fault=None,
)


def called(**changes: Any) -> Step:
    case = _case(**changes)
    return lambda life: life.call(case=case)


def opened(**changes: Any) -> Step:
    case = _case(**changes)
    return lambda life: life.open_by_hand(case=case)


def _case(**changes: Any) -> Case:
    """Make the plain case with some changes, of its terms too."""
    terms = {name: changes.pop(name) for name in [*changes] if hasattr(PLAIN, name)}
    return replace(CASE, terms=replace(PLAIN, **terms), **changes)


def ended() -> Step:
    return lambda life: life.end_by_hand(which=0, case=CASE)


def abandoned() -> Step:
    return lambda life: life.let_time_pass(seconds=LEASE)


def ticked() -> Step:
    return lambda life: life.tick(engine=0)


LIVES: dict[Any, Sequence[Step]] = {
    RAN: [called()],
    REPLAYED: [called(), called(engine=1, method="run")],
    ENDED: [opened(), ended()],
    TroubleError: [called(ending=RAISES)],
    Stop: [called(ending=STOPS, method="consume")],
    StoreUnavailable: [called(claim_fault=REPLY_LOST), ticked(), called()],
    PayloadMismatch: [called(payload="x"), called(payload="y")],
    DuplicateRequest: [called(), called(guard=True)],
    ConcurrentRequest: [opened(), called(engine=1, rejects=True)],
    WaitTimeout: [opened(), called(engine=1)],
    PreviousFailure: [called(ending=RAISES, failure="final"), called()],
    OutcomeUnknown: [opened(hold=True), abandoned(), called(engine=1)],
    AttemptsExhausted: [called(ending=RAISES), called(max_attempts=1)],
    LeaseLost: [opened(), abandoned(), called(engine=1), ended()],
    ResultStoredLate: [called(end_fault=REFUSED), ticked()],
    LostLease: [called(end_fault=REFUSED), abandoned(), called(engine=1), ticked()],
}


def live(machine: type[EnginesBesideTheModel], steps: Sequence[Step]) -> None:
    """Live a life to its end; what must hold is looked at after each step."""
    life = machine()
    life.begin()
    try:
        for step in steps:
            step(life)
            life.records_are_as_predicted()
    finally:
        life.teardown()
