"""Redis Cluster: one slot per script, and slots that move while calls are on their way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket

import pytest
import redis
from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.crc import key_slot

from engines.facade import until
from semel.core.records import Busy, Claimed, Encoded, Finished, GetRequest, Identity, State
from semel.errors import StoreError, StoreUnavailable
from semel.repair import AuditTrail
from semel.stores.redis import (
    AsyncRedisStore,
    RedisStore,
    open_async_store,
    open_store,
    redis_py,
    retry,
    threads,
)
from semel.stores.redis.cluster import ClusterTransport
from semel.stores.redis.commands import Commands, KeyLayout
from semel.stores.redis.listing import _Cursor
from semel.stores.redis.redis_py import socket_of, take_connection
from semel.testing.driver import StoreDriver
from servers.redis import RedisServer, errors_answered, free_port, redis_cluster, wait_until
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

NASTY = [
    "{}",
    "}{",
    "a{b}c",
    "{a}{b}",
    "{{x}}",
    "}",
    "{",
    "~leases",
    "键{值}",
    "a b",
    "\\*?[x]",
    "'\"",
    "a:b:c",
]

KEYS = KeyLayout("idem:")


@pytest.fixture(scope="module")
def running():
    with redis_cluster(primaries=3, spare=1) as servers:
        yield servers


@pytest.fixture
def cluster(running):
    with contextlib.closing(running.client()) as client:
        client.flushall()
    return running


# --- one slot per script --------------------------------------------------------------------


@pytest.mark.parametrize("text", NASTY)
def test_a_record_and_its_index_share_a_slot_whatever_the_key_holds(text):
    for identity in (Identity(text, "k"), Identity("s", text), Identity(text, text)):
        record, index = KEYS.record_and_index(identity)
        assert key_slot(record) == key_slot(index)
        assert KEYS.identity(record) == identity
        assert KEYS.identity(index) is None


@pytest.mark.parametrize("text", NASTY)
def test_nasty_keys_work_in_a_cluster(cluster, text):
    identity = Identity(text, text)
    with opened(cluster.url) as store:
        request = ask(identity, lease=0)
        assert isinstance(store.claim(request), Claimed)
        assert [record.identity for record in store.stuck()] == [identity]
        assert store.renew(identity, request.owner, 30)
        assert store.complete(identity, request.owner, RESULT, 60)
        assert isinstance(store.claim(ask(identity)), Finished)
        for found in (store.scan(), store.scan(scope=text), store.scan(prefix=text)):
            assert [record.identity for record in found.records] == [identity]
        assert store.scan(scope=text + "x").records == ()
        assert store.forget(identity)


def test_foreign_keys_under_our_prefix_are_left_alone():
    for key in (
        b"idem:",
        b"idem:{1}",
        b"idem:{1}x:y:z",
        b"idem:{1}9:a:b",
        b"idem:{1}1:a:b",
        b"idem:{\xff}1:a:b",
        b"1:a:b",
    ):
        assert KEYS.identity(key) is None


def test_a_batch_reaches_every_node_and_each_member_has_its_own_answer(cluster):
    with opened(cluster.url) as store:
        asks = [ask(Identity("s", str(n))) for n in range(200)]
        assert all(isinstance(answer, Claimed) for answer in store.send(asks))
        assert store.send([finish(request) for request in asks[:100]]) == [True] * 100
        assert store.counts().succeeded == store.counts().processing == 100
        used = [server for server in cluster.servers if server.client().dbsize() > 0]
        assert len(used) == 3


def test_the_audit_trail_is_spread_over_the_nodes_and_read_as_one(cluster):
    with opened(cluster.url) as store:
        seen = [Identity("orders", str(number)) for number in range(50)]
        trail = AuditTrail(store, name="anna")
        trail.write("view", seen)
        entries = trail.read(limit=60)
        assert {entry.key_digest for entry in entries} == {each.key_digest for each in seen}
        assert len(entries) == 50
        assert store.scan().records == ()
        assert store.counts().succeeded == 0
        used = [server for server in cluster.servers if server.client().dbsize() > 0]
        assert len(used) == 3


async def test_the_applications_own_cluster_clients_are_used_and_stay_open(cluster):
    with contextlib.closing(cluster.client(decode_responses=True)) as client:
        store = RedisStore(client)
        request = ask(fingerprint=b"\xff" * 16)
        assert isinstance(store.claim(request), Claimed)
        assert str(cluster.servers[0].port) in repr(store)
        store.close()
        assert client.ping()
    async_client = AsyncRedisCluster("127.0.0.1", cluster.servers[0].port, decode_responses=True)
    async_store = AsyncRedisStore(async_client)
    assert isinstance(await async_store.claim(ask(fingerprint=b"\xff" * 16)), Busy)
    assert (await async_store.get(IDENTITY)).owner == request.owner
    assert len((await async_store.scan()).records) == 1
    await async_store.close()
    assert await async_client.ping()
    await close_client(async_client)


def test_every_node_may_forget_its_scripts(cluster):
    with opened(cluster.url) as store:
        store.send([ask(Identity("a", str(n))) for n in range(50)])
        for server in cluster.servers:
            cluster.ask(server, "SCRIPT", "FLUSH")
        answers = store.send([ask(Identity("b", str(n))) for n in range(50)])
        assert all(isinstance(answer, Claimed) for answer in answers)


# --- slots on the move ----------------------------------------------------------------------


class Move:
    """One slot on its way from the node that has it to another."""

    def __init__(self, cluster, target: RedisServer, source: RedisServer | None = None) -> None:
        self.cluster = cluster
        self.record, self.index = KEYS.record_and_index(IDENTITY)
        self.slot = key_slot(self.record)
        self.source = source or cluster.owner(self.slot)
        self.target = target

    def begin(self) -> None:
        ask_node, node_id = self.cluster.ask, self.cluster.node_id
        ask_node(self.target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", node_id(self.source))
        ask_node(self.source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", node_id(self.target))

    def take(self, key: bytes) -> None:
        self.cluster.ask(self.source, "MIGRATE", "127.0.0.1", self.target.port, key, 0, 5000)

    def end(self) -> None:
        for key in (self.record, self.index):
            self.take(key)
        owner = self.cluster.node_id(self.target)
        for server in (self.target, self.source):
            self.cluster.ask(server, "CLUSTER", "SETSLOT", self.slot, "NODE", owner)

    def undo(self) -> None:
        for server in (self.source, self.target):
            self.cluster.ask(server, "FLUSHALL")
            self.cluster.ask(server, "CLUSTER", "SETSLOT", self.slot, "STABLE")
        if not self._at_home(self.target):
            Move(self.cluster, self.source, self.target).whole_way()
        for server in self.cluster.servers:
            wait_until(lambda s=server: self._at_home(s), "everybody to know")

    def whole_way(self) -> None:
        self.begin()
        self.end()

    def _at_home(self, server: RedisServer) -> bool:
        return self.cluster.owner(self.slot, seen_by=server) is self.source


@pytest.fixture(params=["to a node with slots", "to a node that is new"])
def move(request, cluster):
    home = cluster.owner(key_slot(KEYS.record(IDENTITY)))
    *primaries, spare = cluster.servers
    with_slots = next(server for server in primaries if server is not home)
    moving = Move(cluster, with_slots if request.param == "to a node with slots" else spare)
    yield moving
    moving.undo()


def errors(server, name: str) -> int:
    with contextlib.closing(server.client()) as client:
        return errors_answered(client, name)


def test_calls_go_through_while_the_slot_moves_and_after(cluster, move):
    with opened(cluster.url) as store:
        other = ask(owner=new_owner())
        request = ask(run_info=b"who runs it")
        assert isinstance(store.claim(request), Claimed)
        move.begin()
        move.take(move.record)  # the index is still at home: two keys are refused
        before = errors(move.source, "TRYAGAIN"), errors(move.source, "ASK")
        assert isinstance(store.claim(other), Busy)
        assert store.renew(IDENTITY, request.owner, 30)
        assert store.get(IDENTITY).run_info == b"who runs it"
        assert store.renew(IDENTITY, request.owner, 30, b"and why")
        assert store.get(IDENTITY).run_info == b"and why"
        assert store.complete(IDENTITY, request.owner, RESULT, 60)
        assert errors(move.source, "TRYAGAIN") > before[0]
        assert errors(move.source, "ASK") > before[1]
        assert store.get(IDENTITY).state is State.SUCCEEDED
        move.end()
        moved = errors(move.source, "MOVED")
        assert isinstance(store.claim(other), Finished)
        assert errors(move.source, "MOVED") > moved
        assert store.forget(IDENTITY)


async def test_async_calls_go_through_while_the_slot_moves_and_after(cluster, move):
    async with opened_async(cluster.url) as store:
        request = ask()
        assert isinstance(await store.claim(request), Claimed)
        await asyncio.to_thread(move.begin)
        await asyncio.to_thread(move.take, move.record)
        tries = errors(move.source, "TRYAGAIN")
        # Many at once: ASKING and its command have to share a connection.
        answers = await asyncio.gather(*(store.claim(ask()) for _ in range(20)))
        assert {type(answer) for answer in answers} == {Busy}
        assert await store.complete(IDENTITY, request.owner, RESULT, 60)
        assert errors(move.source, "TRYAGAIN") > tries
        await asyncio.to_thread(move.end)
        assert isinstance(await store.claim(ask()), Finished)
        assert await store.forget(IDENTITY)


def test_a_record_that_went_alone_is_found_through_its_index_afterwards(cluster, move):
    with opened(cluster.url) as store:
        placeholder = ask()
        store.claim(placeholder)  # so that the index exists at the source
        store.forget(IDENTITY)
        with contextlib.closing(cluster.client()) as client:
            client.zadd(move.index, {"9:elsewhere:x": 1e18})
        move.begin()
        request = ask(lease=0.0)
        before = errors(move.source, "TRYAGAIN")
        assert isinstance(store.claim(request), Claimed)
        assert errors(move.source, "TRYAGAIN") > before
        move.end()
        assert [record.owner for record in store.stuck()] == [request.owner]


@pytest.mark.parametrize("kind", [open_store, open_async_store])
def test_a_large_result_goes_through_while_the_slot_moves_and_after(cluster, move, kind):
    with contextlib.closing(StoreDriver(kind(cluster.url))) as store:
        request, large = ask(), Encoded("json/1", b"x" * 100_000)
        assert isinstance(store.claim(request), Claimed)
        move.begin()
        move.take(move.record)
        before = errors(move.source, "TRYAGAIN"), errors(move.source, "ASK")
        assert store.complete(IDENTITY, request.owner, large, 60)
        assert errors(move.source, "TRYAGAIN") > before[0]
        assert errors(move.source, "ASK") > before[1]
        assert store.claim(ask()).outcome == large
        move.end()
        moved = errors(move.source, "MOVED")
        assert store.claim(ask()).outcome == large
        assert errors(move.source, "MOVED") > moved
        assert store.stuck() == []
        with contextlib.closing(cluster.client()) as client:
            assert list(client.scan_iter()) == [move.record]
        assert store.forget(IDENTITY)


def test_a_batch_goes_through_while_a_slot_moves(cluster, move):
    with opened(cluster.url) as store:
        asks = [ask(), *(ask(Identity("s", str(n))) for n in range(30))]
        store.send(asks)
        move.begin()
        move.take(move.record)
        before = errors(move.source, "TRYAGAIN")
        assert [answer.number for answer in store.send(asks)] == [1] * 31
        assert errors(move.source, "TRYAGAIN") > before
        move.end()
        assert store.send([finish(request) for request in asks]) == [True] * 31


def test_the_time_to_follow_a_slot_begins_when_a_caller_has_its_turn(monkeypatch):
    now = [0.0]
    for module in (threads, retry):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])

    class Crowded:
        """A limit that lets a caller in after most of the time."""

        def take(self):
            now[0] += 19.0

        def give(self, place):
            pass

    transport = ClusterTransport(lambda: None, "there", 20.0, limit=Crowded())
    replies = [[redis.exceptions.MovedError("1 127.0.0.1:1")], [None]]
    monkeypatch.setattr(transport, "_exchange", lambda sendings: replies.pop(0))
    assert transport.send([Commands(KEYS).get(GetRequest(IDENTITY))]) == [None]


# --- nodes that die -------------------------------------------------------------------------


def test_a_cluster_that_is_not_there_is_store_unavailable():
    absent = pytest.raises(StoreUnavailable, match="redis cluster")
    with opened(f"redis+cluster://127.0.0.1:{free_port()}", timeout=0.5) as store, absent:
        store.claim(ask())


async def test_a_cluster_that_is_not_there_is_store_unavailable_to_the_async_store_too():
    async with opened_async(f"redis+cluster://127.0.0.1:{free_port()}", timeout=0.5) as store:
        with pytest.raises(StoreUnavailable, match="redis cluster"):
            await store.claim(ask())


async def test_a_server_that_is_no_cluster_is_named_as_such(redis_url):
    url = redis_url.replace("redis://", "redis+cluster://")
    with (
        opened(url, timeout=0.5) as store,
        pytest.raises(StoreUnavailable, match="is not a cluster"),
    ):
        store.claim(ask())
    async with opened_async(url, timeout=0.5) as store:
        with pytest.raises(StoreUnavailable, match="is not a cluster"):
            await store.claim(ask())


async def test_a_slot_that_nobody_serves_is_store_unavailable(cluster):
    slot = key_slot(KEYS.record(IDENTITY))
    owner = cluster.owner(slot)
    url = f"redis+cluster://127.0.0.1:{owner.port}?require_full_coverage=no"
    for server in cluster.servers:
        cluster.ask(server, "CLUSTER", "DELSLOTS", slot)
    try:
        nobody = pytest.raises(StoreUnavailable, match="no server has some of its slots")
        with opened(url, timeout=0.3) as store, nobody:
            store.claim(ask())
        async with opened_async(url, timeout=3) as async_store:
            with pytest.raises(StoreUnavailable, match="no server has some of its slots"):
                await async_store.claim(ask())
    finally:
        cluster.ask(owner, "CLUSTER", "ADDSLOTS", slot)
        for server in cluster.servers:
            wait_until(lambda s=server: cluster._is_up(s), "the cluster to be up")


def test_a_listing_goes_on_when_the_node_it_stood_at_is_gone(cluster):
    with opened(cluster.url) as store:
        store.claim(ask())
        gone = _Cursor("127.0.0.1:1", 5).text()
        assert [record.identity for record in store.scan(cursor=gone).records] == [IDENTITY]


async def test_an_async_listing_goes_on_too(cluster):
    async with opened_async(cluster.url) as store:
        await store.claim(ask())
        gone = _Cursor("127.0.0.1:1", 5).text()
        found = (await store.scan(cursor=gone)).records
        assert [record.identity for record in found] == [IDENTITY]


async def test_stores_follow_a_failover_and_a_dead_node_fails_only_its_own_members():
    with redis_cluster(primaries=3, replicas=1) as cluster:
        slot = key_slot(KEYS.record(IDENTITY))
        doomed = cluster.owner(slot)
        with opened(cluster.url, timeout=30) as store, opened(cluster.url, timeout=2) as hasty:
            async with (
                opened_async(cluster.url, timeout=30) as async_store,
                opened_async(cluster.url, timeout=2) as hasty_async,
            ):
                request = ask()
                others = [ask(Identity("s", str(n))) for n in range(40)]
                store.send([request, *others])
                await async_store.get(IDENTITY)
                hasty.get(IDENTITY)
                await hasty_async.get(IDENTITY)
                replica = replica_of(cluster, doomed)
                wait_until(
                    lambda: replica.client().dbsize() == doomed.client().dbsize(), "the replica"
                )
                replica.client().config_set("cluster-replica-no-failover", "yes")
                doomed.kill()
                answers = hasty.send([request, *others])
                assert isinstance(answers[0], StoreError)
                assert any(isinstance(answer, Claimed) for answer in answers[1:])
                with pytest.raises(StoreUnavailable):
                    await hasty_async.claim(request)
                replica.client().config_set("cluster-replica-no-failover", "no")
                assert store.complete(IDENTITY, request.owner, RESULT, 60)
                assert isinstance(await async_store.claim(ask()), Finished)
                assert replica.client().info("replication")["role"] == "master"


def replica_of(cluster, primary):
    for server in cluster.servers:
        about = redis.Redis("127.0.0.1", server.port).info("replication")
        if about["role"] == "slave" and about["master_port"] == primary.port:
            return server
    raise LookupError(primary.port)


# --- a node that stands still ----------------------------------------------------------------


@contextlib.contextmanager
def standing_still(cluster, identity):
    """The node of a record does not answer; gives its name."""
    node = cluster.owner(key_slot(KEYS.record(identity)))
    node.process.send_signal(signal.SIGSTOP)
    try:
        yield f"127.0.0.1:{node.port}"
    finally:
        node.process.send_signal(signal.SIGCONT)
        wait_until(lambda: all(map(cluster._is_up, cluster.servers)), "the cluster to be up")


@pytest.fixture(params=["redis-py", "semel"])
def ordered_by(request, monkeypatch):
    """Who sees to it that a lost node is asked last: until version 8, redis-py does not."""
    if request.param == "semel":
        monkeypatch.setattr(redis_py, "_ASKS_LAST", False)
        monkeypatch.setattr(redis_py, "_ASKS_LAST_ASYNC", False)


def asked_last(manager, last_failed_node_name=None):
    return last_failed_node_name or list(manager.startup_nodes)[-1]


@pytest.mark.usefixtures("ordered_by")
def test_a_node_that_stands_still_is_asked_last_for_the_map(cluster, monkeypatch):
    with opened(cluster.url, timeout=3.0) as store:
        store.claim(ask())
        manager, seen = store.transport.client.nodes_manager, []
        monkeypatch.setattr(
            manager, "initialize", lambda **told: seen.append(asked_last(manager, **told))
        )
        with standing_still(cluster, IDENTITY) as name, pytest.raises(StoreUnavailable):
            store.get(IDENTITY)
    assert set(seen) == {name}


@pytest.mark.usefixtures("ordered_by")
async def test_a_node_that_stands_still_is_asked_last_for_the_map_on_asyncio(cluster, monkeypatch):
    seen = []

    async def noted(manager, **told):
        seen.append(asked_last(manager, **told))

    async with opened_async(cluster.url, timeout=3.0) as store:
        await store.claim(ask())
        manager = store.transport.client.nodes_manager
        monkeypatch.setattr(type(manager), "initialize", noted)
        with standing_still(cluster, IDENTITY) as name, pytest.raises(StoreUnavailable):
            await store.get(IDENTITY)
    assert set(seen) == {name}


# --- the first map ----------------------------------------------------------------------------


@pytest.fixture
def silent_port():
    """A port that takes connections and says nothing, as that of a frozen server."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


async def test_a_caller_that_leaves_does_not_take_the_map_from_the_others(cluster, silent_port):
    url = f"redis+cluster://127.0.0.1:{silent_port},127.0.0.1:{cluster.servers[0].port}"
    async with opened_async(url) as store:
        leaving, staying = (asyncio.ensure_future(store.claim(ask())) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
        assert isinstance(await staying, Claimed)
        with pytest.raises(asyncio.CancelledError):
            await leaving


def test_closing_a_store_closes_what_is_idle_in_the_pools_of_its_nodes(cluster):
    with opened(cluster.url) as store:
        store.claim(ask())
        client = store.transport.client
        pool = client.get_redis_connection(client.get_primaries()[0]).connection_pool
        idle = take_connection(pool)
        pool.release(idle)
        assert socket_of(idle) is not None
    assert socket_of(idle) is None


async def test_closing_a_store_that_waits_for_its_first_map_ends_its_callers(silent_port):
    async with opened_async(f"redis+cluster://127.0.0.1:{silent_port}", timeout=60) as store:
        caller = asyncio.ensure_future(store.claim(ask()))
        await until(lambda: store.transport._first_map.task is not None)
        await store.close()
        with pytest.raises(StoreUnavailable, match="the store was closed"):
            await caller


async def test_a_cluster_that_cannot_be_reached_is_asked_for_its_map_by_each_call():
    url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    async with opened_async(url, timeout=5) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await store.claim(ask())
        manager = store.transport.client.nodes_manager
        assert len(manager.startup_nodes) == 2


# --- which node has a record ------------------------------------------------------------------


def test_a_store_names_the_node_of_a_record(cluster):
    slot = key_slot(KEYS.record(IDENTITY))
    with opened(cluster.url) as store:
        store.claim(ask())
        assert store.server_of(IDENTITY) == f"127.0.0.1:{cluster.owner(slot).port}"
        del store.transport.client.nodes_manager.slots_cache[slot]
        assert store.server_of(IDENTITY) == ""


async def test_a_store_names_the_node_of_a_record_for_asyncio(cluster):
    slot = key_slot(KEYS.record(IDENTITY))
    async with opened_async(cluster.url) as store:
        await store.claim(ask())
        assert store.server_of(IDENTITY) == f"127.0.0.1:{cluster.owner(slot).port}"
        del store.transport.client.nodes_manager.slots_cache[slot]
        assert store.server_of(IDENTITY) == ""
