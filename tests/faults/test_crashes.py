"""A process ends at the worst moment.

| fault | expected |
|---|---|
| 1 crash before the claim | the next caller runs |
| 25 SIGTERM while running | drains, or stops renewing; never frees a key whose function still runs |

Killed with SIGKILL beside the store's verb, or told to end with SIGTERM. (A crash empties a memory
store, so these are the others.)
"""

from __future__ import annotations

import signal

import pytest

from engines.facade import never
from semel import ConcurrentRequest, Policy
from semel.core.records import State

fault = pytest.mark.fault


@fault(1)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_after_a_crash_before_the_claim_the_next_caller_runs(
    shared, kind, operation, ledger, abandoned
):
    policy = {"abandoned": abandoned}
    with operation(
        kind=kind, url=shared.url, steps=["effect"], policy=policy, die="before claim"
    ) as it:
        assert it.ended() == -signal.SIGKILL
    assert ledger.entries() == []
    engine = shared.engine()
    assert engine.peek("k") is None
    assert engine.execute("k", ledger.effect(), policy=Policy(**policy)) == "done here"
    assert [entry.number for entry in ledger.entries()] == [1]


@fault(25)
def test_sigterm_lets_a_running_function_finish_and_save(shared, kind, operation, ledger):
    with operation(kind=kind, url=shared.url, steps=["wait", "effect"], on_sigterm=60) as it:
        it.hear("waiting")
        it.process.send_signal(signal.SIGTERM)
        it.go()
        news = [it.outcome(), it.outcome()]
        (result,) = [item["result"] for item in news if "result" in item]
        assert {"closed": True} in news
        assert it.ended() == 0
    assert shared.engine().execute("k", never) == result
    assert len(ledger.entries()) == 1


@fault(25)
def test_sigterm_never_frees_a_key_whose_function_still_runs(shared, kind, operation, ledger):
    engine = shared.engine()
    with operation(kind=kind, url=shared.url, steps=["effect", "wait"], on_sigterm=0) as it:
        it.hear("waiting")
        it.process.send_signal(signal.SIGTERM)
        it.hear("closed")
        with pytest.raises(ConcurrentRequest):
            engine.execute("k", never, policy=Policy(concurrent="reject"))
        assert engine.peek("k").state is State.PROCESSING
    assert len(ledger.entries()) == 1


@fault(25)
def test_after_sigterm_a_function_that_does_not_end_is_left_to_the_abandoned_policy(
    shared, kind, operation, ledger
):
    engine = shared.engine()
    policy = {"lease": 0.4}
    with operation(
        kind=kind, url=shared.url, steps=["effect", "wait"], policy=policy, on_sigterm=0
    ) as it:
        it.hear("waiting")
        it.process.send_signal(signal.SIGTERM)
        it.hear("closed")
        assert engine.execute("k", ledger.effect()) == "done here"  # after the lease
        it.go()
        assert it.outcome() == {"error": "LeaseLost"}
    assert [entry.number for entry in ledger.entries()] == [1, 2]
