"""Known bugs of other designs: leases, takeovers, crashes, commands that are sent twice."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from engines.doomed import KEY
from engines.facade import PATIENCE, Effect, World, never, wait_until
from semel import ConcurrentRequest, LeaseLost, OutcomeUnknown, Policy, current_attempt, events
from semel.core.records import State

SHORT = Policy(lease=0.4)
REFUSING = Policy(concurrent="reject")


@contextlib.contextmanager
def overtaken(world, effect):
    """An attempt that could not renew, and the one that took over and is running."""
    late, successor = world.engine(), world.engine()
    new = Effect("new").held()
    old = late.start("k", effect.held(), policy=SHORT)
    effect.wait_started()
    late.break_renewals()  # not before: a claim that was slow is renewed before its function runs
    taking_over = successor.start("k", new)
    new.wait_started()
    assert late.renewals_failed() >= 1
    yield late, old, successor
    assert new.runs == 1
    record = successor.peek("k")
    assert (record.state, record.number) == (State.PROCESSING, 2), "the new attempt was touched"
    with pytest.raises(ConcurrentRequest):
        world.engine().execute("k", never, policy=REFUSING)
    new.release()
    assert taking_over.result(PATIENCE) == "new"
    assert late.execute("k", never) == "new"


def test_an_owner_that_finishes_after_a_takeover_is_told_and_changes_nothing(world):
    """Known bug 1: a late result overwrites the one of the new owner."""
    effect = Effect("late")
    with overtaken(world, effect) as (late, old, successor):
        effect.release()
        with pytest.raises(LeaseLost):
            old.result(PATIENCE)
        assert late.told(events.LostLease)
        assert [event.number for event in successor.told(events.TakenOver)] == [2]


def test_an_owner_that_fails_after_a_takeover_does_not_free_the_new_claim(world):
    """Known bug 1: a late release frees the claim of the new owner."""
    effect = Effect(raising=ValueError("too late"))
    with overtaken(world, effect) as (late, old, _):
        effect.release()
        with pytest.raises(ValueError, match="too late"):
            old.result(PATIENCE)
        assert late.told(events.LostLease)
        assert not late.told(events.Failed)


@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_a_late_owner_that_nobody_replaced_saves_its_result(world, abandoned):
    """Known bug 1: a lease that has passed is no reason to throw a result away."""
    late, other = world.engine(), world.engine()
    effect = Effect("late").held()
    running = late.start("k", effect, policy=Policy(lease=0.2, abandoned=abandoned))
    effect.wait_started()
    late.break_renewals()
    wait_until(lambda: (record := other.peek("k")) is not None and record.abandoned)
    effect.release()
    assert running.result(PATIENCE) == "late"
    assert other.execute("k", never) == "late"
    assert late.renewals_failed() >= 1


def test_an_attempt_whose_record_was_removed_is_told_when_it_ends(world):
    """Known bug 1: what an operator has removed does not come back."""
    owner, operator = world.engine(), world.engine()
    effects = {"good": Effect().held(), "bad": Effect(raising=ValueError()).held()}
    calls = {key: owner.start(key, effect, policy=SHORT) for key, effect in effects.items()}
    for key, effect in effects.items():
        effect.wait_started()
        assert operator.forget(key)
    wait_until(lambda: len(owner.told(events.LostLease)) == 2)  # the next renewal was refused
    for effect in effects.values():
        effect.release()
    with pytest.raises(LeaseLost):
        calls["good"].result(PATIENCE)
    with pytest.raises(ValueError):
        calls["bad"].result(PATIENCE)
    assert operator.peek("good") is operator.peek("bad") is None


def test_a_function_longer_than_its_lease_runs_once(world):
    """Known bug 2: renewal has no floor above the lease."""
    engine, other = world.engine(), world.engine()
    effect = Effect("slow").held()
    running = engine.start("k", effect, policy=SHORT)
    effect.wait_started()
    waiting = other.start("k", effect)
    wait_until(lambda: engine.commands("renew", "renew_many") >= 6)  # two leases long
    assert not waiting.done()
    effect.release()
    assert running.result(PATIENCE) == waiting.result(PATIENCE) == "slow"
    assert effect.runs == 1


def test_one_failed_renewal_is_made_good_by_the_next(world):
    """Known bug 5: a single error of the renewal ends the attempt."""
    engine, other = world.engine(), world.engine()
    engine.break_renewals(1)
    effect = Effect().held()
    running = engine.start("k", effect, policy=Policy(lease=1))
    wait_until(lambda: engine.commands("renew", "renew_many") >= 3)
    effect.release()
    assert running.result(PATIENCE) == "done"
    assert engine.renewals_failed() == len(engine.told(events.RenewalFailed)) == 1
    assert not engine.told(events.LostLease)
    assert other.execute("k", never) == "done"


def test_a_function_whose_renewals_fail_to_the_deadline_is_told(world):
    """Known bug 5: the function never learns that it is not the only one any more."""
    engine = world.engine()
    seen = []

    def works_until_told():
        engine.break_renewals()
        attempt = current_attempt()
        attempt.check()
        wait_until(lambda: attempt.lost)
        seen.append("lost")
        wait_until(lambda: engine.told(events.LostLease))
        attempt.check()

    with pytest.raises(LeaseLost):
        engine.execute("k", works_until_told, policy=SHORT)
    assert seen == ["lost"]
    assert engine.renewals_failed() >= 1
    assert len(engine.told(events.LostLease)) <= 2, "the loss is told once, the late failure too"


@pytest.mark.parametrize("verb", ["claim", "complete", "fail"])
def test_a_command_that_was_sent_twice_gives_the_same_answer(world, verb):
    """Known bug 17: after a lost reply the client repeats its claim and is told "busy"."""
    engine, other = world.engine(), world.engine()
    engine.store.twice.add(verb)
    fails = Effect(raising=ValueError("of the business"))
    with pytest.raises(ValueError, match="business"):
        engine.execute("fails", fails)
    assert fails.runs == 1
    assert engine.run("k", Effect("mine")).attempt.number == 1
    assert other.execute("k", never) == "mine"
    assert other.run("fails", Effect("again")).attempt.number == 2
    assert not engine.told(events.LostLease)


@pytest.fixture
def killed(kind, lasting_url):
    """Let another process claim the key under this policy, and kill it while it runs."""

    def kill(abandoned):
        program = Path(__file__).with_name("doomed.py")
        command = [sys.executable, str(program), kind, lasting_url, abandoned]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            World(kind, lasting_url) as world,
        ):
            try:
                assert process.stdout.readline() == "running\n"
                with pytest.raises(ConcurrentRequest):
                    world.engine().execute(KEY, never, policy=REFUSING)
            finally:
                process.kill()

    return kill


def test_the_key_of_a_killed_process_is_free_after_the_lease(kind, lasting_url, killed):
    """Known bug 9: kill -9 after the claim blocks the key for its whole ttl."""
    killed("takeover")
    effect = Effect("second")
    with World(kind, lasting_url) as world:
        outcome = world.engine().run(KEY, effect)
    assert (outcome.value, outcome.attempt.number, effect.runs) == ("second", 2, 1)


def test_the_key_of_a_killed_process_is_held_if_its_policy_says_so(kind, lasting_url, killed):
    """Known bug 9: kill -9 after the claim, and the effect is repeated though nobody may."""
    killed("hold")
    with World(kind, lasting_url) as world:
        engine = world.engine()
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                engine.execute(KEY, never)  # its own policy would take over; the record's counts
        assert engine.peek(KEY).state is State.PROCESSING
        assert engine.told(events.RejectedUnknown)
