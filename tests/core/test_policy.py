"""Policies: what each field accepts, what the presets say, and how levels lie over each other."""

from __future__ import annotations

import copy
import pickle
import re
from datetime import timedelta
from typing import get_type_hints

import pytest
from msgspec import UNSET

from semel.core.codec import JsonCodec, MsgpackCodec
from semel.core.encryption import EncryptedCodec
from semel.core.policy import (
    CHOICES,
    GUARD_WAIT,
    LONGEST,
    POLICY_FIELDS,
    POSITIVE,
    PRESETS,
    SHORTEST_LEASE,
    Policy,
    PolicyFields,
    Rules,
    changed,
    resolve,
    seconds,
)
from semel.errors import ConfigError
from semel.sync import Idempotency

DAY = 86400.0


def test_presets_take_every_field_of_a_policy_with_its_type():
    assert get_type_hints(PolicyFields) == get_type_hints(Policy)


@pytest.mark.parametrize("name", ["http", "messages", "job", "payment", "coupon"])
def test_a_preset_refuses_a_field_that_no_policy_has(name):
    with pytest.raises(TypeError, match="nonsense"):
        getattr(Policy, name)(nonsense=3)


def test_a_mistyped_field_is_answered_with_the_known_ones_and_a_suggestion():
    for made in (Policy, Policy.payment):
        with pytest.raises(TypeError) as refusal:
            made(tll=3)
        said = str(refusal.value)
        assert said.startswith("Policy() got an unexpected keyword argument 'tll'; known are ")
        assert said.endswith("; did you mean ttl?")
        assert all(name in said for name in POLICY_FIELDS)


def test_a_policy_says_only_what_was_written_and_does_not_change():
    one, other = Policy(ttl=5, lease=UNSET), Policy(ttl=timedelta(seconds=5))
    assert (one, hash(one)) == (other, hash(other))
    assert one != Policy(ttl=6)
    assert one != {"ttl": 5.0}
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one  # noqa: S301 - our own
    with pytest.raises(AttributeError):
        one.ttl = 6


NUMBER_OF_SECONDS = "a number of seconds or a timedelta"


def refused(**field):
    """What is said about one wrong field."""
    with pytest.raises(ConfigError) as refusal:
        Policy(**field)
    (name,) = field
    assert f"policy field {name} " in str(refusal.value)
    return str(refusal.value)


# --- fields --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "choices"), CHOICES.items())
def test_a_choice_takes_each_of_its_words_and_names_them_for_any_other(name, choices):
    for choice in choices:
        assert getattr(Policy(**{name: choice}), name) == choice
    for wrong in ("nonsense", "", None, 3, [choices[0]]):
        message = refused(**{name: wrong})
        assert all(repr(choice) in message for choice in choices)


def test_failure_may_also_be_a_function_of_the_exception():
    def judge(error):
        return "final"

    assert Policy(failure=judge).failure is judge
    assert "or a function of the exception" in refused(failure="nonsense")
    assert "a function" not in refused(concurrent=judge)


def test_an_async_function_cannot_judge_a_failure():
    async def judge(error):
        return "final"

    assert "a plain function, not an async one" in refused(failure=judge)


def test_a_policy_shows_what_was_said_and_nothing_else():
    assert repr(Policy()) == "Policy()"
    shown = repr(Policy(ttl=3600, concurrent="wait", wait_timeout=None))
    assert shown == "Policy(concurrent='wait', ttl=3600.0, wait_timeout=None)"


@pytest.mark.parametrize("name", POSITIVE)
def test_a_duration_is_seconds_or_a_timedelta_and_becomes_seconds(name):
    assert getattr(Policy(**{name: 3}), name) == 3.0
    assert type(getattr(Policy(**{name: 3}), name)) is float
    assert getattr(Policy(**{name: timedelta(minutes=2)}), name) == 120.0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (0, "more than zero seconds"),
        (-1, "more than zero seconds"),
        (timedelta(seconds=-1), "more than zero seconds"),
        (LONGEST * 2, "at most 100 years"),
        (float("inf"), NUMBER_OF_SECONDS),
        (float("nan"), NUMBER_OF_SECONDS),
        (True, NUMBER_OF_SECONDS),
        ("5", NUMBER_OF_SECONDS),
        (None, NUMBER_OF_SECONDS),
    ],
)
def test_a_duration_that_makes_no_sense_is_refused(wrong, why):
    assert why in refused(ttl=wrong)


@pytest.mark.parametrize("lease", [0.0001, 0.049, timedelta(milliseconds=1)])
def test_a_lease_that_ends_before_it_can_be_renewed_is_refused(lease):
    assert "at least 0.05 seconds, or it ends before it can be renewed" in refused(lease=lease)
    assert "more than zero seconds" in refused(lease=-lease)
    assert Policy(lease=SHORTEST_LEASE).lease == 0.05


def test_waiting_may_be_endless_or_not_at_all():
    assert Policy(wait_timeout=None).wait_timeout is None
    assert Policy(wait_timeout=0).wait_timeout == 0.0
    assert "zero or more seconds" in refused(wait_timeout=-1)


@pytest.mark.parametrize(("name", "smallest"), [("max_attempts", 1), ("max_result_bytes", 0)])
def test_a_limit_is_a_whole_number(name, smallest):
    assert getattr(Policy(**{name: smallest}), name) == smallest
    for wrong in (smallest - 1, 1.5, "3", True):
        assert f"a whole number of {smallest} or more" in refused(**{name: wrong})


def test_attempts_may_be_unlimited_but_bytes_may_not():
    assert Policy(max_attempts=None).max_attempts is None
    assert "whole number" in refused(max_result_bytes=None)


def test_a_codec_is_named_or_brought_along():
    codec = MsgpackCodec()
    assert Policy(codec="msgpack").codec == "msgpack"
    assert Policy(codec=codec).codec is codec
    assert "an object with name, encode and decode" in refused(codec=object())
    with pytest.raises(ConfigError, match="no codec is called 'pickle'; known: json, msgpack"):
        Policy(codec="pickle")


class Zip:
    """A codec of the user's own."""

    name = "zip/1"

    def encode(self, value, context, hint=None):
        return b""

    def decode(self, data, context, hint=None):
        return None


class TakesNoHint(Zip):
    def encode(self, value, context):
        return b""


class TakesNoContext(Zip):
    def decode(self, data):
        return None


class Awaited(Zip):
    async def encode(self, value, context, hint=None):
        return b""


class NoMethod(Zip):
    decode = "zip"


class LikeJson(JsonCodec):
    """It may write what JSON is not."""


def named(name):
    return type("Named", (Zip,), {"name": name})()


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        (Zip, "must be an object, Zip(...), not the class Zip itself"),
        (TakesNoHint(), "encode is a plain method that takes (value, context, hint=None)"),
        (TakesNoContext(), "decode is a plain method that takes (data, context, hint=None)"),
        (Awaited(), "must be a codec whose encode is a plain method"),
        (NoMethod(), "must be a codec whose decode is a plain method"),
        (LikeJson(), "a name of its own; LikeJson has 'json/1', under which semel"),
        (named("msgpack/1"), "a name of its own; Named has 'msgpack/1'"),
        (named("omitted"), "a name of its own"),
        (named("http/1"), "a name of its own"),
        (named(""), "a printable text of 1 to 255 bytes, such as 'zip/1'; Named has ''"),
        (named("\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 128), "a printable text of 1 to 255"),
        (named("zip\n"), "a printable text"),
        (named("\ud800"), "a printable text"),
        (named(None), "Named has None"),
        (named(b"zip/1"), "a printable text"),
    ],
)
def test_a_codec_that_cannot_work_is_refused_before_anything_runs(codec, why):
    assert why in refused(codec=codec)
    with pytest.raises(ConfigError, match=re.escape(why)):
        Idempotency("memory://", codecs=[codec])
    with pytest.raises(ConfigError, match=re.escape(why)):
        EncryptedCodec(codec, keys={"a": b"k" * 32}, primary="a")


def test_a_codec_may_be_made_in_any_way_that_can_be_called():
    class Untold:
        """Tells no signature, as some functions of extensions do not."""

        @property
        def __signature__(self):
            raise ValueError

        def __call__(self, *args):
            return b""

    anything = type("Anything", (Zip,), {"encode": lambda *args: b""})()
    untold = type("OfAnExtension", (Zip,), {"encode": Untold()})()
    for codec in (Zip(), anything, untold, named("x" * 255), JsonCodec()):
        assert Policy(codec=codec).codec is codec


def test_a_message_is_text_or_none():
    assert Policy(message="please wait").message == "please wait"
    assert Policy(message=None).message is None
    assert "a string or None" in refused(message=b"bytes")


def test_not_done_takes_exception_classes_alone_or_in_a_row():
    assert Policy(not_done=KeyError).not_done == (KeyError,)
    assert Policy(not_done=[KeyError, OSError]).not_done == (KeyError, OSError)
    assert Policy(not_done=(KeyboardInterrupt,)).not_done == (KeyboardInterrupt,)
    for wrong in ("KeyError", KeyError("an instance"), int, [KeyError, None]):
        assert "exception classes" in refused(not_done=wrong)


def test_payload_required_is_a_switch():
    assert Policy(payload_required=True).payload_required is True
    assert "True or False" in refused(payload_required=1)


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="retention"):
        Policy(retention=5)


def test_a_wrong_value_is_shown_short_or_not_at_all():
    assert len(refused(duplicate="x" * 10_000)) < 300
    assert "secret" not in refused(message=["secret"])


def test_a_policy_is_a_value():
    assert Policy(ttl=5) == Policy(ttl=timedelta(seconds=5))
    assert hash(Policy(ttl=5)) == hash(Policy(ttl=5.0))
    with pytest.raises(AttributeError):
        Policy(ttl=5).ttl = 6


def test_seconds_names_what_is_wrong():
    assert seconds("timeout", 0, zero=True) == 0.0
    with pytest.raises(ConfigError, match="timeout"):
        seconds("timeout", 0)


# --- presets -------------------------------------------------------------------------------


def test_each_preset_keeps_its_records_as_long_as_its_domain_asks():
    assert Policy.http().ttl == 600.0
    assert Policy.messages().ttl == 30 * DAY
    assert Policy.job().ttl == DAY
    assert Policy.payment().ttl == 3 * DAY
    assert Policy.coupon().ttl == 7 * DAY


def test_a_payment_is_held_after_a_crash_and_compares_payloads():
    rules = resolve(Policy.payment())
    assert rules.hold
    assert not rules.replace
    assert rules.payload_required


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_named(name):
    assert Policy.preset(name) == Policy(**PRESETS[name])


def test_an_unknown_preset_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="'payments'; known: http, message, job, payment, coupon"):
        Policy.preset("payments")


# --- levels --------------------------------------------------------------------------------


def test_without_any_policy_the_documented_defaults_hold():
    rules = resolve()
    assert rules == Rules()
    assert (rules.duplicate, rules.concurrent, rules.failure) == ("replay", "wait", None)
    assert (rules.abandoned, rules.mismatch, rules.store_error) == ("takeover", "reject", "closed")
    assert (rules.ttl, rules.failed_ttl, rules.lease) == (DAY, 300.0, 30.0)
    assert (rules.wait_timeout, rules.wait_interval, rules.wait_interval_max) == (None, 0.05, 0.5)
    assert (rules.max_attempts, rules.max_result_bytes) == (None, 1024 * 1024)
    assert (rules.store_timeout, rules.message) == (5.0, None)
    assert isinstance(rules.codec, JsonCodec)


def test_a_higher_level_wins_field_by_field():
    rules = resolve(Policy(ttl=1), None, Policy(ttl=2, lease=3), Policy(lease=4, failed_ttl=5))
    assert (rules.ttl, rules.lease, rules.failed_ttl) == (1.0, 3.0, 5.0)


@pytest.mark.parametrize("name", POLICY_FIELDS)
def test_an_explicit_default_wins_over_a_lower_level(name):
    default = "forget" if name == "failure" else getattr(Rules(), name)
    other = {
        **{choice: words[-1] for choice, words in CHOICES.items()},
        **dict.fromkeys((*POSITIVE, "wait_timeout"), 7.5),
        "max_attempts": 7,
        "max_result_bytes": 7,
        "codec": "msgpack",
        "message": "wait",
        "not_done": (KeyError,),
        "payload_required": True,
    }[name]
    below = Policy(**{name: other})
    assert getattr(resolve(below), name) != default
    assert getattr(resolve(Policy(**{name: default}), below), name) == default


def test_a_codec_is_looked_up_by_name():
    assert isinstance(resolve(Policy(codec="msgpack")).codec, MsgpackCodec)


def test_guard_mode_waits_a_little_unless_told_otherwise():
    guard = Policy(duplicate="reject")
    assert resolve(guard).wait_timeout == GUARD_WAIT == 0.3
    assert resolve(guard, Policy(wait_timeout=4)).wait_timeout == 4.0
    assert resolve(guard, Policy(wait_timeout=None)).wait_timeout is None


def test_a_start_above_the_longest_interval_moves_it():
    assert resolve(Policy(wait_interval=3)).wait_interval_max == 3.0
    rules = resolve(Policy(wait_interval=3), Policy(wait_interval_max=1))
    assert (rules.wait_interval, rules.wait_interval_max) == (3.0, 3.0)


def test_what_follows_from_the_rules_follows_from_changed_ones_too():
    rules = changed(Rules(), abandoned="hold", mismatch="replace", concurrent="reject")
    assert (rules.hold, rules.replace, rules.waits, rules.replays) == (True, True, False, True)
    rules = changed(rules, abandoned="takeover", duplicate="reject", hold=True)
    assert (rules.hold, rules.replays) == (False, False)
