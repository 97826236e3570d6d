"""Wake-ups get lost, are refused, or are not meant for us; and the servers they come from.

| fault | expected |
|---|---|
| 31 wake-up message lost | polling finds it |

A waiter with `SELDOM` polls after half a minute at the earliest: an answer before that was told.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import logging
import os
import threading
import time
from functools import partial
from typing import ClassVar

import psycopg
import pytest
from redis.crc import key_slot
from redis.exceptions import NoPermissionError

from engines.facade import PATIENCE, Effect, Gate, World, never, wait_until
from semel import Policy, WaitTimeout, open_async_store, open_store
from semel.core.records import ClaimRequest, Encoded, Finished, Identity, State
from semel.engine import runs
from semel.engine._sync import runs as sync_runs
from semel.stores import listening
from semel.stores.listening import Listening, Subscriptions
from semel.stores.redis.commands import KeyLayout
from semel.stores.redis.subscriber import (
    ChannelCommands,
    MessageReader,
    RedisListeners,
    RedisSubscriber,
)
from semel.stores.sql.postgres import PostgresStore
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.sql.verbs import Reply
from servers.postgres import pgbouncer
from servers.proxy import proxy_to
from servers.redis import redis_cluster, redis_sentinel, redis_server
from tasks_at_once import tasks_that_end_at_once

fault = pytest.mark.fault

SOON = 20.0
SELDOM = Policy(wait_interval=60, wait_interval_max=60, lease=60)
KEYS = KeyLayout("idem:")


def channel(key: str = "k") -> bytes:
    return KEYS.record(Identity("default", key))


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """What every watch was asked: how long to wait now, after the store's answer."""
    asked = []
    pause = listening.Waiter.pause

    def counted(watch, planned):
        asked.append(watch.listening)
        return pause(watch, planned)

    monkeypatch.setattr(listening.Waiter, "pause", counted)
    return asked


class Scene:
    """One engine runs `k`, held; another waits for it."""

    def __init__(self, world, pauses, policy=None, key="k") -> None:
        self.key = key
        self.pauses = pauses
        self.owner, self.waiter = world.engine(policy=SELDOM), world.engine(policy=policy or SELDOM)
        self.effect = Effect().held()
        self.running = self.owner.start(key, self.effect)
        self.effect.wait_started()
        pauses.clear()
        self.waiting = self.waiter.start(key, never)

    def wait_for(self, state: Listening) -> Scene:
        """Until the waiter has asked again since this is what it expects."""
        wait_until(lambda: self.pauses and self.pauses[-1] is state)
        return self

    def end(self) -> None:
        self.effect.release()
        assert self.waiting.result(SOON) == self.running.result(SOON) == "done"
        assert self.effect.runs == 1


@pytest.fixture
def on_redis(kind, redis_url):
    with World(kind, redis_url) as world:
        yield world


@pytest.fixture
def on_postgres(kind, postgres_url):
    with World(kind, postgres_url) as world:
        yield world


# --- lost -------------------------------------------------------------------------------------


@fault(31)
def test_a_message_that_is_never_sent_is_found_by_asking(kind, pauses, monkeypatch):
    monkeypatch.setattr(listening, "SAFETY", 0.2)
    args = ("--rename-command", "SPUBLISH", "", "--rename-command", "PUBLISH", "")
    with redis_server(args=args) as server, World(kind, server.url) as world:
        Scene(world, pauses, policy=Policy()).wait_for(Listening.YES).end()


@fault(31)
def test_a_message_in_postgresql_that_nobody_noted_is_found_by_asking(
    on_postgres, postgres_url, pauses, monkeypatch
):
    monkeypatch.setattr(listening, "SAFETY", 0.2)
    scene = Scene(on_postgres, pauses, policy=Policy()).wait_for(Listening.YES)
    with psycopg.connect(postgres_url) as other:  # in one transaction: the waiter asks meanwhile
        other.execute("ALTER TABLE idempotent_record RENAME COLUMN waited_for TO noted")
        other.execute("ALTER TABLE idempotent_record ADD COLUMN waited_for boolean DEFAULT false")
        other.execute("ALTER TABLE idempotent_record ALTER COLUMN noted DROP NOT NULL")
    scene.end()


@fault(31)
def test_a_subscription_that_is_cut_is_no_loss(on_redis, redis_of_this_worker, pauses):
    scene = Scene(on_redis, pauses, policy=Policy()).wait_for(Listening.YES)
    with contextlib.closing(redis_of_this_worker.client()) as client:
        assert client.client_kill_filter(_type="pubsub") == 1
    scene.wait_for(Listening.NO).end()
    Scene(on_redis, pauses, key="next").wait_for(Listening.YES).end()


@fault(31)
def test_a_listening_session_that_is_terminated_is_no_loss(on_postgres, postgres_url, pauses):
    scene = Scene(on_postgres, pauses, policy=Policy()).wait_for(Listening.YES)
    with psycopg.connect(postgres_url, autocommit=True) as other:
        end_listener = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ~ '^LISTEN'"
        )
        assert other.execute(end_listener).fetchall() == [(True,)]
    scene.wait_for(Listening.NO).end()
    Scene(on_postgres, pauses, key="next").wait_for(Listening.YES).end()


@fault(31)
def test_scripts_that_the_server_forgot_still_wake(on_redis, redis_of_this_worker, pauses):
    scene = Scene(on_redis, pauses).wait_for(Listening.YES)
    with contextlib.closing(redis_of_this_worker.client()) as client:
        client.script_flush()
    scene.end()


def test_who_gives_up_leaves_no_subscription_behind(on_redis, redis_of_this_worker, pauses):
    scene = Scene(on_redis, pauses, policy=Policy(wait_timeout=1.0))
    with contextlib.closing(redis_of_this_worker.client()) as client:

        def subscribed() -> bool:
            return channel() in client.execute_command("PUBSUB SHARDCHANNELS")

        wait_until(subscribed)
        with pytest.raises(WaitTimeout):
            scene.waiting.result(SOON)
        wait_until(lambda: not subscribed())
    scene.effect.release()
    assert scene.running.result(SOON) == "done"


def execute(connection, statement) -> Reply:
    cursor = psycopg.RawCursor(connection)
    cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
    return Reply(cursor.fetchall() if cursor.description else [], cursor.rowcount)


def test_an_attempt_that_ends_before_the_note_is_asked_for_again(postgres_url):
    """The claim saw it running; when the note was to be written, it had ended."""
    waiting = set()
    with contextlib.closing(PostgresStore(postgres_url)) as store:
        identity = Identity("s", "k")
        first = ClaimRequest(identity, b"anna" * 3, None, 60.0, 60.0)
        store.claim(first)
        verbs = PostgresVerbs(store._schema.table, "idem:", {}, waiting)
        waiting.add(verbs.digest(identity))
        verb = verbs.claim(ClaimRequest(identity, b"bert" * 3, None, 60.0, 60.0)).start()
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            note = verb.send(execute(connection, next(verb)))
            assert "waited_for = true" in note.sql
            assert store.complete(identity, first.owner, Encoded("json/1", b"1"), 60.0)
            again = verb.send(execute(connection, note))
            with pytest.raises(StopIteration) as end:
                verb.send(execute(connection, again))
        assert isinstance(end.value.value, Finished)


# --- refused ----------------------------------------------------------------------------------


def test_a_user_without_channels_polls_and_the_log_tells_it_once(kind, pauses, caplog):
    with redis_server() as server:
        with contextlib.closing(server.client()) as client:
            client.execute_command(
                *[
                    "ACL",
                    "SETUSER",
                    "app",
                    "on",
                    ">pw",
                    "~idem:*",
                    "resetchannels",
                    "+@all",
                    "-@admin",
                ]
            )
        url = server.url.replace("redis://", "redis://app:pw@")
        with caplog.at_level(logging.WARNING), World(kind, url) as world:
            Scene(world, pauses, policy=Policy()).wait_for(Listening.NO).end()
            engine = world.engine(policy=Policy())
            effect = Effect().held()
            engine.start("next", effect)
            effect.wait_started()
            world._open[1].start("next", never)
            wait_until(lambda: world._open[1].commands("claim") > 4)
            effect.release()
    told = [each for each in caplog.records if "no wake-ups" in each.message]
    assert len(told) == 1
    assert "permission" in told[0].message


@pytest.mark.parametrize("database", ["redis", "postgres"])
def test_where_no_further_connection_can_be_had_polling_goes_on(request, kind, database):
    url = request.getfixturevalue(f"{database}_url")
    port = request.getfixturevalue(f"{database}_of_this_worker").port
    with proxy_to(port) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        with World(kind, through, timeout=1) as world:
            owner, waiter = world.engine(), world.engine()
            for engine in (owner, waiter):
                engine.peek("connected")
            effect = Effect().held()
            running = owner.start("k", effect)
            effect.wait_started()
            proxy.refusing = True
            waiting = waiter.start("k", never)
            wait_until(lambda: proxy.refused > 0 and waiter.commands("claim") > 3)
            effect.release()
            assert waiting.result(SOON) == running.result(SOON) == "done"
            proxy.refusing = False


def test_a_server_without_shard_channels_is_subscribed_to_plainly(kind, pauses, caplog):
    args = ("--rename-command", "SPUBLISH", "", "--rename-command", "SSUBSCRIBE", "")
    with redis_server(args=args) as server, World(kind, server.url) as world:
        Scene(world, pauses).wait_for(Listening.YES).end()
    assert not caplog.records


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_thread_that_cannot_be_started_is_no_error(redis_url, pauses, monkeypatch, error):
    class Exhausted(threading.Thread):
        def start(self) -> None:
            raise error

    with World("threads", redis_url) as world:
        store = world.engine().store.store
        with monkeypatch.context() as patched:
            patched.setattr(listening.threading, "Thread", Exhausted)
            with store.watch(Identity("default", "k")) as watch:
                assert watch.listening is Listening.NO
        Scene(world, pauses).wait_for(Listening.YES).end()


@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
def test_a_signal_while_the_thread_starts_leaves_nobody_without_notifications(
    redis_url, monkeypatch, begun
):
    class Interrupted(threading.Thread):
        def start(self) -> None:
            if begun:
                super().start()
            raise KeyboardInterrupt

    with contextlib.closing(open_store(redis_url)) as store:
        with monkeypatch.context() as patched:
            patched.setattr(listening.threading, "Thread", Interrupted)
            with pytest.raises(KeyboardInterrupt), store.watch(Identity("default", "k")):
                pass
        with store.watch(Identity("default", "another")) as watch:
            wait_until(lambda: watch.listening is Listening.YES)


def test_a_process_that_may_open_no_more_files_listens_again_when_it_may(redis_url, monkeypatch):
    def exhausted() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with contextlib.closing(open_store(redis_url)) as store:
        with monkeypatch.context() as patched:
            patched.setattr(listening.socket, "socketpair", exhausted)
            with store.watch(Identity("default", "k")) as watch:
                wait_until(lambda: watch.listening is Listening.NO)

        def is_notified() -> bool:
            with store.watch(Identity("default", "k")) as again:
                time.sleep(0.01)
                return again.listening is Listening.YES

        wait_until(is_notified)


# --- not meant for us -------------------------------------------------------------------------


@contextlib.contextmanager
def reader_of_redis(server):
    """A user that may read records and publish; yields how it sends, and a forged outcome."""
    with contextlib.closing(server.client()) as admin:
        admin.execute_command(
            *("ACL", "SETUSER", "reader", "reset", "on", ">pw", "~*", "&*"),
            *("+@read", "+@connection", "+spublish"),
        )
        with contextlib.closing(server.client(username="reader", password="pw")) as reader:
            with pytest.raises(NoPermissionError):
                reader.set("x", 1)
            record = bytearray(reader.get(channel()))
            record[1] |= State.SUCCEEDED  # PROCESSING is 0
            beginning = bytes(record[:38])  # of a record without a fingerprint: see lua/record.lua
            outcome = (60_000).to_bytes(6) + beginning + b'\x01"forged"'
            try:
                yield partial(reader.execute_command, "SPUBLISH", channel()), outcome
            finally:
                admin.execute_command("ACL", "DELUSER", "reader")


@contextlib.contextmanager
def reader_of_postgres(url):
    """A role that may only SELECT; yields how it sends, and a forged outcome."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader")
        connection.execute("GRANT SELECT ON idempotent_record TO reader")
        connection.execute("SET ROLE reader")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("UPDATE idempotent_record SET fence = 0")
        seen = "SELECT digest::text, encode(owner, 'base64'), fence FROM idempotent_record"
        digest, owner, fence = connection.execute(seen).fetchone()
        result = base64.b64encode(b'"forged"').decode()
        outcome = [owner, None, State.SUCCEEDED, 1, fence, 60.0, "json/1", result]

        def send(message):
            connection.execute("SELECT pg_notify('semel_wakeup', %s)", [digest + message.decode()])

        try:
            yield send, json.dumps(outcome).encode()
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP OWNED BY reader")
            connection.execute("DROP ROLE reader")


@pytest.fixture(params=["redis", "postgres"])
def database(request, kind):
    """An engine's world, and what opens the user that may only read and send messages."""
    with World(kind, request.getfixturevalue(f"{request.param}_url")) as world:
        if request.param == "redis":
            server = request.getfixturevalue("redis_of_this_worker")
            yield world, partial(reader_of_redis, server)
        else:
            yield world, partial(reader_of_postgres, world.url)


def test_a_forged_outcome_is_no_answer(database, pauses):
    world, reader = database
    scene = Scene(world, pauses, policy=Policy(lease=60)).wait_for(Listening.YES)
    with reader() as (send, forged):
        send(forged)
        send(b"")  # the same connection: it comes after what was forged
        wait_until(lambda: scene.waiter.commands("claim") > 2)
        assert not scene.waiting.done()
    scene.end()


@pytest.fixture
def held(monkeypatch):
    """How long a waiter is held back, where it stays until the gate is opened."""
    gate, seconds = Gate(), []

    def sleep(pause):
        seconds.append(pause)
        gate()

    async def async_sleep(pause):
        await asyncio.to_thread(sleep, pause)

    monkeypatch.setattr(runs, "sleep", async_sleep)
    monkeypatch.setattr(sync_runs, "sleep", sleep)
    return gate, seconds


def test_a_flood_of_messages_costs_one_question_in_each_wait_interval(database, pauses, held):
    world, reader = database
    gate, seconds = held
    scene = Scene(world, pauses).wait_for(Listening.YES)
    asked = partial(scene.waiter.commands, "claim")
    with reader() as (send, _):
        send(b"")
        wait_until(lambda: asked() == 3)
        assert seconds == [], "the first message is asked about at once"
        for _ in range(100):
            send(b"")
        gate.wait()
        for _ in range(100):
            send(b"")
    assert (asked(), len(seconds)) == (3, 1)
    assert 0 < seconds[0] <= 60, "until the end of wait_interval"
    scene.effect.release()
    assert scene.running.result(SOON) == "done"
    gate.open()
    assert scene.waiting.result(SOON) == "done", "the question was held back, not lost"
    assert asked() == 4


def test_a_flood_of_messages_keeps_nobody_past_wait_timeout(database, pauses):
    world, reader = database
    policy = Policy(wait_interval=60, wait_interval_max=60, wait_timeout=2)
    scene = Scene(world, pauses, policy=policy).wait_for(Listening.YES)
    with reader() as (send, _):
        for _ in range(100):
            send(b"")
        with pytest.raises(WaitTimeout):
            scene.waiting.result(SOON)
    scene.effect.release()
    assert scene.running.result(SOON) == "done"


def test_where_nobody_waits_nothing_is_published(on_redis, redis_of_this_worker):
    before = redis_of_this_worker.calls("publish", "spublish")
    engine = on_redis.engine()
    engine.execute("k", lambda: "done")
    engine.execute("k", never)
    assert redis_of_this_worker.calls("publish", "spublish") == before


def test_where_nobody_waits_nothing_is_notified(on_postgres, postgres_url):
    engine = on_postgres.engine()
    engine.peek("k")  # makes the table
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("LISTEN semel_wakeup")
        engine.execute("k", lambda: "done")
        engine.execute("k", never)
        assert list(other.notifies(timeout=0.3)) == []


# --- the servers ------------------------------------------------------------------------------


def test_a_server_behind_tls_wakes(kind, pauses):
    with redis_server(tls=True, password="secret") as server, World(kind, server.url) as world:
        Scene(world, pauses).wait_for(Listening.YES).end()


def test_valkey_wakes(kind, pauses):
    with redis_server(valkey=True) as server, World(kind, server.url) as world:
        Scene(world, pauses).wait_for(Listening.YES).end()


def test_the_primary_that_sentinel_names_wakes(kind, pauses):
    with redis_sentinel() as sentinel, World(kind, sentinel.url) as world:
        Scene(world, pauses).wait_for(Listening.YES).end()


@pytest.fixture(scope="module")
def cluster():
    with redis_cluster(primaries=3) as servers:
        yield servers


def test_every_node_of_a_cluster_wakes(kind, cluster, pauses):
    with World(kind, cluster.url) as world:
        owner, waiter = world.engine(policy=SELDOM), world.engine(policy=SELDOM)
        keys = [f"{kind}{number}" for number in range(12)]
        assert len({cluster.owner(key_slot(channel(key))).port for key in keys}) == 3
        effects = {key: Effect(key).held() for key in keys}
        running = [owner.start(key, effect) for key, effect in effects.items()]
        for effect in effects.values():
            effect.wait_started()
        waiting = [waiter.start(key, never) for key in keys]
        wait_until(lambda: len(pauses) == 24)
        for effect in effects.values():
            effect.release()
        assert [call.result(SOON) for call in waiting] == keys
        assert [call.result(SOON) for call in running] == keys


def test_a_node_that_has_lost_the_slot_is_no_error(kind, cluster, pauses, monkeypatch, caplog):
    with World(kind, cluster.url) as world:
        first = Scene(world, pauses, key=f"here-{kind}").wait_for(Listening.YES)
        first.end()
        (listener,) = first.waiter.store.store._listeners._listeners.values()
        here = cluster.owner(key_slot(channel(first.key)))
        names = (f"elsewhere-{kind}-{number}" for number in range(100))
        elsewhere = next(n for n in names if cluster.owner(key_slot(channel(n))) is not here)
        # As if the slot had moved there, and the map were old: the wrong node is asked.
        monkeypatch.setattr(RedisListeners, "listener", lambda self, channel: listener)
        with World(kind, cluster.url) as other:
            effect = Effect().held()
            running = other.engine().start(elsewhere, effect)
            effect.wait_started()
            pauses.clear()
            eager = Policy(wait_interval=0.05, wait_interval_max=0.5)
            waiting = first.waiter.start(elsewhere, never, policy=eager)
            wait_until(lambda: pauses and pauses[-1] is Listening.NO)
            effect.release()
            assert waiting.result(PATIENCE) == running.result(PATIENCE) == "done"
    assert not caplog.records


def test_a_slot_that_nobody_serves_is_not_listened_to(kind, cluster, pauses, monkeypatch):
    with World(kind, cluster.url) as world:
        engine = world.engine()
        engine.peek("connected")
        store = engine.store.store
        client = store.transport.client
        monkeypatch.setattr(client.nodes_manager, "slots_cache", {})
        assert store.transport.connector_of(channel()) == ("", None)
        assert store._listeners.listener(channel())._new_subscriber is None


# --- PostgreSQL that is not ours to listen on ---------------------------------------------------


def test_behind_pgbouncer_waiters_poll(kind, postgres_of_this_worker, postgres_url, pauses):
    with pgbouncer(postgres_of_this_worker) as address:
        url = f"{address}/{postgres_url.rpartition('/')[2]}?prepare=off"
        with World(kind, url) as world:
            Scene(world, pauses, policy=Policy()).wait_for(Listening.NO).end()


def test_on_a_given_connection_waiters_poll(postgres_url, pauses):
    with psycopg.connect(postgres_url) as connection:
        store = PostgresStore(connection=connection)
        with store.watch(Identity("s", "k")) as watch:
            assert watch.listening is Listening.NO
        store.close()


# --- fork -------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("database", ["redis", "postgres"])
def test_a_forked_child_listens_for_itself(request, database, pauses):
    url = request.getfixturevalue(f"{database}_url")
    with World("threads", url) as world:
        scene = Scene(world, pauses).wait_for(Listening.YES)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store = scene.waiter.store.store
                with store.watch(Identity("default", "k")) as watch:
                    watch.wait(SOON)  # woken by the confirmation
                    status = 0 if watch.listening is Listening.YES else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        scene.end()


@pytest.mark.parametrize("database", ["redis", "postgres"])
async def test_after_a_fork_a_store_for_asyncio_listens_anew(request, database):
    store = open_async_store(request.getfixturevalue(f"{database}_url"))
    with store.watch(Identity("s", "k")) as before:
        opened = store._listeners if database == "redis" else store._wakeups
        opened.after_fork_in_child()
        with store.watch(Identity("s", "k")) as after:
            assert after._listener is not before._listener
            await after.wait(SOON)
            assert after.listening is Listening.YES
        await before._listener.close()
    await store.close()


# --- subscribers that are slow, or say strange things -------------------------------------------


class SlowSubscriber:
    """A subscriber that does not open until it may."""

    confirms = True

    def __init__(self) -> None:
        self.opening = threading.Event()
        self.may_open = threading.Event()
        self.closed = threading.Event()

    def open(self) -> None:
        self.opening.set()
        assert self.may_open.wait(PATIENCE)

    def close(self) -> None:
        self.closed.set()


def test_closing_does_not_wait_for_a_subscriber_that_does_not_open(monkeypatch):
    monkeypatch.setattr(listening, "CLOSING", 0.01)
    subscriber = SlowSubscriber()
    listener = listening.Listener(lambda: subscriber, "there")
    with listening.Watch(listener, "k") as watch:
        assert subscriber.opening.wait(PATIENCE)
        with listening.Watch(listener, "k"):
            pass  # another one waits for the same subscriber
        listener.close()
        assert not subscriber.closed.is_set()
        subscriber.may_open.set()
        assert subscriber.closed.wait(PATIENCE)
        watch.wait(SOON)
        assert watch.listening is Listening.NO
        with listening.Watch(listener, "k") as late:
            assert late.listening is Listening.NO


async def test_closing_ends_a_subscriber_for_asyncio_that_does_not_open():
    opening, closed = asyncio.Event(), asyncio.Event()

    class Silent:
        confirms = True

        async def open(self, _subscriptions, _on_lost) -> None:
            opening.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            closed.set()

    listener = listening.AsyncListener(Silent, "there")
    with listening.AsyncWatch(listener, "k") as watch:
        await opening.wait()
        await listener.close()
        assert closed.is_set()
        await watch.wait(SOON)
        assert watch.listening is Listening.NO


async def test_an_ear_listens_again_where_tasks_begin_at_once():
    class Refused:
        confirms = True

        async def open(self, _subscriptions, _on_lost) -> None:
            raise ConnectionRefusedError

        async def close(self) -> None:
            pass

    listener = listening.AsyncListener(Refused, "there")
    with (
        tasks_that_end_at_once(),
        listening.AsyncWatch(listener, "k") as watch,
    ):
        await watch.wait(SOON)
        assert watch.listening is Listening.NO
        assert listener._opening is None
    await listener.close()


def test_a_thread_that_is_woken_twice_looks_once():
    watch = listening.Watch(listening.Listener(None, "there"), "k")
    watch.wake()
    watch.wake()
    assert watch.wait(SOON)
    assert not watch.wait(0.01)


async def test_a_task_that_is_woken_twice_looks_once():
    watch = listening.AsyncWatch(listening.AsyncListener(None, "there"), "k")
    watch.wake()
    watch.wake()
    assert await watch.wait(SOON)
    assert not await watch.wait(0.01)


def test_what_is_no_news_is_passed_over():
    account = Subscriptions("there")
    waiter = Waiting(b"k")
    account.add(waiter)
    messages = MessageReader(ChannelCommands())
    messages.read(b"+PONG\r\n>2\r\n+MOVING\r\n:1\r\n*3\r\n$8\r\nsmess", account)
    assert waiter.woken == 0
    messages.read(b"age\r\n$1\r\nk\r\n$1\r\nx\r\n", account)
    assert waiter.woken == 1


def test_what_tls_has_decrypted_already_is_read_too(redis_url):
    class Pieces:
        """A socket whose first piece left another one behind."""

        left: ClassVar = [b"*3\r\n$8\r\nsmessage\r\n$1\r\nk\r\n", b"$1\r\nx\r\n"]

        def recv(self, _size: int) -> bytes:
            return self.left.pop(0)

        def pending(self) -> int:
            return len(self.left)

    with contextlib.closing(open_store(redis_url)) as store:
        subscriber = RedisSubscriber(store.transport.client.connection_pool, ChannelCommands())
        subscriber._socket = Pieces()
        account = Subscriptions("there")
        waiter = Waiting(b"k")
        account.add(waiter)
        subscriber.read(account)
        assert waiter.woken == 1


# --- the account of who waits -------------------------------------------------------------------


class Waiting:
    def __init__(self, channel) -> None:
        self.channel = channel
        self.listening = Listening.SOON
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def test_a_confirmation_belongs_to_the_channel_that_was_requested_first():
    account = Subscriptions("there")
    gone, here = Waiting("k"), Waiting("k")
    assert account.add(gone)
    account.requested("k")
    account.remove(gone)
    assert account.take_unused() == ["k"]
    assert account.add(here)
    account.requested("k")
    account.confirmed()
    assert here.listening is Listening.SOON, "that was the answer to the one who left"
    account.ended("k")  # the answer to his leaving
    assert here.listening is Listening.SOON
    account.confirmed()
    assert here.listening is Listening.YES
    assert account.is_subscribed("k")


def test_a_confirmation_after_a_lost_connection_belongs_to_the_first_of_the_new_one():
    account = Subscriptions("there")
    before, after = Waiting("a"), Waiting("b")
    account.add(before)
    account.requested("a")
    account.lose()  # its confirmation will never come
    account.remove(before)
    account.add(after)
    account.requested("b")
    account.confirmed()
    assert after.listening is Listening.YES
    assert account.is_subscribed("b")


def test_a_subscription_that_is_needed_again_is_not_ended():
    account = Subscriptions("there")
    one, other = Waiting("a"), Waiting("b")
    for waiter in (one, other):
        account.add(waiter)
        account.remove(waiter)
    account.remove(other)  # twice, as one that was interrupted
    account.add(one)
    assert account.take_unused() == ["b"]
    assert account.take_unused() == []


def test_a_subscription_that_the_server_ends_or_refuses_is_lost():
    account = Subscriptions("there")
    ended, refused = Waiting("a"), Waiting("b")
    for waiter in (ended, refused):
        account.add(waiter)
        account.requested(waiter.channel)
    account.confirmed()
    account.rejected()
    assert refused.listening is Listening.NO
    account.ended("a")
    assert ended.listening is Listening.NO
    assert not account.is_subscribed("a")
    assert account.channels() == ["a", "b"]


def test_a_message_reaches_those_who_wait_for_it_alone():
    account = Subscriptions("there")
    one, other = Waiting("a"), Waiting("b")
    account.add(one)
    account.add(other)
    account.received("a")
    account.received("c")
    account.ended("c")
    assert (one.woken, other.woken) == (1, 0)
    assert not account.is_subscribed("c")


def test_listening_is_tried_again_after_ever_longer_pauses(caplog):
    backoff = listening.Backoff("there")
    assert backoff.is_over(0.0)
    backoff.failed(OSError("no"), 0.0)
    assert not backoff.is_over(0.9)
    backoff.failed(OSError("no"), 1.0)
    assert not backoff.is_over(2.9)
    for _ in range(10):
        backoff.failed(OSError("no"), 10.0)
    assert backoff.is_over(10.0 + listening.LONGEST_PAUSE)
    assert len(caplog.records) == 1
    backoff.succeeded()
    backoff.failed(OSError("it worked, and broke"), 100.0)
    assert backoff.is_over(100.0)
    backoff.failed(OSError("no"), 100.0)
    assert not backoff.is_over(100.9)
    assert len(caplog.records) == 2
