"""Drives two real engines on one store, and the model, through the same random life.

Rules are sequential; what overlaps is held open by hand. The engines' timers are stopped and their
ticks are a rule, the store's clock moves by a rule: every life can be lived again exactly.

Beside the model, safety is checked against the store and the effects alone: nothing runs for a key
whose success is retained, a fence grows with every run, a mismatch runs nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import UNSET

from engines.facade import Stop
from proof.engine_model import (
    ENDED,
    FAILED_TTL,
    LEASE,
    RAISES,
    RAN,
    REFUSED,
    REPLAYED,
    REPLY_LOST,
    STOPS,
    SUCCEEDS,
    TTL,
    Asked,
    Model,
    Terms,
)
from semel import AsyncIdempotency, Idempotency, IdempotencyError, Policy, current_attempt
from semel.core.records import State
from semel.events import LostLease, ResultStoredLate
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FakeClock, FaultyStore, LoseReply, Refuse

KEYS = ("a", "b")
PAYLOADS = (None, "x", "y", "z")
ENGINES = (0, 1)
METHODS = ("execute", "run", "consume")

FAULTS = {REFUSED: Refuse, REPLY_LOST: LoseReply}
ENDS = ("fail", "renew")
"""How a failure is told: parking is a renewal for no time."""

SOME_TIME = 0.001
"""Enough for fences, which are microseconds, to grow where no record is left."""

some_engine = st.sampled_from(ENGINES)
some_key = st.sampled_from(KEYS)


@dataclass(frozen=True)
class Case:
    """What one call is about, and what befalls it."""

    engine: int
    method: str
    key: str
    payload: str | None
    terms: Terms
    ending: str
    claim_fault: str | None
    end_fault: str | None

    @classmethod
    def by_dice(cls, seed: int) -> Case:
        """Make a case as different from the last as dice make it; drawn, they come in clumps."""
        dice = Random(seed)
        faults = [None] * 6 + [REFUSED, REPLY_LOST]
        return cls(
            engine=dice.choice(ENGINES),
            method=dice.choice(METHODS),
            key=dice.choice(KEYS),
            payload=dice.choice(PAYLOADS),
            terms=Terms(
                hold=dice.random() < 0.25,
                replace=dice.random() < 0.25,
                guard=dice.random() < 0.2,
                rejects=dice.random() < 0.2,
                patient=dice.random() < 0.5,
                failure=dice.choice((None, "forget", "retryable", "final", "unknown")),
                max_attempts=dice.choice((None, None, 1, 2)),
            ),
            ending=dice.choice((SUCCEEDS, SUCCEEDS, RAISES, STOPS)),
            claim_fault=dice.choice(faults),
            end_fault=dice.choice((None, None, REFUSED, REPLY_LOST)),
        )

    def asked(self, *, by_message: bool = False) -> Asked:
        """The call for the model; who consumes a message never waits for another.

        Its attempts are counted for as long as the message may come again.
        """
        terms = replace(self.terms, rejects=self.terms.rejects or by_message)
        counted = by_message and terms.max_attempts is not None
        return Asked(
            self.engine,
            self.key,
            self.payload,
            terms,
            shares=not terms.rejects,
            failed_ttl=TTL if counted else FAILED_TTL,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The call for an engine."""
        payload = UNSET if self.payload is None else self.payload
        return {"payload": payload, "policy": self.terms.policy}


some_case = st.integers(0, 2**31 - 1).map(Case.by_dice)


class TroubleError(Exception):
    """What a function raises."""


RAISED = {RAISES: TroubleError, STOPS: Stop}


class Threads:
    """Calls engines for threads."""

    engine, store, faulty = Idempotency, MemoryStore, FaultyStore
    enter, leave = "__enter__", "__exit__"

    def call(self, method: Callable[..., Any], *args: Any, within: Context, **kwargs: Any) -> Any:
        return within.run(method, *args, **kwargs)

    def function(self, body: Callable[[], Any]) -> Callable[[], Any]:
        return body

    def close(self) -> None:
        pass


class Tasks:
    """Calls engines for asyncio, each call a task on one loop."""

    engine, store, faulty = AsyncIdempotency, AsyncMemoryStore, AsyncFaultyStore
    enter, leave = "__aenter__", "__aexit__"

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def call(self, method: Callable[..., Any], *args: Any, within: Context, **kwargs: Any) -> Any:
        task = self._loop.create_task(method(*args, **kwargs), context=within)
        try:
            return self._loop.run_until_complete(task)
        finally:
            # What goes on after its caller was freed.
            for rest in asyncio.all_tasks(self._loop):
                self._loop.run_until_complete(rest)

    def function(self, body: Callable[[], Any]) -> Callable[[], Any]:
        async def awaited() -> Any:
            return body()

        return awaited

    def close(self) -> None:
        self._loop.close()


class EnginesBesideTheModel(RuleBasedStateMachine):
    """Two engines, as in two processes, on one store; and what the model says of it."""

    kind: ClassVar[type[Threads | Tasks]]
    met: ClassVar[Counter[Any]]
    """How often each prediction was made, over all lives: what was never met was not tested."""

    @initialize()
    def begin(self) -> None:
        self.clock = FakeClock()
        self.model = Model(self.clock)
        self.values = count(1)
        self.runs: list[tuple[str, int]] = []
        self.fences = dict.fromkeys(KEYS, 0)
        self.open: list[tuple[Asked, Any, Context, Any]] = []
        self.told: list[Any] = []
        self.way = self.kind()
        self.store = self.way.store(clock=self.clock)
        self.faulty = [self.way.faulty(self.store) for _ in ENGINES]
        self.engines: list[Any] = [
            self.way.engine(faulty, policy=Policy(ttl=TTL), hooks=[self.told.append])
            for faulty in self.faulty
        ]
        for engine in self.engines:
            self.ask(engine.internals.renewer.timer.stop)
            self.ask(engine.internals.renewer.watch.stop)

    def teardown(self) -> None:
        for engine in self.engines:
            self.ask(engine.close, timeout=0)
        self.ask(self.store.close)
        self.way.close()

    def ask(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.way.call(method, *args, within=copy_context(), **kwargs)

    # --- calls ---------------------------------------------------------------------------

    @rule(case=some_case)
    def call(self, case):
        method, key, ending = case.method, case.key, case.ending
        asked = case.asked(by_message=method == "consume")
        before, ran = self.record(key), len(self.runs)
        value = {"paid": next(self.values)}

        def body() -> object:
            self.effect(asked, before)
            self.break_store(case.engine, None, case.end_fault)
            if ending != SUCCEEDS:
                raise RAISED[ending]
            return value

        begun = self.model.begin(asked, case.claim_fault)
        error, expected = begun.error, begun.value
        if begun.runs:
            if ending == SUCCEEDS:
                expected = None if method == "consume" else value
                error = self.model.succeed(asked, expected, case.end_fault)
            else:
                self.model.fail(asked, ending, case.end_fault)
                error = RAISED[ending]
        self.break_store(case.engine, case.claim_fault, None)
        answer, raised = self.caught(
            getattr(self.engines[case.engine], method),
            key,
            self.way.function(body),
            within=copy_context(),
            **case.options,
        )
        self.note_met(begun, error)
        assert self.runs[ran:] == ([(key, begun.number)] if begun.runs else [])
        assert raised is error, f"{raised} where the model says {error}"
        if error is not None:
            return
        match method:
            case "execute":
                assert answer == expected
            case "run":
                assert (answer.value, answer.replayed) == (expected, not begun.runs)
                assert answer.attempt.number == begun.number
            case "consume":
                assert answer is begun.runs

    @rule(case=some_case)
    def open_by_hand(self, case):
        asked = case.asked()
        before, within = self.record(case.key), copy_context()
        begun = self.model.begin(asked, case.claim_fault)
        self.break_store(case.engine, case.claim_fault, None)
        context = self.engines[case.engine].attempt(case.key, **case.options)
        attempt, raised = self.caught(getattr(context, self.way.enter), within=within)
        self.note_met(begun, begun.error)
        assert raised is begun.error, f"{raised} where the model says {begun.error}"
        if raised is not None:
            return
        assert (attempt.replayed, attempt.number) == (not begun.runs, begun.number)
        if attempt.replayed:
            assert attempt.result == begun.value
        else:
            within.run(self.effect, asked, before)
            self.open.append((asked, context, within, attempt))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100), case=some_case)
    def end_by_hand(self, which, case):
        ending, fault = case.ending, case.end_fault
        asked, context, within, attempt = self.open.pop(which % len(self.open))
        self.break_store(asked.engine, None, fault)
        error, failure = None, None
        if ending == SUCCEEDS:
            attempt.result = {"paid": next(self.values)}
            error = self.model.succeed(asked, attempt.result, fault)
        else:
            self.model.fail(asked, ending, fault)
            failure = RAISED[ending]()
        leave = getattr(context, self.way.leave)
        _, raised = self.caught(leave, failure and type(failure), failure, None, within=within)
        self.met[ENDED if error is None else error] += 1
        assert raised is error, f"{raised} where the model says {error}"

    # --- beside the calls ----------------------------------------------------------------

    @rule(engine=some_engine, key=some_key)
    def mark(self, engine, key):
        assert self.ask(self.engines[engine].marks.set, key) is self.model.mark(key)

    @rule(engine=some_engine, key=some_key)
    def forget(self, engine, key):
        assert self.ask(self.engines[engine].forget, key) is self.model.forget(engine, key)
        self.clock.advance(SOME_TIME)

    @rule(seconds=st.sampled_from((SOME_TIME, LEASE, LEASE, LEASE, FAILED_TTL, TTL)))
    def let_time_pass(self, seconds):
        self.clock.advance(seconds)

    @rule(engine=some_engine)
    def tick(self, engine):
        self.told.clear()
        self.ask(self.engines[engine].internals.renewer.tick)
        self.ask(self.engines[engine].internals.renewer._give_back_doubtful, math.inf, math.inf)
        told = Counter(type(event) for event in self.told)
        expected = Counter(self.model.tick(engine))
        self.met.update(expected)
        assert {
            kind: told[kind] for kind in (LostLease, ResultStoredLate) if told[kind]
        } == expected

    # --- what must hold ------------------------------------------------------------------

    def effect(self, asked: Asked, before: Any) -> None:
        """What a function does, and what must be true when it does it."""
        attempt = current_attempt()
        assert attempt is not None
        if before is not None:
            replaces = asked.terms.replace and asked.payload is not None
            assert before.state is not State.SUCCEEDED or replaces, "ran after a retained success"
            expected = {before.number + 1}
            if replaces:
                expected.add(1)
            if asked.terms.max_attempts is not None:
                expected.add(before.number)  # A claim that nobody wanted is given back first.
            assert attempt.number in expected, "attempts count up, those of a new payload from one"
        assert attempt.fence > self.fences[asked.key], "a fence grows, also over forgetting"
        self.fences[asked.key] = attempt.fence
        self.runs.append((asked.key, attempt.number))

    @invariant()
    def records_are_as_predicted(self) -> None:
        for key in KEYS:
            record, entry = self.record(key), self.model.entry(key)
            assert (record is None) is (entry is None)
            if record is not None and entry is not None:
                assert (record.state, record.number) == (entry.state, entry.number)
                until = record.expires_at if record.lease_until is None else record.lease_until
                assert until == entry.until

    # --- tools ---------------------------------------------------------------------------

    def record(self, key: str) -> Any:
        return self.ask(self.engines[0].peek, key)

    def break_store(self, engine: int, claim_fault: str | None, end_fault: str | None) -> None:
        """Script the faults of the next step, and drop those that the last one did not meet."""
        store = self.faulty[engine]
        store.heal()
        if claim_fault is not None:
            store.inject("claim", FAULTS[claim_fault]())
        if end_fault is not None:
            for verb in ("complete", *ENDS):
                store.inject(verb, FAULTS[end_fault]())

    def caught(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The answer, and the kind of error, of a call."""
        try:
            return self.way.call(method, *args, **kwargs), None
        except (IdempotencyError, TroubleError, Stop) as error:
            return None, type(error)
        finally:
            for store in self.faulty:
                store.heal()

    def note_met(self, begun: Any, error: Any) -> None:
        self.met[error if error is not None else RAN if begun.runs else REPLAYED] += 1
