"""The work is done, but its result cannot be kept or given back.

| fault | expected |
|---|---|
| 29 result too large, or not encodable | SUCCEEDED without a value; duplicates get ResultUnavailable, never a second run |
| 30 stored result unreadable after a deploy | typed error, never a second run |
"""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from engines.facade import PATIENCE, Effect, never, wait_until
from semel import Policy, ResultUnavailable, events
from semel.core.records import OMITTED, Encoded, State

fault = pytest.mark.fault

UNKEEPABLE = pytest.mark.parametrize(
    "result", ["x" * 2000, object(), lambda: None], ids=["too large", "object", "function"]
)
SMALL = Policy(max_result_bytes=1000)


@fault(29)
@UNKEEPABLE
def test_a_result_that_cannot_be_kept_reaches_its_caller_and_nothing_runs_again(world, result):
    engine = world.engine()
    effect = Effect(result)
    assert engine.execute("k", effect, policy=SMALL) is result
    assert engine.told(events.ResultOmitted)
    for duplicate in (engine, world.engine()):
        with pytest.raises(ResultUnavailable):
            duplicate.execute("k", effect, policy=SMALL)
    assert engine.consume("k", never) is False  # that it was done is known
    record = engine.peek("k")
    assert (record.state, record.outcome.codec) == (State.SUCCEEDED, OMITTED)
    assert effect.runs == 1


@fault(29)
def test_ten_callers_that_wait_for_a_result_that_cannot_be_kept_do_not_run_again(world):
    here, elsewhere = world.engine(), world.engine()
    effect = Effect(object()).held()
    running = here.start("k", effect)
    effect.wait_started()
    waiting = [engine.start("k", effect) for engine in (here, elsewhere) for _ in range(5)]
    wait_until(lambda: here.sharers() + elsewhere.sharers() == 5 + 4)
    effect.release()
    assert running.result(PATIENCE) is effect.result
    for waiter in waiting:
        with pytest.raises(ResultUnavailable):
            waiter.result(PATIENCE)
    assert effect.runs == 1


class OldCodec:
    """A codec of the application that the next release does not have any more."""

    name = "old"

    def encode(self, value, context, hint=None):
        return repr(value).encode()

    def decode(self, data, context, hint=None):
        return data.decode().strip("'")


@fault(30)
def test_a_result_whose_codec_is_gone_is_an_error_and_not_a_second_run(world):
    before, after = world.engine(codecs=[OldCodec()]), world.engine()
    assert before.execute("k", Effect("kept"), policy=Policy(codec=OldCodec())) == "kept"
    with pytest.raises(ResultUnavailable, match="old"):
        after.execute("k", never)
    assert after.consume("k", never) is False
    assert before.execute("k", never) == "kept"  # rolled back, it is readable again


@fault(30)
def test_a_result_whose_class_is_gone_or_has_changed_is_an_error_and_not_a_second_run(world):
    engine = world.engine()
    module = types.ModuleType("shop_of_this_test")
    sys.modules[module.__name__] = module
    try:
        old = dataclasses.make_dataclass(
            "Receipt", [("total", int)], namespace={"__module__": module.__name__}
        )
        module.Receipt = old
        assert engine.execute("k", Effect(old(1))) == old(1)
        module.Receipt = dataclasses.make_dataclass(
            "Receipt", [("amount", int)], namespace={"__module__": module.__name__}
        )
        with pytest.raises(ResultUnavailable):
            engine.execute("k", never)
        del module.Receipt
        with pytest.raises(ResultUnavailable):
            engine.execute("k", never)
    finally:
        del sys.modules[module.__name__]
    assert engine.peek("k").state is State.SUCCEEDED


@fault(30)
@pytest.mark.parametrize(
    "stored",
    [Encoded("json", b'{"cut off'), Encoded("json", b"\xff\xfe"), Encoded("from-the-future", b"1")],
    ids=["cut off", "not text", "unknown codec"],
)
def test_damaged_bytes_are_an_error_and_not_a_second_run(world, stored):
    engine = world.engine()
    identity = engine.engine.internals.setup.identity("k", "default")
    assert engine.ask_store("put", identity, stored, 60.0, owner=b"a deploy ago")
    with pytest.raises(ResultUnavailable):
        engine.execute("k", never)
    assert engine.peek("k").outcome == stored, "what cannot be read must stay for who can"
