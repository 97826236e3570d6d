"""An exception between an act and the note of it: what was done is known, or is done again.

A signal handler, a time limit or a cancellation may raise at any line, also between the closing of
a connection and the line that says so. Each act here is struck at each of its lines in turn.

| # | fault | what must hold |
|---|---|---|
| 55 | an exception between an act and the note of it | the next call works |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from itertools import count
from time import monotonic, time
from typing import Any

import pymysql
import pytest

from engines.facade import PATIENCE, Effect, Stop, until, wait_until
from interrupting import PACKAGE, TimeLimit, Trace
from semel import AsyncIdempotency, Idempotency, Policy
from semel.core.records import ClaimRequest, Identity
from semel.engine.colours import tasks, threads
from semel.errors import IdempotencyError, StoreUnavailable
from semel.repair import Reconciler
from semel.stores.listening import AsyncListener, AsyncWatch, Listening
from semel.stores.memory import MemoryStore
from semel.stores.sql.sqlite import AsyncSQLiteStore
from semel.testing import FakeClock
from servers.redis import open_connections

pytestmark = pytest.mark.usefixtures("not_measured")

fault = pytest.mark.fault

POLICY = Policy(lease=60, wait_timeout=5)
"""What is left locked is not waited for until its lease ends: the test would see it."""

keys = (f"k{number}" for number in count())


def struck_at_each_line(
    act: Callable[[], object], prepare: Callable[[], object] = lambda: None, part: str = ""
) -> Iterator[str]:
    """Do an act again and again, each time with an exception at another of its lines."""
    for _ in range(2):  # the first one fills caches
        listed = Trace()
        prepare()
        listed.run(act)
    steps = [
        step
        for step in listed.steps
        if step[1] == "line" and step[0].co_filename.startswith(f"{PACKAGE}{part}")
    ]
    assert steps
    fired = 0
    for step in steps:
        prepare()
        trace = Trace(step, TimeLimit())
        with suppress(TimeLimit, IdempotencyError):
            trace.run(act)
        fired += trace.struck.is_set()
        yield f"{step[0].co_qualname}:{step[2]}"
    assert fired > 0.8 * len(steps), "a few lines depend on who comes first"


# --- connections that are closed ------------------------------------------------------------------


@fault(55)
def test_struck_while_sqlite_closes_its_file_the_next_call_opens_it(sqlite_url):
    with Idempotency(sqlite_url) as idem:
        session = idem.internals.store._executor._session
        for where in struck_at_each_line(session.rest, lambda: idem.execute(next(keys), int)):
            assert idem.execute(next(keys), lambda: "ran") == "ran", where


class Redis:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.url = f"{request.getfixturevalue('redis_url')}?client_name=cut"
        self._server = request.getfixturevalue("redis_of_this_worker")

    def cut(self) -> None:
        with closing(self._server.client()) as client:
            client.client_kill_filter(_type="normal", skipme=True)

    def check(self, store: Any) -> None:
        idle = store.transport._connections._idle
        with closing(self._server.client()) as client:
            wait_until(lambda: open_connections(client, "cut") == len(idle))


class SQLServer:
    def check(self, store: Any) -> None:
        for pool in {store._calls.pool, store._batches._executor.pool}:
            slots = pool._slots
            wait_until(lambda slots=slots: slots._free.qsize() == slots._count)


class Postgres(SQLServer):
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.url = f"{request.getfixturevalue('postgres_url')}?application_name=cut"
        self._server = request.getfixturevalue("postgres_of_this_worker")

    def cut(self) -> None:
        sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
        self._server.run(sql, "cut")


class MariaDB(SQLServer):
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.url = request.getfixturevalue("mysql_url")
        self._server = request.getfixturevalue("mariadb_of_this_worker")

    def cut(self) -> None:
        sql = "SELECT id FROM information_schema.processlist WHERE db = %s"
        for (number,) in self._server.execute(sql, self.url.rsplit("/", 1)[1]):
            with suppress(pymysql.OperationalError):  # it has ended meanwhile
                self._server.execute(f"KILL {number}")


@fault(55)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("server", [Redis, Postgres, MariaDB])
def test_struck_while_a_lost_connection_is_replaced_the_next_call_works(request, server):
    given = server(request)
    with Idempotency(given.url, policy=POLICY) as idem:
        effect = Effect("ran")

        def act() -> object:
            return idem.execute(next(keys), effect)

        act()
        for where in struck_at_each_line(act, given.cut, "/stores"):
            assert idem.execute(next(keys), effect) == "ran", where
            given.check(idem.internals.store)


@fault(55)
async def test_so_it_is_with_tasks_on_redis(request):
    given = Redis(request)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # what strikes a call-back
    async with AsyncIdempotency(given.url, policy=POLICY) as idem:

        async def run() -> str:
            return "ran"

        async def act(trace: Trace) -> None:
            given.cut()
            calls = idem.internals.store.transport._connections.calls
            await until(lambda: calls.connection is None or calls.connection.broken)
            with suppress(TimeLimit, IdempotencyError):
                async with asyncio.timeout(30):
                    await trace.awaited(idem.execute(next(keys), run))

        assert await idem.execute(next(keys), run) == "ran"
        listed = Trace()
        for _ in range(2):
            await act(listed)
        steps = [
            step
            for step in listed.steps
            if step[1] == "line" and step[0].co_filename.endswith("redis/tasks.py")
        ]
        assert len(steps) > 30
        for step in steps:
            trace = Trace(step, TimeLimit())
            await act(trace)
            where = f"{step[0].co_qualname}:{step[2]}"
            assert await idem.execute(next(keys), run) == "ran", where
            pool = idem.internals.store.transport.client.connection_pool
            assert len(pool._in_use_connections) <= 2, where


@fault(55)
async def test_struck_while_a_listener_connects_the_next_waiter_is_notified(redis_url):
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with AsyncIdempotency(redis_url) as idem:

        def watch() -> AsyncWatch:
            return idem.internals.store.watch(Identity("default", next(keys)))

        async def listen(trace: Trace) -> None:
            listener._disconnect()
            with watch() as waiting:
                notified = until(
                    lambda: waiting.listening is Listening.YES or trace.struck.is_set()
                )
                await trace.awaited(notified)

        async def is_notified() -> bool:
            with watch() as waiting:
                await waiting.wait(0.05)
                return waiting.listening is Listening.YES

        await idem.execute(next(keys), nothing)
        listener = watch()._listener
        listed = Trace()
        await listen(listed)
        opening = AsyncListener._open.__code__
        steps = [step for step in listed.steps if step[0] is opening and step[1] == "line"]
        assert len(steps) > 3
        for step in steps:
            trace = Trace(step, TimeLimit())
            await listen(trace)
            assert trace.struck.is_set()
            async with asyncio.timeout(PATIENCE):
                while not await is_notified():  # one waiter after the other, after a pause
                    pass


async def nothing() -> None:
    """What a call may do."""


@asynccontextmanager
async def closed_at_the_end(store: Any) -> AsyncIterator[Any]:
    yield store
    await store.close()


@fault(55)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_writer_thread_that_died_is_replaced_by_the_next_call(tmp_path):
    armed = []

    def clock() -> float:
        if armed:
            raise armed.pop()
        return time()

    async with closed_at_the_end(AsyncSQLiteStore(tmp_path / "semel.db", clock=clock)) as store:
        identity = Identity("default", "k")
        assert await store.get(identity) is None
        dying = store._executor._thread
        armed += [Stop(), Stop()]  # the second one when it is done once more
        with pytest.raises(StoreUnavailable):
            await store.get(identity)
        await until(lambda: not dying.is_alive())
        assert await store.get(identity) is None


# --- threads and timers ---------------------------------------------------------------------------


@fault(55)
def test_struck_while_a_reconciler_stops_it_can_be_stopped():
    with Idempotency("memory://") as idem:
        reconciler = Reconciler(idem, {})
        running = []

        def start() -> None:
            reconciler.start()
            running.append(reconciler._background.running)

        for where in struck_at_each_line(reconciler.stop, start):
            reconciler.stop()
            wait_until(lambda: not running[-1].is_alive())  # at the latest then
            assert reconciler._background.running is None, where


@fault(55)
def test_struck_while_it_is_set_a_timer_is_there_for_the_next_call():
    ticks = []
    timer = threads.Timer(lambda: ticks.append(1) or math.inf)

    def asked_for() -> None:
        timer.next = math.inf
        timer.due(monotonic() + 60)

    for _ in struck_at_each_line(lambda: timer.due(monotonic() + 30), asked_for):
        del ticks[:]
        timer.due(monotonic())
        wait_until(lambda: ticks)
        wait_until(lambda: timer.next == math.inf)
    timer.stop()


@fault(55)
async def test_so_it_is_with_the_timer_of_tasks():
    ticks = []

    async def tick() -> float:
        ticks.append(1)
        return math.inf

    timer = tasks.Timer(tick)

    def asked_for() -> None:
        timer.next = math.inf
        timer.due(monotonic() + 0.05)

    for _ in struck_at_each_line(lambda: timer.due(monotonic() + 0.001), asked_for):
        # What was asked for is still there, or the next call asks for it: never neither.
        timer.due(monotonic() + 0.1)
        await until(lambda: ticks)
        del ticks[:]
        await until(lambda: timer.next == math.inf and timer._ticking is None)
    await timer.stop()


# --- records in memory ----------------------------------------------------------------------------


@fault(55)
def test_struck_while_expired_records_go_the_next_calls_work():
    clock = FakeClock()
    store = MemoryStore(clock=clock)

    def claim(seconds: float) -> object:
        identity = Identity("default", next(keys))
        return store.ask(ClaimRequest(identity, next(keys).encode(), None, seconds, ttl=10.0))

    def prepare() -> None:
        for seconds in (1.0, 2.0, 20.0):
            claim(seconds)
        clock.advance(15)  # the last one is renewed, and has to be looked at again

    for where in struck_at_each_line(lambda: claim(1.0), prepare):
        for _ in range(4):
            assert claim(1.0), where
            clock.advance(15)
    clock.advance(100)
    for _ in range(100):  # each call lets a few go
        claim(1.0)
    assert len(store._records) == 100, "nothing is kept for ever"
