"""What Redis can do to a tiered store, done to it: calls get slower, never wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from engines.facade import Effect, World, never
from semel.core.records import Claimed, Finished, Identity
from semel.errors import StoreUnavailable
from semel.stores.tiered.entries import Kind
from servers.proxy import proxy_to
from servers.redis import redis_sentinel, redis_server, wait_until
from stores.tiered_given import (
    ANNA,
    BERT,
    KEY,
    OTHER,
    PATIENT,
    RED,
    RESULT,
    Tiers,
    ask,
    entry_of,
    succeed,
)

SOON = 0.25
"""How long a front may take that a test takes away."""


@pytest.fixture(params=["threads", "asyncio"])
def kind(request):
    return request.param


@pytest.fixture
def server():
    """A Redis that the test may stop and kill."""
    with redis_server() as started:
        yield started


@pytest.fixture
def proxy(redis_of_this_worker, redis_url):
    with proxy_to(redis_of_this_worker.port) as between:
        yield between


@pytest.fixture
def opened(kind, sqlite_url):
    """Open tiers on a front; they are closed with the test."""
    with contextlib.ExitStack() as closing:

        def open_on(front, **options):
            tiers = Tiers(kind, front, sqlite_url, **{"front_timeout": SOON, **options})
            closing.callback(tiers.close)
            return tiers

        yield open_on


class TieredWorld(World):
    """Engines on tiers: each with a store object of its own, as if each were another process."""

    def __init__(self, kind: str, front: str, behind: str) -> None:
        super().__init__(kind, front)
        self._behind = behind

    def _store(self):
        store = self.kind.open_store(self.url, behind=self._behind, front_timeout=1.0)
        self._stores.append(store)
        return self._stores[-1]


@pytest.fixture
def world(kind, server, sqlite_url):
    with TieredWorld(kind, server.url, sqlite_url) as opened:
        yield opened


def counted_calls(tiers) -> list[int]:
    """The calls of the front from now on, one number each."""
    calls: list[int] = []
    transport = tiers.store._front._transport
    call_many = transport.call_many

    def counting(sent):
        calls.append(len(sent))
        return call_many(sent)

    transport.call_many = counting
    return calls


def in_use_again(tiers, identity=KEY) -> bool:
    """Whether a replay comes from the front."""
    tiers.claim(ask(BERT, RED, identity=identity))
    tiers.sql  # noqa: B018 - begin anew
    return isinstance(tiers.claim(ask(BERT, RED, identity=identity)), Finished) and not tiers.sql


# --- the breaker --------------------------------------------------------------------------------


def test_a_front_that_is_down_is_left_alone_and_used_again_when_it_is_back(opened, proxy):
    tiers = opened(proxy.url)
    succeed(tiers, ANNA, RED)
    proxy.refusing = True
    proxy.cut_all()
    calls = counted_calls(tiers)
    for _ in range(200):
        assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert proxy.refused > 0
    assert 1 <= len(calls) < 20
    proxy.refusing = False
    wait_until(lambda: in_use_again(tiers), "the front to be used again")


def test_a_front_that_hangs_costs_one_short_time_out_not_one_per_call(opened, server):
    tiers = opened(server.url, front_timeout=0.1)
    succeed(tiers, ANNA, RED)
    server.process.send_signal(signal.SIGSTOP)
    calls = counted_calls(tiers)
    for number in range(50):
        assert tiers.claim(ask(ANNA, RED, identity=Identity("hanging", str(number)))).number == 1
    assert 1 <= len(calls) < 10
    server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: in_use_again(tiers), "the front to be used again")


def test_a_slow_front_is_as_good_as_none(opened, proxy):
    tiers = opened(proxy.url, front_timeout=0.1)
    proxy.delay = 1.0
    before = proxy.requests
    succeed(tiers, ANNA, RED)
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert tiers.sql == ["claim", "complete", "claim"]
    assert proxy.requests > before
    proxy.delay = 0.0
    wait_until(lambda: in_use_again(tiers), "the front to be used again")


def test_a_front_that_was_never_there_is_not_missed(opened, proxy):
    proxy.refusing = True
    tiers = opened(proxy.url)
    succeed(tiers, ANNA, RED)
    assert isinstance(tiers.claim(ask(BERT, RED)), Finished)
    assert isinstance(tiers.claim_many([ask(BERT, RED)])[0], Finished)
    assert tiers.sql == ["claim", "complete", "claim", "claim_many"]


def test_a_lost_reply_of_the_front_is_no_outage(opened, proxy):
    tiers = opened(proxy.url, front_timeout=PATIENT)
    succeed(tiers, ANNA, RED)
    proxy.lose_reply(lambda request: b"EVALSHA" in request)
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    assert proxy.lost == 1
    assert tiers.sql == ["claim", "complete"]


def test_a_full_front_still_answers_for_what_it_has(opened, server):
    tiers = opened(server.url, front_timeout=PATIENT)
    succeed(tiers, ANNA, RED)
    with server.client() as client:
        client.config_set("maxmemory", "1")
        succeed(tiers, ANNA, RED, identity=OTHER)
        tiers.sql  # noqa: B018 - begin anew
        assert tiers.claim(ask(BERT, RED)).outcome == RESULT
        assert tiers.sql == []
        assert tiers.claim(ask(BERT, RED, identity=OTHER)).outcome == RESULT
        assert tiers.sql == ["claim", "get_many"]
        with pytest.raises(StoreUnavailable, match="did not confirm"):
            tiers.forget(KEY)
        client.config_set("maxmemory", "0")
    assert tiers.forget(KEY)


def test_the_outage_is_told_once_and_so_is_its_end(opened, proxy, caplog):
    caplog.set_level("INFO", "semel.stores.tiered.breaker")
    tiers = opened(proxy.url)
    succeed(tiers, ANNA, RED)
    proxy.refusing = True
    proxy.cut_all()
    for _ in range(50):
        tiers.claim(ask(BERT, RED))
    proxy.refusing = False
    wait_until(lambda: in_use_again(tiers), "the front to be used again")
    told = [record.levelname for record in caplog.records]
    assert told == ["WARNING", "INFO"]


def test_forget_asks_a_front_that_is_out_of_use_all_the_same(opened, proxy):
    tiers = opened(proxy.url)
    succeed(tiers, ANNA, RED)
    proxy.refusing = True
    proxy.cut_all()
    with pytest.raises(StoreUnavailable, match="did not confirm"):
        tiers.forget(KEY)
    assert tiers.get(KEY).outcome == RESULT  # nothing was forgotten
    proxy.refusing = False
    assert tiers.forget(KEY)
    assert tiers.claim(ask(BERT, RED)).number == 1


# --- what Redis loses -----------------------------------------------------------------------------


@pytest.mark.fault(15)
@pytest.mark.parametrize("loss", ["flush", "evict", "restart"])
def test_what_redis_loses_is_replayed_from_sql_and_never_run_again(world, server, loss):
    first, second = world.engine(), world.engine()
    done, running = Effect("paid"), Effect("shipped").held()
    assert first.execute("order:1", done, payload=1) == "paid"
    owner = first.start("order:2", running, payload=2)
    running.wait_started()
    duplicate = second.start("order:2", never, payload=2)
    with server.client() as client:
        wait_until(lambda: client.dbsize() == 2, "a copy and a hint")
        match loss:
            case "flush":
                client.flushall()
            case "evict":
                client.config_set("maxmemory-policy", "allkeys-random")
                client.config_set("maxmemory", "1")
                wait_until(lambda: client.info("stats")["evicted_keys"] >= 2, "the eviction")
    if loss == "restart":
        server.restart()
    assert second.execute("order:1", never, payload=1) == "paid"
    running.release()
    assert owner.result(30) == duplicate.result(30) == "shipped"
    assert second.execute("order:2", never, payload=2) == "shipped"
    assert (done.runs, running.runs) == (1, 1)


@pytest.mark.fault(13)
@pytest.mark.fault(14)
def test_a_failover_that_loses_a_claim_and_a_finished_record_runs_nothing_twice(kind, sqlite_url):
    with redis_sentinel() as servers, TieredWorld(kind, servers.url, sqlite_url) as world:
        first, second = world.engine(), world.engine()
        done, running = Effect("paid"), Effect("shipped").held()
        # The replica hears nothing of what follows.
        servers.replica.process.send_signal(signal.SIGSTOP)
        with servers.primary.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")
            assert first.execute("order:1", done, payload=1) == "paid"
            owner = first.start("order:2", running, payload=2)
            running.wait_started()
            duplicate = second.start("order:2", never, payload=2)
            wait_until(lambda: client.dbsize() == 2, "a copy and a hint")
        old = servers.primary_port()
        servers.primary.kill()
        servers.replica.process.send_signal(signal.SIGCONT)
        wait_until(lambda: servers.primary_port() != old, "the failover")
        with servers.replica.client() as client:
            assert client.dbsize() == 0  # lost, both of them

        assert second.execute("order:1", never, payload=1) == "paid"
        third = world.engine().start("order:2", never, payload=2)
        running.release()
        assert [each.result(30) for each in (owner, duplicate, third)] == ["shipped"] * 3
        assert (done.runs, running.runs) == (1, 1)
        fresh = world.engine()

        def in_use() -> bool:
            assert fresh.execute("order:1", never, payload=1) == "paid"
            with servers.replica.client() as client:
                return client.dbsize() > 0

        wait_until(in_use, "the new primary to be used")


# --- with engines -----------------------------------------------------------------------------------


def test_a_duplicate_that_the_front_told_busy_wakes_when_the_operation_ends(world, server):
    effect = Effect("paid").held()
    owner = world.engine().start("order:1", effect, payload=1)
    effect.wait_started()
    waiting = [world.engine().start("order:1", never, payload=1) for _ in range(3)]
    with server.client() as client:
        identity = Identity("default", "order:1")
        wait_until(lambda: entry_of(client, identity) is not None, "a hint")
        assert entry_of(client, identity).kind is Kind.HINT
    effect.release()
    # The lease is half a minute: nobody waits for that.
    assert [each.result(15) for each in (owner, *waiting)] == ["paid"] * 4
    assert effect.runs == 1


def test_redis_killed_between_claim_and_complete_costs_nobody_his_result(world, server):
    effect = Effect("paid").held()
    owner = world.engine().start("order:1", effect, payload=1)
    effect.wait_started()
    server.kill()
    effect.release()
    assert owner.result(30) == "paid"
    assert world.engine().execute("order:1", never, payload=1) == "paid"
    server.restart()
    fresh = world.engine()

    def copied() -> bool:
        assert fresh.execute("order:1", never, payload=1) == "paid"
        with server.client() as client:
            return entry_of(client, Identity("default", "order:1")) is not None

    wait_until(copied, "the front to be used again")
    assert effect.runs == 1


def test_a_storm_of_duplicates_while_redis_is_killed_flushed_and_restarted(
    kind, server, sqlite_url, tmp_path
):
    ledger = tmp_path / "effects"
    orders = {
        "kind": kind,
        "front": server.url,
        "behind": f"{sqlite_url}?synchronous=NORMAL",
        "ledger": str(ledger),
        "keys": 20,
    }
    script = Path(__file__).parent / "tiered_storm.py"
    command = [sys.executable, "-W", "error", str(script), json.dumps(orders)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]

    def effects() -> Counter[str]:
        return Counter(ledger.read_text().split()) if ledger.exists() else Counter()

    def progress(more: int) -> None:
        wanted = len(effects()) + more
        wait_until(lambda: len(effects()) >= wanted, "the storm to go on", patience=60)

    try:
        for _ in range(3):
            progress(20)
            server.kill()
            progress(20)
            server.restart()
            progress(20)
            with server.client() as client:
                client.flushall()
        progress(20)
    finally:
        reports = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert [report["errors"] for report in reports] == [[]] * 3
    assert all(report["outages"] > 0 for report in reports)  # each met the fault
    twice = {key: times for key, times in effects().items() if times > 1}
    assert twice == {}
    assert len(effects()) >= 20 * max(report["rounds"] for report in reports)
    assert server.calls("evalsha", "eval") > 0  # and the front was used after it


# --- forks ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_finds_the_breaker_and_the_notes_unlocked(redis_url, sqlite_url):
    tiers = Tiers("threads", redis_url, sqlite_url)
    succeed(tiers, ANNA, RED)
    locks = [tiers.store._tier._notes._lock, tiers.store._front._breaker._lock]
    busy = threading.Event()

    def work() -> None:
        while not busy.is_set():
            for lock in locks:
                with lock:
                    time.sleep(0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                answer = tiers.claim(ask(BERT, RED, identity=Identity("fork", str(os.getpid()))))
                os._exit(0 if isinstance(answer, Claimed) else 1)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
    finally:
        busy.set()
        thread.join()
    assert tiers.claim(ask(BERT, RED)).outcome == RESULT
    tiers.close()
