"""What Redis can do to a call, done to it: each test checks that its fault really fired."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import pytest
import redis

from semel.core.records import Busy, Claimed, Finished, Identity, State
from semel.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from semel.stores.redis import AsyncRedisStore, RedisStore, commands
from semel.stores.redis.redis_py import take_connection
from servers.proxy import proxy_to
from servers.redis import free_port, redis_server, wait_until
from stores.redis_given import (
    IDENTITY,
    RESULT,
    ask,
    close_client,
    finish,
    new_owner,
    opened,
    opened_async,
)


@pytest.fixture
def server(redis_of_this_worker, redis_url):
    return redis_of_this_worker


def sends(script):
    """Matches a request that runs this script."""
    return lambda request: script.sha.encode() in request


# --- one round trip per verb ----------------------------------------------------------------


def test_a_first_execution_is_two_script_calls_and_a_replay_is_one(server):
    with opened(server.url) as store:
        store.claim(ask(Identity("warm", "up")))  # the script cache of a new server is empty
        store.complete(Identity("warm", "up"), new_owner(), RESULT, 1)
        before = server.calls("evalsha", "eval")
        request = ask()
        store.claim(request)
        store.complete(IDENTITY, request.owner, RESULT, 60)
        assert server.calls("evalsha", "eval") - before == 2
        assert isinstance(store.claim(ask()), Finished)
        assert server.calls("evalsha", "eval") - before == 3


def test_a_batch_is_one_round_trip(server, monkeypatch):
    with opened(server.url) as store:
        store.send([ask(Identity("warm", str(n))) for n in range(2)])
        round_trips = []
        exchange = store.transport._exchange
        monkeypatch.setattr(
            store.transport,
            "_exchange",
            lambda sent: round_trips.append(len(sent)) or exchange(sent),
        )
        store.send([ask(Identity("s", str(n))) for n in range(50)])
        assert round_trips == [50]


# --- the server forgot the scripts ----------------------------------------------------------


def test_a_flushed_script_cache_is_filled_again_by_the_call_itself(server):
    with opened(server.url) as store, server.client() as client:
        request = ask()
        store.claim(request)
        client.script_flush()
        before = server.calls("eval")
        assert store.complete(IDENTITY, request.owner, RESULT, 60)
        assert server.calls("eval") - before == 1
        assert store.complete(IDENTITY, request.owner, RESULT, 60)
        assert server.calls("eval") - before == 1  # remembered from now on


def test_only_the_members_of_a_batch_that_failed_are_sent_again(server):
    with opened(server.url) as store, server.client() as client:
        client.script_flush()
        asks = [ask(Identity("s", str(n))) for n in range(20)]
        before = server.calls("eval")
        assert all(isinstance(answer, Claimed) for answer in store.send(asks))
        assert server.calls("eval") - before == 20
        assert [answer.number for answer in store.send(asks)] == [1] * 20


async def test_an_async_batch_survives_a_flushed_script_cache(server):
    async with opened_async(server.url) as store:
        with server.client() as client:
            client.script_flush()
        answers = await store.send([ask(Identity("s", str(n))) for n in range(5)])
        assert all(isinstance(answer, Claimed) for answer in answers)


# --- the reply is lost ----------------------------------------------------------------------


def test_a_claim_whose_reply_was_lost_is_claimed_by_the_same_attempt(server):
    with proxy_to(server.port) as proxy, opened(proxy.url) as store:
        store.get(IDENTITY)
        proxy.lose_reply(sends(commands.CLAIM))
        with server.client() as client:
            client.script_load(commands.CLAIM.text)
        assert store.claim(ask()).number == 1
        assert proxy.lost == 1


def test_a_complete_whose_reply_was_lost_still_answers_true(server):
    with proxy_to(server.port) as proxy, opened(proxy.url) as store:
        request = ask()
        store.claim(request)
        with server.client() as client:
            client.script_load(commands.END.text)
        proxy.lose_reply(sends(commands.END))
        assert store.complete(IDENTITY, request.owner, RESULT, 60)
        assert proxy.lost == 1
        assert store.get(IDENTITY).state is State.SUCCEEDED


async def test_lost_replies_do_not_matter_to_the_async_store_either(server):
    with proxy_to(server.port) as proxy:
        async with opened_async(proxy.url) as store:
            with server.client() as client:
                client.script_load(commands.CLAIM.text)
                client.script_load(commands.END.text)
            request = ask()
            proxy.lose_reply(sends(commands.CLAIM))
            assert (await store.claim(request)).number == 1
            proxy.lose_reply(sends(commands.END))
            assert await store.complete(IDENTITY, request.owner, RESULT, 60)
            assert proxy.lost == 2


def test_a_batch_whose_replies_were_lost_is_sent_again_as_a_whole(server):
    with proxy_to(server.port) as proxy, opened(proxy.url) as store:
        asks = [ask(Identity("s", str(n))) for n in range(10)]
        store.send(asks)
        proxy.lose_reply(sends(commands.CLAIM))
        assert [answer.number for answer in store.send(asks)] == [1] * 10
        assert proxy.lost == 1


def test_connections_cut_while_idle_go_unnoticed(server):
    with proxy_to(server.port) as proxy, opened(proxy.url) as store:
        store.claim(ask())
        proxy.cut_all()
        assert isinstance(store.claim(ask()), Busy)
        assert proxy.connections == 2


# --- the server is not there, or does not answer --------------------------------------------


def test_a_server_that_is_not_there_is_store_unavailable():
    port = free_port()
    with opened(f"redis://127.0.0.1:{port}", timeout=0.3) as store:
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} cannot be reached"):
            store.claim(ask())
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            store.send([ask(), ask()])
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            store.scan()


async def test_a_server_that_is_not_there_is_store_unavailable_to_the_async_store_too():
    async with opened_async(f"redis://127.0.0.1:{free_port()}", timeout=0.3) as store:
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await store.claim(ask())


@pytest.fixture
def paused_server():
    with redis_server() as server:
        yield server


def test_a_server_that_does_not_answer_is_store_unavailable(paused_server):
    with opened(paused_server.url, timeout=0.4) as store:
        store.get(IDENTITY)
        paused_server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            store.claim(ask())
        paused_server.process.send_signal(signal.SIGCONT)
        wait_until(lambda: bool(paused_server.client().ping()), "the server to wake up")
        assert store.get(Identity("nothing", "here")) is None


async def test_a_server_that_does_not_answer_is_store_unavailable_to_the_async_store_too(
    paused_server,
):
    async with opened_async(paused_server.url, timeout=0.4) as store:
        await store.get(IDENTITY)
        paused_server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            await store.claim(ask())
        paused_server.process.send_signal(signal.SIGCONT)


def test_a_server_that_comes_back_within_the_timeout_is_not_noticed(paused_server):
    with opened(paused_server.url, timeout=20) as store:
        store.get(IDENTITY)
        paused_server.stop()
        revival = threading.Timer(0.3, paused_server.restart)
        revival.start()
        assert isinstance(store.claim(ask()), Claimed)
        revival.join()


# --- the pool is exhausted ------------------------------------------------------------------


def test_callers_beyond_the_pool_wait_and_are_served(server):
    with opened(server.url, max_connections=2) as store:
        answers: list[object] = []

        def call(number: int) -> None:
            answers.append(store.claim(ask(Identity("s", str(number)))))

        threads = [threading.Thread(target=call, args=(n,)) for n in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [type(answer) for answer in answers] == [Claimed] * 30


async def test_two_hundred_async_callers_share_a_small_pool(server):
    with server.client() as client:
        others = {each["id"] for each in client.client_list()}  # of tests before this one
        async with opened_async(server.url, max_connections=4) as store:
            answers = await asyncio.gather(
                *(store.claim(ask(Identity("s", str(n)))) for n in range(200))
            )
            assert {type(answer) for answer in answers} == {Claimed}
            ours = {each["id"] for each in client.client_list()} - others
            assert 0 < len(ours) <= 4


def test_a_caller_that_finds_no_connection_in_time_gets_store_unavailable_and_nothing_is_sent(
    server,
):
    with proxy_to(server.port) as proxy, opened(proxy.url, max_connections=1, timeout=0.5) as store:
        store.get(IDENTITY)
        limit = store.transport._limit
        place = limit.take()  # somebody uses the only connection
        with pytest.raises(StoreUnavailable, match=r"all 1 connections .* stayed in use"):
            store.claim(ask())
        limit.give(place)
        assert isinstance(store.claim(ask()), Claimed)


def test_a_full_pool_of_the_application_is_store_unavailable(server):
    with server.client(max_connections=1) as client:
        connection = take_connection(client.connection_pool)
        with pytest.raises(StoreUnavailable, match="higher max_connections"):
            RedisStore(client).claim(ask())
        client.connection_pool.release(connection)
        assert isinstance(RedisStore(client).claim(ask()), Claimed)


# --- the server refuses ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded():
    with redis_server(password="right") as server:
        yield server


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:right@"])
def test_a_wrong_password_is_named_as_such_without_showing_it(guarded, login):
    with opened(f"redis://{login}127.0.0.1:{guarded.port}") as store:
        with pytest.raises(
            StoreUnavailable, match=f"authentication failed for redis 127.0.0.1:{guarded.port}"
        ) as caught:
            store.claim(ask())
        assert "wrong" not in str(caught.value)


async def test_a_wrong_password_is_named_to_the_async_store_too(guarded):
    async with opened_async(f"redis://:wrong@127.0.0.1:{guarded.port}") as store:
        with pytest.raises(StoreUnavailable, match="authentication failed"):
            await store.claim(ask())


def test_the_right_password_opens(guarded):
    with opened(guarded.url) as store:
        assert isinstance(store.claim(ask()), Claimed)


@pytest.fixture
def settings_restored(server):
    with server.client() as client:
        yield client
        client.config_set("maxmemory", 0)
        client.replicaof("NO", "ONE")


def test_a_full_server_refuses_new_keys_but_still_answers_for_old_ones(server, settings_restored):
    with opened(server.url) as store:
        done = ask(Identity("s", "done"))
        store.claim(done)
        store.complete(done.identity, done.owner, RESULT, 60)
        settings_restored.config_set("maxmemory", 1)
        with pytest.raises(StoreFull, match="is full; raise maxmemory"):
            store.claim(ask())
        (answer,) = [a for a in store.send([ask(), ask(done.identity)]) if isinstance(a, StoreFull)]
        assert "is full" in str(answer)
        assert isinstance(store.claim(ask(done.identity)), Finished)
        settings_restored.config_set("maxmemory", 0)
        assert isinstance(store.claim(ask()), Claimed)  # nothing of the refused one is left


def test_a_replica_is_named_as_such(server, settings_restored):
    settings_restored.replicaof("127.0.0.1", free_port())
    with opened(server.url) as store, pytest.raises(StoreUnavailable, match="is a replica"):
        store.claim(ask())


def test_a_node_of_a_cluster_opened_as_a_single_server_is_named_as_such():
    with redis_server(
        args=("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    ) as server:
        with opened(server.url) as store, pytest.raises(StoreUnavailable, match="CLUSTER INFO"):
            store.claim(ask())
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: client.cluster("info")["cluster_state"] == "ok", "the cluster")
        with opened(server.url) as store:
            assert isinstance(store.claim(ask()), Claimed)  # it has every slot: nothing to complain


def test_a_database_that_does_not_exist_is_a_store_error(server):
    refused = pytest.raises(StoreError, match="no database of that number")
    with opened(f"redis://127.0.0.1:{server.port}/9999", timeout=0.4) as store, refused:
        store.claim(ask())


def test_another_protocol_on_the_port_is_store_unavailable():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        thread = threading.Thread(target=babble, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with opened(f"redis://127.0.0.1:{port}", timeout=0.3) as store, pytest.raises(StoreError):
            store.claim(ask())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


# --- clients of the application -------------------------------------------------------------


def test_the_applications_own_client_is_used_and_stays_open(server):
    with server.client() as client:
        store = RedisStore(client, prefix="mine:")
        request = ask()
        store.claim(request)
        store.close()
        assert client.exists(store.keys.record(IDENTITY))
        assert client.ping()


def test_a_client_that_decodes_replies_does_no_harm(server):
    with server.client(decode_responses=True) as client:
        store = RedisStore(client)
        request = ask(fingerprint=b"\xff" * 16, lease=0)
        assert isinstance(store.claim(request), Claimed)
        assert store.get(IDENTITY).fingerprint == b"\xff" * 16
        assert [record.owner for record in store.stuck()] == [request.owner]
        assert [record.owner for record in store.scan().records] == [request.owner]
        assert store.send([finish(request)]) == [True]


async def test_an_async_client_that_decodes_replies_does_no_harm(server):
    client = redis.asyncio.Redis(port=server.port, decode_responses=True)
    store = AsyncRedisStore(client)
    request = ask(fingerprint=b"\xff" * 16, lease=0)
    await store.claim(request)
    assert [record.owner for record in (await store.scan()).records] == [request.owner]
    assert (await store.send([ask(), ask()]))[0].takeover
    await store.close()
    assert await client.ping()
    await close_client(client)


async def test_a_client_of_the_other_kind_is_named(server):
    with (
        redis.Redis(port=server.port) as client,
        pytest.raises(ConfigError, match=r"AsyncRedisStore takes .*got a redis.client.Redis"),
    ):
        AsyncRedisStore(client)
    async_client = redis.asyncio.Redis(port=server.port)
    with pytest.raises(ConfigError, match=r"RedisStore takes .*got a redis.asyncio.client.Redis"):
        RedisStore(async_client)
    assert (
        repr(AsyncRedisStore(async_client))
        == f"<AsyncRedisStore redis localhost:{server.port} prefix='idem:'>"
    )
    await close_client(async_client)
    with pytest.raises(ConfigError, match=r"got a builtins\.str"):
        RedisStore("redis://localhost")


def test_an_async_store_belongs_to_the_first_loop_that_uses_it(server):
    from semel.stores.redis import open_async_store

    async def use_and_leave(store):
        try:
            return await store.get(IDENTITY)
        finally:
            await close_client(store.transport.client)

    store = open_async_store(server.url)
    assert asyncio.run(use_and_leave(store)) is None
    with pytest.raises(ConfigError, match="belongs to another event loop"):
        asyncio.run(use_and_leave(store))


# --- fork -----------------------------------------------------------------------------------


def test_a_forked_child_uses_connections_of_its_own(server):
    with opened(server.url, max_connections=1) as store:
        store.claim(ask(Identity("s", "parent")))
        limit = store.transport._limit
        place = limit.take()  # the parent's place is taken at the moment of the fork
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                store.put(Identity("s", "child"), RESULT, 60, owner=new_owner())
                code = 0
            os._exit(code)
        limit.give(place)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.get(Identity("s", "child")).state is State.SUCCEEDED
        assert isinstance(store.claim(ask(Identity("s", "parent"))), Busy)
