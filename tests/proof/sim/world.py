"""One simulated history: real engines, virtual time, processes that pause and crash.

`World(plan).run()` lives the plan and returns what was wrong with it. The history that led there is
in `World.history`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

from msgspec import UNSET

import semel.engine.outcomes
from proof.sim.clock import PROCESS, Process, SimLoop, virtual_time
from proof.sim.plan import (
    ENGINES,
    PROCESS_OF_ENGINE,
    PROCESSES,
    Call,
    ClockJump,
    Close,
    Crash,
    NotDoneError,
    Outage,
    Pause,
    Plan,
    RefusedError,
    Repair,
)
from proof.sim.store import NOBODY, NOISE, PROXIES, Ledger, Wires
from semel import AsyncIdempotency, Attempt, IdempotencyError, Policy, StoreError, current_attempt
from semel.core import judge
from semel.core.fingerprint import fingerprint
from semel.events import Event

EPS = 1e-4
"""Two moments this close are one."""

CACHE_TTL = 5.0

RAISED = {"refused": RefusedError, "not done": NotDoneError}


class Violation(NamedTuple):
    """Something that must never be."""

    kind: str
    text: str


@dataclass(eq=False)
class Run:
    """A function that was called."""

    caller: Caller
    value: str
    start: float
    owner: bytes
    number: int
    fence: int
    protected: bool
    end: float | None = None
    error: type[BaseException] | None = None
    lost: bool = False
    """What the attempt knew at its end."""

    @property
    def key(self) -> str:
        return self.caller.call.key

    @property
    def succeeded(self) -> bool:
        return self.end is not None and self.error is None


@dataclass(eq=False)
class Caller:
    """A call of the plan, and what became of it."""

    call: Call
    process: Process
    task: asyncio.Task[None] | None = None
    start: float | None = None
    start_in_store: float = 0.0
    end: float | None = None
    cancelled_at: float | None = None
    runs: list[Run] = field(default_factory=list)
    value: object = None
    ran: bool | None = None
    """What the caller was told: whether its own function ran; None = nothing."""
    error: BaseException | None = None

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def own(self) -> Run | None:
        return self.runs[-1] if self.runs else None

    @property
    def got_value(self) -> bool:
        return self.end is not None and self.error is None


class Announced(NamedTuple):
    """An event, and whose it is where that can be told."""

    at: float
    event: Event
    owner: bytes | None


class World:
    """Two processes with three engines, one store, and a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = SimLoop(Random(plan.seed + 1), shuffled=plan.network.shuffled)
        self.history: list[tuple[Any, ...]] = []
        self.violations: list[Violation] = []
        self.runs: list[Run] = []
        self.events: list[Announced] = []
        self.jumps: list[float] = []
        self.closed: dict[int, float] = {}
        self.forgotten: list[tuple[int, str, float]] = []
        """By which engine, which key, and when that engine said so."""
        self.ledger = Ledger(self.loop, self.log)
        self.wires = Wires(self.loop, plan.network, self.ledger, self.log, self._sending)
        self.processes = [Process(f"P{number}") for number in PROCESSES]
        self._contexts = [self._context_of(process) for process in self.processes]
        kind = PROXIES[plan.network.batches, plan.network.notifies]
        self.proxies = [kind(self.wires, process) for process in self.processes]
        self.engines = [
            AsyncIdempotency(
                self.proxies[PROCESS_OF_ENGINE[number]],
                cache=8 if plan.network.cached else 0,
                cache_ttl=CACHE_TTL,
                hooks=[self._hook(number)],
            )
            for number in ENGINES
        ]
        self.callers = [Caller(call, self.process_of(call.engine)) for call in plan.calls]
        self._by_task: dict[asyncio.Task[Any] | None, Caller] = {}
        self._others: set[asyncio.Task[Any]] = set()

    def _context_of(self, process: Process) -> Context:
        context = copy_context()
        context.run(PROCESS.set, process)
        return context

    def process_of(self, engine: int) -> Process:
        return self.processes[PROCESS_OF_ENGINE[engine]]

    def log(self, *what: object) -> None:
        self.history.append((round(self.loop.now, 4), *what))

    def violation(self, kind: str, text: str) -> None:
        self.violations.append(Violation(kind, text))

    def run(self) -> list[Violation]:
        """Live the plan, and tell what was wrong."""
        from proof.sim.checks import check

        callers = iter(self.callers)
        for number, action in enumerate(self.plan.actions):
            if isinstance(action, Call):
                step = partial(self._begin, next(callers))
            else:
                step = partial(_ACTS[type(action)], self, action)
            context = NOBODY.copy()
            context.run(NOISE.set, Random(f"{self.plan.seed}/{getattr(action, 'name', number)}"))
            self.loop.call_at(action.at, step, context=context)
        with patch.object(semel.engine.outcomes, "random", Random(self.plan.seed + 3).random):
            self.loop.live()
        if self.loop.livelocked:
            self.violation("livelock", f"{self.loop.steps} steps")
        check(self)
        return self.violations

    # --- the actions ---------------------------------------------------------------------

    def _within(self, engine: int) -> Context:
        """The context of a process, with the dice of the action that begins there."""
        context = self._contexts[PROCESS_OF_ENGINE[engine]].copy()
        context.run(NOISE.set, NOISE.get())
        return context

    def _begin(self, caller: Caller) -> None:
        if caller.process.dead:
            return
        context = self._within(caller.call.engine)
        caller.task = self.loop.create_task(self._ask(caller), context=context)
        self._by_task[caller.task] = caller
        cancel = caller.call.cancel
        if cancel is not None and cancel.command is None:
            self._cancel_later(caller, cancel.after)

    def _sending(self, verb: str) -> None:
        caller = self._by_task.get(asyncio.current_task())
        cancel = None if caller is None else caller.call.cancel
        if caller is not None and cancel is not None and cancel.command == verb:
            self._cancel_later(caller, cancel.after)

    def _cancel_later(self, caller: Caller, seconds: float) -> None:
        context = self._contexts[PROCESS_OF_ENGINE[caller.call.engine]].copy()
        self.loop.call_later(seconds, self._cancel, caller, context=context)

    def _cancel(self, caller: Caller) -> None:
        if caller.task is not None and not caller.task.done() and caller.cancelled_at is None:
            caller.cancelled_at = self.loop.now
            self.log("cancel", caller.name)
            caller.task.cancel()

    def _pause(self, action: Pause) -> None:
        process = self.processes[action.process]
        process.paused_until = self.loop.now + action.seconds
        process.pauses.append((self.loop.now, process.paused_until))
        self.log("pause", process.name, action.seconds)

        def resume() -> None:
            if self.loop.now + EPS >= process.paused_until:
                self.log("resumes", process.name)
                self.loop.resume(process)

        self.wires.later(action.seconds, resume)

    def _crash(self, action: Crash) -> None:
        self.processes[action.process].dead = True
        self.log("crash", self.processes[action.process].name)

    def _jump(self, action: ClockJump) -> None:
        self.ledger.offset += action.seconds
        self.jumps.append(self.loop.now)
        self.log("clock jumps", action.seconds)

    def _go_away(self, action: Outage) -> None:
        self.wires.outages.append((self.loop.now, self.loop.now + action.seconds))
        self.log("outage", action.seconds)

    def _close(self, action: Close) -> None:
        async def close() -> None:
            # Noted when it begins, which in a process that pauses is later than the plan says.
            self.closed.setdefault(action.engine, self.loop.now)
            await self.engines[action.engine].close(action.timeout)

        self._beside(action.engine, close())

    def _repair(self, action: Repair) -> None:
        engine, key = self.engines[action.engine], action.key

        async def repair() -> None:
            self.log(action.what, key, f"E{action.engine}")
            try:
                match action.what:
                    case "forget":
                        await engine.forget(key)
                    case "delete":
                        await engine.marks.delete(key)
                    case "refresh":
                        await engine.marks.refresh(key, ttl=50.0)
                    case _:
                        await engine.marks.set_result(key, f"marked at {action.at}")
            except StoreError:
                self.log(action.what, "failed", key)
            else:
                self.log(action.what, "done", key)
                if action.what in {"forget", "delete"}:
                    self.forgotten.append((action.engine, key, self.loop.now))

        self._beside(action.engine, repair())

    def _beside(self, engine: int, work: Any) -> None:
        if self.process_of(engine).dead:
            work.close()
            return
        self._others.add(self.loop.create_task(work, context=self._within(engine)))

    # --- the callers and their functions -------------------------------------------------

    async def _ask(self, caller: Caller) -> None:
        call = caller.call
        caller.start, caller.start_in_store = self.loop.now, self.ledger.now
        self.log("call", call.name, f"E{call.engine}", call.method, call.key, call.payload)
        try:
            await self._by_its_method(caller)
        except BaseException as error:  # the outcome of a call, whatever it is
            caller.error = error
        caller.end = self.loop.now
        told = caller.value if caller.error is None else type(caller.error).__name__
        self.log("end", call.name, call.key, told)

    async def _by_its_method(self, caller: Caller) -> None:
        call, engine = caller.call, self.engines[caller.call.engine]
        options = {
            "payload": UNSET if call.payload is None else call.payload,
            "policy": Policy(**call.options),
        }

        def function() -> Any:
            return self._function(caller)

        match call.method:
            case "execute":
                caller.value = await engine.execute(call.key, function, **options)
            case "run":
                outcome = await engine.run(call.key, function, **options)
                caller.value, caller.ran = outcome.value, not outcome.replayed
            case "consume":
                caller.ran = await engine.consume(call.key, function, **options)
            case _:
                async with engine.attempt(call.key, **options) as attempt:
                    if not attempt.replayed:
                        attempt.result = await function()
                caller.value, caller.ran = attempt.result, not attempt.replayed

    async def _function(self, caller: Caller) -> str:
        call, attempt = caller.call, current_attempt()
        assert attempt is not None
        run = Run(
            caller,
            f"{call.name}.{len(caller.runs)}",
            self.loop.now,
            attempt.owner,
            attempt.number,
            attempt.fence,
            attempt.protected,
        )
        self.log("runs", call.name, call.key, self.ledger.name(run.owner), f"#{run.number}")
        self._check_start(run, attempt)
        caller.runs.append(run)
        self.runs.append(run)
        try:
            for seconds in call.works:
                await asyncio.sleep(seconds)
            if call.nested:
                await self._nested(call)
            if call.ends in RAISED:
                raise RAISED[call.ends]  # noqa: TRY301 - what the function does
        except BaseException as error:
            run.error = type(error)
            raise
        else:
            return run.value
        finally:
            run.end, run.lost = self.loop.now, attempt.lost
            how = "ok" if run.error is None else run.error.__name__
            self.log("ran", call.name, call.key, self.ledger.name(run.owner), how)

    async def _nested(self, call: Call) -> None:
        async def quick() -> int:
            await asyncio.sleep(0.05)
            return 1

        policy = Policy(lease=call.lease)
        with suppress(IdempotencyError):
            await self.engines[call.engine].execute(f"inside {call.key}", quick, policy=policy)

    def _check_start(self, run: Run, attempt: Attempt) -> None:
        """What must be true at the moment when a function begins."""
        call, ledger, name = run.caller.call, self.ledger, run.caller.name
        if not run.protected:
            if call.options.get("store_error") != "open":
                self.violation("ran unprotected", f"{name} ran without a claim")
            return
        granted = ledger.granted.get(run.owner)
        if granted is None:
            self.violation("ran without a claim", f"{name}: the store granted nothing to it")
            return
        if ledger.ended(run.owner):
            self.violation("ran after its end", f"{name}: its attempt has ended in the store")
        if granted.fingerprint != fingerprint_of(call):
            self.violation("wrong payload", f"{name} runs under another payload's claim")
        if any(other.owner == run.owner for other in self.runs):
            self.violation("ran twice", f"{name}: its claim has run before")
        limit = call.options.get("max_attempts")
        if limit is not None and run.number > limit:
            self.violation("too many attempts", f"{name} is attempt {run.number}")
        undisturbed = not run.caller.process.stood_still(
            granted.at - 2.5, self.loop.now
        ) and not any(jump >= granted.at - EPS for jump in self.jumps)
        if not undisturbed:
            return
        if attempt.lost:
            self.violation("started lost", f"{name} starts with a lost lease")
        record = judge.present(ledger.records.get(attempt.identity), ledger.now)
        if not self.plan.has(Repair) and (record is None or record.owner != run.owner):
            owner = None if record is None else record.owner
            self.violation(
                "started without its record", f"{name}: it belongs to {ledger.name(owner)}"
            )

    def _hook(self, engine: int) -> Callable[[Event], None]:
        process = self.process_of(engine)

        def told(event: Event) -> None:
            number = getattr(event, "number", None)
            owners = [
                owner
                for owner, granted in self.ledger.granted.items()
                if (granted.key, granted.process) == (event.identity.key, process)
                and number in granted.numbers
            ]
            # Numbers begin anew after a repair or a replaced payload: then nobody can tell.
            owner = owners[0] if len(owners) == 1 else None
            self.events.append(Announced(self.loop.now, event, owner))
            self.log("event", f"E{engine}", type(event).__name__, event.identity.key, number)

        return told


_ACTS: dict[type, Any] = {
    Pause: World._pause,
    Crash: World._crash,
    ClockJump: World._jump,
    Outage: World._go_away,
    Close: World._close,
    Repair: World._repair,
}


def fingerprint_of(call: Call) -> bytes | None:
    return None if call.payload is None else fingerprint(call.payload)


def violations(plan: Plan) -> list[Violation]:
    """Live a plan once."""
    return World(plan).run()


@contextmanager
def simulating() -> Iterator[Callable[[Plan], list[Violation]]]:
    """Live as many plans as you like: in virtual time, and without a word about their faults."""
    lived = 0

    def live(plan: Plan) -> list[Violation]:
        nonlocal lived
        lived += 1
        if lived % 40 == 0:
            gc.collect()
        return violations(plan)

    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # Crashed processes leave tasks that never end.
    with (
        virtual_time(),
        warnings.catch_warnings(),
        patch.object(sys, "unraisablehook", lambda _: None),
    ):
        warnings.simplefilter("ignore")
        gc.collect()
        gc.disable()  # by its own timing, it would find the remains in the middle of a history
        try:
            yield live
        finally:
            gc.enable()
            gc.collect()
            logging.disable(level)
