"""Fingerprints made with a secret: a reader of the store cannot guess the payloads behind them."""

from __future__ import annotations

import pytest

from engines.facade import Effect, never
from semel import ConfigError, Idempotency, PayloadMismatch, Policy
from semel.core.fingerprint import fingerprint, keyed
from semel.core.records import Identity
from semel.core.settings import load_settings

OLD, NEW = "an old secret of 24 bytes", b"a new secret of 23 bytes"
LOOSE = Policy(mismatch="replace")
PIN = {"pin": "739214"}


def stored(idem, key="k"):
    return idem.peek(key).fingerprint


def test_without_a_secret_a_payload_is_found_by_trying_and_with_one_it_is_not(memory_world):
    open_book, closed_book = memory_world.engine(), memory_world.engine(fingerprint_secret=NEW)
    open_book.execute("plain", Effect(), payload=PIN)
    closed_book.execute("keyed", Effect(), payload=PIN)
    tried = {fingerprint({"pin": f"{number:06d}"}) for number in range(739_000, 740_000)}
    assert stored(open_book, "plain") in tried
    assert stored(closed_book, "keyed") not in tried
    assert stored(closed_book, "keyed") == keyed(
        fingerprint(PIN), Identity("default", "keyed"), NEW
    )


def test_equal_payloads_of_two_keys_have_two_fingerprints(memory_world):
    idem = memory_world.engine(fingerprint_secret=NEW)
    for key in ("ann", "bob"):
        idem.execute(key, Effect(), payload=PIN)
    assert stored(idem, "ann") != stored(idem, "bob")


def test_payloads_are_compared_by_their_keyed_fingerprints(world):
    one, two = (world.engine(fingerprint_secret=NEW) for _ in range(2))
    assert one.execute("k", lambda: "done", payload=PIN) == "done"
    assert two.execute("k", never, payload=PIN) == "done"
    with pytest.raises(PayloadMismatch):
        two.execute("k", never, payload={"pin": "000000"})


def test_secrets_are_rotated_without_a_mismatch(world):
    before = world.engine(fingerprint_secret=OLD)
    during = world.engine(fingerprint_secret=[NEW, OLD])
    after = world.engine(fingerprint_secret=NEW)
    before.execute("old", lambda: "done", payload=1)
    during.execute("new", lambda: "done", payload=1)
    assert during.execute("old", never, payload=1) == "done"
    assert after.execute("new", never, payload=1) == "done", "the first secret has written it"
    with pytest.raises(PayloadMismatch):
        during.execute("old", never, payload=2)
    with pytest.raises(PayloadMismatch):
        after.execute("old", never, payload=1)


def test_a_failure_from_before_a_rotation_is_tried_again(memory_world):
    before = memory_world.engine(fingerprint_secret=OLD)
    with pytest.raises(ZeroDivisionError):
        before.execute("k", lambda: 1 / 0, payload=1, policy=Policy(failure="retryable"))
    during = memory_world.engine(fingerprint_secret=[NEW, OLD])
    assert during.execute("k", lambda: "done", payload=1) == "done"


def test_while_secrets_are_rotated_only_another_payload_replaces_and_late_ones_are_rejected(world):
    before = world.engine(fingerprint_secret=OLD, policy=LOOSE)
    before.execute("k", lambda: "Ann", payload="Ann")
    before.execute("k", lambda: "Bob", payload="Bob")
    during = world.engine(fingerprint_secret=[NEW, OLD], policy=LOOSE)
    assert during.execute("k", never, payload="Bob") == "Bob", "the same payload as before"
    with pytest.raises(PayloadMismatch, match="replaced by a newer one"):
        during.execute("k", never, payload="Ann")
    assert during.execute("k", lambda: "Cid", payload="Cid") == "Cid"
    assert during.execute("k", never, payload="Cid") == "Cid"
    with pytest.raises(PayloadMismatch, match="replaced by a newer one"):
        during.execute("k", never, payload="Bob")
    assert during.execute("fresh", lambda: "Dan", payload="Dan") == "Dan"


def test_a_call_without_a_payload_has_no_fingerprint(memory_world):
    idem = memory_world.engine(fingerprint_secret=[NEW, OLD])
    idem.execute("k", Effect())
    assert stored(idem) is None


# --- where it is set -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "environ", "code", "found"),
    [
        ("", {}, {}, ()),
        (f'fingerprint_secret = "{OLD}"', {}, {}, (OLD.encode(),)),
        (f'fingerprint_secret = ["{NEW.decode()}", "{OLD}"]', {}, {}, (NEW, OLD.encode())),
        ("", {"SEMEL_FINGERPRINT_SECRET": "0123456789abcdef"}, {}, (b"0123456789abcdef",)),
        ("", {"SEMEL_FINGERPRINT_SECRET": "a" * 16 + " " + "b" * 16}, {}, (b"a" * 16, b"b" * 16)),
        (f'fingerprint_secret = "{OLD}"', {}, {"fingerprint_secret": NEW}, (NEW,)),
    ],
)
def test_files_variables_and_code_set_it(tmp_path, files, environ, code, found):
    (tmp_path / "semel.toml").write_text(files, encoding="utf-8")
    assert load_settings(environ, tmp_path, **code).fingerprint_secret == found


@pytest.mark.parametrize("wrong", ["", "too short", b"too short", [], [NEW, "short"], [NEW, 7], 7])
def test_one_that_protects_nothing_is_rejected_and_not_shown(wrong):
    with pytest.raises(ConfigError, match="at least 16 bytes") as refused:
        Idempotency("memory://", fingerprint_secret=wrong)
    assert "short" not in str(refused.value)
