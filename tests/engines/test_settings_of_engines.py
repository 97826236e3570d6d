"""Where an engine's rules come from: call > decorator > scope > engine > environment > file >
default, field by field, and what switches it off."""

from __future__ import annotations

import functools

import pytest

from engines.facade import KINDS, Effect, World, never
from semel import AsyncIdempotency, ConfigError, Idempotency, Policy
from semel.core.policy import Rules
from semel.stores.memory import MemoryStore
from semel.testing import bypass

DEFAULT = Rules().ttl
ENGINES = {"threads": Idempotency, "asyncio": AsyncIdempotency}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- precedence ----------------------------------------------------------------------------

LEVELS = ("call", "decorator", "scope", "engine", "environment", "file", "default")


class Levels:
    """An engine whose ttl is said at some of the levels; asks what a call keeps."""

    def __init__(self, kind, monkeypatch, folder, said) -> None:
        self.said = said
        lines = ["[policy]", f"ttl = {said['file']}"] if "file" in said else []
        (folder / "semel.toml").write_text("\n".join(lines))
        if "environment" in said:
            monkeypatch.setenv("SEMEL_TTL", f"{said['environment']}")
        self.world = World(kind, "memory://")
        self.idem = self.world.engine(
            policy=self.policy("engine"),
            scopes={} if "scope" not in said else {"orders": self.policy("scope")},
        )

    def policy(self, level):
        return Policy(ttl=self.said[level]) if level in self.said else None

    def of_a_call(self) -> float:
        self.idem.execute("call", lambda: 1, scope="orders", policy=self.policy("call"))
        return self.idem.peek("call", scope="orders").remaining

    def of_a_decorated_function(self) -> float:
        def plain(a):
            return a

        async def twin(a):
            return a

        fn = plain if self.world.name == "threads" else twin
        once = self.idem.engine.once("{a}", scope="orders", policy=self.policy("decorator"))(fn)
        self.world.kind.finish(once, 1)
        return self.idem.peek("1", scope="orders").remaining

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.world.close()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [50, DEFAULT], ids=["another value", "the default, explicitly"])
def test_the_highest_level_that_says_something_wins(kind, monkeypatch, folder, level, value):
    below = LEVELS[LEVELS.index(level) + 1 : -1]
    said = {name: 1000 * (number + 2) for number, name in enumerate(below)} | {level: value}
    with Levels(kind, monkeypatch, folder, said) as levels:
        expected = DEFAULT if level == "default" else value
        # A decorated function has no call level, and a call no decorator.
        if level != "decorator":
            said_here = levels.of_a_call()
            assert expected - 10 < said_here <= expected
        if level != "call":
            said_here = levels.of_a_decorated_function()
            assert expected - 10 < said_here <= expected


def test_each_field_comes_from_the_highest_level_that_says_it(kind, monkeypatch, folder):
    (folder / "semel.toml").write_text(
        "[policy]\nlease = 11\nttl = 12\nfailed_ttl = 13\n[scopes.orders]\nmax_attempts = 14\n"
        "wait_timeout = 15\n"
    )
    monkeypatch.setenv("SEMEL_FAILED_TTL", "23s")
    with World(kind, "memory://") as world:
        engine = world.engine(
            policy=Policy(ttl=32, max_attempts=34),
            scopes={"orders": Policy(wait_timeout=45), "other": Policy(lease=41)},
        ).engine
        rules = engine.internals.setup.rules(
            "orders", Policy(message="call"), Policy(message="decorator")
        )
        assert (rules.lease, rules.ttl, rules.failed_ttl) == (11.0, 32.0, 23.0)
        assert (rules.max_attempts, rules.wait_timeout, rules.message) == (14, 45.0, "call")
        assert engine.internals.setup.rules("other").lease == 41.0
        assert engine.internals.setup.rules("unnamed").max_attempts == 34


def test_rules_are_worked_out_once_for_each_policy_and_not_for_each_scope(memory_world):
    engine = memory_world.engine(scopes={"orders": Policy(ttl=5)}).engine
    policy = Policy(lease=7)
    assert engine.internals.setup.rules("a", policy) is engine.internals.setup.rules(
        "b", Policy(lease=7)
    )
    assert engine.internals.setup.rules("orders", policy) is not engine.internals.setup.rules(
        "a", policy
    )


def test_many_policies_do_not_fill_the_memory(memory_world):
    engine = memory_world.engine().engine
    for number in range(1, 400):
        assert engine.internals.setup.rules("a", Policy(ttl=number)).ttl == number
    assert len(engine.internals.setup._rules_of) <= 256


def test_a_codec_without_a_hash_may_be_used(memory_world):
    class Unhashable:
        name = "upper/1"
        __hash__ = None

        def encode(self, value, context, hint=None):
            return value.upper().encode()

        def decode(self, data, context, hint=None):
            return data.decode()

    idem = memory_world.engine()
    policy = Policy(codec=Unhashable())
    assert idem.execute("k", lambda: "paid", policy=policy) == "PAID"
    assert idem.execute("k", never, policy=policy) == "PAID"


# --- where records are kept ----------------------------------------------------------------


def test_without_a_url_the_settings_decide(kind, monkeypatch, folder):
    (folder / "semel.toml").write_text('url = "sqlite:///from-file.db"')
    assert ENGINES[kind]().internals.setup.opening["url"] == "sqlite:///from-file.db"
    monkeypatch.setenv("SEMEL_URL", "memory://")
    monkeypatch.setenv("SEMEL_PREFIX", "shop:")
    monkeypatch.setenv("SEMEL_STORE_TIMEOUT", "2s")
    assert ENGINES[kind]().internals.setup.opening == {
        "url": "memory://",
        "prefix": "shop:",
        "timeout": 2.0,
    }
    assert ENGINES[kind]("memory://?max_records=5", prefix="x:").internals.setup.opening == {
        "url": "memory://?max_records=5",
        "prefix": "x:",
        "timeout": 2.0,
    }


def test_the_pattern_of_keys_may_be_switched_off_by_the_code(kind, monkeypatch):
    monkeypatch.setenv("SEMEL_KEY_PATTERN", "[0-9]+")
    assert ENGINES[kind]("memory://").internals.setup.key_rules.pattern.pattern == "[0-9]+"
    assert ENGINES[kind]("memory://", key_pattern=None).internals.setup.key_rules.pattern is None
    assert (
        ENGINES[kind]("memory://", key_pattern="[a-z]+").internals.setup.key_rules.pattern.pattern
        == "[a-z]+"
    )


def test_wrong_settings_are_named_all_at_once(kind, monkeypatch):
    monkeypatch.setenv("SEMEL_TTL", "soon")
    monkeypatch.setenv("SEMEL_LEESE", "5")
    with pytest.raises(ConfigError) as refusal:
        ENGINES[kind]("memory://")
    assert "SEMEL_TTL: must be seconds" in str(refusal.value)
    assert "SEMEL_LEESE: is not known; did you mean SEMEL_LEASE?" in str(refusal.value)


def test_a_wrong_url_is_named_with_its_source_and_not_shown(kind, monkeypatch, folder):
    (folder / "semel.toml").write_text('url = "nosql://me:hunter2@host"')
    with pytest.raises(ConfigError, match=r"^semel\.toml: url: no store knows the scheme") as shown:
        ENGINES[kind]()
    assert "hunter2" not in str(shown.value)
    monkeypatch.setenv("SEMEL_URL", "hunter2")
    with pytest.raises(ConfigError, match=r"^SEMEL_URL: a store URL looks like") as shown:
        ENGINES[kind]()
    assert "hunter2" not in str(shown.value)


def test_a_wrong_url_in_the_code_needs_no_source(kind, monkeypatch):
    monkeypatch.setenv("SEMEL_URL", "memory://")
    with pytest.raises(ConfigError, match=r"^no store knows the scheme nosql"):
        ENGINES[kind]("nosql://host")


def test_two_stores_of_which_one_is_wrong_are_named_both(kind, monkeypatch):
    monkeypatch.setenv("SEMEL_BEHIND", "nosql://host")
    with pytest.raises(ConfigError, match=r"^code: url, SEMEL_BEHIND: .*nosql"):
        ENGINES[kind]("redis://localhost")


@pytest.mark.parametrize("say", ["environment", "file"])
def test_production_refuses_memory_and_a_missing_url(kind, monkeypatch, folder, say):
    if say == "environment":
        monkeypatch.setenv("SEMEL_ENV", "production")
    else:
        (folder / "semel.toml").write_text('preset = "production"')
    with pytest.raises(ConfigError, match="production needs a store: set SEMEL_URL"):
        ENGINES[kind]()
    with pytest.raises(ConfigError, match="must not keep its records in memory"):
        ENGINES[kind]("memory://")
    assert (
        ENGINES[kind]("sqlite:///semel.db").internals.setup.opening["url"] == "sqlite:///semel.db"
    )
    assert list(folder.glob("*.db")) == [], "opened by the first call, not before"


def test_production_takes_a_store_that_the_code_brings(monkeypatch):
    monkeypatch.setenv("SEMEL_ENV", "production")
    with Idempotency(MemoryStore()) as idem:
        assert idem.execute("k", lambda: 1) == 1


# --- switched off --------------------------------------------------------------------------


def runs_every_time(idem):
    effect = Effect("paid")
    outcome = idem.run("k", effect)
    assert (outcome.value, outcome.replayed, outcome.attempt.protected) == ("paid", False, False)
    assert idem.execute("k", effect) == "paid"
    assert idem.consume("k", effect) is True
    assert effect.runs == 3
    with pytest.raises(ValueError, match="unwrapped"):
        idem.execute("k", Effect(raising=ValueError("unwrapped")))
    value = object()
    assert idem.execute("k", lambda: value) is value, "not even copied"


def test_semel_disabled_switches_every_engine_off(kind, monkeypatch):
    monkeypatch.setenv("SEMEL_DISABLED", "1")
    with World(kind, "memory://") as world:
        idem = world.engine()
        runs_every_time(idem)
        assert idem.store.calls == []
        assert idem.events == []


@pytest.mark.parametrize("kind", KINDS)
def test_bypass_switches_off_for_a_while(kind):
    with World(kind, "memory://") as world:
        idem = world.engine()
        idem.execute("k", lambda: "first")
        idem.store.calls.clear()
        with bypass():
            runs_every_time(idem)
        assert idem.store.calls == []
        assert idem.execute("k", never) == "first"


def test_bypass_covers_attempts_by_hand_and_decorated_functions():
    runs = []
    with Idempotency("memory://") as idem:

        @idem.once
        def f(a):
            runs.append(a)

        with bypass():
            for _ in range(2):
                f(1)
                with idem.attempt("k") as attempt:
                    assert not attempt.replayed
                    attempt.result = 1
        assert runs == [1, 1]
        assert idem.peek("k") is None


def test_a_bypassed_test_function_is_decorated():
    with Idempotency("memory://") as idem:

        @bypass()
        def test():
            return [idem.run("k", functools.partial(int, "1")).replayed for _ in range(2)]

        assert test() == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_rules_the_scopes_that_it_matches(kind, monkeypatch, folder):
    (folder / "semel.toml").write_text(
        '[scopes."orders.*"]\nttl = 60\nlease = 20\n[scopes."*"]\nlease = 7'
    )
    world = World(kind, "memory://")
    idem = world.engine(scopes={"orders.pay": Policy(ttl=90)})
    rules = idem.engine.internals.setup.rules
    assert (rules("orders.pay").ttl, rules("orders.pay").lease) == (90, 20)
    assert (rules("orders.ship").ttl, rules("orders.ship").lease) == (60, 20)
    assert (rules("mail").ttl, rules("mail").lease) == (DEFAULT, 7)
    assert rules("orders.ship") is rules("orders.ship") is rules("orders.refund")
    idem.execute("a", lambda: 1, scope="orders.ship")
    assert idem.peek("a", scope="orders.ship").remaining <= 60
    world.close()
