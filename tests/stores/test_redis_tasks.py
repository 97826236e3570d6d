"""One connection shared by tasks: who waits for what, and what they are told when it breaks."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import signal
import threading

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import MaxConnectionsError
from redis.exceptions import TimeoutError as TimedOut

from semel.core.records import Claimed, Identity
from semel.errors import ConfigError, StoreUnavailable
from semel.stores.redis import AsyncRedisStore, commands, open_async_store, open_store
from semel.stores.redis.commands import Command, pack
from semel.stores.redis.redis_py import take_connection
from semel.stores.redis.tasks import HANDFUL, Connection, SharedConnection, _pass_outcome
from servers.proxy import proxy_to
from servers.redis import redis_server, wait_until
from stores.redis_given import IDENTITY, ask, close_client, opened, opened_async
from stores.sqlite_helpers import forked, in_a_fork, start_fork

PING = pack(("PING",))
PATIENCE = 10.0


@pytest.fixture
def server(redis_of_this_worker, redis_url):
    return redis_of_this_worker


@contextlib.asynccontextmanager
async def connection_to(url, within=PATIENCE):
    client = redis.asyncio.Redis.from_url(url)
    connected = await take_connection(client.connection_pool)
    try:
        yield Connection(connected, within)
    finally:
        await connected.disconnect()
        await close_client(client)


async def test_replies_belong_to_the_commands_in_their_order(server):
    async with connection_to(server.url) as connection:
        replies = await asyncio.gather(
            *(connection.ask(pack(("ECHO", str(number)))) for number in range(300))
        )
        assert replies == [str(number).encode() for number in range(300)]


async def test_commands_of_one_turn_leave_together(server):
    with proxy_to(server.port) as proxy:
        async with connection_to(proxy.url) as connection:
            before = proxy.requests
            await asyncio.gather(*(connection.ask(PING) for _ in range(HANDFUL)))
            assert proxy.requests - before <= 3  # the first at once, the others in one write


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@forks
async def test_a_child_forked_by_a_running_loop_sends_nothing_on_the_connection_of_its_parent(
    server,
):
    in_the_child = Identity("orders.create", "in the child")
    async with opened_async(server.url) as store:
        assert isinstance(await store.ask(ask()), Claimed)
        connection = store.transport._connections.ready()
        unsent = connection.ask(PING), connection.ask(PING)
        assert connection._outbox, "the second one waits for the next turn of the loop"

        async def claim() -> object:
            return await store.ask(ask(in_the_child))

        assert "belongs to another event loop" in in_a_fork(lambda: asyncio.run(claim()))
        assert await store.get(in_the_child) is None
        assert await asyncio.gather(*unsent)


@pytest.fixture
def shared_loop(server):
    """A loop that parent and child run, and a store on it whose pool has one connection."""
    loop = asyncio.new_event_loop()
    client = redis.asyncio.Redis.from_url(server.url, max_connections=1)
    store = AsyncRedisStore(client, prefix="forked:")
    yield loop, store
    loop.run_until_complete(store.close())
    loop.run_until_complete(close_client(client))
    loop.close()


async def claimed(store, key):
    """Claim a key; returns the answer's type, and the number of the store's connection."""
    async with asyncio.timeout(PATIENCE):
        answer = await store.ask(ask(Identity("s", key)))
        connection = await store.transport._connections.open()
        return type(answer).__name__, await connection.ask(pack(("CLIENT", "ID")))


@forks
def test_a_child_that_runs_the_loop_of_its_parent_opens_a_connection(shared_loop):
    loop, store = shared_loop
    kind, mine = loop.run_until_complete(claimed(store, "before"))
    assert kind == "Claimed"
    kind, childs = ast.literal_eval(
        in_a_fork(lambda: loop.run_until_complete(claimed(store, "child")))
    )
    assert kind == "Claimed"
    assert childs != mine
    assert loop.run_until_complete(claimed(store, "after")) == ("Claimed", mine)


@forks
def test_a_child_that_runs_the_loop_of_its_parent_reads_none_of_its_replies(shared_loop):
    loop, store = shared_loop
    _, mine = loop.run_until_complete(claimed(store, "before"))
    here, there = forked.Pipe()

    async def run_beside() -> None:
        there.send("running")
        while not there.poll():  # noqa: ASYNC110 - its parent's loop has no other way to tell
            await asyncio.sleep(0)

    async def asked(number: int) -> int:
        connection = await store.transport._connections.open()
        return int(await connection.ask(pack(("ECHO", str(number)))))

    child = start_fork(lambda: loop.run_until_complete(run_beside()))
    assert here.recv() == "running"
    for number in range(200):
        assert loop.run_until_complete(asyncio.wait_for(asked(number), PATIENCE)) == number
    here.send("enough")
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert loop.run_until_complete(claimed(store, "after")) == ("Claimed", mine)


async def test_who_waits_in_a_forked_child_is_told_that_the_connection_is_not_its_own(server):
    async with connection_to(server.url, within=0.2) as connection:
        waiting = connection.ask(pack(("BLPOP", "nobody pushes", "60")))
        connection.leave_to_parent()
        with pytest.raises(TimedOut):
            await asyncio.wait_for(waiting, PATIENCE)
        connection.leave_to_parent()  # a child may fork, too
        with pytest.raises(Disconnected, match="parent"):
            await connection.ask(PING)


async def test_a_cancelled_caller_leaves_its_reply_to_nobody(server):
    async with connection_to(server.url) as connection:
        gone, stays = (
            connection.ask(pack(("ECHO", "gone"))),
            connection.ask(pack(("ECHO", "stays"))),
        )
        gone.cancel()
        assert await stays == b"stays"


async def test_an_error_of_the_server_is_a_reply_like_any_other(server):
    async with connection_to(server.url) as connection:
        refused, well = await connection.exchange([pack(("NONSENSE",)), PING])
        assert "unknown command" in str(refused)
        assert well in (b"PONG", "PONG")


async def test_everyone_who_waits_is_told_when_the_connection_breaks(server):
    with proxy_to(server.port) as proxy:
        proxy.delay = 1.0
        async with connection_to(proxy.url) as connection:
            waiting = [connection.ask(PING) for _ in range(3)]
            proxy.cut_all()
            told = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(error) for error in told] == [Disconnected] * 3
            with pytest.raises(Disconnected):
                await connection.ask(PING)


async def test_who_has_left_is_not_told_that_the_connection_broke(server):
    async with connection_to(server.url) as connection:
        gone, stays = connection.ask(PING), connection.ask(PING)
        gone.cancel()
        connection.end(Disconnected("cut"))  # before any reply could be read
        with pytest.raises(Disconnected, match="cut"):
            await stays
        assert gone.cancelled()


async def test_a_connection_that_nobody_waits_on_is_not_looked_at_again(server):
    async with connection_to(server.url, within=1.0) as connection:
        await connection.ask(PING)
        async with asyncio.timeout(PATIENCE):
            while connection._alarm is not None:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        assert connection.broken is None
        assert await connection.ask(pack(("ECHO", "later"))) == b"later"


async def test_an_exchange_that_breaks_leaves_no_error_unread(server):
    with proxy_to(server.port) as proxy:
        proxy.delay = 1.0
        async with connection_to(proxy.url) as connection:
            exchange = asyncio.create_task(connection.exchange([PING] * 3))
            await asyncio.sleep(0)
            proxy.cut_all()
            with pytest.raises(Disconnected):
                await exchange


async def test_an_interrupted_exchange_gives_up_all_its_places(server):
    with proxy_to(server.port) as proxy:
        proxy.delay = 0.2
        async with connection_to(proxy.url) as connection:
            exchange = asyncio.create_task(connection.exchange([PING] * 3))
            await asyncio.sleep(0)
            exchange.cancel()
            with pytest.raises(asyncio.CancelledError):
                await exchange
            assert all(answer.cancelled() for answer, *_ in connection.waiting)
            assert await connection.ask(pack(("ECHO", "next"))) == b"next"


async def test_a_reply_that_cannot_be_read_is_the_error_of_its_caller_alone(server):
    def unreadable(_):
        raise KeyError("a bug of the reader")

    async with connection_to(server.url) as connection:
        bad = connection.ask(PING, Command(commands.GET, (b"k",), (), unreadable))
        good = connection.ask(pack(("ECHO", "well")))
        with pytest.raises(KeyError):
            await bad
        assert await good == b"well"
        assert connection.broken is None


async def test_a_call_is_told_of_a_connection_that_has_no_way_around_its_end(server):
    async with connection_to(server.url) as connection:
        asked = connection.ask(PING, Command(commands.GET, (b"k",), (), bool))
        connection.end(Disconnected("cut"))
        with pytest.raises(Disconnected, match="cut"):
            await asked


async def test_a_call_ends_when_a_stranger_cancels_its_way_around_a_break(server):
    with proxy_to(server.port) as proxy:
        async with opened_async(proxy.url) as store:
            await store.get(IDENTITY)
            proxy.delay = PATIENCE
            claiming = asyncio.ensure_future(store.claim(ask()))
            before = asyncio.all_tasks()
            store.transport._connections.calls.connection.end(Disconnected("cut"))
            (way,) = asyncio.all_tasks() - before
            way.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
            proxy.delay = 0


async def test_a_caller_who_leaves_as_the_long_way_ends_is_told_nothing():
    answer = asyncio.get_running_loop().create_future()
    way = asyncio.create_task(asyncio.sleep(0, ["an answer"]))
    await way
    answer.cancel()
    _pass_outcome(answer, way)
    assert answer.cancelled()


async def test_replies_that_nobody_asked_for_break_the_connection(server):
    async with connection_to(server.url) as connection:
        connection.data_received(b"+who asked?\r\n")
        with pytest.raises(Disconnected, match="cannot be read"):
            await connection.ask(PING)


async def test_news_of_the_server_are_no_reply(server):
    async with connection_to(server.url) as connection:
        waiting = connection.ask(pack(("ECHO", "mine")))
        connection.data_received(b">2\r\n+invalidate\r\n+something\r\n")
        assert await waiting == b"mine"


async def test_a_connection_looks_again_while_its_oldest_command_may_still_be_answered():
    with redis_server() as paused:
        async with connection_to(paused.url, within=0.4) as connection:
            assert await connection.ask(PING)
            paused.process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(TimedOut):
                    await connection.ask(PING)
            finally:
                paused.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(
                0.2
            )  # one more look, at a connection without commands, does nothing


# --- connections ------------------------------------------------------------------------------------


async def test_whoever_finds_no_connection_opens_it_for_all(server):
    with proxy_to(server.port) as proxy:
        async with opened_async(proxy.url) as store:
            answers = await asyncio.gather(
                *(store.claim(ask(Identity("s", str(n)))) for n in range(4 * HANDFUL))
            )
            assert {type(answer) for answer in answers} == {Claimed}
            assert proxy.connections == 1


async def test_many_commands_of_one_turn_leave_in_parts(server):
    async with opened_async(server.url) as store:
        await store.get(IDENTITY)
        connection = store.transport._connections.ready()
        writes = []
        transport = connection._transport

        class Told:
            def write(self, data):
                writes.append(data.count(b"EVALSHA"))
                transport.write(data)

            def __getattr__(self, name):
                return getattr(transport, name)

        connection._transport = Told()
        # The first goes alone, as nobody waits; then a handful, or as many as are under way already;
        # the rest at the end.
        calls = [store.get(Identity("s", str(n))) for n in range(1 + 4 * HANDFUL + 3)]
        assert await asyncio.gather(*calls) == [None] * len(calls)
        assert writes == [1, HANDFUL, HANDFUL, 2 * HANDFUL, 3]


async def test_a_connection_that_is_open_is_given_again(server):
    async with opened_async(server.url) as store:
        await store.get(IDENTITY)  # a store that was never used closes nothing
        slot = store.transport._connections.calls
        assert await slot.open() is await slot.open()


async def test_one_who_leaves_does_not_take_the_connection_from_those_who_stay(server):
    async with opened_async(server.url) as store:
        leaves, stays = (asyncio.create_task(store.get(IDENTITY)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await stays is None


async def test_renewals_soon_have_a_connection_of_their_own(server):
    with proxy_to(server.port) as proxy:
        async with opened_async(proxy.url) as store:
            claim = ask()
            await store.claim(claim)
            assert await store.renew(IDENTITY, claim.owner, 30.0)  # on the connection that is there
            await store.transport._connections._renewals.open()
            assert await store.renew(IDENTITY, claim.owner, 30.0)
            assert proxy.connections == 2


async def test_renewals_keep_their_connection_though_no_other_can_be_opened(server):
    with proxy_to(server.port) as proxy:
        async with opened_async(proxy.url, timeout=1.0) as store:
            claim = ask()
            await store.claim(claim)
            connections = store.transport._connections
            await connections._renewals.open()
            proxy.refusing = True
            connections.calls.connection.end(Disconnected("cut"))
            with pytest.raises(StoreUnavailable):
                await store.get(IDENTITY)
            assert await store.renew(IDENTITY, claim.owner, 30.0)
            connections._renewals.connection.end(Disconnected("cut, too"))
            with pytest.raises(StoreUnavailable):
                await store.renew(IDENTITY, claim.owner, 30.0)
            assert proxy.refused


async def test_a_renewal_that_comes_first_opens_the_connection_for_all(server):
    async with opened_async(server.url) as store:
        assert not await store.renew(IDENTITY, ask().owner, 30.0)
        assert isinstance(await store.claim(ask()), Claimed)


async def test_renewals_share_the_connection_of_a_client_that_has_no_second_connection(server):
    client = redis.asyncio.Redis.from_url(server.url, max_connections=1)
    store = AsyncRedisStore(client)
    claim = ask()
    await store.claim(claim)
    for _ in range(3):
        assert await store.renew(IDENTITY, claim.owner, 30.0)
    await store.close()
    await close_client(client)


async def test_a_full_pool_of_the_application_is_store_unavailable_to_asyncio_too(server):
    client = redis.asyncio.Redis.from_url(server.url, max_connections=1)
    connection = await take_connection(client.connection_pool)
    store = AsyncRedisStore(client)
    for call in (store.claim(ask()), store.renew(IDENTITY, ask().owner, 30.0)):
        with pytest.raises(StoreUnavailable, match="higher max_connections"):
            await call
    await client.connection_pool.release(connection)
    assert isinstance(await store.claim(ask()), Claimed)
    await close_client(client)


async def test_a_connection_that_was_closed_by_the_application_is_opened_anew(server):
    client = redis.asyncio.Redis.from_url(server.url)
    store, claim = AsyncRedisStore(client), ask()
    await store.claim(claim)
    await close_client(client)
    assert isinstance(await store.claim(claim), Claimed)
    await store.close()
    await close_client(client)


async def test_closing_ends_an_opening_that_is_under_way():
    class Slow:
        async def get_connection(self, *_command):
            await asyncio.sleep(PATIENCE)

        async def release(self, connection):
            raise AssertionError(connection)

    slot = SharedConnection(Slow(), PATIENCE)
    opening = asyncio.create_task(slot.open())
    await asyncio.sleep(0)
    await slot.close()
    with pytest.raises(Disconnected, match="closed"):  # nobody cancelled that caller
        await opening
    with pytest.raises(Disconnected, match="closed"):
        await slot.open()


async def test_a_caller_who_leaves_during_an_opening_is_cancelled_as_ever(server):
    async with opened_async(server.url) as store:
        leaves = asyncio.create_task(store.get(IDENTITY))
        await asyncio.sleep(0)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves


async def test_a_batch_that_is_away_while_the_store_closes_opens_nothing_again(server):
    with proxy_to(server.port) as proxy:
        store = open_async_store(proxy.url)
        await store.get(IDENTITY)
        proxy.delay = 0.5
        batch = asyncio.create_task(store.get_many([IDENTITY] * 3))
        await asyncio.sleep(0.1)
        await store.close()
        with pytest.raises(StoreUnavailable):
            await batch
        assert proxy.connections == 1
        assert store.transport._connections.calls.connection is None


async def test_listing_survives_a_connection_that_the_server_has_closed(server):
    with proxy_to(server.port) as proxy:
        async with opened_async(proxy.url) as store:
            await store.claim(ask())
            proxy.cut_all()
            assert [record.identity for record in (await store.scan()).records] == [IDENTITY]


def test_listing_survives_connections_that_the_server_has_closed(server):
    with proxy_to(server.port) as proxy, opened(proxy.url) as store:
        store.claim(ask())
        proxy.cut_all()
        assert [record.identity for record in store.scan().records] == [IDENTITY]


def test_a_connection_that_is_given_back_to_a_closed_store_is_closed(server):
    with proxy_to(server.port) as proxy:
        store = open_store(proxy.url)
        store.get(IDENTITY)
        proxy.delay = 0.3

        def get():
            with contextlib.suppress(StoreUnavailable):  # closed before it was answered
                store.get(IDENTITY)

        asking = threading.Thread(target=get)
        asking.start()
        wait_until(lambda: not store.transport._connections._idle, "the connection to be taken")
        store.close()
        asking.join(PATIENCE)
        assert not store.transport._connections._idle


async def test_a_failure_to_open_is_told_to_those_who_wait_and_the_next_one_tries_again():
    class Full:
        async def get_connection(self, *_command):
            raise MaxConnectionsError

        async def release(self, connection):
            raise AssertionError(connection)

    slot = SharedConnection(Full(), PATIENCE)
    for _ in range(2):
        told = await asyncio.gather(slot.open(), slot.open(), return_exceptions=True)
        assert [type(error) for error in told] == [MaxConnectionsError] * 2


# --- closed stores, other loops -----------------------------------------------------------------


async def test_a_closed_store_for_asyncio_stays_closed(server):
    async with opened_async(server.url) as store:
        await store.get(IDENTITY)
    with pytest.raises(StoreUnavailable, match="was closed"):
        await store.get(IDENTITY)


def test_a_closed_store_for_threads_stays_closed(server):
    with opened(server.url) as store:
        store.get(IDENTITY)
    with pytest.raises(StoreUnavailable, match="was closed"):
        store.get(IDENTITY)


async def test_another_loop_is_refused_before_anything_is_sent(server):
    async with opened_async(server.url) as store:
        await store.get(IDENTITY)
        with pytest.raises(ConfigError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(store.claim(ask())))
        assert await store.get(IDENTITY) is None
