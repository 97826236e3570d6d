"""48 threads on 40 keys of one SQL store, while connections die, the process forks, signals come.

However the calls were batched: each effect happens once, each caller gets its own answer or an
error of its own, and nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Self

import psycopg
import pytest

from engines.facade import PATIENCE
from interrupting import TimeLimit
from semel import Idempotency, Policy, StoreUnavailable
from servers.redis import wait_until
from stores.sqlite_helpers import in_a_fork

THREADS, KEYS = 48, 40
POLICY = Policy(lease=60.0)


class Crowd:
    """Threads that each call for every key, and call again after an outage."""

    def __init__(self, idem: Idempotency) -> None:
        self._idem = idem
        self._keys = [f"key-{number}" for number in range(KEYS)]
        self.effects: list[str] = []
        self.answers: list[tuple[str, object]] = []
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._call, args=[number], daemon=True)
            for number in range(THREADS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a caller waits for ever"

    def _call(self, number: int) -> None:
        keys = deque(self._keys)
        keys.rotate(number)
        try:
            for key in keys:
                self.answers.append((key, self._until_answered(key)))
        except BaseException as error:
            self.errors.append(error)

    def _until_answered(self, key: str) -> object:
        while True:
            with contextlib.suppress(StoreUnavailable):
                return self._idem.execute(key, lambda: self._run(key))

    def _run(self, key: str) -> str:
        self.effects.append(key)
        return f"answer of {key}"

    def wait_for(self, answers: int) -> None:
        wait_until(lambda: len(self.answers) >= answers or bool(self.errors), "answers", PATIENCE)

    def check(self) -> None:
        assert self.errors == []
        assert len(self.answers) == THREADS * KEYS
        assert all(answer == f"answer of {key}" for key, answer in self.answers)
        assert Counter(self.effects) == dict.fromkeys(self._keys, 1)


def end_postgres_backends(request: pytest.FixtureRequest, url: str) -> Callable[[], int]:
    def end() -> int:
        with psycopg.connect(url, autocommit=True) as connection:
            ended = connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
        assert ended is not None
        return int(ended[0])

    return end


def end_mariadb_connections(request: pytest.FixtureRequest, url: str) -> Callable[[], int]:
    server = request.getfixturevalue("mariadb_of_this_worker")
    database = url.rpartition("/")[2].partition("?")[0]

    def end() -> int:
        found = server.execute(
            "SELECT id FROM information_schema.processlist WHERE db = %s", database
        )
        for (number,) in found:
            with contextlib.suppress(Exception):  # it has ended by itself
                server.execute(f"KILL {number}")
        return len(found)

    return end


@pytest.fixture(params=["postgres", "mysql", "sqlite"])
def url(request) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def idem(url) -> Iterator[Idempotency]:
    with Idempotency(url, policy=POLICY) as engine:
        engine.execute("connected", lambda: None)
        yield engine


def test_each_effect_happens_once_and_each_caller_gets_its_own_answer(idem):
    with Crowd(idem) as crowd:
        pass
    crowd.check()


@pytest.mark.parametrize(
    ("store", "ending"),
    [("postgres", end_postgres_backends), ("mysql", end_mariadb_connections)],
)
def test_connections_that_are_ended_cost_no_effect_and_no_answer(request, store, ending):
    url = request.getfixturevalue(f"{store}_url")
    ended = 0
    with Idempotency(url, policy=POLICY) as idem:
        idem.execute("connected", lambda: None)
        end = ending(request, url)
        with Crowd(idem) as crowd:
            for answers in range(100, THREADS * KEYS - 500, 250):
                crowd.wait_for(answers)
                ended += end()
    crowd.check()
    assert ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_is_forked_from_a_busy_process_can_call_at_once(idem):
    with Crowd(idem) as crowd:
        for number in range(5):
            crowd.wait_for(number * 200 + 50)
            key = f"child-{number}"
            assert in_a_fork(lambda key=key: idem.execute(key, lambda: key)) == key
    crowd.check()


def test_signals_in_a_thread_that_leads_or_follows_strand_nobody(idem):
    calling = False
    struck = 0

    def strike(*_: object) -> None:
        if calling:
            raise TimeLimit

    def send(to: int) -> None:
        for number in range(0, THREADS * KEYS - 500, 40):
            crowd.wait_for(number)
            signal.pthread_kill(to, signal.SIGUSR1)
        while not struck:  # on a slow machine each of them may have come between two calls
            signal.pthread_kill(to, signal.SIGUSR1)
            time.sleep(0.001)

    before = signal.signal(signal.SIGUSR1, strike)
    with Crowd(idem) as crowd:
        sender = threading.Thread(target=send, args=[threading.get_ident()], daemon=True)
        sender.start()
        number = 0
        while sender.is_alive() or not number:
            try:
                calling = True
                assert idem.execute(f"main-{number}", lambda: "mine") == "mine"
                number += 1
            except TimeLimit:
                struck += 1
            finally:
                calling = False
    signal.signal(signal.SIGUSR1, before)
    crowd.check()
