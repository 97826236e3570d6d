"""Behind a Sentinel: a primary that was frozen and replaced still takes writes when it is thawed."""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import socket
import threading
import time

import pytest
import redis.asyncio
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from engines.facade import until
from semel.core.records import Claimed, Identity
from semel.errors import StoreUnavailable
from semel.stores.redis import RedisStore
from semel.stores.redis.clients import opener, parse_url
from semel.stores.redis.retry import SILENCE
from servers.proxy import answering_for
from servers.redis import redis_sentinel, wait_until
from stores.redis_given import IDENTITY, ask, finish, opened, opened_async

PATIENCE = 60.0
LATER = Identity("s", "after the failover")


class Replaced:
    """A primary that is frozen until another server has taken its place."""

    def __init__(self, servers) -> None:
        self.servers = servers
        self.old, self.new = servers.primary, servers.replica

    def wait_copied(self, records: int) -> None:
        """Every record and its index are on the replica."""
        wait_until(lambda: self.new.client().dbsize() == 2 * records, "the replica to have it")

    def freeze(self) -> None:
        self.old.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        port = self.new.port
        wait_until(lambda: self.servers.primary_port() == port, "the sentinel to fail over")
        wait_until(lambda: self.role(self.new) == "master", "the replica to be the primary")
        self.old.process.send_signal(signal.SIGCONT)
        assert self.role(self.old) == "master", "it knows that it was replaced"

    def role(self, server) -> str:
        with contextlib.closing(server.client()) as client:
            return client.info("replication")["role"]

    def has(self, server, identity) -> bool:
        with contextlib.closing(server.client()) as client:
            return any(identity.key.encode() in key for key in client.scan_iter())


@pytest.fixture
def replaced():
    with redis_sentinel(stubborn=True) as servers:
        yield Replaced(servers)
        servers.primary.process.send_signal(signal.SIGCONT)


def test_a_connection_that_was_idle_across_a_failover_is_not_used(replaced):
    with opened(replaced.servers.url, timeout=PATIENCE) as store:
        first = ask()
        store.claim(first)
        replaced.wait_copied(1)
        replaced.freeze()
        replaced.thaw()
        assert isinstance(store.claim(ask(LATER)), Claimed)
        assert replaced.has(replaced.new, LATER)
        assert not replaced.has(replaced.old, LATER)
        assert store.renew(IDENTITY, first.owner, 300)
        assert store.send([finish(first)]) == [True]


def test_an_answer_that_comes_after_a_failover_is_not_believed(replaced):
    with opened(replaced.servers.url, timeout=PATIENCE) as store:
        store.claim(ask())
        replaced.wait_copied(1)
        replaced.freeze()
        answers = []
        caller = threading.Thread(target=lambda: answers.append(store.claim(ask(LATER))))
        caller.start()
        replaced.thaw()
        caller.join(PATIENCE)
        assert isinstance(answers[0], Claimed)
        assert replaced.has(replaced.old, LATER), "the old primary was never asked"
        assert replaced.has(replaced.new, LATER)


async def test_a_connection_that_was_idle_across_a_failover_is_not_used_by_asyncio(replaced):
    async with opened_async(replaced.servers.url, timeout=PATIENCE) as store:
        first = ask()
        await store.claim(first)
        assert await store.renew(IDENTITY, first.owner, 300)
        await asyncio.to_thread(replaced.wait_copied, 1)
        replaced.freeze()
        await asyncio.to_thread(replaced.thaw)
        later = await asyncio.gather(*(store.claim(ask(LATER)) for _ in range(3)))
        assert [isinstance(answer, Claimed) for answer in later].count(True) == 1
        assert replaced.has(replaced.new, LATER)
        assert not replaced.has(replaced.old, LATER)
        assert await store.renew(IDENTITY, first.owner, 300)
        assert await store.send([finish(first)]) == [True]


@pytest.mark.parametrize("verb", ["claim", "claim_many"])
async def test_an_answer_that_comes_after_a_failover_is_not_believed_by_asyncio(replaced, verb):
    async with opened_async(replaced.servers.url, timeout=PATIENCE) as store:
        await store.claim(ask())
        await asyncio.to_thread(replaced.wait_copied, 1)
        replaced.freeze()
        one = verb == "claim"
        asked = [store.claim(ask(LATER))] if one else [store.send([ask(LATER)])]
        caller = asyncio.gather(*asked)
        await asyncio.sleep(0)
        await asyncio.to_thread(replaced.thaw)
        [answer] = await caller
        assert isinstance(answer if one else answer[0], Claimed)
        assert replaced.has(replaced.old, LATER), "the old primary was never asked"
        assert replaced.has(replaced.new, LATER)


# --- in the middle of a failover -------------------------------------------------------------


SHORT = 4.0


class Unfinished(Replaced):
    """Sentinel names the new primary where it is asked for one, and lists the old one still."""

    def thaw(self) -> None:
        super().thaw()
        wait_until(lambda: self.listed() == (self.old.port, False), "the old one to be listed")
        assert self.servers.primary_port() == self.new.port

    def listed(self) -> tuple[int, bool]:
        """What redis-py goes by when it connects."""
        with contextlib.closing(self.servers.sentinels[0].client()) as client:
            state = client.sentinel_masters()[self.servers.service]
        return state["port"], state["is_sdown"] or state["is_odown"]

    def finish(self) -> None:
        with contextlib.closing(self.servers.sentinels[0].client()) as client:
            client.execute_command("SENTINEL SET", self.servers.service, "failover-timeout", "1000")
        wait_until(lambda: self.listed()[0] == self.new.port, "the failover to end")


@pytest.fixture
def unfinished():
    with redis_sentinel(stubborn=True, unfinished=True) as servers:
        yield Unfinished(servers)
        servers.primary.process.send_signal(signal.SIGCONT)


def test_the_connection_that_replaces_a_refused_one_is_checked_too(unfinished):
    refused = pytest.raises(StoreUnavailable, match="Sentinel names another primary")
    url, first = unfinished.servers.url, ask()
    with opened(url, timeout=SHORT) as store, opened(url, timeout=SHORT) as new_store:
        store.claim(first)
        unfinished.wait_copied(1)
        unfinished.freeze()
        unfinished.thaw()
        with refused:
            store.claim(ask(LATER))
        with refused:
            store.send([finish(first)])
        with refused:
            new_store.claim(ask(LATER))
        assert not unfinished.has(unfinished.old, LATER)
        unfinished.finish()
        assert isinstance(store.claim(ask(LATER)), Claimed)
        assert store.send([finish(first)]) == [True]
        assert unfinished.has(unfinished.new, LATER)
        assert not unfinished.has(unfinished.old, LATER)


async def test_the_connection_that_replaces_a_refused_one_is_checked_too_by_asyncio(unfinished):
    refused = pytest.raises(StoreUnavailable, match="Sentinel names another primary")
    url, first = unfinished.servers.url, ask()
    async with (
        opened_async(url, timeout=SHORT) as store,
        opened_async(url, timeout=SHORT) as new_store,
    ):
        await store.claim(first)
        await asyncio.to_thread(unfinished.wait_copied, 1)
        unfinished.freeze()
        await asyncio.to_thread(unfinished.thaw)
        with refused:
            await store.claim(ask(LATER))
        with refused:
            await store.renew(IDENTITY, first.owner, 300)
        with refused:
            await new_store.claim(ask(LATER))
        assert not unfinished.has(unfinished.old, LATER)
        await asyncio.to_thread(unfinished.finish)
        assert isinstance(await store.claim(ask(LATER)), Claimed)
        assert await store.renew(IDENTITY, first.owner, 300)
        assert unfinished.has(unfinished.new, LATER)
        assert not unfinished.has(unfinished.old, LATER)


# --- a primary that is slow, and still the primary -------------------------------------------


@pytest.fixture
def slow():
    """A primary that is frozen for a second, and not replaced."""
    with redis_sentinel(fails_over=False) as servers:
        yield servers
        for server in (servers.primary, *servers.sentinels):
            server.process.send_signal(signal.SIGCONT)


def freeze_for_long(server) -> None:
    """Longer than what counts as a silence; then let it answer."""
    server.process.send_signal(signal.SIGSTOP)
    threading.Timer(2 * SILENCE, server.process.send_signal, (signal.SIGCONT,)).start()


def test_a_late_answer_of_the_primary_is_believed(slow):
    with opened(slow.url, timeout=PATIENCE) as store:
        store.claim(ask())
        before = slow.primary.calls("evalsha", "eval")
        freeze_for_long(slow.primary)
        assert isinstance(store.claim(ask(LATER)), Claimed)
        assert slow.primary.calls("evalsha", "eval") == before + 1


async def test_late_answers_of_the_primary_are_believed_by_asyncio(slow):
    async with opened_async(slow.url, timeout=PATIENCE) as store:
        await store.claim(ask())
        with contextlib.closing(slow.primary.client()) as client:
            client.script_flush()
        freeze_for_long(slow.primary)
        forgotten, leaving, one = (
            asyncio.ensure_future(store.claim(ask(Identity("s", name)))) for name in "abc"
        )
        many = asyncio.ensure_future(store.send([ask(Identity("s", "d"))]))
        await asyncio.sleep(0)
        leaving.cancel()
        for answer in (await forgotten, await one, *(await many)):
            assert isinstance(answer, Claimed)
        renewed = ask(Identity("s", "e"))
        freeze_for_long(slow.primary)
        assert isinstance(await store.claim(renewed), Claimed)  # its script is known by now


async def test_closing_a_store_ends_what_it_asks_of_a_sentinel(slow):
    async with opened_async(slow.url, timeout=PATIENCE) as store:
        await store.claim(ask())
        slow.sentinels[0].process.send_signal(signal.SIGSTOP)
        freeze_for_long(slow.primary)
        caller = asyncio.ensure_future(store.claim(ask(LATER)))
        await until(lambda: store.transport._checks)
        await store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await caller


async def answered_late(store, slow, *, on_its_way=lambda: None):
    """A claim that the primary answers late, at the moment when that answer is to be checked."""
    await store.claim(ask())
    slow.primary.process.send_signal(signal.SIGSTOP)
    caller = asyncio.ensure_future(store.claim(ask(LATER)))
    await until(lambda: store.transport._connections.ready().waiting)
    on_its_way()
    await asyncio.sleep(2 * SILENCE)
    slow.primary.process.send_signal(signal.SIGCONT)
    return caller


async def test_a_late_answer_is_not_held_for_ever_if_its_check_is_cancelled(slow):
    process = slow.sentinels[0].process
    async with opened_async(slow.url, timeout=PATIENCE) as store:
        caller = await answered_late(
            store, slow, on_its_way=lambda: process.send_signal(signal.SIGSTOP)
        )
        await until(lambda: store.transport._checks)
        for check in store.transport._checks:
            check.cancel()
        process.send_signal(signal.SIGCONT)
        assert isinstance(await asyncio.wait_for(caller, PATIENCE), Claimed)


async def test_a_late_answer_is_not_held_for_ever_if_its_check_fails(slow):
    to_garble, garbled = [], []

    def garbles(request, writer) -> bool:
        if not to_garble or b"GET-MASTER" not in request.upper():
            return False
        garbled.append(to_garble.pop())
        writer.write(b"*2\r\n$9\r\n127.0.0.1\r\n$4\r\nport\r\n")
        return True

    async with answering_for(slow.sentinels[0].port, garbles) as port:
        url = f"redis+sentinel://127.0.0.1:{port}/{slow.service}/0"
        async with opened_async(url, timeout=PATIENCE) as store:
            caller = await answered_late(store, slow, on_its_way=lambda: to_garble.append(1))
            assert isinstance(await asyncio.wait_for(caller, PATIENCE), Claimed)
            assert garbled == [1]


def test_the_sentinels_have_one_limit_of_time_for_all_of_them(slow):
    """Also with a client of the application, whose own limits are longer."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        places = [("127.0.0.1", slow.sentinels[0].port), other.getsockname()]
        settings = {"socket_timeout": 2.0, "retry": Retry(NoBackoff(), 0)}
        manager = redis.sentinel.Sentinel(places, sentinel_kwargs=settings)
        with contextlib.closing(manager.master_for(slow.service)) as client:
            store = RedisStore(client, timeout=2.0)
            store.claim(ask())
            slow.sentinels[0].process.send_signal(signal.SIGSTOP)
            time.sleep(2 * SILENCE)
            assert isinstance(store.claim(ask(LATER)), Claimed)
            assert select.select([other], [], [], 0)[0] == [], "the next one was asked, too"


@pytest.mark.parametrize(("given", "each"), [("", 2.0), ("?socket_timeout=5", 5.0)])
def test_each_sentinel_has_a_share_of_the_time_unless_the_url_says_otherwise(given, each):
    url = f"redis+sentinel://a,b,c/semel{given}"
    for driver in (redis, redis.asyncio):
        client = opener(parse_url(url), 12.0, {}, driver)()
        manager = client.connection_pool.sentinel_manager
        options = [one.connection_pool.connection_kwargs for one in manager.sentinels]
        assert [one["socket_timeout"] for one in options] == [each] * 3
        assert [one["socket_connect_timeout"] for one in options] == [2.0] * 3


def lose_sentinels(slow) -> None:
    for sentinel in slow.sentinels:
        sentinel.kill()


def forget_service(slow) -> None:
    for sentinel in slow.sentinels:
        with contextlib.closing(sentinel.client()) as client:
            client.execute_command("SENTINEL REMOVE", slow.service)


@pytest.mark.parametrize("lose", [lose_sentinels, forget_service])
async def test_what_is_open_is_used_while_no_sentinel_knows_the_primary(slow, lose):
    with opened(slow.url, timeout=PATIENCE) as store:
        async with opened_async(slow.url, timeout=PATIENCE) as async_store:
            store.claim(ask())
            await async_store.claim(ask())
            lose(slow)
            await asyncio.sleep(2 * SILENCE)
            assert isinstance(store.claim(ask(Identity("s", "threads"))), Claimed)
            assert isinstance(await async_store.claim(ask(Identity("s", "tasks"))), Claimed)


async def test_what_is_open_is_used_while_a_sentinel_does_not_answer(slow):
    async with opened_async(slow.url, timeout=8.0) as store:
        await store.claim(ask())
        slow.sentinels[0].process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2 * SILENCE)
        assert isinstance(await store.claim(ask(LATER)), Claimed)
