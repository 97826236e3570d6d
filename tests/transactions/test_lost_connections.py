"""The connection of a transaction is lost while a message is handled: the class of the error decides."""

from __future__ import annotations

import contextlib
import inspect
import re
import time
from urllib.parse import urlsplit

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel import (
    AsyncIdempotency,
    Idempotency,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    current_attempt,
    events,
    open_async_store,
    open_store,
)
from semel.adapters._sync.consuming import Consumer
from semel.adapters.consuming import AsyncConsumer
from semel.core.records import Identity, State
from semel.engine.starts import MOST_LOSSES
from semel.messages import Ack, Later, Message, Reject
from servers.proxy import proxy_to
from transactions.kinds import KINDS

MESSAGE = Message(id="m-1", body=b"{}")
IDENTITY = Identity("mailer", "m-1")
OWN_ID = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
CUT = {"postgresql": "SELECT pg_terminate_backend({})", "mysql": "KILL {}"}
LEFT = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE pid = {}",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE id = {}",
}
SERVERS = [kind for kind in KINDS if kind.dialect in CUT]
PATIENCE = 60


def on(kinds):
    return pytest.mark.parametrize("world", kinds, ids=lambda kind: kind.name, indirect=True)


def never_waits(coroutine):
    """Run what is written as a coroutine and waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def cut_and_wait(world, connection):
    """Cut a connection, from another one, and wait until it is gone."""
    world.query(CUT[world.kind.dialect].format(connection))
    end = time.monotonic() + PATIENCE
    while world.query(LEFT[world.kind.dialect].format(connection)) != [(0,)]:
        assert time.monotonic() < end, "the connection is still there"
        time.sleep(0.01)


class Cuts:
    """A consumer whose connections are cut from outside, while, or after, its handler runs."""

    def __init__(self, world, where, times):
        self.world, self.where, self.times = world, where, times
        self.fired = self.ran = 0
        self.numbers = []

    async def cut(self, work, where):
        if where != self.where or self.fired == self.times:
            return
        ((own,),) = await work.run(OWN_ID[self.world.kind.dialect])
        cut_and_wait(self.world, own)
        self.fired += 1

    @contextlib.asynccontextmanager
    async def working(self):
        async with self.world.work() as work:
            self.work = work
            yield work.connection
            await self.cut(work, "commit")

    @contextlib.contextmanager
    def working_threads(self):
        working = self.working()
        connection = never_waits(working.__aenter__())
        try:
            yield connection
        except BaseException as error:
            if not never_waits(working.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            never_waits(working.__aexit__(None, None, None))

    async def handle(self, _):
        self.ran += 1
        self.numbers.append(current_attempt().number)
        await self.work.run("INSERT INTO ledger VALUES ('sent', 1)")
        await self.cut(self.work, "end of the handler")
        await self.cut(self.work, "handler")
        await self.cut(self.work, "caught by the handler")
        if self.where == "caught by the handler":
            with contextlib.suppress(Exception):
                await self.work.run("INSERT INTO ledger VALUES ('more', 1)")
        if self.where == "handler":
            await self.work.run("INSERT INTO ledger VALUES ('more', 1)")
            self.where = "never again" if self.fired == self.times else self.where

    def consumer(self, idem, **policy):
        asynchronous = self.world.kind.asynchronous
        handler = self.handle if asynchronous else lambda _: never_waits(self.handle(_))
        return (AsyncConsumer if asynchronous else Consumer)(
            idem,
            handler,
            {"consumer": "mailer", "policy": Policy(**policy)},
            framework_retries=True,
            transaction=self.working if asynchronous else self.working_threads,
        )


async def handled(consumer):
    given = consumer.handle(MESSAGE)
    return await given if inspect.isawaitable(given) else given


async def record(idem):
    given = idem.internals.store.get(IDENTITY)
    return await given if inspect.isawaitable(given) else given


@on(SERVERS)
@pytest.mark.more(one_of=3)
@pytest.mark.fault(59)
@pytest.mark.parametrize(
    "where", ["handler", "caught by the handler", "end of the handler", "commit"]
)
async def test_a_connection_that_is_cut_is_never_a_failure_of_the_handler(world, where, caplog):
    cuts = Cuts(world, where, times=2)
    async with world.engine() as idem:
        consumer = cuts.consumer(idem, max_attempts=2)
        verdicts = [await handled(consumer) for _ in range(4)]
        assert [type(verdict) for verdict in verdicts] == [Later, Later, Ack, Ack], verdicts
        assert (cuts.fired, cuts.ran) == (2, 3)
        assert (await record(idem)).number == 1
    said = r"transaction not committed; it will be redelivered in 5\S* s \[scope=mailer key_digest="
    assert len(re.findall(said, caplog.text)) == 2
    assert world.entries().count("sent") == 1


# --- at the flush ------------------------------------------------------------------------------


class Base(DeclarativeBase):
    """The tables of these tests."""


class Entry(Base):
    """A row of the ledger, which a session writes at its flush."""

    __tablename__ = "ledger"
    entry: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]


SESSIONS = [
    kind for kind in SERVERS if kind.name.startswith("sqlalchemy-") and "session" in kind.name
]


@on(SESSIONS)
@pytest.mark.fault(59)
async def test_a_connection_that_is_cut_before_the_flush_is_no_failure_of_the_handler(world):
    class AtFlush(Cuts):
        async def handle(self, session):
            self.ran += 1
            await self.cut(self.work, "flush")
            session.add(Entry(entry="sent", amount=1))

    cuts = AtFlush(world, "flush", times=2)
    async with world.engine() as idem:
        consumer = cuts.consumer(idem, max_attempts=2)
        verdicts = [await handled(consumer) for _ in range(3)]
        assert [type(verdict) for verdict in verdicts] == [Later, Later, Ack], verdicts
        assert (cuts.fired, cuts.ran) == (2, 3)
    assert world.entries() == ["sent"]


# --- what is the handler's ---------------------------------------------------------------------


async def failures(world, handler, idem):
    """Deliver a message three times whose handler violates a constraint; it is counted."""

    class Violating(Cuts):
        async def handle(self, session):
            self.ran += 1
            await handler(self.work, session)

    violating = Violating(world, "nowhere", times=0)
    consumer = violating.consumer(idem, max_attempts=2)
    consumer.rules.framework_retries = False
    verdicts = [await handled(consumer) for _ in range(3)]
    assert [type(verdict) for verdict in verdicts] == [Later, Reject, Reject], verdicts
    assert violating.ran == 2
    assert (await record(idem)).number == 2


@on([kind for kind in SERVERS if kind.dialect == "postgresql"])
@pytest.mark.fault(59)
async def test_a_constraint_that_is_violated_at_commit_is_a_failure_of_the_handler(world):
    async def handler(work, _):
        await work.run("INSERT INTO ledger VALUES ('sent', 1), ('sent', 2)")

    world.query("ALTER TABLE ledger ADD UNIQUE (entry) DEFERRABLE INITIALLY DEFERRED")
    async with world.engine() as idem:
        await failures(world, handler, idem)
    assert world.entries() == []


@on(SESSIONS)
async def test_a_constraint_that_is_violated_at_the_flush_is_a_failure_of_the_handler(world):
    async def handler(_, session):
        session.add(Entry(entry="sent", amount=1))

    world.query("ALTER TABLE ledger ADD UNIQUE (entry)")
    world.query("INSERT INTO ledger VALUES ('sent', 1)")
    async with world.engine() as idem:
        await failures(world, handler, idem)
    assert world.entries() == ["sent"]


# --- how often a start is not counted ------------------------------------------------------------

TWO = [kind for kind in SERVERS if kind.name in {"psycopg", "asyncmy"}]


@on(TWO)
async def test_a_handler_that_loses_its_connection_each_time_is_bounded(world):
    cuts = Cuts(world, "end of the handler", times=1000)
    async with world.engine() as idem:
        consumer = cuts.consumer(idem, max_attempts=2)
        consumer.rules.framework_retries = False
        verdicts = [await handled(consumer) for _ in range(2 * (MOST_LOSSES + 1) + 1)]
        assert [type(each) for each in verdicts[:-2]] == [Later] * (2 * MOST_LOSSES + 1)
        assert [type(each) for each in verdicts[-2:]] == [Reject, Reject]
        assert cuts.fired == cuts.ran == 2 * (MOST_LOSSES + 1)
        assert cuts.numbers == [1] * (MOST_LOSSES + 1) + [2] * (MOST_LOSSES + 1)
        assert (await record(idem)).number == 2
    assert world.entries() == []


@on(TWO)
async def test_a_start_is_taken_back_when_the_server_is_there_again(world, request):
    """The connection is lost because the server is away, so that nothing can be written then."""
    parts = urlsplit(world.url)
    with proxy_to(parts.port) as proxy:
        through = world.url.replace(f":{parts.port}/", f":{proxy.port}/")
        direct, world.url = world.url, through

        class Away(Cuts):
            async def handle(self, _):
                self.ran += 1
                await self.work.run("INSERT INTO ledger VALUES ('sent', 1)")
                if self.ran == 1:
                    proxy.refusing = True
                    proxy.cut_all()

        def come_back(event):
            if isinstance(event, events.StoreFailed):
                failed.append(event)
                proxy.refusing = False

        failed = []
        away = Away(world, "nowhere", times=0)
        async with world.engine(hooks=[come_back]) as idem:
            consumer = away.consumer(idem, max_attempts=1, store_timeout=1)
            assert isinstance(await handled(consumer), Later)
            assert proxy.refused > 0
            assert [event.verb for event in failed] == ["fail"]
            assert (await record(idem)).number == 0
            assert await handled(consumer) == Ack()
        world.url = direct
    assert world.entries() == ["sent"]


@on(TWO)
async def test_a_start_is_not_taken_back_from_what_the_handler_committed_itself(world):
    class Committing(Cuts):
        async def handle(self, _):
            self.ran += 1
            await self.work.run("INSERT INTO ledger VALUES ('sent', 1)")
            await self.work.run("COMMIT")
            await self.cut(self.work, "handler")
            raise ValueError("after the commit")

    for where in ("nowhere", "handler"):
        committing = Committing(world, where, times=1)
        async with world.engine() as idem:
            consumer = committing.consumer(idem, max_attempts=5)
            await handled(consumer)
            kept = await record(idem)
            assert (kept.state, kept.hold) == (State.PROCESSING, True)
            verdict = await handled(consumer)
            assert isinstance(verdict.error, OutcomeUnknown)
            assert committing.ran == 1
            await world.done(idem.forget("m-1", scope="mailer"))


@on(TWO[:1])
async def test_a_start_whose_record_stays_locked_is_left_as_it_is(world):
    """As where a server has not noticed that a connection is gone, and keeps its locks."""

    class Locked(Cuts):
        async def handle(self, _):
            self.ran += 1
            await self.cut(self.work, "handler")
            other = await locking.enter_async_context(world.work())
            await other.run("UPDATE idempotent_record SET hold = hold")
            raise StoreUnavailable("lost")

    locked = Locked(world, "handler", times=1)
    async with contextlib.AsyncExitStack() as locking, world.engine() as idem:
        consumer = locked.consumer(idem, max_attempts=2, lease=1, store_timeout=1)
        assert isinstance(await handled(consumer), Later)
        assert locked.fired == 1
        assert idem.internals.leases.running() == []
        await locking.aclose()
        assert (await record(idem)).number == 1


@on([kind for kind in SERVERS if kind.name in {"psycopg", "asyncpg"}])
async def test_a_start_is_counted_in_sql_where_redis_stands_before_it(world, redis_url):
    cuts = Cuts(world, "commit", times=1)
    opened = open_async_store if world.kind.asynchronous else open_store
    store = opened(redis_url, behind=world.url)
    idem = (AsyncIdempotency if world.kind.asynchronous else Idempotency)(store)
    await world.done(idem.peek("any"))
    consumer = cuts.consumer(idem, max_attempts=1)
    verdicts = [await handled(consumer) for _ in range(3)]
    await world.done(idem.close())
    await world.done(store.close())
    assert [type(verdict) for verdict in verdicts] == [Later, Ack, Ack], verdicts
    assert cuts.fired == 1
    assert world.entries() == ["sent"]
