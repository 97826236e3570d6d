"""An exception raised by a signal handler, at every step of a call.

Python runs a signal handler between any two steps of the main thread, and what it raises (Ctrl-C, a
worker's soft time limit) comes out of whatever line was running. Here a trace function stands for
the handler: a first call lists the steps (each line of the library, each function's beginning and
end), then one call after the other is struck at each of them.

What must hold after each of them: the exception or an answer reaches the caller, the next caller
gets an answer, a result that the engine got is never lost, and nothing is left behind (no lease
that is renewed, no leader, no waiter, no place, no connection).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import semel
from engines.facade import PATIENCE, Effect, wait_until
from semel import Idempotency, Policy, current_attempt
from semel.errors import IdempotencyError

PACKAGE = str(Path(semel.__file__).parent)

Step = tuple[CodeType, str, int]


class TimeLimit(Exception):
    """What the handler of a worker's soft time limit raises: an ordinary exception."""


class Trace:
    """Lists the steps of a call, or raises at one of them."""

    def __init__(self, strike_at: Step | None = None, error: BaseException | None = None) -> None:
        self.steps: dict[Step, None] = {}
        self.struck = threading.Event()
        self._strike_at = strike_at
        self._errors = [] if error is None else [error]

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if event == "call" and not code.co_filename.startswith(PACKAGE):
            return None
        if event in ("call", "line", "return"):
            step = (code, event, frame.f_lineno)
            self.steps[step] = None
            if step == self._strike_at and self._errors:
                self.struck.set()
                raise self._errors.pop()
        return self

    def run(self, function: Callable[[], object]) -> object:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(before)


@pytest.fixture(params=["memory", "redis"])
def url(request) -> str:
    return "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")


LEASE = Policy(lease=3)


@pytest.fixture
def idem(url) -> Iterator[Idempotency]:
    with Idempotency(url, policy=LEASE) as engine:
        engine.execute("connected", lambda: None)
        yield engine


# --- the scenarios: each prepares a key, and gives the call that is struck -----------------------


class Scenario:
    """One kind of call; `effect` counts what it does."""

    def __init__(self, idem: Idempotency, key: str) -> None:
        self.idem = idem
        self.key = key
        self.effect = Effect("first")
        self.prepare()

    def prepare(self) -> None:
        """Bring the key into its state."""

    def call(self) -> object:
        raise NotImplementedError

    def again(self) -> object:
        """The next call."""
        return self.idem.execute(self.key, self.effect)

    def release(self, trace: Trace) -> None:
        """Let those end that the call waits for; in a thread beside it."""

    def finish(self) -> None:
        """Wait for others that take part."""


class FirstRun(Scenario):
    def call(self):
        return self.idem.execute(self.key, self.effect)


class FirstRunTold(Scenario):
    def call(self):
        return self.idem.run(self.key, self.effect, payload={"a": 1}).value


class Decorated(Scenario):
    def call(self):
        @self.idem.once("{key}")
        def work(key):
            return self.effect()

        return work(self.key)

    again = call


class Raising(Scenario):
    def prepare(self):
        self.effect = Effect(raising=ValueError("the function's own"))

    def call(self):
        return self.idem.execute(self.key, self.effect)


class Replay(Scenario):
    def prepare(self):
        self.idem.execute(self.key, self.effect)

    def call(self):
        return self.idem.execute(self.key, self.effect)


class Consumed(Scenario):
    def call(self):
        return self.idem.consume(self.key, self.effect)


class ConsumedBefore(Scenario):
    def prepare(self):
        self.idem.consume(self.key, self.effect)

    def call(self):
        return self.idem.consume(self.key, self.effect)


class ConsumedRaising(Raising):
    def call(self):
        return self.idem.consume(self.key, self.effect)


class ByHand(Scenario):
    def call(self):
        with self.idem.attempt(self.key) as attempt:
            if attempt.replayed:
                return attempt.result
            attempt.result = self.effect()
        return attempt.result


class ByHandRaising(Scenario):
    def prepare(self):
        self.effect = Effect(raising=ValueError("the block's own"))

    def call(self):
        with self.idem.attempt(self.key):
            self.effect()


class Waiting(Scenario):
    """A duplicate in the same process, which shares the execution of a thread that leads."""

    def prepare(self):
        self.effect.held()
        self.first = threading.Thread(target=self.lead, daemon=True)
        self.first.start()
        self.effect.wait_started()

    def lead(self):
        self.idem.execute(self.key, self.effect)

    def call(self):
        return self.idem.execute(self.key, self.effect)

    def release(self, trace):
        wait_until(lambda: self.waits() or trace.struck.is_set())
        self.effect.release()

    def waits(self):
        return any(map(len, tuple(self.idem._flights._seats._waiting.values())))

    def finish(self):
        self.first.join(PATIENCE)
        assert not self.first.is_alive()


class WaitingElsewhere(Waiting):
    """A duplicate that waits at the store: what runs there shares nothing with it."""

    def lead(self):
        self.idem.consume(self.key, lambda: self.effect() and None)

    def release(self, trace):
        wait_until(lambda: self.asked() or trace.struck.is_set())
        self.effect.release()

    def asked(self):
        return self.idem._flights._seats._waiting


SCENARIOS = [
    FirstRun,
    FirstRunTold,
    Decorated,
    Raising,
    Replay,
    Consumed,
    ConsumedBefore,
    ConsumedRaising,
    ByHand,
    ByHandRaising,
    Waiting,
    WaitingElsewhere,
]

keys = (f"k{number}" for number in itertools.count())


def struck(scenario: Scenario, trace: Trace) -> tuple[str, object]:
    """Make the call and tell how it ended; nothing keeps the exception afterwards."""
    beside = threading.Thread(target=scenario.release, args=(trace,), daemon=True)
    beside.start()
    try:
        return "gave", trace.run(scenario.call)
    except (TimeLimit, KeyboardInterrupt, ValueError, IdempotencyError) as error:
        return "raised", type(error)
    finally:
        trace.struck.set()
        beside.join(PATIENCE)


def later(scenario: Scenario) -> list[object]:
    """What the next callers get: one in another thread, then one in this."""
    answers: list[object] = []

    def again() -> None:
        with suppress(ValueError):
            answers.append(scenario.again())

    other = threading.Thread(target=again, daemon=True)
    other.start()
    other.join(PATIENCE)
    assert not other.is_alive(), "it waits for ever"
    again()
    return answers


def check_nothing_is_left(idem: Idempotency) -> None:
    wait_until(lambda: not idem._leases._running)
    assert not idem._flights._seats._waiting
    assert current_attempt() is None
    transport = getattr(idem._store, "_transport", None)
    if transport is not None:
        wait_until(lambda: transport._gate._free.qsize() == transport._gate._places)
        pool = transport._client.connection_pool
        wait_until(lambda: len(pool._in_use_connections) == len(transport._wires._idle))


def may_run_twice(step: Step) -> bool:
    """Whether the function had not given its value yet, or the block's end was never begun."""
    code, event, line = step
    if code.co_qualname == "AttemptContext.__exit__":
        return event == "call" or line == min(
            number for _, _, number in code.co_lines() if number and number > code.co_firstlineno
        )
    return code.co_name in ("finished", "result")


# What strikes while Python closes a generator is dropped by Python itself, and told by a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [TimeLimit, KeyboardInterrupt])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_struck_at_any_step_a_call_leaves_nothing_behind(idem, scenario, kind):
    for _ in range(2):  # the first call fills caches
        listed = Trace()
        struck(scenario(idem, next(keys)), listed)
    fired = 0
    for step in listed.steps:
        where = f"{step[1]} {step[0].co_qualname}:{step[2]}"
        case, trace = scenario(idem, next(keys)), Trace(step, kind())
        end = struck(case, trace)
        fired += not trace._errors
        try:
            case.finish()
            answers = later(case)
            check_nothing_is_left(idem)
        except AssertionError as error:
            raise AssertionError(f"{where}: {end}") from error
        if case.effect.raising is None:
            assert len(answers) == 2, where
            if case.effect.runs > 1:
                assert may_run_twice(step), where
    assert fired > max(50, 0.9 * len(listed.steps)), "a few steps depend on who comes first"
