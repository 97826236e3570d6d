"""Two services on one store behind HAProxy; one of them is killed under load.

Each key has one effect, and no caller sees an error: at most its request was sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from engines.facade import KINDS, PATIENCE
from faults.children import Ledger, child
from semel import AsyncIdempotency, Idempotency, Policy
from semel.stores.remote.store import RemoteStore
from semel.stores.remote.wire import passes
from servers.haproxy import haproxy
from servers.redis import wait_until

KEYS = 50
EXECUTIONS = 200
MOMENTS = ("before claim", "after complete", "after being claimed")

CALLS = 600
CALLERS = 32


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=["redis", "postgres"])
def shared_url(request) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "effects")


@pytest.fixture
def instances(service, shared_url):
    return [service(shared_url), service(shared_url)]


@pytest.fixture
def url(instances, tmp_path):
    with haproxy(tmp_path, [each.port for each in instances]) as port:
        yield f"semel+http://127.0.0.1:{port}"


def kill(instance) -> None:
    instance.process.kill()
    assert instance.process.wait(PATIENCE) == -signal.SIGKILL


def test_several_processes_have_one_effect_for_each_key_whoever_is_killed(
    kind, instances, url, ledger, tmp_path
):
    chance = random.Random(1)
    results = tmp_path / "results"
    with contextlib.ExitStack() as stack:

        def start(die: str | None = None):
            return stack.enter_context(
                child(
                    "contender.py",
                    kind=kind,
                    url=url,
                    ledger=str(ledger.path),
                    results=str(results),
                    keys=KEYS,
                    executions=EXECUTIONS,
                    seed=chance.random(),
                    policy={"lease": 2.0},
                    die=die,
                    at=chance.randrange(1, 4),
                )
            )

        survivors = [start() for _ in range(2)]
        victims = [start(die) for die in MOMENTS]
        for contender in (*survivors, *victims):
            contender.hear("waiting")
        for contender in (*survivors, *victims):
            contender.go()
        wait_until(lambda: len(ledger.entries()) >= KEYS // 5, "the first effects")
        kill(instances[0])
        assert {survivor.ended() for survivor in survivors} == {0}
        ends = [victim.ended() for victim in victims]
    assert -signal.SIGKILL in ends, "nobody was killed"

    effects = Counter(entry.key for entry in ledger.entries())
    assert set(effects.values()) == {1}
    answers = defaultdict(set)
    for line in results.read_text().splitlines():
        key, result = line.split()
        answers[key].add(result)
    assert all(len(results) == 1 for results in answers.values())
    authors = {(entry.key, f"{entry.key}-by-{entry.pid}") for entry in ledger.entries()}
    assert {(key, *results) for key, results in answers.items()} <= authors


def test_a_crowd_of_callers_notices_nothing_when_an_instance_is_killed(kind, instances, url):
    effects: Counter[str] = Counter()
    begun, killed = threading.Event(), threading.Event()

    def act(key: str) -> str:
        effects[key] += 1  # one operation of a dict: of threads too
        if sum(effects.values()) >= CALLS // 4:
            begun.set()
        return f"result of {key}"

    def kill_one() -> None:
        begun.wait(PATIENCE)
        kill(instances[1])
        killed.set()

    keys = [f"key-{number % (CALLS // 2)}" for number in range(CALLS)]
    policy = Policy(lease=10)
    killer = threading.Thread(target=kill_one)
    killer.start()
    if kind == "threads":
        with Idempotency(url, policy=policy) as idem, ThreadPoolExecutor(CALLERS) as pool:
            results = list(pool.map(lambda key: idem.execute(key, lambda: act(key)), keys))
    else:

        async def main() -> list[str]:
            turns = asyncio.Semaphore(CALLERS)

            async def act_async(key: str) -> str:
                return act(key)

            async with AsyncIdempotency(url, policy=policy) as idem:

                async def call(key: str) -> str:
                    async with turns:
                        return await idem.execute(key, lambda: act_async(key))

                return await asyncio.gather(*map(call, keys))

        results = asyncio.run(main())
    killer.join(PATIENCE)
    assert killed.is_set()
    assert results == [f"result of {key}" for key in keys]
    assert set(effects.values()) == {1}


def test_a_request_that_was_under_way_in_a_killed_instance_is_sent_again(
    service, redis_url, tmp_path, monkeypatch
):
    """By hand: the instance is stopped while it has the request, and killed then."""
    instances = [service(redis_url), service(redis_url)]
    with haproxy(tmp_path, [each.port for each in instances], check="") as port:
        url = f"semel+http://127.0.0.1:{port}"
        replies, runs = [], []
        with Idempotency(url, policy=Policy(store_timeout=PATIENCE)) as idem:
            store = idem.internals.store
            assert isinstance(store, RemoteStore)
            post = store.transport.post

            def noted(*args):
                reply = post(*args)
                replies.append(reply)
                return reply

            monkeypatch.setattr(store.transport, "post", noted)
            instances[0].send_signal(signal.SIGSTOP)
            with ThreadPoolExecutor(2) as pool:
                calls = [
                    pool.submit(idem.execute, key, lambda key=key: runs.append(key) or key)
                    for key in ("one", "two")
                ]
                # Round robin: one of two requests is with the instance that is stopped.
                wait_until(lambda: len(runs) == 1, "the call that the other instance answers")
                kill(instances[0])
                assert [call.result(PATIENCE) for call in calls] == ["one", "two"]
        assert sorted(runs) == ["one", "two"]
        assert any(map(passes, replies)), "no request was lost"
