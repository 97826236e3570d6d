"""Too much, too long, or not what it should be.

| fault | expected |
|---|---|
| 39 memory store full | expired records go first; then new keys are refused before anything runs; existing keys still served |
| 49 Redis full (noeviction) while attempts run | new keys are refused; renew, complete and fail of admitted attempts work |
| 43 1 MB key, endless body, control characters, invalid config | a clear error before anything is stored |
"""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from engines.facade import PATIENCE, Effect, World, intercepted, never, wait_until
from semel import (
    ConcurrentRequest,
    ConfigError,
    IdempotencyError,
    InvalidKey,
    Policy,
    SerializationError,
    StoreFull,
)
from semel.events import LostLease, Parked, StoreFailed

fault = pytest.mark.fault


@pytest.fixture
def small(kind):
    """An engine whose store has room for two records."""
    with World(kind, "memory://?max_records=2") as world:
        yield world.engine()


@fault(39)
def test_a_full_memory_store_refuses_new_keys_before_anything_runs(small):
    done, running = Effect("first"), Effect("second").held()
    small.execute("done", done)
    call = small.start("running", running)
    running.wait_started()
    for _ in range(2):
        with pytest.raises(StoreFull):
            small.execute("new", never)
    assert small.peek("new") is None
    assert small.execute("done", never) == "first"  # keys that exist are served
    running.release()
    assert call.result(PATIENCE) == "second"
    assert small.execute("running", never) == "second"


@fault(39)
def test_a_full_memory_store_still_runs_a_key_that_may_run_again(small):
    small.execute("other", Effect())
    with pytest.raises(ValueError):
        small.execute("failed", Effect(raising=ValueError()))
    assert small.execute("failed", Effect("now")) == "now"


@fault(39)
def test_in_a_full_memory_store_expired_records_go_first(small):
    small.execute("brief", Effect(), policy=Policy(ttl=0.05))
    small.execute("lasting", Effect("kept"))
    time.sleep(0.1)
    assert small.execute("new", Effect("fits")) == "fits"
    assert small.execute("lasting", never) == "kept"
    with pytest.raises(StoreFull):
        small.execute("one-more", never)


@fault(39)
def test_a_full_memory_store_runs_unprotected_only_if_the_policy_says_so(small):
    for key in ("a", "b"):
        small.execute(key, Effect())
    effect = Effect("unprotected")
    assert small.execute("new", effect, policy=Policy(store_error="open")) == "unprotected"
    assert effect.runs == 1


@fault(49)
def test_a_redis_that_fills_up_keeps_and_saves_what_it_admitted(kind, own_server):
    brief = Policy(lease=3.0, concurrent="reject")
    with World(kind, own_server.url) as world, own_server.client() as client:
        engine, other = world.engine(policy=brief), world.engine(policy=brief)
        done = [Effect(number).held() for number in range(20)]
        calls = [engine.start(f"k{number}", effect) for number, effect in enumerate(done)]
        failing = Effect(raising=ValueError("declined")).held()
        failed = engine.start("failing", failing)
        for effect in (*done, failing):
            effect.wait_started()
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreFull):
            other.execute("new", never)
        renewals = engine.commands("renew", "renew_many")
        wait_until(lambda: engine.commands("renew", "renew_many") > renewals + 4)  # > a lease
        with pytest.raises(ConcurrentRequest):
            other.execute("k0", never)
        for effect in (*done, failing):
            effect.release()
        assert [call.result(PATIENCE) for call in calls] == list(range(20))
        with pytest.raises(ValueError, match="declined"):
            failed.result(PATIENCE)
        assert [other.execute(f"k{number}", never) for number in range(20)] == list(range(20))
        again = Effect("now")
        assert other.execute("failing", again) == "now"
        with pytest.raises(StoreFull):
            other.execute("new", never)
        client.config_set("maxmemory", 0)
        assert not engine.told(LostLease)
        assert not engine.told(StoreFailed)
        assert {effect.runs for effect in (*done, failing, again)} == {1}


CROWD = 24
"""More than the pool of two connections has room for, with its spare ones."""


def paused(server, seconds):
    """Let the server take commands, and answer none of them for a while."""
    with server.client() as client:
        client.execute_command("CLIENT", "PAUSE", int(1000 * seconds), "ALL")


def test_claims_that_were_answered_late_wait_for_a_connection_like_all_others(own_server):
    with World("threads", own_server.url, max_connections=2, timeout=PATIENCE) as world:
        engine = world.engine(policy=Policy(lease=6.0))
        given, tell = threading.Semaphore(0), threading.Event()

        def late(ask, request):
            answer = ask(request)
            if not tell.is_set():
                given.release()
                assert tell.wait(PATIENCE)
            return answer

        intercepted(engine.store.store, "claim", late)
        effects = [Effect(number) for number in range(CROWD)]
        calls = [engine.start(f"k{effect.result}", effect) for effect in effects]
        for _ in effects:
            assert given.acquire(timeout=PATIENCE)
        time.sleep(2.1)  # more than a third of the lease: all of them are asked again
        paused(own_server, 1.0)
        tell.set()
        assert [call.result(PATIENCE) for call in calls] == list(range(CROWD))
        assert [effect.runs for effect in effects] == [1] * CROWD
        assert not engine.told(StoreFailed)


def test_attempts_that_are_parked_wait_for_a_connection_like_all_others(own_server):
    with World("threads", own_server.url, max_connections=2, timeout=PATIENCE) as world:
        engine = world.engine(policy=Policy(abandoned="hold"))
        effects = [Effect(raising=ValueError("who knows")).held() for _ in range(CROWD)]
        calls = [engine.start(f"k{number}", effect) for number, effect in enumerate(effects)]
        for effect in effects:
            effect.wait_started()
        paused(own_server, 1.0)
        for effect in effects:
            effect.release()
        for call in calls:
            with pytest.raises(ValueError, match="who knows"):
                call.result(PATIENCE)
        assert len(engine.told(Parked)) == CROWD
        assert not engine.told(StoreFailed)


BAD_KEYS = {
    "empty": "",
    "a megabyte": "k" * 1024 * 1024,
    "line feed": "a\nb",
    "nul": "a\0b",
    "escape": "a\x1b[2Jb",
    "delete": "a\x7fb",
    "space": "a b",
    "line separator": "a\u2028b",
    "right to left": "a\u202eb",
    "half a character": "a\ud800b",
    "bytes": b"key",
    "number": 7,
    "nothing": None,
}


@fault(43)
@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS)
def test_a_bad_key_or_scope_is_refused_before_the_store_is_asked(memory_world, key):
    engine = memory_world.engine()
    for method in (engine.execute, engine.consume):
        with pytest.raises(InvalidKey) as told:
            method(key, never)
        assert len(str(told.value)) < 500, "the error repeats the key"
        with pytest.raises(InvalidKey):
            method("k", never, scope=key)
    assert engine.commands() == 0


def endless_list() -> list[object]:
    within: list[object] = []
    within.append(within)
    return within


BAD_PAYLOADS = {
    "endless generator": itertools.count(),
    "endless list": endless_list(),
    "object": object(),
    "half a character": "\ud800",
}


@fault(43)
@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_a_payload_that_has_no_end_or_no_form_is_refused_before_the_store_is_asked(
    memory_world, payload
):
    engine = memory_world.engine()
    with pytest.raises(SerializationError):
        engine.execute("k", never, payload=payload)
    assert engine.commands() == 0


@fault(43)
def test_a_payload_of_many_megabytes_leaves_only_its_digest(world):
    engine = world.engine()
    engine.execute("k", Effect(), payload=b"x" * 20_000_000)
    assert len(engine.peek("k").fingerprint) == 16


BAD_POLICIES = [
    {"ttl": 0},
    {"ttl": -1},
    {"ttl": float("nan")},
    {"lease": "30"},
    {"lease": float("inf")},
    {"wait_timeout": -1},
    {"duplicate": "replya"},
    {"abandoned": True},
    {"max_attempts": 0},
    {"max_result_bytes": -1},
    {"codec": "no-such-codec"},
    {"not_done": "ValueError"},
]


@fault(43)
@pytest.mark.parametrize("fields", BAD_POLICIES, ids=str)
def test_an_invalid_policy_is_refused_when_it_is_made_and_names_the_field(fields):
    with pytest.raises(ConfigError) as told:
        Policy(**fields)
    (field,) = fields
    assert field.split("_")[0] in str(told.value)


@fault(43)
@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("no-such-store://", {}),
        ("memory", {}),
        ("", {}),
        ("memory://?max_records=few", {}),
        ("redis://127.0.0.1:1?colour=red", {}),
        ("sqlite://", {}),
        ("memory://", {"policy": {"ttl": 1}}),
        ("memory://", {"scopes": {"a": None}}),
        ("memory://", {"hooks": [None]}),
        ("memory://", {"cache": -1}),
        ("memory://", {"key_pattern": "("}),
        (7, {}),
    ],
    ids=str,
)
def test_an_engine_with_an_invalid_setting_is_never_made(kind, url, options):
    with World(kind, "memory://") as world, pytest.raises(IdempotencyError) as told:
        world.kind.engine(url, **options)
    assert isinstance(told.value, ConfigError)
    assert str(told.value)
