"""The module-level functions: an engine made at the first use, or the one that was configured."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import semel
from engines.facade import PATIENCE, Effect, never
from semel import ConfigError, Idempotency, Outcome, Policy, StoreUnavailable, default
from semel.engine.setup import EngineOptions
from semel.stores.memory import MemoryStore

FORKS_WHILE_MAKING = Path(__file__).with_name("forking_default.py")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No default engine yet, and a folder and environment that say nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default._default, "_engine", None)
    yield
    if default._default._engine is not None:
        default._default._engine.close()


def test_the_engine_is_made_at_the_first_use_and_kept(tmp_path):
    assert semel.execute("k", lambda: "paid") == "paid"
    first = default.default_engine()
    assert (tmp_path / "semel.db").exists(), "the default preset keeps records in a file"
    assert semel.execute("k", never) == "paid"
    assert default.default_engine() is first


def test_threads_that_come_together_get_one_engine():
    together = threading.Barrier(8)
    got = []

    def ask():
        together.wait()
        got.append(default.default_engine())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_a_thread_that_waited_for_the_lock_finds_the_engine_made(monkeypatch):
    made = Idempotency("memory://")
    lock = threading.RLock()

    class Waited:
        def __enter__(self):
            lock.acquire()
            default._default._engine = made  # somebody else was first

        def __exit__(self, *_):
            lock.release()

    monkeypatch.setattr(default._default, "_lock", Waited())
    assert default.default_engine() is made


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_while_another_thread_makes_the_engine_leaves_the_child_able_to_make_its_own(
    tmp_path,
):
    done = subprocess.run(
        [sys.executable, FORKS_WHILE_MAKING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the child's\nthe parent's\n"), done.stderr


def test_settings_decide_what_it_is_made_of(monkeypatch, tmp_path):
    monkeypatch.setenv("SEMEL_ENV", "test")
    assert semel.consume("k", Effect()) is True
    assert semel.consume("k", never) is False
    assert list(tmp_path.iterdir()) == []
    assert isinstance(default.default_engine().internals.store, MemoryStore)


def test_each_function_is_that_of_the_engine():
    idem = semel.configure("memory://")
    outcome = semel.run("run", lambda: 1)
    assert isinstance(outcome, Outcome)
    assert (outcome.value, outcome.replayed) == (1, False)
    assert semel.run("run", never).replayed
    with semel.attempt("attempt") as attempt:
        attempt.result = 2
    assert idem.execute("attempt", never) == 2
    assert semel.execute("execute", lambda: 3, scope="s", payload=1, policy=Policy(ttl=50)) == 3
    assert 40 < idem.peek("execute", scope="s").remaining <= 50
    assert semel.consume("consume", lambda: 4, scope="s", ttl=50) is True
    assert 40 < idem.peek("consume", scope="s").remaining <= 50


def test_configure_replaces_and_closes_the_engine_before():
    first = semel.configure("memory://")
    assert semel.execute("k", lambda: 1) == 1
    second = semel.configure("memory://", policy=Policy(ttl=50))
    assert default.default_engine() is second
    assert semel.execute("k", lambda: 2) == 2, "another store"
    assert 40 < second.peek("k").remaining <= 50
    with pytest.raises(StoreUnavailable, match="closed"):
        first.execute("k", never)


def test_a_wrong_configuration_leaves_the_engine_as_it_was():
    first = semel.configure("memory://")
    with pytest.raises(ConfigError):
        semel.configure("mongo://localhost")
    assert default.default_engine() is first
    assert semel.execute("k", lambda: 1) == 1


def test_a_function_decorated_before_configuring_uses_what_is_configured():
    runs = []

    @semel.once("order:{order_id}", scope="orders")
    def create(order_id):
        runs.append(order_id)
        return order_id

    @semel.once
    def bare(order_id):
        runs.append(order_id)
        return order_id

    assert default._default._engine is None, "decorating makes no engine"
    store = MemoryStore()
    semel.configure(store)
    assert [create(1), create(1), bare(2), bare(2)] == [1, 1, 2, 2]
    assert runs == [1, 2]
    assert create.peek(1).number == 1
    semel.configure(MemoryStore())
    assert create(1) == 1
    assert runs == [1, 2, 1]
    semel.configure(store)
    assert create(1) == 1
    assert runs == [1, 2, 1]


def test_marks_are_those_of_the_engine_of_the_moment():
    marks = semel.marks
    semel.configure("memory://")
    assert marks.set_result("k", 0) is True
    assert marks.get_result("k") == 0
    assert semel.execute("k", never) == 0
    assert marks.do("other", Effect()) is True
    semel.configure("memory://")
    assert not marks.check("k")


def test_importing_semel_opens_nothing_and_imports_no_driver(tmp_path):
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"  # who measures coverage brings modules along
        "import semel\n"
        "@semel.once\n"
        "def f(a): return a\n"
        "drivers = {'redis', 'sqlite3', 'cryptography', 'pydantic'} & (set(sys.modules) - before)\n"
        "assert not drivers, drivers\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_it_is_configured_with_the_options_of_an_engine():
    options = inspect.getfullargspec(Idempotency.__init__).kwonlyargs
    assert set(EngineOptions.__annotations__) == set(options)
