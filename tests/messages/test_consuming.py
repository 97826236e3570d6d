"""One message, handled by threads and by tasks: when it runs, and which verdict it gets."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import aiosqlite
import pymysql
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from semel import (
    AsyncIdempotency,
    AttemptsExhausted,
    ConfigError,
    DuplicateRequest,
    Idempotency,
    LeaseLost,
    NestedCall,
    Policy,
    RetryTransaction,
    StoreError,
    StoreUnavailable,
    current_attempt,
    events,
)
from semel.adapters import consuming
from semel.adapters._sync import consuming as sync_consuming
from semel.adapters._sync.consuming import Consumer
from semel.adapters.consuming import AsyncConsumer, AsyncRunning
from semel.cli.formatting import state_of
from semel.core.fingerprint import fingerprint
from semel.core.records import OWNER_BYTES, ClaimRequest, Identity, State
from semel.engine import outcomes, runs
from semel.engine._sync import runs as sync_runs
from semel.errors import about
from semel.messages import LONGEST, Ack, Fail, Later, Message, Reject
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FaultyStore, Refuse

MESSAGE = Message(id="m-1", body=b'{"number": 42}')
IDENTITY = Identity("mailer", "m-1")
OTHER = b"o" * OWNER_BYTES


class Kind:
    """One of the two kinds, driven by plain calls; handlers are plain functions."""

    def __init__(self, asynchronous):
        self.asynchronous = asynchronous
        self._runner = asyncio.Runner()
        self.engines = []

    def wait(self, value):
        return self._runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def ready(self, value):
        return _ready(value) if self.asynchronous else value

    def store(self):
        if self.asynchronous:
            return AsyncFaultyStore(AsyncMemoryStore())
        return FaultyStore(MemoryStore())

    def engine(self, store, **options):
        engine = (AsyncIdempotency if self.asynchronous else Idempotency)(store, **options)
        self.engines.append(engine)
        return engine

    def consumer(self, engine, handler, options=None, **more):
        kind = AsyncConsumer if self.asynchronous else Consumer
        return kind(engine, handler, {"consumer": "mailer", **(options or {})}, **more)

    def handle(self, consumer, message=MESSAGE, *args):
        return self.wait(consumer.handle(message, *args))

    def close(self):
        for engine in self.engines:
            self.wait(engine.close())
        self._runner.close()


async def _awaited(value):
    return await value


async def _ready(value):
    return value


@pytest.fixture(params=[False, True], ids=["threads", "asyncio"])
def kind(request):
    kind = Kind(request.param)
    yield kind
    kind.close()


@pytest.fixture
def store(kind):
    return kind.store()


@pytest.fixture
def engine(kind, store):
    return kind.engine(store)


def record(kind, store, identity=IDENTITY):
    return kind.wait(store.get(identity))


# --- it runs once ----------------------------------------------------------------------------


def test_a_message_runs_once_and_every_delivery_is_acknowledged(kind, engine):
    ran = []
    consumer = kind.consumer(engine, ran.append)
    assert kind.handle(consumer, MESSAGE, "delivery 1") == Ack()
    assert kind.handle(consumer, MESSAGE, "delivery 2") == Ack(replayed=True)
    assert ran == ["delivery 1"]


def test_another_consumer_handles_the_same_message_for_itself(kind, engine):
    ran = []
    for name in ("mailer", "stock"):
        chosen = {"consumer": name}
        consumer = kind.consumer(engine, lambda: ran.append(current_attempt().scope), chosen)
        assert kind.handle(consumer) == Ack()
    assert ran == ["mailer", "stock"]


def test_a_duplicate_gets_the_value_where_it_is_kept(kind, engine):
    consumer = kind.consumer(engine, lambda: {"sent": 1}, keeps_value=True)
    assert kind.handle(consumer) == Ack({"sent": 1})
    assert kind.handle(consumer) == Ack({"sent": 1}, replayed=True)


def test_in_guard_mode_a_duplicate_is_acknowledged_too(kind, engine):
    consumer = kind.consumer(engine, lambda: None, {"policy": Policy(duplicate="reject")})
    assert kind.handle(consumer) == Ack()
    assert kind.handle(consumer) == Ack(replayed=True, has_value=False)


def test_a_result_that_cannot_be_kept_does_not_keep_the_message(kind, engine):
    consumer = kind.consumer(engine, threading.Lock, keeps_value=True)
    assert isinstance(kind.handle(consumer), Ack)
    assert kind.handle(consumer) == Ack(replayed=True, has_value=False)


def test_the_engine_of_the_other_kind_is_refused(kind):
    other = Kind(not kind.asynchronous)
    try:
        with pytest.raises(ConfigError, match="Idempotency is needed"):
            kind.consumer(other.engine(other.store()), print)
    finally:
        other.close()
    with pytest.raises(ConfigError, match=r'is needed, such as \w+\("redis://\.\.\."\), not str'):
        kind.consumer("memory://", print)


def test_a_handler_and_a_transaction_have_to_be_functions(kind, engine):
    with pytest.raises(ConfigError, match="a function that takes the message is needed, not str"):
        kind.consumer(engine, "handle")
    with pytest.raises(ConfigError, match="transaction must be a function"):
        kind.consumer(engine, print, transaction="begin")
    with pytest.raises(ConfigError, match="FaultyStore keeps them elsewhere"):
        kind.consumer(engine, print, transaction=print)


# --- it does not run -------------------------------------------------------------------------


def test_a_message_that_runs_elsewhere_comes_back_when_that_lease_ends(kind, store, engine):
    kind.wait(store.ask(ClaimRequest(IDENTITY, OTHER, fingerprint(None), lease=40.0, ttl=60.0)))
    consumer = kind.consumer(engine, pytest.fail, {"payload": lambda _: None})
    verdict = kind.handle(consumer)
    assert isinstance(verdict, Later)
    assert 30.0 < verdict.seconds <= 44.0


def test_a_message_without_an_id_and_one_with_another_body_are_rejected(kind, store, engine):
    consumer = kind.consumer(engine, lambda: None)
    assert isinstance(kind.handle(consumer, Message(body=b"no id")), Reject)
    assert kind.handle(consumer) == Ack()
    assert isinstance(kind.handle(consumer, Message(id="m-1", body=b"other")), Reject)
    assert record(kind, store).fingerprint == fingerprint(MESSAGE.body)


def test_a_body_that_is_nested_too_deeply_is_rejected(kind, engine):
    body = []
    for _ in range(100_000):
        body = [body]
    assert isinstance(kind.handle(kind.consumer(engine, print), Message("m-1", body=body)), Reject)
    while body:  # else Python's own end of it is as deep
        body = body.pop()


def test_a_store_that_is_away_at_the_claim_rejects_nothing(kind, store, engine):
    consumer = kind.consumer(engine, lambda: None, {"dead_letters": True})
    store.inject("claim", Refuse())
    assert isinstance(kind.handle(consumer), Later)
    assert store.fired("claim") == 1
    assert kind.handle(consumer) == Ack()


def test_with_an_open_store_error_the_message_runs_unprotected(kind, store, engine):
    ran = []
    policy = Policy(store_error="open")
    consumer = kind.consumer(engine, lambda: ran.append(1), {"policy": policy})
    store.inject("claim", Refuse())
    assert kind.handle(consumer) == Ack()
    failing = kind.consumer(engine, _failing, {"policy": policy})
    store.inject("claim", Refuse())
    assert isinstance(kind.handle(failing, Message(id="m-2")), Later)
    assert ran == [1]


def test_without_protection_an_error_of_another_call_is_the_handlers_own(kind, store, engine):
    other = about(DuplicateRequest(), Identity("stock", "order:42"))
    policy = Policy(store_error="open")
    consumer = kind.consumer(engine, lambda: _raise(other), {"policy": policy})
    store.inject("claim", Refuse())
    assert isinstance(kind.handle(consumer), Later)


def test_a_held_message_stays_or_goes_to_the_dead_letters(kind, store):
    engine = kind.engine(store, policy=Policy(abandoned="hold"))
    consumer = kind.consumer(engine, _failing)
    verdict = kind.handle(consumer)
    assert isinstance(verdict, Reject)
    assert "unknown outcome" in verdict.reason
    assert kind.handle(consumer).seconds == LONGEST
    dead = kind.consumer(engine, _failing, {"dead_letters": True})
    assert isinstance(kind.handle(dead), Reject)


def test_an_error_of_the_program_stops_the_consumer_and_frees_the_key(kind, store, engine):
    consumer = kind.consumer(engine, lambda: _raise(ConfigError("a wrong setting")))
    with pytest.raises(ConfigError, match="a wrong setting"):
        kind.handle(consumer)
    assert record(kind, store).state is not State.PROCESSING


@pytest.mark.parametrize("note", ["\ud800", object()], ids=["a lone surrogate", "an object"])
def test_what_a_message_makes_uncomparable_stops_no_consumer(kind, engine, note):
    if kind.asynchronous:

        @engine.once("{number}")
        async def charge(number, note):
            return note
    else:

        @engine.once("{number}")
        def charge(number, note):
            return note

    verdict = kind.handle(kind.consumer(engine, lambda: charge(42, note)))
    assert isinstance(verdict, Later)
    assert "payload=None" in verdict.reason


def test_a_handler_that_handles_its_own_message_stops_the_consumer(engine, kind, store):
    nested = kind.consumer(engine, lambda: None)
    if kind.asynchronous:

        async def handler():
            return await nested.handle(MESSAGE)
    else:

        def handler():
            return nested.handle(MESSAGE)

    with pytest.raises(NestedCall):
        kind.handle(kind.consumer(engine, handler))
    assert record(kind, store).state is not State.PROCESSING


# --- the handler raises ----------------------------------------------------------------------


class Failure(Exception):
    """What a handler of these tests raises."""


def _raise(error):
    raise error


def _failing():
    raise Failure("not yet")


def test_the_record_is_released_before_the_framework_retries(kind, store, engine):
    consumer = kind.consumer(engine, _failing, framework_retries=True)
    verdict = kind.handle(consumer)
    assert isinstance(verdict, Fail)
    assert isinstance(verdict.error, Failure)
    assert record(kind, store).state is State.FAILED
    assert isinstance(kind.handle(consumer), Fail)  # a retry is not taken for a duplicate


def test_without_a_framework_a_failure_comes_back_later_and_later_until_max_attempts(kind, engine):
    policy = Policy(max_attempts=3)
    consumer = kind.consumer(engine, _failing, {"policy": policy})
    first, second, third, fourth = (kind.handle(consumer) for _ in range(4))
    assert (first.seconds, second.seconds) == (1.0, 2.0)
    assert isinstance(third, Reject)
    assert isinstance(third.error, Failure)
    assert isinstance(fourth, Reject)


def test_what_a_handler_raises_is_logged_where_no_framework_does_it(kind, engine, caplog):
    policy = Policy(max_attempts=2)
    consumer = kind.consumer(engine, _failing, {"policy": policy})
    for said in ("attempt 1); it will be redelivered in 1 s", "attempt 2); it will be rejected"):
        caplog.clear()
        kind.handle(consumer)
        assert said in caplog.text
        assert "Failure: not yet" in caplog.text  # with the traceback
    caplog.clear()
    framework = kind.consumer(engine, _failing, {"consumer": "stock"}, framework_retries=True)
    kind.handle(framework)
    assert "raised (attempt" not in caplog.text


def test_by_hand_too_the_count_of_attempts_is_kept_as_long_as_the_record(kind, store, engine):
    policy = Policy(max_attempts=2)
    for _ in range(2):
        with pytest.raises(Failure):
            kind.wait(engine.consume("m-1", _failing, scope="mailer", ttl=9000, policy=policy))
    kept = record(kind, store)
    assert kept.expires_at - kept.now > 8000
    with pytest.raises(AttemptsExhausted):
        kind.wait(engine.consume("m-1", _failing, scope="mailer", ttl=9000, policy=policy))


def test_a_final_failure_is_rejected_now_and_at_every_delivery(kind, engine):
    policy = Policy(failure="final")
    consumer = kind.consumer(engine, _failing, {"policy": policy}, framework_retries=True)
    assert isinstance(kind.handle(consumer), Reject)
    again = kind.handle(consumer)
    assert isinstance(again, Reject)
    assert "failed before" in again.reason


def test_a_failure_that_could_not_be_recorded_is_not_rejected(kind, store, engine):
    policy = Policy(failure="final")
    consumer = kind.consumer(engine, _failing, {"policy": policy})
    store.inject("fail", Refuse())
    assert isinstance(kind.handle(consumer), Later)
    assert store.fired("fail") == 1


def test_what_the_framework_raises_itself_is_not_done_under_hold_too(kind, store):
    engine = kind.engine(store, policy=Policy(abandoned="hold"))
    consumer = kind.consumer(engine, _failing, framework_retries=True, not_done=(Failure,))
    assert isinstance(kind.handle(consumer), Fail)
    assert isinstance(kind.handle(consumer), Fail)


# --- the end of the attempt --------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """The engine leaves a save that fails to its timer almost at once."""
    monkeypatch.setattr(outcomes, "SAVE_FOR", 0.02)


def when_not_stored(step):
    """A hook that does something when a result could not be stored at once."""
    return lambda event: step() if isinstance(event, events.ResultNotStored) else None


@pytest.mark.usefixtures("impatient")
def test_a_message_is_acknowledged_when_its_record_is_stored_and_not_before(kind, store, caplog):
    engine = kind.engine(store, policy=Policy(lease=1.0), hooks=[when_not_stored(store.heal)])
    consumer = kind.consumer(engine, lambda: None)
    store.inject("complete", Refuse(), times=1000)
    with caplog.at_level(logging.WARNING, "semel"):
        assert kind.handle(consumer) == Ack()
    assert "acknowledged when its record is stored" in caplog.text
    assert record(kind, store).state is State.SUCCEEDED


@pytest.mark.usefixtures("impatient")
def test_a_time_limit_that_strikes_before_the_result_is_stored_acknowledges_nothing(
    kind, store, monkeypatch
):
    engine = kind.engine(store, policy=Policy(lease=1.0))
    consumer = kind.consumer(engine, lambda: None, framework_retries=True)
    monkeypatch.setattr(engine.internals, "stored", lambda _: _raise(SoftLimit()))
    store.inject("complete", Refuse(), times=1000)
    assert isinstance(kind.handle(consumer), Later)
    store.heal()


@pytest.mark.usefixtures("impatient")
def test_a_message_whose_late_result_is_refused_comes_back(kind, store):
    def take_over():
        store.heal()
        removed = store.store.forget(IDENTITY)
        if inspect.isawaitable(removed):
            removed = asyncio.ensure_future(removed)
        kept.append(removed)

    kept = []
    engine = kind.engine(store, policy=Policy(lease=1.0), hooks=[when_not_stored(take_over)])
    consumer = kind.consumer(engine, lambda: None)
    store.inject("complete", Refuse(), times=1000)
    verdict = kind.handle(consumer)
    assert isinstance(verdict, Later)
    assert "replaced" in verdict.reason


@pytest.mark.usefixtures("impatient")
def test_a_consumer_that_is_shut_down_before_the_result_is_stored_acknowledges_nothing(
    kind, store, monkeypatch
):
    monkeypatch.setattr(runs, "CLOSING_LOOK", 0.05)
    monkeypatch.setattr(sync_runs, "CLOSING_LOOK", 0.05)

    def shut_down():
        engine.internals.closed = True

    engine = kind.engine(store, policy=Policy(lease=1.0), hooks=[when_not_stored(shut_down)])
    consumer = kind.consumer(engine, lambda: None)
    store.inject("complete", Refuse(), times=1000)
    with pytest.raises(StoreUnavailable, match="not acknowledged"):
        kind.handle(consumer)
    store.heal()


def test_a_message_whose_attempt_was_replaced_comes_back(kind, store, engine):
    lost = about(LeaseLost("the lease of this attempt was lost"), IDENTITY)
    consumer = kind.consumer(engine, lambda: _raise(lost), framework_retries=True)
    assert isinstance(kind.handle(consumer), Later)
    # One of another operation is the handler's own affair.
    lost = about(LeaseLost("of another"), Identity("stock", "m-1"))
    other = kind.consumer(engine, lambda: _raise(lost), framework_retries=True)
    assert isinstance(kind.handle(other, Message(id="m-2")), Fail)


class SoftLimit(Exception):
    """What a worker's time limit raises, wherever the program is."""


def test_a_time_limit_that_strikes_after_the_end_does_not_undo_it(kind, store):
    struck = []
    engine = kind.engine(store)
    consumer = kind.consumer(engine, lambda: "sent", keeps_value=True, framework_retries=True)
    original = engine.internals._saved

    def saved(*args, **kwargs):
        original(*args, **kwargs)
        if not struck:
            struck.append(1)
            raise SoftLimit

    engine.internals._saved = saved
    assert isinstance(kind.handle(consumer), Later)
    assert kind.handle(consumer) == Ack("sent", replayed=True)


def test_an_interrupted_handler_is_released_and_its_message_is_not_acknowledged(
    kind, store, engine
):
    consumer = kind.consumer(engine, lambda: _raise(Interrupted()))
    with pytest.raises(Interrupted):
        kind.handle(consumer)
    kind.wait(engine.close())
    assert record(kind, store).state is not State.PROCESSING


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt and its kind, which would end an event loop."""


# --- in a transaction ------------------------------------------------------------------------


class Database:
    """A SQLite file that has the records and the effects."""

    def __init__(self, kind, path):
        self.kind = kind
        self.path = path
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE effects (message)")
        connection.close()

    def begin(self):
        if self.kind.asynchronous:
            return self._begun_aio()
        return self._begun()

    @contextmanager
    def _begun(self):
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()

    @asynccontextmanager
    async def _begun_aio(self):
        async with aiosqlite.connect(self.path, isolation_level=None) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            yield connection
            await connection.execute("COMMIT")

    def effect(self, session, text="sent"):
        done = session.execute("INSERT INTO effects VALUES (?)", (text,))
        if not self.kind.asynchronous:
            return None
        return self._effect_aio(done)

    @staticmethod
    async def _effect_aio(done):
        await done

    def effects(self):
        connection = sqlite3.connect(self.path)
        try:
            return [text for (text,) in connection.execute("SELECT message FROM effects")]
        finally:
            connection.close()


@pytest.fixture
def database(kind, tmp_path):
    return Database(kind, tmp_path / "shop.db")


def engine_in(database, **options):
    """An engine in that file, which has the table of records from its first call on."""
    engine = database.kind.engine(f"sqlite:///{database.path}", **options)
    database.kind.wait(engine.marks.set("first"))
    return engine


@pytest.fixture
def in_sql(database):
    return engine_in(database)


def test_record_and_effect_are_committed_together(kind, database, in_sql):
    consumer = kind.consumer(in_sql, database.effect, transaction=database.begin)
    assert kind.handle(consumer) == Ack()
    assert kind.handle(consumer) == Ack(replayed=True)
    assert database.effects() == ["sent"]
    assert isinstance(kind.handle(consumer, Message()), Reject)


def test_a_transaction_of_the_other_kind_is_refused(kind, database, in_sql):
    begin = database._begun if kind.asynchronous else database._begun_aio
    needed = {
        True: r"an async context manager, such as async_sessionmaker\(\.\.\.\)\.begin",
        False: r"a context manager, such as sessionmaker\(\.\.\.\)\.begin",
    }
    consumer = kind.consumer(in_sql, database.effect, transaction=begin)
    said = (
        f"^transaction= must be a function that returns {needed[kind.asynchronous]}; it returned _"
    )
    with pytest.raises(ConfigError, match=said):
        kind.handle(consumer)
    assert database.effects() == []


def test_a_session_that_has_not_begun_is_refused(kind, database, in_sql):
    url = (
        f"sqlite+aiosqlite:///{database.path}"
        if kind.asynchronous
        else f"sqlite:///{database.path}"
    )
    engine = create_async_engine(url) if kind.asynchronous else create_engine(url)
    sessions = (async_sessionmaker if kind.asynchronous else sessionmaker)(engine)
    ran = []
    try:
        consumer = kind.consumer(in_sql, ran.append, transaction=sessions)
        said = "^transaction= gave a session without an open transaction: pass Session.begin"
        with pytest.raises(ConfigError, match=said) as refused:
            kind.handle(consumer)
        assert refused.value.key_digest == IDENTITY.key_digest
        in_sql.internals.setup.disabled = True  # without a record, any session will do
        assert kind.handle(consumer) == Ack()
        in_sql.internals.setup.disabled = False
        consumer = kind.consumer(in_sql, ran.append, transaction=sessions.begin)
        assert kind.handle(consumer) == Ack()
    finally:
        kind.wait(engine.dispose())
    assert len(ran) == 2


def test_a_handler_that_raises_leaves_no_effect_and_is_counted(kind, database, in_sql):
    def fails(session):
        done = database.effect(session)
        if inspect.isawaitable(done):
            return _then_fail(done)
        raise Failure("not yet")

    async def _then_fail(done):
        await done
        raise Failure("not yet")

    policy = Policy(max_attempts=3)
    consumer = kind.consumer(in_sql, fails, {"policy": policy}, transaction=database.begin)
    first, second, third, fourth = (kind.handle(consumer) for _ in range(4))
    assert (first.seconds, second.seconds) == (1.0, 2.0)
    assert isinstance(third, Reject)
    assert isinstance(fourth, Reject)
    assert database.effects() == []


def test_a_failure_in_a_transaction_is_recorded_without_a_limit_of_attempts(kind, database, in_sql):
    ran = []

    def fails(_):
        ran.append("ran")
        raise Failure("no")

    consumer = kind.consumer(in_sql, fails, transaction=database.begin)
    assert [kind.handle(consumer).seconds for _ in range(3)] == [1.0, 2.0, 4.0]
    assert record(kind, in_sql.internals.store).number == 3
    final = {"policy": Policy(failure="final")}
    kind.wait(in_sql.forget(IDENTITY.key, scope=IDENTITY.scope))
    ran.clear()
    consumer = kind.consumer(in_sql, fails, final, transaction=database.begin)
    assert [type(kind.handle(consumer)) for _ in range(2)] == [Reject, Reject]
    assert ran == ["ran"]


@pytest.mark.parametrize("most", [None, 1])
def test_a_repeated_transaction_that_does_not_begin_is_no_failure_of_its_handler(
    kind, database, in_sql, most
):
    rounds = []

    def begin():
        rounds.append("begun")
        if len(rounds) == 2:
            raise OSError("no connection is left in the pool")
        return database.begin()

    consumer = kind.consumer(
        in_sql,
        lambda _: _raise(RetryTransaction("a deadlock")),
        {"policy": Policy(max_attempts=most)},
        transaction=begin,
    )
    assert isinstance(kind.handle(consumer), Later)
    assert len(rounds) == 2
    kind.wait(_drained(kind, in_sql))
    consumer = kind.consumer(
        in_sql, database.effect, {"policy": Policy(max_attempts=most)}, transaction=database.begin
    )
    assert kind.handle(consumer) == Ack()


def test_a_commit_that_fails_is_counted_too(kind, database, in_sql):
    # As a session does, which sends its rows with the commit.
    @contextmanager
    def begin():
        with database._begun() as connection:
            yield connection
            raise sqlite3.IntegrityError("UNIQUE constraint failed")

    @asynccontextmanager
    async def aio_begin():
        async with database._begun_aio() as connection:
            yield connection
            raise sqlite3.IntegrityError("UNIQUE constraint failed")

    consumer = kind.consumer(
        in_sql,
        database.effect,
        {"policy": Policy(max_attempts=2)},
        transaction=aio_begin if kind.asynchronous else begin,
    )
    assert [type(kind.handle(consumer)) for _ in range(3)] == [Later, Reject, Reject]
    assert database.effects() == []


def test_a_commit_that_succeeded_although_it_looked_lost_is_found_by_the_next_delivery(
    kind, database, in_sql
):
    @contextmanager
    def begin():
        with database._begun() as connection:
            yield connection
        raise OSError("the connection was lost")

    @asynccontextmanager
    async def aio_begin():
        async with database._begun_aio() as connection:
            yield connection
        raise OSError("the connection was lost")

    lost = aio_begin if kind.asynchronous else begin
    consumer = kind.consumer(in_sql, database.effect, transaction=lost)
    assert isinstance(kind.handle(consumer), Later)
    again = kind.consumer(in_sql, database.effect, transaction=database.begin)
    assert kind.handle(again) == Ack(replayed=True)
    assert database.effects() == ["sent"]


@pytest.mark.parametrize("most", [None, 2])
def test_what_was_rolled_back_is_not_held(kind, database, most):
    engine = engine_in(database, policy=Policy(abandoned="hold", max_attempts=most))
    consumer = kind.consumer(
        engine, lambda _: _raise(Failure("no")), framework_retries=True, transaction=database.begin
    )
    assert isinstance(kind.handle(consumer), Fail)
    done = kind.consumer(engine, database.effect, transaction=database.begin)
    assert kind.handle(done) == Ack()


KILLED = """
import os, signal, sqlite3, sys
from contextlib import contextmanager
from semel import Idempotency, Policy
from semel.adapters._sync.consuming import Consumer
from semel.messages import Message

@contextmanager
def begin():
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield connection

def handler(connection):
    connection.execute("INSERT INTO effects VALUES ('sent')")
    os.kill(os.getpid(), signal.SIGKILL)

policy = Policy(max_attempts=2, abandoned="hold", lease=0.2)
options = {"consumer": "mailer", "policy": policy}
Consumer(Idempotency("sqlite:///" + sys.argv[1]), handler, options, transaction=begin).handle(
    Message(id="m-1", body=b'{"number": 42}')
)
"""


def test_a_start_that_waits_for_its_connection_beyond_its_lease_is_counted_once(
    kind, database, in_sql
):
    duplicates = []

    def waiting():
        begun, wait = database.begin(), _duplicate if kind.asynchronous else _duplicate_of_threads
        return _after(wait, begun) if kind.asynchronous else _after_of_threads(wait, begun)

    async def _duplicate():
        while not (await in_sql.peek("m-1", scope="mailer")).abandoned:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        duplicates.append(await consumer.handle(MESSAGE))

    def _duplicate_of_threads():
        while not in_sql.peek("m-1", scope="mailer").abandoned:
            time.sleep(0.01)
        duplicates.append(consumer.handle(MESSAGE))

    policy = {"policy": Policy(max_attempts=1, lease=0.3)}
    consumer = kind.consumer(in_sql, database.effect, policy, transaction=waiting)
    assert kind.handle(consumer) == Ack()
    assert [type(verdict) for verdict in duplicates] == [Later]
    assert database.effects() == ["sent"]


@contextmanager
def _after_of_threads(step, begun):
    """Enter a transaction after a step."""
    step()
    with begun as session:
        yield session


@asynccontextmanager
async def _after(step, begun):
    await step()
    async with begun as session:
        yield session


def test_a_worker_that_is_killed_in_its_transaction_is_counted_and_not_held(kind, database, in_sql):
    policy = Policy(max_attempts=2, abandoned="hold", lease=0.2)
    consumer = kind.consumer(
        in_sql, database.effect, {"policy": policy}, transaction=database.begin
    )
    for number in (1, 2):
        ended = subprocess.run([sys.executable, "-c", KILLED, database.path], check=False)
        assert ended.returncode == -signal.SIGKILL
        kept = record(kind, in_sql.internals.store)
        assert (kept.state, kept.number, kept.hold) == (State.PROCESSING, number, False)
        end = time.monotonic() + 60
        while not record(kind, in_sql.internals.store).abandoned:
            assert time.monotonic() < end
            time.sleep(0.01)
        shown = state_of(record(kind, in_sql.internals.store))
        assert shown == ("abandoned" if number == 1 else "exhausted")
    verdict = kind.handle(consumer)
    assert isinstance(verdict, Reject)
    assert isinstance(verdict.error, AttemptsExhausted)
    assert database.effects() == []


def away(kind, error=StoreUnavailable):
    """A verb of a store that does not answer."""

    async def fails_aio(*_, **__):
        raise error("away")

    return fails_aio if kind.asynchronous else lambda *_, **__: _raise(error("away"))


COUNTED = {"policy": Policy(max_attempts=2)}


@pytest.mark.parametrize("options", [{}, COUNTED], ids=["not counted", "counted"])
def test_a_failure_that_the_store_could_not_record_is_still_the_handlers(
    kind, database, in_sql, monkeypatch, options
):
    def handler(_):
        monkeypatch.setattr(in_sql.internals.store, "get", away(kind))
        raise Failure("no")

    consumer = kind.consumer(in_sql, handler, options, transaction=database.begin)
    verdict = kind.handle(consumer)
    assert isinstance(verdict, Later)
    assert "its handler raised Failure: no" in verdict.reason
    assert not in_sql.internals.leases.running()


def test_a_start_whose_transaction_does_not_begin_is_not_counted(kind, database, in_sql):
    consumer = kind.consumer(
        in_sql, pytest.fail, COUNTED, transaction=lambda: _raise(OSError("no route"))
    )
    for _ in range(3):
        assert isinstance(kind.handle(consumer), Later)
        kind.wait(_drained(kind, in_sql))
    assert record(kind, in_sql.internals.store).number == 0


def test_a_start_that_is_given_back_leaves_the_count_of_earlier_ones_for_its_time(
    kind, database, in_sql
):
    failing = kind.consumer(
        in_sql, lambda _: _raise(Failure("no")), COUNTED, transaction=database.begin
    )
    assert isinstance(kind.handle(failing), Later)
    unbegun = kind.consumer(
        in_sql, pytest.fail, COUNTED, transaction=lambda: _raise(OSError("no route"))
    )
    assert isinstance(kind.handle(unbegun), Later)
    kind.wait(_drained(kind, in_sql))
    kept = record(kind, in_sql.internals.store)
    assert kept.number == 1
    assert kept.remaining > 86400


def _drained(kind, engine):
    """Wait for what an engine does in the background."""
    tasks = engine.internals.in_background
    return asyncio.wait(tasks) if tasks else None


def test_what_the_framework_raises_itself_is_never_taken_for_an_outage(kind, database, in_sql):
    lost = OperationalError("SELECT 1", None, Exception("lost"), connection_invalidated=True)

    def handler(_):
        raise Failure("sent again") from lost

    options = {"transaction": database.begin, "framework_retries": True}
    assert isinstance(kind.handle(kind.consumer(in_sql, handler, **options)), Later)
    retrying = kind.consumer(in_sql, handler, not_done=(Failure,), **options)
    assert isinstance(kind.handle(retrying), Fail)


@pytest.mark.parametrize("options", [{}, COUNTED], ids=["not counted", "counted"])
def test_an_error_after_the_commit_changes_nothing(kind, database, in_sql, options):
    @contextmanager
    def begin():
        with database._begun() as connection:
            yield connection
        raise ValueError("after the commit")

    @asynccontextmanager
    async def aio_begin():
        async with database._begun_aio() as connection:
            yield connection
        raise ValueError("after the commit")

    begin = aio_begin if kind.asynchronous else begin
    consumer = kind.consumer(
        in_sql, database.effect, options, framework_retries=True, transaction=begin
    )
    assert isinstance(kind.handle(consumer), Later)
    again = kind.consumer(in_sql, database.effect, options, transaction=database.begin)
    assert kind.handle(again) == Ack(replayed=True)
    assert database.effects() == ["sent"]


def test_a_start_whose_record_was_removed_before_its_transaction_runs(kind, database, in_sql):
    def forgetting():
        connection = sqlite3.connect(database.path)
        with connection:
            connection.execute("DELETE FROM idempotent_record")
        connection.close()
        return database.begin()

    consumer = kind.consumer(in_sql, database.effect, COUNTED, transaction=forgetting)
    assert kind.handle(consumer) == Ack()
    assert database.effects() == ["sent"]
    assert record(kind, in_sql.internals.store).state is State.SUCCEEDED


def test_an_interrupted_handler_in_a_transaction_leaves_no_trace(kind, database, in_sql):
    consumer = kind.consumer(in_sql, lambda _: _raise(Interrupted()), transaction=database.begin)
    with pytest.raises(Interrupted):
        kind.handle(consumer)
    assert record(kind, in_sql.internals.store) is None


@pytest.mark.parametrize(("begun", "number"), [(False, 0), (True, 1)])
def test_an_interrupted_start_counts_if_the_handler_was_called(
    kind, database, in_sql, begun, number
):
    begin = database.begin if begun else lambda: _raise(Interrupted())
    handler = (lambda _: _raise(Interrupted())) if begun else pytest.fail
    consumer = kind.consumer(in_sql, handler, COUNTED, transaction=begin)
    with pytest.raises(Interrupted):
        kind.handle(consumer)
    kind.wait(_drained(kind, in_sql))
    kind.wait(_drained(kind, in_sql))
    kept = record(kind, in_sql.internals.store)
    assert (kept.state, kept.number) == (State.FAILED, number)


def test_a_transaction_without_protection_counts_nothing(kind, database, in_sql, monkeypatch):
    in_sql.internals.setup.disabled = True
    monkeypatch.setattr(in_sql.internals.store, "ask", lambda *_: _raise(Interrupted()))
    consumer = kind.consumer(in_sql, database.effect, COUNTED, transaction=database.begin)
    assert kind.handle(consumer) == Ack()
    assert database.effects() == ["sent"]
    for options in (COUNTED, {}):
        failing = kind.consumer(
            in_sql, lambda _: _raise(Failure("no")), options, transaction=database.begin
        )
        assert isinstance(kind.handle(failing), Later)


def test_a_start_that_cannot_be_counted_runs_if_the_policy_says_so(
    kind, database, in_sql, monkeypatch
):
    policy = {"policy": Policy(max_attempts=2, store_error="open")}
    with monkeypatch.context() as unreachable:
        unreachable.setattr(in_sql.internals.store, "ask", away(kind))
        unreachable.setattr(in_sql.internals.store, "get", away(kind))
        failing = kind.consumer(
            in_sql, lambda _: _raise(Failure("no")), policy, transaction=database.begin
        )
        assert isinstance(kind.handle(failing), Later)
        consumer = kind.consumer(in_sql, database.effect, policy, transaction=database.begin)
        assert kind.handle(consumer) == Ack()
    assert database.effects() == ["sent"]


@pytest.mark.parametrize("ends", ["store", "engine", "consumer"])
def test_a_start_that_can_never_be_taken_back_stays_counted(
    kind, database, in_sql, monkeypatch, ends
):
    def handler(_):
        monkeypatch.setattr(
            in_sql.internals.store,
            "fail",
            away(kind, StoreError if ends == "store" else StoreUnavailable),
        )
        in_sql.internals.closed = ends == "engine"
        if ends == "consumer":
            consumer.wait_no_longer()
        raise StoreUnavailable("lost")

    consumer = kind.consumer(in_sql, handler, COUNTED, transaction=database.begin)
    assert isinstance(kind.handle(consumer), Later)
    in_sql.internals.closed = False
    kept = record(kind, in_sql.internals.store)
    assert (kept.state, kept.number) == (State.PROCESSING, 1)
    assert not in_sql.internals.leases.running()


def test_a_start_whose_taking_back_is_interrupted_is_not_kept(kind, database, in_sql, monkeypatch):
    def handler(_):
        monkeypatch.setattr(in_sql.internals.store, "fail", away(kind, Interrupted))
        raise StoreUnavailable("lost")

    consumer = kind.consumer(in_sql, handler, COUNTED, transaction=database.begin)
    with pytest.raises(Interrupted) as interrupted:
        kind.handle(consumer)
    assert not in_sql.internals.leases.running()
    assert interrupted.tb  # which keeps the call alive until here


def test_messages_that_come_after_a_stop_wait_for_the_store_again(
    kind, database, in_sql, monkeypatch
):
    for module in (consuming, sync_consuming):
        monkeypatch.setattr(module, "SOONEST", 0.0)
    store, failures = in_sql.internals.store, []
    works = store.get

    def fails(*given):
        if len(failures) == 3:
            return works(*given)
        failures.append("down")
        return away(kind)()

    def handler(_):
        monkeypatch.setattr(store, "get", fails)
        raise StoreUnavailable("lost")

    consumer = kind.consumer(in_sql, handler, COUNTED, transaction=database.begin)
    consumer.wait_no_longer()
    assert isinstance(kind.handle(consumer), Later)
    assert record(kind, store).number == 0
    assert len(failures) == 3


def test_a_time_limit_that_strikes_while_a_start_is_taken_back_rejects_nothing(
    kind, database, in_sql, monkeypatch
):
    def handler(_):
        monkeypatch.setattr(in_sql.internals.store, "fail", away(kind, SoftLimit))
        raise StoreUnavailable("lost")

    consumer = kind.consumer(
        in_sql, handler, COUNTED, framework_retries=True, transaction=database.begin
    )
    assert isinstance(kind.handle(consumer), Later)


def test_a_transaction_that_cannot_begin_or_commit_is_tried_later(kind, database, in_sql, caplog):
    consumer = kind.consumer(
        in_sql, database.effect, transaction=lambda: _raise(OSError("no route"))
    )
    with caplog.at_level(logging.WARNING, "semel"):
        verdict = kind.handle(consumer)
    assert isinstance(verdict, Later)
    assert "OSError: no route" in verdict.reason
    assert "transaction not begun; it will be redelivered in 5" in caplog.text
    assert "s [scope=mailer key_digest=" in caplog.text


def test_a_transaction_that_the_database_gives_up_for_good_is_tried_later(kind, database, in_sql):
    ran = []

    def handler(_):
        ran.append(1)
        raise RetryTransaction("a deadlock")

    for options, times in (({}, 4), (COUNTED, 8)):
        consumer = kind.consumer(in_sql, handler, options, transaction=database.begin)
        assert isinstance(kind.handle(consumer), Later)
        assert len(ran) == times
    assert record(kind, in_sql.internals.store).number == 0


def deadlock():
    return pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock")


def test_an_error_that_the_handler_makes_of_a_deadlock_is_repeated_and_not_counted(
    kind, database, in_sql
):
    ran = []

    def handler(_, style):
        ran.append(1)
        try:
            raise deadlock()
        except pymysql.err.OperationalError as error:
            if style == "from":
                raise Failure("no") from error
            if style == "group":
                raise ExceptionGroup("tasks", [Failure("no"), error])  # noqa: B904 - the case
            raise Failure("no")  # noqa: B904 - the case

    consumer = kind.consumer(in_sql, handler, COUNTED, transaction=database.begin)
    for times, style in enumerate(("from", "handled", "group"), 1):
        verdict = kind.wait(consumer.handle(MESSAGE, style))
        assert isinstance(verdict, Later), style
        assert isinstance(verdict.error, RetryTransaction), style
        assert len(ran) == 4 * times, style
    assert record(kind, in_sql.internals.store).number == 0


def test_an_error_from_none_is_the_handlers_whatever_the_database_said(kind, database, in_sql):
    ran = []

    def handler(_):
        ran.append(1)
        try:
            raise deadlock()
        except pymysql.err.OperationalError:
            raise Failure("no") from None

    consumer = kind.consumer(in_sql, handler, COUNTED, transaction=database.begin)
    assert isinstance(kind.handle(consumer), Later)
    assert isinstance(kind.handle(consumer), Reject)
    assert len(ran) == 2


def test_what_the_framework_raises_itself_is_never_repeated(kind, database, in_sql):
    ran = []

    def handler(_):
        ran.append(1)
        raise Failure("sent again") from deadlock()

    consumer = kind.consumer(
        in_sql, handler, not_done=(Failure,), framework_retries=True, transaction=database.begin
    )
    assert isinstance(kind.handle(consumer), Fail)
    assert len(ran) == 1


# --- tasks of their own ----------------------------------------------------------------------


async def test_a_cancelled_callback_leaves_its_message_to_a_task_that_ends_it():
    running, began, go, ended = AsyncRunning(), asyncio.Event(), asyncio.Event(), []

    async def handling():
        began.set()
        await go.wait()
        ended.append(1)

    async def callback():
        running.start(handling())
        await asyncio.sleep(60)

    task = asyncio.create_task(callback())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await running.drain(grace=60) == 0
    assert ended == [1]
    assert await running.drain(grace=60) == 0


async def test_what_runs_after_the_time_of_grace_is_cancelled(caplog):
    running, began, cancelled = AsyncRunning(), asyncio.Event(), []

    async def handling():
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    running.start(handling())
    await began.wait()
    assert await running.drain(grace=0.001) == 1
    assert cancelled == [1]
    assert caplog.text == ""


async def test_what_a_task_raises_is_in_the_log(caplog):
    running = AsyncRunning()

    async def fails():
        raise Failure("no")

    running.start(fails())
    await running.drain(grace=60)
    await asyncio.sleep(0)
    assert "message handling failed" in caplog.text


async def test_drain_waits_for_what_begins_meanwhile():
    running, ended = AsyncRunning(), []

    async def first():
        running.start(second())

    async def second():
        for _ in range(10):  # turns of the loop, so that it outlasts the first
            await asyncio.sleep(0)
        ended.append(2)

    running.start(first())
    assert await running.drain(grace=60) == 0
    assert ended == [2]
