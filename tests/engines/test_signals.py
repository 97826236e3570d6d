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

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from engines.facade import PATIENCE, Effect, until, wait_until
from interrupting import PACKAGE, Step, TimeLimit, Trace
from semel import AsyncIdempotency, Idempotency, Policy, current_attempt, open_store
from semel.engine.colours import tasks
from semel.engine.colours.leaders import Leaders
from semel.errors import IdempotencyError
from semel.stores.sql.errors import Deadline

pytestmark = pytest.mark.usefixtures("not_measured")


@pytest.fixture
def url(request) -> str:
    return "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")


STRIKES = [
    ("memory", KeyboardInterrupt),
    ("redis", TimeLimit),
    pytest.param("memory", TimeLimit, marks=pytest.mark.more),
    pytest.param("redis", KeyboardInterrupt, marks=pytest.mark.more),
]


LEASE = Policy(lease=3)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Connections and places must return at once, not with the garbage that holds them."""
    gc.disable()
    yield
    gc.enable()


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
        return any(map(len, tuple(self.idem.internals.shared_runs._leaders._waiting.values())))

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
        return self.idem.internals.shared_runs._leaders._waiting


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
    wait_until(lambda: not idem.internals.leases._running)
    assert not idem.internals.shared_runs._leaders._waiting
    assert current_attempt() is None
    transport = getattr(idem.internals.store, "transport", None)
    if transport is not None:
        wait_until(lambda: transport._limit._free.qsize() == transport._limit._count)


def may_run_twice(step: Step) -> bool:
    """Whether the function had not given its value yet, or the block's end was never begun."""
    code, event, line = step
    if code.co_qualname == "AttemptContext.__exit__":
        return event == "call" or line == min(
            number for _, _, number in code.co_lines() if number and number > code.co_firstlineno
        )
    return code.co_name == "result"


def strike_everywhere(  # noqa: PLR0917 - each test says all of it
    idem: Idempotency,
    scenario: type[Scenario],
    kind: type[BaseException],
    events: tuple[str, ...],
    check: Callable[[Idempotency], None],
    part: str = "",
) -> None:
    """Strike calls of one kind at each of their steps (in a part of the library), one by one."""
    for _ in range(2):  # the first call fills caches
        listed = Trace()
        struck(scenario(idem, next(keys)), listed)
    steps = [
        step
        for step in listed.steps
        if step[1] in events and step[0].co_filename.startswith(f"{PACKAGE}{part}")
    ]
    fired = 0
    for step in steps:
        where = f"{step[1]} {step[0].co_qualname}:{step[2]}"
        case, trace = scenario(idem, next(keys)), Trace(step, kind())
        end = struck(case, trace)
        fired += not trace._errors
        try:
            case.finish()
            answers = later(case)
            check(idem)
        except AssertionError as error:
            raise AssertionError(f"{where}: {end}") from error
        if case.effect.raising is None:
            assert len(answers) == 2, where
            if case.effect.runs > 1:
                assert may_run_twice(step), where
    assert fired > max(50, 0.8 * len(steps)), "a few steps depend on who comes first"


# What strikes while Python closes a generator is dropped by Python itself, and told by a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("without_collector")
@pytest.mark.fault(44)
@pytest.mark.parametrize(("url", "kind"), STRIKES, indirect=["url"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_struck_at_any_step_a_call_leaves_nothing_behind(idem, scenario, kind):
    strike_everywhere(idem, scenario, kind, ("call", "line", "return"), check_nothing_is_left)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("scenario", [FirstRun, Replay])
def test_struck_at_any_step_a_call_on_tiers_hangs_nobody(redis_url, sqlite_url, scenario):
    store = open_store(redis_url, behind=f"{sqlite_url}?synchronous=NORMAL")
    with closing(store), Idempotency(store, policy=LEASE) as idem:
        idem.execute("connected", lambda: None)
        steps = ("call", "line", "return")
        check, part = check_nothing_is_left, "/stores/tiered"
        strike_everywhere(idem, scenario, TimeLimit, steps, check, part)


# --- the connections of databases ----------------------------------------------------------------

MOST_CONNECTIONS = 2


class Connecting(FirstRun):
    """A call that finds no open connection."""

    def prepare(self):
        for pool in pools_of(self.idem):
            pool.close()
            pool._closed = False


class Postgres:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.url = request.getfixturevalue("postgres_url")
        self._server = request.getfixturevalue("postgres_of_this_worker")

    def sessions(self) -> int:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        return self._server.run(sql, "struck")[0][0]

    @property
    def options(self) -> str:
        return "application_name=struck"


class MariaDB:
    options = ""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.url = request.getfixturevalue("mysql_url")
        self._server = request.getfixturevalue("mariadb_of_this_worker")

    def sessions(self) -> int:
        sql = "SELECT count(*) FROM information_schema.processlist WHERE db = %s"
        return self._server.execute(sql, self.url.rsplit("/", 1)[1])[0][0]


def pools_of(idem: Idempotency) -> list[Any]:
    store: Any = idem.internals.store
    batches = store._batches
    executors = {store._calls, batches._executor, batches._renewals}
    return [store._calls.pool, *(each.pool for each in executors - {store._calls})]


def check_every_place_is_free(idem: Idempotency) -> None:
    check_nothing_is_left(idem)
    for pool in pools_of(idem):
        slots = pool._slots
        wait_until(lambda slots=slots: slots._free.qsize() == slots._count)


def take_all(pool: Any) -> None:
    """Take as many connections as there may be, and give them back."""
    for session in [pool.take(Deadline(PATIENCE)) for _ in range(MOST_CONNECTIONS)]:
        pool.give_back(session)


# psycopg closes a connection that is lost, and warns; as an error, the warning would keep it.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("database", "kind"), [(Postgres, TimeLimit), (MariaDB, KeyboardInterrupt)]
)
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("scenario", [FirstRun, Replay, Raising, Connecting])
def test_struck_at_any_line_a_call_keeps_no_connection(request, database, kind, scenario):
    server = database(request)
    url = f"{server.url}?max_size={MOST_CONNECTIONS}&{server.options}"
    with Idempotency(url, policy=LEASE) as idem:
        idem.execute("connected", lambda: None)
        strike_everywhere(idem, scenario, kind, ("line",), check_every_place_is_free)
        calls, *_ = pools_of(idem)
        take_all(calls)
        idle = sum(len(pool._idle) for pool in pools_of(idem))
        wait_until(lambda: server.sessions() <= idle)
        assert server.sessions() >= MOST_CONNECTIONS
    wait_until(lambda: server.sessions() == 0)
    gc.collect()  # here, where the warnings of sockets that were struck while connecting are ignored


# --- tasks that share an execution ---------------------------------------------------------------

TELLING = {
    function.__code__
    for function in (
        tasks.SharedRuns.give,
        tasks.SharedRuns.pass_on,
        Leaders.end,
        Leaders.next_leader,
    )
}


def shared(trace: Trace, *, raising: bool) -> tuple[object, int]:
    """What a task gets that shares an execution whose leader is struck, and how often it ran."""
    runs = []

    async def start(idem):
        may_end, may_go_on = asyncio.Event(), asyncio.Event()

        async def work():
            runs.append(1)
            if len(runs) > 1:
                await may_go_on.wait()  # only the leader is struck
                return "first"
            await may_end.wait()
            if raising:
                raise ValueError("the function's own")
            return "first"

        leader = asyncio.create_task(idem.execute("k", work))
        await until(lambda: runs)
        follower = asyncio.create_task(idem.execute("k", work))
        await until(lambda: any(map(len, idem.internals.shared_runs._leaders._waiting.values())))
        return leader, follower, may_end, may_go_on

    async def finish(leader, may_end):
        may_end.set()
        await asyncio.wait((leader,))
        leader.exception()

    with asyncio.Runner() as runner:
        idem = AsyncIdempotency("memory://", policy=LEASE)
        leader, follower, may_end, may_go_on = runner.run(start(idem))
        with suppress(KeyboardInterrupt):  # it comes out of the loop itself
            trace.run(lambda: runner.run(finish(leader, may_end)))
        may_go_on.set()
        answer = runner.run(asyncio.wait_for(follower, PATIENCE))
        runner.run(idem.close())
        return answer, len(runs)


@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.parametrize("kind", [TimeLimit, KeyboardInterrupt])
def test_a_task_struck_while_it_tells_the_others_leaves_none_of_them_waiting(
    monkeypatch, kind, raising
):
    monkeypatch.setattr(tasks, "CHECK_EVERY", 0.05)
    listed = Trace()
    assert shared(listed, raising=raising) == ("first", 1 + raising)
    steps = [step for step in listed.steps if step[0] in TELLING]
    assert len(steps) > 5
    for step in steps:
        trace = Trace(step, kind())
        assert shared(trace, raising=raising) == ("first", 1 + raising), step
        assert trace.struck.is_set()
