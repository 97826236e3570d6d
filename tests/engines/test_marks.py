"""Marks: the plain "was it done?" on the engine's records, for both engines."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest

from engines.facade import PATIENCE, Driven, Effect, World, never
from semel import (
    AsyncIdempotency,
    ConcurrentRequest,
    ConfigError,
    EncryptedCodec,
    Idempotency,
    InvalidKey,
    OutcomeUnknown,
    Policy,
    ResultUnavailable,
    SerializationError,
    State,
    StoreUnavailable,
)
from semel.core.records import LISTINGS, AdoptRequest
from semel.repair import AsyncAuditTrail, AuditTrail
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import Refuse, bypass

RESULTS = [1, 0, False, "", [], {}, None, (1, 2), b"\x00"]


class Marks:
    """The marks of a driven engine, by plain calls."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven

    def __getattr__(self, name):
        return partial(self.driven._kind.finish, getattr(self.driven.engine.marks, name))

    def do(self, key, fn, **options):
        return self.driven._kind.call(self.driven.engine.marks.do, key, fn, **options)

    def calls(self) -> list[str]:
        """Which verbs the store was asked since the last time."""
        verbs = [call.verb for call in self.driven.store.calls]
        self.driven.store.calls.clear()
        return verbs


class Bare(MemoryStore):
    """A store that answers what every store answers, and nothing else."""

    unsupported = LISTINGS | {AdoptRequest}


class AsyncBare(AsyncMemoryStore):
    """The same for asyncio."""

    unsupported = Bare.unsupported


@pytest.fixture
def marks(world) -> Marks:
    return Marks(world.engine())


@pytest.fixture
def memory(memory_world) -> Marks:
    return Marks(memory_world.engine())


@pytest.fixture
def bare(memory_world) -> Marks:
    store = Bare() if memory_world.name == "threads" else AsyncBare()
    return Marks(memory_world.engine_on(memory_world.kind.steered(store)))


# --- switched off --------------------------------------------------------------------------


def act_as_if_nothing_were_marked(marks) -> None:
    effect = Effect()
    for _ in range(2):
        assert marks.set("k")
        assert marks.set_result("k", 1)
        assert marks.do("k", effect)
        assert marks.set_many(["k", "m"]) == {"k": True, "m": True}
        assert not marks.check("k")
        assert not marks.exists("k")
        assert marks.get_result("k", "default") == "default"
        assert marks.ttl("k") is None
        assert marks.get_result_many(["k", "m"]) == {}
        assert marks.check_many(["k"]) == marks.exists_many(["k"]) == {"k": False}
        assert not marks.refresh("k")
        assert not marks.delete("k")
        assert marks.delete_many(["k"]) == {"k": False}
        assert marks.clear("") == 0
    assert effect.runs == 2
    with pytest.raises(ResultUnavailable):
        marks.get_result("k")
    with pytest.raises(InvalidKey):
        marks.set("")
    assert marks.calls() == []


def test_switched_off_nothing_is_marked_and_nothing_is_stored(kind, monkeypatch):
    monkeypatch.setenv("SEMEL_DISABLED", "1")
    with World(kind, "memory://") as world:
        act_as_if_nothing_were_marked(Marks(world.engine()))


def test_bypassed_marks_are_neither_seen_nor_kept(memory):
    assert memory.set_result("k", 7)
    memory.calls()
    with bypass():
        act_as_if_nothing_were_marked(memory)
    assert memory.get_result("k") == 7
    assert not memory.exists("m")


# --- one at a time -------------------------------------------------------------------------


def test_a_mark_is_set_once_and_checked_until_it_is_deleted(marks):
    assert (marks.check("k"), marks.exists("k")) == (False, False)
    assert marks.set("k") is True
    assert (marks.check("k"), marks.exists("k")) == (True, True)
    assert marks.set("k") is False
    assert marks.delete("k") is True
    assert marks.delete("k") is False
    assert (marks.check("k"), marks.exists("k")) == (False, False)
    assert marks.set("k") is True


def test_marks_of_two_scopes_are_two_marks(marks):
    assert marks.set("k", scope="a")
    assert not marks.check("k", scope="b")
    assert marks.set("k", scope="b")
    assert marks.delete("k", scope="a")
    assert marks.check("k", scope="b")


def test_a_result_is_given_back_as_itself(marks):
    for number, value in enumerate(RESULTS):
        key = f"k{number}"
        assert marks.set_result(key, value) is True
        assert marks.set_result(key, "another") is False
        for given in (
            marks.get_result(key),
            marks.get_result(key, "a default"),
            marks.driven.execute(key, never),
            marks.get_result_many([key])[key],
        ):
            assert given == value
            assert type(given) is type(value)
        assert marks.check(key)


def test_a_plain_mark_has_the_result_none(memory):
    memory.set("k")
    assert memory.get_result("k", "a default") is None


def test_without_a_result_there_is_the_default_or_an_error(memory):
    assert memory.get_result("k", None) is None
    assert memory.get_result("k", 0) == 0
    with pytest.raises(ResultUnavailable, match="not marked as done"):
        memory.get_result("k")


def test_a_result_that_was_left_out_is_unavailable_and_still_done(memory):
    memory.driven.execute("k", object, policy=Policy(failure="final"))
    assert memory.check("k")
    with pytest.raises(ResultUnavailable, match="cannot be stored"):
        memory.get_result("k", "a default")


def test_do_runs_once(marks):
    effect = Effect()
    assert marks.do("k", effect) is True
    assert marks.do("k", effect) is False
    assert effect.runs == 1
    assert marks.check("k")


def test_do_runs_again_after_a_failure(memory):
    with pytest.raises(ValueError, match="not today"):
        memory.do("k", Effect(raising=ValueError("not today")))
    assert not memory.check("k")
    assert memory.exists("k")
    assert memory.do("k", Effect()) is True


def test_what_the_engine_has_done_is_marked(memory):
    memory.driven.execute("k", lambda: "paid")
    assert memory.check("k")
    assert memory.get_result("k") == "paid"
    assert memory.set("k") is False


def test_what_is_marked_is_done_for_the_engine(memory):
    memory.set_result("k", "paid")
    assert memory.driven.execute("k", never) == "paid"
    assert memory.driven.consume("k", never) is False
    assert memory.do("k", never) is False


def test_what_is_running_is_not_done(marks):
    effect = Effect().held()
    running = marks.driven.start("k", effect)
    effect.wait_started()
    assert marks.check("k") is False
    assert marks.exists("k") is True
    assert marks.check_many(["k"]) == {"k": False}
    assert marks.set("k") is False
    assert marks.set_result("k", 5) is False
    assert marks.set_many(["k"]) == {"k": False}
    assert marks.get_result("k", "not yet") == "not yet"
    assert marks.get_result_many(["k"]) == {}
    assert marks.ttl("k") is None
    assert marks.refresh("k") is False
    with pytest.raises(ConcurrentRequest):
        marks.do("k", never)
    effect.release()
    assert running.result() == "done"
    assert marks.check("k") is True


# --- how long ------------------------------------------------------------------------------


def test_a_mark_is_kept_for_its_ttl(marks):
    for number, ttl in enumerate([500, 500.0, timedelta(seconds=500)]):
        key = f"k{number}"
        assert marks.ttl(key) is None
        marks.set(key, ttl=ttl)
        assert 400 < marks.ttl(key) <= 500
        assert marks.refresh(key, ttl=5000) is True
        assert 4900 < marks.ttl(key) <= 5000
    assert marks.refresh("other") is False


def test_without_a_ttl_the_policy_of_the_scope_decides(memory_world):
    marks = Marks(memory_world.engine(policy=Policy(ttl=1000), scopes={"short": Policy(ttl=100)}))
    marks.set("k")
    marks.set("k", scope="short")
    assert 990 < marks.ttl("k") <= 1000
    assert 90 < marks.ttl("k", scope="short") <= 100
    marks.refresh("k", ttl=5)
    marks.refresh("k")
    assert 990 < marks.ttl("k") <= 1000


def test_an_expired_mark_is_gone(marks):
    marks.set("k", ttl=0.001)
    while marks.exists("k"):
        pass
    assert marks.set("k") is True


def test_do_keeps_its_mark_for_its_ttl(memory):
    memory.do("k", Effect(), ttl=50)
    assert 40 < memory.ttl("k") <= 50


# --- many at once: one round trip ----------------------------------------------------------


def test_each_batch_is_one_question_to_the_store(marks):
    keys = [f"k{number}" for number in range(100)]
    assert set(marks.set_many(keys, ttl=50).values()) == {True}
    assert marks.calls() == ["put_many"]
    assert set(marks.set_result_many(dict.fromkeys(keys, 1)).values()) == {False}
    assert marks.calls() == ["put_many"]
    assert set(marks.check_many(keys).values()) == {True}
    assert marks.calls() == ["get_many"]
    assert set(marks.exists_many(keys).values()) == {True}
    assert marks.calls() == ["get_many"]
    assert set(marks.get_result_many(keys).values()) == {None}
    assert marks.calls() == ["get_many"]
    assert set(marks.delete_many(keys).values()) == {True}
    assert marks.calls() == ["forget_many"]
    assert set(marks.exists_many(keys).values()) == {False}


def test_each_key_has_its_own_answer(memory):
    memory.set_result("b", 0)
    assert memory.check_many(["a", "b", "a"]) == {"a": False, "b": True}
    assert memory.exists_many(iter(["a", "b"])) == {"a": False, "b": True}
    assert memory.set_many(["a", "b", "c", "c"]) == {"a": True, "b": False, "c": True}
    assert memory.set_result_many({"c": 1, "d": [2]}) == {"c": False, "d": True}
    assert memory.get_result_many(["a", "b", "d", "e"]) == {"a": None, "b": 0, "d": [2]}
    assert memory.delete_many(["a", "a", "e"]) == {"a": True, "e": False}
    memory.calls()
    assert memory.check_many([]) == memory.set_many([]) == memory.delete_many([]) == {}
    assert memory.calls() == []


def test_a_bad_key_among_many_stops_all_of_them(memory):
    for call in (memory.check_many, memory.set_many, memory.delete_many, memory.get_result_many):
        with pytest.raises(InvalidKey):
            call(["fine", "not fine"])
    assert not memory.exists("fine")


def test_a_store_that_fails_for_one_member_is_told(memory):
    refused = StoreUnavailable("one of them failed")

    def partly(asks):
        return [True, refused]

    async def partly_async(asks):
        return [True, refused]

    threads = memory.driven.engine.internals.setup.asynchronous is False
    memory.driven.store.send = partly if threads else partly_async
    with pytest.raises(StoreUnavailable, match="one of them failed"):
        memory.set_many(["a", "b"])


# --- clearing ------------------------------------------------------------------------------


def test_clear_removes_what_begins_with_the_prefix_in_one_scope(marks):
    keys = [f"a:{number}" for number in range(1100)] + ["b:1", "a%", "a_"]
    for first in range(0, len(keys), 100):  # all at once may take longer than the store's timeout
        marks.set_many(keys[first : first + 100])
    marks.set("a:1", scope="other")
    assert marks.clear("a:") == 1100
    assert marks.check_many(["a:1", "b:1", "a%", "a_"]) == {
        "a:1": False,
        "b:1": True,
        "a%": True,
        "a_": True,
    }
    assert marks.clear("") == 3
    assert marks.check("a:1", scope="other")


def test_the_audit_trail_has_an_entry_before_anything_is_cleared(memory):
    kind, engine = memory.driven._kind, memory.driven.engine
    memory.set("a:1", scope="orders")
    memory.driven.store.inject("put", Refuse())
    with pytest.raises(StoreUnavailable, match="audit trail could not be written"):
        memory.clear("a:", scope="orders")
    assert memory.check("a:1", scope="orders")
    assert memory.clear("a:", scope="orders") == 1
    assert memory.clear("", scope="orders") == 0
    trail = AuditTrail if isinstance(engine, Idempotency) else AsyncAuditTrail
    entries = kind.finish(trail(engine).read)
    assert [(entry.action, entry.scope, entry.key_digest) for entry in entries] == [
        ("clear", "orders", None)
    ] * 2
    assert [entry.details for entry in entries] == ["all", "with a prefix of 2 characters"]


def test_clear_needs_a_scope(memory):
    memory.set("k")
    for scope in (None, "", 5):
        with pytest.raises(InvalidKey, match="scope"):
            memory.clear("", scope=scope)
    assert memory.check("k")


def test_a_store_that_cannot_list_cannot_clear(bare):
    with pytest.raises(ConfigError, match="cannot list its keys, so it cannot clear"):
        bare.clear("")


def test_clear_must_be_told_what_to_remove(memory):
    memory.set("k")
    with pytest.raises(TypeError, match="prefix"):
        memory.clear()
    for prefix in (None, 5, b"k"):
        with pytest.raises(InvalidKey, match=r"the prefix must be a str .* not "):
            memory.clear(prefix)
    assert memory.check("k")


def test_clear_leaves_what_is_running_and_what_is_held(marks):
    engine, effect = marks.driven, Effect().held()
    running = engine.start("k:runs", effect)
    effect.wait_started()
    with pytest.raises(ZeroDivisionError):
        engine.execute(
            "k:held",
            Effect(raising=ZeroDivisionError()),
            policy=Policy(abandoned="hold"),
        )
    marks.set("k:done")
    with pytest.raises(ZeroDivisionError):
        engine.execute(
            "k:failed", Effect(raising=ZeroDivisionError()), policy=Policy(failure="final")
        )
    assert marks.clear("k:") == 2
    assert marks.exists_many(["k:runs", "k:held", "k:done", "k:failed"]) == {
        "k:runs": True,
        "k:held": True,
        "k:done": False,
        "k:failed": False,
    }
    with pytest.raises(OutcomeUnknown):
        engine.execute("k:held", never)
    effect.release()
    assert running.result(PATIENCE) == "done"
    assert engine.execute("k:runs", never) == "done"


def test_what_begins_to_run_after_it_was_listed_is_not_cleared(marks):
    engine, effect = marks.driven, Effect().held()
    with pytest.raises(ZeroDivisionError):
        engine.execute("k", Effect(raising=ZeroDivisionError()))
    runs = []

    def begin() -> None:
        runs.append(engine.start("k", effect))
        effect.wait_started()

    engine.store.before["touch"] = begin
    assert marks.clear("k") == 0
    effect.release()
    assert runs[0].result(PATIENCE) == "done"
    assert engine.execute("k", never) == "done"


def test_what_is_cleared_runs_again_in_spite_of_the_local_cache(memory_world):
    marks = Marks(memory_world.engine(cache=10))
    assert marks.driven.execute("k", lambda: "first") == "first"
    assert marks.clear("k") == 1
    assert marks.driven.execute("k", lambda: "second") == "second"


# --- codecs and bad input ------------------------------------------------------------------


def test_a_scope_with_a_codec_of_its_own_reads_what_it_wrote(memory_world):
    sealed = EncryptedCodec(keys={"a": b"k" * 32}, primary="a")
    marks = Marks(memory_world.engine(scopes={"cards": Policy(codec=sealed)}))
    marks.set_result("k", "4242", scope="cards")
    assert marks.get_result("k", scope="cards") == "4242"
    assert marks.get_result_many(["k"], scope="cards") == {"k": "4242"}
    assert marks.driven.execute("k", never, scope="cards") == "4242"


@pytest.mark.parametrize(
    ("value", "reason"), [(object(), "cannot be stored"), ("x" * 20, "keeps at most 10")]
)
def test_a_result_that_cannot_be_kept_is_refused_and_nothing_is_marked(memory_world, value, reason):
    marks = Marks(memory_world.engine(policy=Policy(max_result_bytes=10)))
    with pytest.raises(SerializationError, match=reason):
        marks.set_result("k", value)
    with pytest.raises(SerializationError, match=reason):
        marks.set_result_many({"other": 1, "k": value})
    assert marks.exists_many(["k", "other"]) == {"k": False, "other": False}


@pytest.mark.parametrize(
    "verb", ["check", "exists", "set", "get_result", "delete", "ttl", "refresh"]
)
def test_a_bad_key_is_refused_before_the_store_is_asked(memory, verb):
    with pytest.raises(InvalidKey):
        getattr(memory, verb)("a b")
    assert memory.calls() == []


def test_a_bad_ttl_is_refused_before_the_store_is_asked(memory):
    for call in (memory.set, memory.refresh, partial(memory.set_result, value=1)):
        with pytest.raises(ConfigError, match="ttl"):
            call("k", ttl=-1)
    with pytest.raises(ConfigError, match="ttl"):
        memory.do("k", never, ttl=0)
    assert memory.calls() == []


def test_a_failing_store_is_told(memory):
    memory.driven.store.inject("get", Refuse())
    with pytest.raises(StoreUnavailable):
        memory.check("k")


def test_a_record_tells_more_than_its_mark(memory):
    memory.set_result("k", 1)
    assert memory.driven.peek("k").state is State.SUCCEEDED


def test_records_are_listed_page_by_page():
    with Idempotency("memory://") as idem:
        for number in range(250):
            idem.marks.set(f"a-{number}", scope="many")
        idem.marks.set("b", scope="many")
        assert sum(1 for _ in idem.records()) == 251
        assert {record.identity.key for record in idem.records(scope="many", prefix="b")} == {"b"}
        assert list(idem.records(state=State.FAILED)) == []


async def test_records_are_listed_on_asyncio_too():
    async with AsyncIdempotency("memory://") as idem:
        for number in range(120):
            await idem.marks.set(f"{number}")
        assert len([record async for record in idem.records()]) == 120


async def test_a_store_that_cannot_list_says_so():
    with (
        Idempotency(Bare()) as idem,
        pytest.raises(ConfigError, match="cannot list"),
    ):
        list(idem.records())
    async with AsyncIdempotency(AsyncBare()) as idem:
        with pytest.raises(ConfigError, match="cannot list"):
            [record async for record in idem.records()]
