"""A running record says which process runs it, under which policy, and why it was parked."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from contextlib import closing

import pytest

from engines.facade import PATIENCE, Effect, Stop, wait_until
from semel import AsyncIdempotency, Idempotency, Policy, events, open_store
from semel.core import run_info
from semel.core.codec import JsonCodec
from semel.core.decide import UnstoredResponse
from semel.core.policy import Rules, changed, resolve
from semel.core.records import RUN_INFO_BYTES, Identity, State
from semel.core.run_info import OwnRunInfo, RunInfo, read
from semel.stores.sql.sqlite import SQLiteStore
from stores.sqlite_helpers import in_a_fork, start_fork

DAY = 86400.0
THREE_DAYS = 3 * DAY
JSON = JsonCodec.name
HERE = f"{socket.gethostname()}:{os.getpid()}"
PAYMENT = Policy.payment(payload_required=False)
forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


class CustomCodec(JsonCodec):
    name = "custom/1"


def said(record) -> RunInfo | None:
    assert record is not None
    return read(record.run_info)


def test_a_running_record_names_its_process_and_its_policy(world):
    engine, effect = world.engine(), Effect().held()
    call = engine.start("k", effect, policy=PAYMENT)
    effect.wait_started()
    running = engine.peek("k")
    effect.release()
    call.result(PATIENCE)
    assert said(running) == RunInfo(HERE, THREE_DAYS, JSON, None)
    ended = engine.peek("k")
    assert (ended.state, ended.run_info) == (State.SUCCEEDED, b"")


def test_renewals_keep_it(world):
    engine, effect = world.engine(), Effect().held()
    call = engine.start("k", effect, policy=Policy(lease=0.3, codec=CustomCodec()))
    effect.wait_started()
    before = engine.peek("k").updated_at
    wait_until(lambda: engine.peek("k").updated_at > before)
    renewed = engine.peek("k")
    effect.release()
    call.result(PATIENCE)
    assert said(renewed) == RunInfo(HERE, DAY, "custom/1", None)


def test_a_parked_attempt_says_which_exception_parked_it(world):
    engine = world.engine()
    with pytest.raises(TimeoutError):
        engine.execute("k", Effect(raising=TimeoutError("the bank")), policy=PAYMENT)
    parked = engine.peek("k")
    assert parked.abandoned
    assert said(parked) == RunInfo(HERE, THREE_DAYS, JSON, "TimeoutError")


def test_an_interruption_parks_with_its_name_too(memory_world):
    engine = memory_world.engine()
    with pytest.raises(Stop):
        engine.execute("k", Effect(raising=Stop()), policy=PAYMENT)
    wait_until(lambda: engine.told(events.Parked))
    assert said(engine.peek("k")) == RunInfo(HERE, THREE_DAYS, JSON, "Stop")


def test_a_response_that_is_not_stored_is_said_in_its_words(memory_world):
    engine = memory_world.engine()
    with pytest.raises(UnstoredResponse):
        engine.execute("k", Effect(raising=UnstoredResponse("answered with 502")), policy=PAYMENT)
    assert said(engine.peek("k")) == RunInfo(HERE, THREE_DAYS, JSON, "answered with 502")


def test_an_exception_with_an_endless_name_is_cut(memory_world):
    engine = memory_world.engine()
    endless = type("Error" * 100, (Exception,), {})
    with pytest.raises(endless):
        engine.execute("k", Effect(raising=endless()), policy=PAYMENT)
    record = engine.peek("k")
    assert len(record.run_info) <= RUN_INFO_BYTES
    info = said(record)
    assert info is not None
    assert (info.by, info.why) == (HERE, ("Error" * 100)[: run_info.LONGEST_WHY])


def test_a_failure_that_ends_the_attempt_leaves_nothing(memory_world):
    engine = memory_world.engine()
    with pytest.raises(ValueError):
        engine.execute("k", Effect(raising=ValueError()))
    record = engine.peek("k")
    assert (record.state, record.run_info) == (State.FAILED, b"")


def test_a_takeover_names_the_process_that_took_over(world, monkeypatch):
    monkeypatch.setenv("SEMEL_NAME", "first")
    first = world.engine(policy=Policy(failure="unknown"))
    with pytest.raises(ValueError):
        first.execute("k", Effect(raising=ValueError()))
    assert said(first.peek("k")) == RunInfo("first", DAY, JSON, "ValueError")
    monkeypatch.setenv("SEMEL_NAME", "second")
    second, effect = world.engine(policy=Policy(ttl=60)), Effect().held()
    call = second.start("k", effect)
    effect.wait_started()
    running = second.peek("k")
    effect.release()
    call.result(PATIENCE)
    assert said(running) == RunInfo("second", 60, JSON)


def test_what_a_renewal_may_have_hidden_is_parked_again_with_its_reason(memory_world):
    engine = memory_world.engine()
    renewing, go_on = threading.Event(), threading.Event()
    engine.store.before["renew_many"] = lambda: renewing.set() or go_on.wait(PATIENCE)
    effect = Effect(raising=ValueError()).held()
    policy = Policy.payment(payload_required=False, lease=0.3, store_timeout=0.01)
    call = engine.start("k", effect, policy=policy)
    assert renewing.wait(PATIENCE)
    effect.release()
    with pytest.raises(ValueError):
        call.result(PATIENCE)
    # As if somebody had written over it: the second parking says everything, too.
    engine.ask_store("renew", Identity("default", "k"), engine.peek("k").owner, 0.0, b"")
    go_on.set()
    wait_until(lambda: engine.commands("renew") == 2)
    wait_until(lambda: said(engine.peek("k")) == RunInfo(HERE, THREE_DAYS, JSON, "ValueError"))


async def test_an_attempt_by_hand_says_it_too():
    with Idempotency("memory://") as idem, idem.attempt("k", policy=PAYMENT):
        assert said(idem.peek("k")) == RunInfo(HERE, THREE_DAYS, JSON)
    async with AsyncIdempotency("memory://") as other, other.attempt("k", policy=PAYMENT):
        assert said(await other.peek("k")) == RunInfo(HERE, THREE_DAYS, JSON)


# --- once for the rules, and again after a fork ----------------------------------------------


def test_it_is_written_once_for_the_rules_and_not_for_each_call(monkeypatch):
    written = []
    build = run_info.build
    monkeypatch.setattr(run_info, "build", lambda *args: written.append(args) or build(*args))
    with Idempotency("memory://") as idem:
        for number in range(10):
            idem.execute(f"first-{number}", Effect(), policy=PAYMENT)
            idem.execute(f"second-{number}", Effect(), policy=Policy(ttl=60))
    assert len(written) <= 3, "for the engine, and for each policy"


def test_rules_that_say_the_same_are_the_same(monkeypatch):
    one = resolve(PAYMENT)
    monkeypatch.setenv("SEMEL_NAME", "another")
    other = resolve(PAYMENT)
    assert one == other
    assert hash(one.run_info) == hash(other.run_info)
    assert one.run_info != "something else"
    assert one.run_info.claim != other.run_info.claim


def test_changed_rules_say_what_changed():
    before = resolve(PAYMENT)
    after = changed(before, codec=CustomCodec(), ttl=60.0)
    assert read(before.run_info.claim) == RunInfo(HERE, THREE_DAYS, JSON)
    assert read(after.run_info.claim) == RunInfo(HERE, 60, "custom/1")


def test_what_belongs_to_rules_goes_with_them():
    before = len(run_info._of_all_rules)
    rules = Rules()
    assert len(run_info._of_all_rules) == before + 1
    del rules
    gc.collect()
    assert len(run_info._of_all_rules) <= before


def test_a_new_pid_is_written_into_what_is_there(monkeypatch):
    one, other = OwnRunInfo(60.0, JSON), OwnRunInfo(60.0, JSON)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    run_info._write_again()
    here = f"{socket.gethostname()}:1"
    for own in (one, other):
        assert read(own.claim) == RunInfo(here, 60, JSON)
        assert read(own.parked("ValueError")) == RunInfo(here, 60, JSON, "ValueError")


@forking
def test_a_forked_child_names_itself(tmp_path):
    with closing(SQLiteStore(tmp_path / "semel.db")) as store, Idempotency(store) as idem:
        idem.execute("before", Effect(), policy=PAYMENT)  # its rules are known

        def park():
            def pay():
                running = said(idem.peek("k"))
                assert running == RunInfo(f"{socket.gethostname()}:{os.getpid()}", THREE_DAYS, JSON)
                raise TimeoutError

            with pytest.raises(TimeoutError):
                idem.execute("k", pay, policy=PAYMENT)
            return os.getpid()

        child = in_a_fork(park)
        expected = f"{socket.gethostname()}:{child}"
        assert expected != HERE
        assert said(idem.peek("k")) == RunInfo(expected, THREE_DAYS, JSON, "TimeoutError")


@forking
@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres", "mysql"])
def test_the_record_of_a_killed_process_still_names_it(kind, request):
    url = request.getfixturevalue(f"{kind}_url")

    def die():
        idem = Idempotency(url)
        idem.execute("k", lambda: os.kill(os.getpid(), signal.SIGKILL), policy=PAYMENT)

    child = start_fork(die)
    child.join(PATIENCE)
    with closing(open_store(url)) as store:
        record = store.get(Identity("default", "k"))
        assert said(record) == RunInfo(f"{socket.gethostname()}:{child.pid}", THREE_DAYS, JSON)
