"""Redis killed, flushed, full and failed over in front of each database, under both engines.

| fault | what it is | expected |
|---|---|---|
| 13 | a failover loses a claim | the duplicate waits for the owner: nothing runs twice |
| 14 | a failover loses a finished record | it is replayed from SQL |
| 15 | Redis evicts, is flushed or restarts empty | the same |
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.facade import Effect, World, never
from semel.core.records import Identity
from semel.stores.tiered.front import Kind
from servers.redis import RedisServer, redis_sentinel, redis_server, wait_until
from stores.tiered_given import entry_of

STORM = Path(__file__).parent / "tiered_storm.py"
PROCESSES = 3


def entries(client) -> int:
    """How many keys the front knows of; what it keeps for each bucket is none of them."""
    return sum(not key.endswith(b"~generation") for key in client.scan_iter())


@pytest.fixture(params=["threads", "asyncio"])
def kind(request) -> str:
    return request.param


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def behind(request) -> str:
    """An empty database of each kind in turn: it decides."""
    url = request.getfixturevalue(f"{request.param}_url")
    return f"{url}?synchronous=NORMAL" if request.param == "sqlite" else url


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis that the test may stop and kill."""
    with redis_server() as started:
        yield started


@pytest.fixture
def world(kind, server, behind) -> Iterator[World]:
    with World(kind, server.url, behind=behind, front_timeout=1.0) as opened:
        yield opened


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
        wait_until(lambda: entries(client) == 2, "a copy and a hint")
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
def test_a_failover_that_loses_a_claim_and_a_finished_record_runs_nothing_twice(kind, behind):
    options = {"behind": behind, "front_timeout": 1.0}
    with redis_sentinel() as servers, World(kind, servers.url, **options) as world:
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
            wait_until(lambda: entries(client) == 2, "a copy and a hint")
        old = servers.primary_port()
        servers.primary.kill()
        servers.replica.process.send_signal(signal.SIGCONT)
        wait_until(lambda: servers.primary_port() != old, "the failover")
        with servers.replica.client() as client:
            # Lost, both of them; but the duplicate may have asked SQL and told this one already.
            assert entry_of(client, Identity("default", "order:1")) is None

        assert second.execute("order:1", never, payload=1) == "paid"
        third = world.engine().start("order:2", never, payload=2)
        running.release()
        assert [each.result(30) for each in (owner, duplicate, third)] == ["shipped"] * 3
        assert (done.runs, running.runs) == (1, 1)
        fresh = world.engine()

        def in_use() -> bool:
            assert fresh.execute("order:1", never, payload=1) == "paid"
            with servers.replica.client() as client:
                return entries(client) > 0

        wait_until(in_use, "the new primary to be used")


# --- with engines -----------------------------------------------------------------------------------


def test_a_duplicate_that_the_front_told_busy_wakes_when_the_operation_ends(world, server):
    effect = Effect("paid").held()
    owner = world.engine().start("order:1", effect, payload=1)
    effect.wait_started()
    waiting = [world.engine().start("order:1", never, payload=1) for _ in range(3)]
    with server.client() as client:
        identity = Identity("default", "order:1")

        def hinted() -> bool:
            entry = entry_of(client, identity)
            return entry is not None and entry.kind is Kind.HINT

        wait_until(hinted, "a hint")
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


@pytest.mark.timeout(300)
def test_a_storm_of_duplicates_while_redis_is_killed_flushed_and_restarted(
    kind, server, behind, tmp_path
):
    ledger, outages = tmp_path / "effects", tmp_path / "outages"
    for file in (ledger, outages):
        file.touch()
    orders = {
        "kind": kind,
        "front": server.url,
        "behind": behind,
        "ledger": str(ledger),
        "outages": str(outages),
        "keys": 20,
    }
    command = [sys.executable, "-W", "error", str(STORM), json.dumps(orders)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]

    def effects() -> Counter[str]:
        return Counter(ledger.read_text().split())

    def everybody_met_it() -> bool:
        return len(set(outages.read_text().split())) == PROCESSES

    def progress(more: int) -> None:
        wanted = len(effects()) + more
        wait_until(lambda: len(effects()) >= wanted, "the storm to go on", patience=60)

    try:
        for _ in range(3):
            progress(20)
            server.kill()
            wait_until(everybody_met_it, "each process to miss Redis", patience=60)
            progress(20)
            server.restart()
            progress(20)
            with server.client() as client:
                client.flushall()
        progress(20)
    except BaseException:
        for process in processes:
            process.kill()
            process.communicate()
        raise
    reports = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert [report["errors"] for report in reports] == [[]] * PROCESSES
    twice = {key: times for key, times in effects().items() if times > 1}
    assert twice == {}
    assert len(effects()) >= 20 * max(report["rounds"] for report in reports)
    assert server.calls("evalsha", "eval") > 0  # and the front was used after it
