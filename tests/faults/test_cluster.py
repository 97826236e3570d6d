"""A slot of a Redis Cluster moves while its keys are running, or one of the nodes is frozen.

| fault | expected |
|---|---|
| 34 MOVED, ASK, TRYAGAIN | retried, still once |
| 50 one cluster node frozen | attempts on the other nodes keep their leases; new engines serve the healthy nodes |

The slot is moved in real steps between real servers, which count the redirections they sent.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading

import pytest
from redis.crc import key_slot

from engines.facade import PATIENCE, Effect, World, never
from semel import ConcurrentRequest, Policy, StoreUnavailable
from semel.core.records import Identity
from semel.events import LostLease, ResultNotStored
from semel.stores.redis.commands import KeyLayout
from semel.testing import LoseReply
from servers.redis import redis_cluster, wait_until

fault = pytest.mark.fault

LAYOUT = KeyLayout("idem:")
SHARING = 4
"""Keys in the slot that moves."""


@pytest.fixture(scope="module")
def running():
    with redis_cluster(primaries=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(running):
    with contextlib.closing(running.client()) as client:
        client.flushall()
    return running


def keys_of_one_slot() -> tuple[int, list[str]]:
    """Keys that live together: their digests end alike."""
    first = Identity("default", "k0")
    slot = key_slot(LAYOUT.record(first))
    keys = (f"k{number}" for number in range(100_000))
    found = (key for key in keys if key_slot(LAYOUT.record(Identity("default", key))) == slot)
    return slot, [next(found) for _ in range(SHARING)]


class Moving:
    """One slot on its way from the node that has it to another."""

    def __init__(self, cluster, slot: int) -> None:
        self.cluster, self.slot = cluster, slot
        self.source = cluster.owner(slot)
        self.target = next(server for server in cluster.servers if server is not self.source)

    def begin(self) -> None:
        ask, name = self.cluster.ask, self.cluster.node_id
        ask(self.target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", name(self.source))
        ask(self.source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", name(self.target))

    def take(self, *keys: bytes) -> None:
        for key in keys:
            self.cluster.ask(self.source, "MIGRATE", "127.0.0.1", self.target.port, key, 0, 5000)

    def take_all(self) -> None:
        while keys := self.cluster.ask(self.source, "CLUSTER", "GETKEYSINSLOT", self.slot, 100):
            self.take(*keys)

    def end(self) -> None:
        self.take_all()
        owner = self.cluster.node_id(self.target)
        for server in (self.target, self.source, *self.cluster.servers):
            self.cluster.ask(server, "CLUSTER", "SETSLOT", self.slot, "NODE", owner)

    def redirections(self, name: str) -> int:
        """How many the two nodes have sent."""
        count = 0
        for server in (self.source, self.target):
            with contextlib.closing(server.client()) as client:
                stats = client.info("errorstats")
            found = stats.get(f"errorstat_{name}", "count=0")
            # redis-py 5.0 leaves a value of one field as text.
            count += int(found.removeprefix("count=")) if isinstance(found, str) else found["count"]
        return count


@fault(34)
def test_keys_that_run_while_their_slot_moves_run_once(kind, cluster):
    slot, (running_key, new_key, *_) = keys_of_one_slot()
    moving = Moving(cluster, slot)
    before = {name: moving.redirections(name) for name in ("TRYAGAIN", "ASK", "MOVED")}

    def fired(name: str) -> bool:
        return moving.redirections(name) > before[name]

    with World(kind, cluster.url) as world:
        engine, other = world.engine(), world.engine()
        effect = Effect().held()
        call = engine.start(running_key, effect)
        effect.wait_started()
        other.peek(new_key)  # knows the map as it was
        moving.begin()
        moving.take(LAYOUT.record(Identity("default", running_key)))  # and not its index
        effect.release()
        assert call.result(PATIENCE) == "done"
        assert fired("TRYAGAIN")
        new = Effect("new")
        assert other.execute(new_key, new) == "new"
        assert fired("ASK")
        moving.end()
        assert other.execute(running_key, never) == "done"
        assert engine.execute(new_key, never) == "new"
        assert fired("MOVED")
        assert (effect.runs, new.runs) == (1, 1)


@fault(34)
def test_callers_that_never_pause_while_slots_move_run_each_key_once(kind, cluster):
    keys = [f"storm-{number}" for number in range(60)]
    slots = {key_slot(LAYOUT.record(Identity("default", key))) for key in keys[::6]}
    effects = {key: Effect(key) for key in keys}
    moved = threading.Event()
    answers: list[tuple[str, object]] = []

    with World(kind, cluster.url) as world:
        engines = [world.engine() for _ in range(2)]

        def call_all(engine) -> None:
            rounds = 0
            while rounds < 2 or not moved.is_set():
                answers.extend([(key, engine.execute(key, effects[key])) for key in keys])
                rounds += 1

        callers = [threading.Thread(target=call_all, args=(engine,)) for engine in engines]
        for caller in callers:
            caller.start()
        moves = [Moving(cluster, slot) for slot in slots]
        before = sum(move.redirections("MOVED") for move in moves)
        for move in moves:
            move.begin()
            move.end()
        moved.set()
        for caller in callers:
            caller.join(PATIENCE)
        assert sum(move.redirections("MOVED") for move in moves) > before
    assert len(answers) >= 4 * len(keys)
    assert all(key == answer for key, answer in answers)
    assert {effect.runs for effect in effects.values()} == {1}


# --- one node frozen --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def partial_cluster():
    """Three nodes, of which two go on serving when the third is gone."""
    with redis_cluster(primaries=3, args=("--cluster-require-full-coverage", "no")) as cluster:
        yield cluster


@pytest.fixture
def frozen(partial_cluster):
    """Freezes nodes, and thaws them at the end."""
    paused = []

    def freeze(server) -> None:
        server.process.send_signal(signal.SIGSTOP)
        paused.append(server)

    def thaw() -> None:
        while paused:
            paused.pop().process.send_signal(signal.SIGCONT)

    freeze.thaw = thaw
    with contextlib.closing(partial_cluster.client()) as client:
        client.flushall()
    yield freeze
    thaw()
    for server in partial_cluster.servers:
        wait_until(lambda s=server: partial_cluster._is_up(s), "the cluster to be up")


def keys_by_node(cluster, each: int) -> list[list[str]]:
    """So many keys of every node."""
    found = {server.port: [] for server in cluster.servers}
    names = (f"node-{number}" for number in itertools.count())
    while any(len(keys) < each for keys in found.values()):
        key = next(names)
        keys = found[cluster.owner(key_slot(LAYOUT.record(Identity("default", key)))).port]
        if len(keys) < each:
            keys.append(key)
    return list(found.values())


@fault(50)
def test_attempts_on_healthy_nodes_keep_their_leases_while_another_node_is_frozen(
    kind, partial_cluster, frozen
):
    lease = 3.0
    policy = Policy(lease=lease, concurrent="reject")
    victim, *others = keys_by_node(partial_cluster, 4)
    saved_late = victim[0]
    healthy = [key for keys in others for key in keys]
    with World(kind, partial_cluster.url) as world:
        engine, other = world.engine(policy=policy), world.engine(policy=policy)
        effects = {key: Effect(key).held() for key in (*victim, *healthy)}
        calls = {key: engine.start(key, effect) for key, effect in effects.items()}
        for effect in effects.values():
            effect.wait_started()
        began = {key: other.peek(key).lease_until for key in healthy}
        frozen(partial_cluster.servers[0])
        effects[saved_late].release()  # what is saved again and again holds up nobody either

        def all_renewed() -> bool:
            return all(other.peek(key).lease_until > began[key] + 3 * lease for key in healthy)

        wait_until(all_renewed, "the healthy nodes to be told of every attempt for three leases")
        lost = {event.identity.key for event in engine.told(LostLease)}
        assert lost <= set(victim)
        assert lost, "the frozen node answered"
        assert engine.told(ResultNotStored)
        for key in healthy:
            with pytest.raises(ConcurrentRequest):
                other.execute(key, never)
        frozen.thaw()
        for effect in effects.values():
            effect.release()
        assert {key: call.result(PATIENCE) for key, call in calls.items()} == {
            key: key for key in effects
        }
        assert [other.execute(key, never) for key in healthy] == healthy
        assert {effect.runs for effect in effects.values()} == {1}


@fault(50)
@pytest.mark.parametrize("number", range(3))
def test_a_new_engine_serves_the_healthy_nodes_while_another_node_is_frozen(
    kind, partial_cluster, frozen, number
):
    keys = keys_by_node(partial_cluster, 2)
    healthy = [key for other, found in enumerate(keys) if other != number for key in found]
    frozen(partial_cluster.servers[number])
    with World(kind, partial_cluster.url) as world:
        engine = world.engine()
        for key in healthy:
            assert engine.execute(key, Effect(key)) == key
        with pytest.raises(StoreUnavailable):
            engine.execute(keys[number][0], never)
        assert [engine.execute(key, never) for key in healthy] == healthy
        frozen.thaw()
        wait_until(lambda: engine.execute(keys[number][1], Effect("thawed")) == "thawed", "a thaw")


@fault(50)
def test_a_claim_whose_answer_was_lost_is_given_back_in_a_cluster(kind, cluster):
    with World(kind, cluster.url) as world:
        engine, other = world.engine(policy=Policy(abandoned="hold")), world.engine()
        engine.store.inject("claim", LoseReply())
        with pytest.raises(StoreUnavailable):
            engine.execute("k", never)
        assert engine.store.fired("claim") == 1
        wait_until(lambda: other.peek("k").retryable, "the claim to be given back")
        assert other.execute("k", Effect("runs")) == "runs"
