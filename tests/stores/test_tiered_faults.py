"""What Redis can do to a tiered store, done to it: calls get slower, never wrong.

The store by itself; `test_tiered_storm` is about engines on it, in front of every database.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from semel.core.records import Busy, Claimed, Finished, Identity
from semel.errors import StoreUnavailable
from servers.proxy import proxy_to
from servers.redis import redis_server, wait_until
from stores.tiered_given import (
    ANNA,
    BERT,
    KEY,
    LONG,
    OTHER,
    PATIENT,
    RED,
    RESULT,
    Tiers,
    ask,
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


def counted_calls(tiers) -> list[int]:
    """The calls of the front from now on, one number each."""
    calls: list[int] = []
    transport = tiers.store._front._transport
    send = transport.send

    def counting(sent):
        calls.append(len(sent))
        return send(sent)

    transport.send = counting
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


def test_a_hint_does_not_outlive_an_owner_who_cannot_reach_the_front(opened, proxy, server):
    owner, other = opened(proxy.url), opened(server.url)
    proxy.refusing = True
    owner.claim(ask(ANNA, RED))
    assert isinstance(other.claim(ask(BERT, RED)), Busy)
    assert isinstance(other.claim(ask(BERT, RED)), Busy)
    assert other.sql == ["claim"]  # the second was told by the hint
    owner.complete(KEY, ANNA, RESULT, LONG)  # of which the front is not told
    assert proxy.refused > 0

    def told() -> bool:
        return isinstance(other.claim(ask(BERT, RED)), Finished)

    wait_until(told, "the end to be seen, long before the lease ends")


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
    assert isinstance(tiers.send([ask(BERT, RED)])[0], Finished)
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
    caplog.set_level("INFO", "semel.stores.tiered.front")
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


def test_what_is_kept_for_no_time_is_forgotten_by_a_front_that_is_out_of_use_too(opened, proxy):
    tiers = opened(proxy.url, front_timeout=PATIENT)
    succeed(tiers, ANNA, RED)
    proxy.refusing = True
    proxy.cut_all()
    with pytest.raises(StoreUnavailable, match="did not confirm"):
        tiers.touch(KEY, 0.0)
    assert tiers.get(KEY) is not None  # not even tried: the front could still answer with it
    proxy.refusing = False
    assert tiers.touch(KEY, 0.0)
    assert tiers.claim(ask(BERT, RED)).number == 1


# --- forks ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_finds_the_breaker_and_the_notes_unlocked(redis_url, sqlite_url):
    tiers = Tiers("threads", redis_url, sqlite_url)
    succeed(tiers, ANNA, RED)
    locks = [tiers.store._tier._notes._lock.lock, tiers.store._front._breaker._lock.lock]
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
