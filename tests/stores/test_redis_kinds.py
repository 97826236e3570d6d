"""The other ways to a server: TLS, a unix socket, Sentinel, a user with few permissions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import threading

import pytest
import redis

import semel.stores.redis as package
from semel.core.records import Busy, Claimed, Encoded, Finished, Identity, State
from semel.errors import ConfigError, StoreError, StoreRefused, StoreUnavailable
from semel.stores.redis import AsyncRedisStore, RedisStore
from semel.stores.redis.redis_py import socket_of, take_connection
from semel.stores.urls import tls_error
from servers.proxy import answering_for
from servers.redis import Certificates, redis_sentinel, redis_server, wait_until
from stores.redis_given import IDENTITY, RESULT, ask, close_client, finish, opened, opened_async

# --- TLS ------------------------------------------------------------------------------------

# redis-py 5 leaves a socket whose TLS fails to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
    if redis.__version__.startswith("5.")
    else "error"
)


@pytest.fixture(scope="module")
def tls_server():
    with redis_server(tls=True) as server:
        yield server


def test_a_server_behind_tls_is_opened_by_rediss(tls_server):
    with opened(tls_server.url) as store:
        request = ask()
        assert isinstance(store.claim(request), Claimed)
        assert store.send([finish(request)]) == [True]


async def test_a_server_behind_tls_is_opened_by_rediss_for_asyncio(tls_server):
    async with opened_async(tls_server.url, prefix="aio:") as store:
        assert isinstance(await store.claim(ask()), Claimed)


def test_where_no_certificate_is_checked_neither_is_the_name_in_it(tls_server):
    url = f"rediss://127.0.0.1:{tls_server.port}?ssl_cert_reqs=none"
    with opened(url, prefix="unchecked:") as store:
        assert isinstance(store.claim(ask()), Claimed)


def connections(server) -> int:
    with server.client() as client:
        return client.info("stats")["total_connections_received"]


REFUSED = {
    "unknown authority": ("rediss://127.0.0.1:{port}", "name the file of its authority in ssl_ca"),
    "other host name": ("rediss://localhost:{port}?ssl_ca_certs={ca}", "not for this host name"),
    "cluster": ("rediss+cluster://127.0.0.1:{port}", "name the file of its authority in ssl_ca"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_certificate_that_will_never_do_is_refused_at_once(tls_server, case):
    url, words = REFUSED[case]
    url = url.format(port=tls_server.port, ca=tls_server.tls.authority)
    before = connections(tls_server)
    refused = pytest.raises(
        StoreRefused, match=f"the certificate of redis.* is rejected: .*{words}"
    )
    with opened(url, timeout=60) as store, refused:
        store.claim(ask())
    async with opened_async(url, timeout=60) as store:
        with refused:
            await store.claim(ask())
    assert connections(tls_server) - before < 10, "it was repeated"


async def test_an_expired_certificate_is_refused_at_once(tls_server, tmp_path):
    files = Certificates(tmp_path, days=-1)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={files.authority}"
        async with opened_async(url, timeout=60) as store:
            with pytest.raises(StoreRefused, match="is rejected: it has expired"):
                await store.claim(ask())


async def test_a_port_that_answers_without_tls_is_refused_at_once():
    async def plainly(_, writer) -> None:
        writer.write(b"-ERR Protocol error\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(plainly, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with opened_async(f"rediss://127.0.0.1:{port}", timeout=60) as store:
            with pytest.raises(StoreRefused, match="does not speak TLS; use redis://"):
                await store.claim(ask())


@pytest.mark.parametrize(
    "answer",
    [b"\x17\x03\x03\x00\x30" + 48 * b"x", b"-ERR the proxy is restarting\r\n"],
    ids=["a bad record", "plain words"],
)
async def test_tls_that_breaks_on_an_open_connection_is_repeated(
    redis_of_this_worker, redis_url, tmp_path, answer
):
    assert redis_url
    files = Certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    to_spoil, spoiled = [], []

    def spoils(_, writer) -> bool:
        if not to_spoil:
            return False
        spoiled.append(to_spoil.pop())
        os.write(writer.get_extra_info("socket").fileno(), answer)
        return True

    async with answering_for(redis_of_this_worker.port, spoils, context) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={files.authority}"
        with opened(url, timeout=60) as store:
            await asyncio.to_thread(store.claim, ask())
            to_spoil.append("threads")
            [claim] = await asyncio.to_thread(store.send, [ask(Identity("s", "threads"))])
            assert isinstance(claim, Claimed)
        async with opened_async(url, timeout=60) as store:
            await store.claim(ask())
            to_spoil.append("tasks")
            [claim] = await store.send([ask(Identity("s", "tasks"))])
            assert isinstance(claim, Claimed)
        assert spoiled == ["threads", "tasks"]


def ssl_error(reason: str, library: str = "SSL") -> ssl.SSLError:
    error = ssl.SSLError(1, f"[{library}: {reason}] as OpenSSL words it")
    error.reason, error.library = reason, library
    return error


PASSING = [
    ssl_error("APPLICATION_DATA_AFTER_CLOSE_NOTIFY"),
    ssl_error("TLSV1_ALERT_INTERNAL_ERROR"),
    ssl_error("DECRYPTION_FAILED_OR_BAD_RECORD_MAC"),
    ssl.SSLWantReadError(2, "The operation did not complete (read)"),
    ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    ssl.SSLError(1, "an error without a reason"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_an_error_of_tls_that_may_pass_is_no_reason_to_give_up(error):
    assert tls_error(error, connecting=True) is None


LASTING = [
    ssl_error("UNSUPPORTED_PROTOCOL"),
    ssl_error("NO_PROTOCOLS_AVAILABLE"),
    ssl_error("TLSV1_ALERT_PROTOCOL_VERSION"),
    ssl_error("TLSV1_ALERT_UNKNOWN_CA"),
    ssl_error("SSLV3_ALERT_HANDSHAKE_FAILURE"),
    ssl_error("TLSV13_ALERT_CERTIFICATE_REQUIRED"),
    ssl_error("KEY_VALUES_MISMATCH", "X509"),
    ssl.SSLError(524297, "[SSL] PEM lib (_ssl.c:3905)"),
]


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_an_error_of_tls_that_stays_is_found_in_what_a_driver_made_of_it(error):
    assert raised_while_handling(error, StoreUnavailable("wrapped")) is error
    assert tls_error(error, connecting=False) is error


def raised_while_handling(error, another):
    """What is found in an error that was raised while one of TLS was handled."""
    try:
        try:
            raise error
        except ssl.SSLError:
            raise another  # noqa: B904 - as drivers do
    except Exception as raised:
        return tls_error(raised, connecting=False)


def test_an_error_with_a_reason_of_its_own_is_not_one_of_tls():
    earlier = ssl_error("TLSV1_ALERT_UNKNOWN_CA")
    assert raised_while_handling(earlier, ConnectionRefusedError("the server restarts")) is None
    suppressing = StoreUnavailable("somewhere else")
    suppressing.__suppress_context__ = True
    assert raised_while_handling(earlier, suppressing) is None


def test_words_without_tls_count_only_while_connecting():
    plain = ssl_error("WRONG_VERSION_NUMBER")
    assert tls_error(plain, connecting=True) is plain
    assert tls_error(plain, connecting=False) is None


def test_a_port_that_waits_without_tls_is_store_unavailable():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"rediss://127.0.0.1:{silent.getsockname()[1]}"
        unavailable = pytest.raises(StoreUnavailable, match="one without TLS that rediss://")
        with opened(url, timeout=0.4) as store, unavailable:
            store.claim(ask())


def test_a_file_of_certificates_that_holds_none_is_refused_at_once(tls_server, tmp_path):
    (tmp_path / "ca.pem").write_text("nothing of the kind")
    url = f"rediss://127.0.0.1:{tls_server.port}?ssl_ca_certs={tmp_path / 'ca.pem'}"
    with opened(url, timeout=60) as store, pytest.raises(StoreRefused, match="check ssl_ca_certs"):
        store.claim(ask())


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path"])
def test_a_file_of_tls_that_is_not_there_is_named_when_the_store_is_opened(name):
    with pytest.raises(ConfigError, match=f"{name}: no such file .*: '/nowhere/ca.pem'"):
        package.open_store(f"rediss://127.0.0.1?{name}=/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=f"{name}: no such file .*: '/nowhere/ca.pem'"):
        package.open_async_store("rediss://127.0.0.1", **{name: "/nowhere/ca.pem"})


def test_a_protocol_that_does_not_exist_is_named_when_the_store_is_opened():
    with pytest.raises(ConfigError, match="protocol is 2 or 3, got 9"):
        package.open_store("redis://127.0.0.1?protocol=9")


def test_speaking_plainly_to_a_tls_port_is_store_unavailable(tls_server):
    refused = pytest.raises(StoreUnavailable)
    with opened(f"redis://127.0.0.1:{tls_server.port}", timeout=0.4) as store, refused:
        store.claim(ask())


# --- unix socket ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unix_server():
    with redis_server(unix=True, password="secret") as server:
        yield server


async def test_a_unix_socket_is_opened_by_both_kinds_of_store(unix_server):
    assert unix_server.url.startswith("redis+unix://")
    request = ask()
    with opened(unix_server.url) as store:
        assert isinstance(store.claim(request), Claimed)
        assert unix_server.socket_path in repr(store)
    async with opened_async(unix_server.url) as store:
        assert isinstance(await store.claim(ask()), Busy)
        assert await store.complete(IDENTITY, request.owner, RESULT, 60)


def test_a_client_on_a_unix_socket_is_named_by_its_file(unix_server):
    with redis.Redis(unix_socket_path=unix_server.socket_path, password="secret") as client:
        assert unix_server.socket_path in repr(RedisStore(client))


# --- few permissions ------------------------------------------------------------------------

PERMISSIONS = re.findall(r"\+[a-z|]+", package.__doc__.partition("ACL SETUSER")[2])


@pytest.fixture
def permissions(redis_of_this_worker, redis_url):
    """Gives user `semel` what it is told to, and takes it back afterwards."""
    server = redis_of_this_worker
    with server.client() as client:

        def permit(*rules: str, keys: str = "~idem:*") -> str:
            client.execute_command(
                "ACL", "SETUSER", "semel", "reset", "on", ">pw", keys, "-@all", *rules
            )
            return f"redis://semel:pw@127.0.0.1:{server.port}/0"

        yield permit
        client.acl_deluser("semel")


def test_the_documented_permissions_are_enough(permissions, redis_of_this_worker):
    with redis_of_this_worker.client() as client, opened(permissions(*PERMISSIONS)) as store:
        client.script_flush()
        client.acl_log_reset()
        request = ask(lease=0)
        assert isinstance(store.claim(request), Claimed)
        assert store.renew(IDENTITY, request.owner, 0)
        assert len(store.stuck()) == 1
        assert store.counts().abandoned == 1
        assert store.purge(abandoned_after=0) == 1
        assert isinstance(store.claim(request), Claimed)
        assert store.complete(IDENTITY, request.owner, RESULT, 60)
        assert isinstance(store.claim(ask()), Finished)
        large = ask(Identity("s", "large"))
        assert isinstance(store.claim(large), Claimed)
        assert store.complete(large.identity, large.owner, Encoded("json/1", bytes(100_000)), 60)
        assert isinstance(store.claim(ask(large.identity)), Finished)
        assert store.forget(large.identity)
        assert store.touch(IDENTITY, 60)
        assert store.get(IDENTITY).state is State.SUCCEEDED
        assert len(store.scan().records) == 1
        assert store.forget(IDENTITY)
        assert store.put(IDENTITY, RESULT, 60, owner=request.owner)
        refused = {entry["object"] for entry in client.acl_log() if entry["username"] == "semel"}
        assert refused <= {
            "client|setinfo",
            "client|maint_notifications",
        }  # redis-py introduces itself; not needed


def test_a_missing_permission_for_a_command_is_named(permissions):
    refused = pytest.raises(StoreError, match=r"does not permit .* the command evalsha")
    with opened(permissions("+get")) as store, refused:
        store.claim(ask())


def test_a_missing_permission_inside_a_script_is_named_and_nothing_is_written(
    permissions, redis_of_this_worker
):
    rules = [rule for rule in PERMISSIONS if rule != "+set"]
    with opened(permissions(*rules)) as store, redis_of_this_worker.client() as client:
        with pytest.raises(StoreError, match="what semel needs: a command"):
            store.claim(ask())
        assert client.dbsize() == 0


def test_keys_outside_the_permitted_prefix_are_named(permissions):
    refused = pytest.raises(StoreError, match="what semel needs: a key")
    with opened(permissions(*PERMISSIONS, keys="~other:*")) as store, refused:
        store.claim(ask())


# --- Sentinel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_sentinel():
    with redis_sentinel() as servers:
        yield servers


@pytest.fixture
def sentinel(shared_sentinel):
    with shared_sentinel.primary.client() as client:
        client.flushall()
    return shared_sentinel


def fail_over(servers):
    old = servers.primary_port()
    servers.primary.kill()
    wait_until(lambda: servers.primary_port() != old, "the failover")


@pytest.fixture
def mortal_sentinel():
    with redis_sentinel() as servers:
        yield servers


async def test_stores_follow_a_failover_to_the_new_primary(mortal_sentinel):
    sentinel = mortal_sentinel
    with opened(sentinel.url, timeout=20) as store:
        async with opened_async(sentinel.url, timeout=20) as async_store:
            request = ask()
            assert isinstance(store.claim(request), Claimed)
            assert isinstance(await async_store.claim(ask()), Busy)
            wait_until(lambda: sentinel.replica.client().dbsize() == 2, "the replica to have it")
            await asyncio.to_thread(fail_over, sentinel)
            assert store.complete(IDENTITY, request.owner, RESULT, 60)
            assert isinstance(await async_store.claim(ask()), Finished)
            assert sentinel.replica.calls("evalsha", "eval") >= 2


async def test_a_sentinel_client_of_the_application_is_taken_as_it_is(sentinel):
    hosts = [("127.0.0.1", server.port) for server in sentinel.sentinels]
    watchers = redis.Sentinel(hosts)
    with watchers.master_for(sentinel.service) as client:
        store = RedisStore(client)
        assert isinstance(store.claim(ask()), Claimed)
        assert sentinel.service in repr(store)
    for watcher in watchers.sentinels:
        watcher.close()
    async_watchers = redis.asyncio.Sentinel(hosts)
    async_client = async_watchers.master_for(sentinel.service)
    assert isinstance(await AsyncRedisStore(async_client).claim(ask()), Busy)
    await close_client(async_client)
    for watcher in async_watchers.sentinels:
        await close_client(watcher)


def test_a_service_that_sentinel_does_not_know_is_store_unavailable(sentinel):
    url = sentinel.url.replace(f"/{sentinel.service}/", "/unknown/")
    with opened(url, timeout=0.6) as store, pytest.raises(StoreUnavailable, match="'unknown'"):
        store.claim(ask())


def test_many_threads_share_a_sentinel_pool(sentinel):
    with opened(sentinel.url, max_connections=3) as store:
        answers: list[object] = []
        threads = [
            threading.Thread(target=lambda: answers.append(store.claim(ask()))) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(isinstance(answer, Claimed) for answer in answers) == 1
        assert sum(isinstance(answer, Busy) for answer in answers) == 19


def test_closing_a_store_closes_the_sentinel_connections_too(sentinel):
    def connections() -> set[str]:
        with contextlib.closing(sentinel.sentinels[0].client()) as client:
            return {each["id"] for each in client.client_list()} - {str(client.client_id())}

    before = connections()
    with opened(sentinel.url) as store:
        store.claim(ask())
        of_store = connections() - before
        assert of_store
    wait_until(lambda: not connections() & of_store, "the connections to be closed")


def test_closing_a_store_closes_what_is_idle_in_the_pool_of_the_primary(sentinel):
    with opened(sentinel.url) as store:
        pool = store.transport.client.connection_pool
        idle = take_connection(pool)
        pool.release(idle)
        assert socket_of(idle) is not None
    assert socket_of(idle) is None


async def test_closing_an_async_store_closes_what_is_idle_in_the_pool_of_the_primary(sentinel):
    """Such a connection stays behind when a store is closed while it opens its second one."""
    async with opened_async(sentinel.url) as store:
        await store.claim(ask())
        pool = store.transport.client.connection_pool
        idle = await take_connection(pool)
        await pool.release(idle)
        assert idle.is_connected
    assert not idle.is_connected


async def test_an_async_store_tells_what_its_server_puts_at_risk(redis_url):
    store = package.open_async_store(redis_url)
    try:
        assert any("appendonly" in risk for risk in await store.diagnose())
    finally:
        await store.close()
