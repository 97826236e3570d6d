"""forget and resolve: what a person decides."""

from __future__ import annotations

import getpass
import json
import logging
import re
import shlex
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from cli.conftest import OWNER
from semel import (
    Idempotency,
    OutcomeUnknown,
    Policy,
    PreviousFailure,
    State,
    StoreUnavailable,
)
from semel.cli.deciding import FINAL
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.stores.urls import open_store


def test_forget_removes_a_record(semel):
    semel.succeed("order:1")
    said = semel.on_store("forget", "orders", "order:1")
    assert (said.code, said.err) == (0, "")
    assert semel.get("order:1") is None
    assert semel.on_store("forget", "orders", "order:1").code == 1


def test_somebody_else_may_forget_it_first(semel_sqlite, monkeypatch):
    def forgotten_meanwhile(engine, key, scope):
        found = engine.peek(key, scope=scope)
        engine.forget(key, scope=scope)
        return found

    semel_sqlite.succeed("order:1")
    monkeypatch.setattr("semel.cli.deciding._peek", forgotten_meanwhile)
    said = semel_sqlite.on_store("forget", "orders", "order:1")
    assert (said.code, said.out) == (1, "")
    assert "no such record" in said.err


def test_a_question_shows_what_a_terminal_would_obey_in_the_name_of_a_process(semel_sqlite):
    said_by_it = b'{"by":"web\\u001b[2J","ttl":60,"codec":"json/1"}'
    with closing(open_store(semel_sqlite.url)) as store:
        identity = Identity("orders", "order:1")
        store.claim(ClaimRequest(identity, OWNER, None, 600.0, 600.0, run_info=said_by_it))
    said = semel_sqlite.on_store("forget", "orders", "order:1")
    assert (said.code, "\x1b" in said.err) == (2, False)
    assert r"is running (by web\x1b[2J), with a lease" in said.err


def test_forget_warns_where_it_may_have_happened(semel):
    semel.abandon("order:1")
    semel.abandon("order:2", hold=False)
    for words in (("order:1", "--yes"), ("order:2",)):
        said = semel.on_store("forget", "orders", *words)
        assert said.code == 0
        assert "may have happened" in said.err


def test_resolve_as_succeeded(semel, tmp_path):
    semel.abandon("order:1")
    audit = tmp_path / "audit.jsonl"
    said = semel.on_store(
        *("resolve", "orders", "order:1", "--succeeded", '{"charge": "ch_1"}'),
        *("--by", "anna", "--audit", str(audit), "--ttl", "3d"),
    )
    assert (said.code, said.out.splitlines()[0]) == (0, "resolved as succeeded")
    with Idempotency(semel.url) as engine:
        assert engine.execute("order:1", lambda: None, scope="orders") == {"charge": "ch_1"}
    (entry,) = map(json.loads, audit.read_text().splitlines())
    assert entry["by"].startswith("anna@")
    assert entry["verdict"] == "succeeded"


def test_the_name_of_a_process_is_shown_and_not_obeyed(semel_sqlite):
    info = b'{"by":"\\u001b[2Jweb","ttl":60,"codec":"json/1"}'
    with closing(open_store(semel_sqlite.url)) as store:
        claim = ClaimRequest(Identity("orders", "a"), OWNER, None, 60.0, 60.0, run_info=info)
        store.claim(claim)
    said = semel_sqlite.on_store("forget", "orders", "a")
    assert said.code == 2
    assert "is running (by \\x1b[2Jweb), " in said.err


@pytest.mark.parametrize("file", ["", "missing/audit.jsonl", "/"])
def test_nothing_is_decided_where_the_audit_file_cannot_be_written(semel_sqlite, file):
    semel_sqlite.abandon("order:1")
    words = ("--failed", "no", "--ttl", "3d", "--audit", file)
    said = semel_sqlite.on_store("resolve", "orders", "order:1", *words)
    assert (said.code, said.out) == (2, "")
    assert f"--audit: {file!r} cannot be written: " in said.err
    assert semel_sqlite.get("order:1").state is State.PROCESSING
    assert semel_sqlite.on_store("audit").out == "the audit trail has no such entries\n"


def test_resolve_as_failed(semel, caplog):
    semel.abandon("order:1")
    words = ("--failed", "not at the bank", "--ttl", "3d")
    said = semel.on_store("resolve", "orders", "order:1", *words)
    assert (said.code, said.out.splitlines()[0]) == (0, "resolved as failed")
    with Idempotency(semel.url) as engine, pytest.raises(PreviousFailure, match="not at the bank"):
        engine.execute("order:1", lambda: None, scope="orders")
    (entry,) = (record for record in caplog.records if record.name == "semel.audit")
    assert entry.levelno == logging.INFO
    assert entry.semel["by"].startswith(f"{getpass.getuser()}@")


def test_resolve_as_failed_and_retryable(semel):
    semel.abandon("order:1")
    said = semel.on_store("resolve", "orders", "order:1", "--failed", "never sent", "--retryable")
    assert said.out.startswith("resolved as retryable: the next call runs")
    assert "until then only a call with the same payload runs" in said.out
    assert "runs again" not in said.out
    with Idempotency(semel.url) as engine:
        assert engine.execute("order:1", lambda: "ran", scope="orders") == "ran"


@pytest.mark.parametrize("outcome", [("--succeeded", "1"), ("--failed", "no", "--retryable")])
def test_resolve_says_how_long_the_outcome_is_kept(semel, outcome):
    semel.abandon("order:1")
    assert semel.on_store("resolve", "orders", "order:1", *outcome, "--ttl", "7d").code == 0
    assert 604_000 < semel.get("order:1").remaining <= 604_800


def test_resolve_keeps_the_outcome_as_the_settings_say(semel):
    Path("semel.toml").write_text('[scopes.orders]\nttl = "30d"\n')
    semel.abandon("order:1")
    said = semel.on_store("resolve", "orders", "order:1", "--succeeded", "1")
    assert said.code == 0
    record = semel.get("order:1")
    assert record.remaining > 29 * 86_400
    _, until, moment, left, *_ = said.out.splitlines()[1].split()
    assert (until, left) == ("until", "(30d0h);")
    assert abs(datetime.fromisoformat(moment).timestamp() - record.expires_at) < 60


@pytest.mark.parametrize("outcome", [("--succeeded", "1"), ("--failed", "no")])
@pytest.mark.parametrize("settings", ["", '[policy]\nttl = "30d"\n', "[scopes.other]\nttl = 60\n"])
def test_a_held_attempt_needs_a_ttl_where_the_settings_do_not_name_its_scope(
    semel, outcome, settings
):
    """Its policy, in the program, may say 3 days: forgotten after one, a payment is made again."""
    Path("semel.toml").write_text(settings)
    semel.abandon("order:1")
    before = semel.get("order:1")
    said = semel.on_store("resolve", "orders", "order:1", *outcome)
    assert said.code == 2
    assert "--ttl" in said.err
    assert "'orders'" in said.err
    assert semel.get("order:1").owner == before.owner
    assert semel.on_store("resolve", "orders", "order:1", *outcome, "--ttl", "3d").code == 0
    assert 2.9 * 86_400 < semel.get("order:1").remaining <= 3 * 86_400


def test_an_attempt_that_is_not_held_needs_no_ttl(semel):
    semel.abandon("order:1", hold=False)
    assert semel.on_store("resolve", "orders", "order:1", "--succeeded", "1").code == 0


def test_a_text_that_is_no_json_gets_a_hint(semel_sqlite):
    said = semel_sqlite.on_store("resolve", "orders", "order:1", "--succeeded", "ch_42")
    assert said.code == 2
    assert """--succeeded '"ch_42"'""" in said.err


def test_there_is_nothing_to_resolve_where_nothing_is_stuck(semel):
    def refused(key):
        said = semel.on_store("resolve", "orders", key, "--failed", "no")
        assert said.code == 1
        return said.err

    assert "no such record" in refused("nothing")
    semel.succeed("done")
    assert "ended as succeeded" in refused("done")
    assert "That is final: see semel resolve --help" in refused("done")
    semel.run("running")
    message = refused("running")
    assert "it is running, with a lease for another 9m" in message
    assert "If it hangs, end its process first" in message
    assert semel.get("running").state is State.PROCESSING


def test_a_refusal_names_the_process_that_is_still_running(semel):
    info = b'{"by":"web\\u001b[2J:4711","ttl":60,"codec":"json/1"}'
    with closing(open_store(semel.url)) as store:
        identity = Identity("orders", "order:1")
        store.claim(ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=True, run_info=info))
    said = semel.on_store("resolve", "orders", "order:1", "--failed", "no")
    assert (said.code, "\x1b" in said.err) == (1, False)
    assert r"it is running in web\x1b[2J:4711, with a lease for another 9m" in said.err
    assert r"If it hangs, end web\x1b[2J:4711 first" in said.err


@pytest.mark.parametrize(
    "outcome", [("--succeeded", "1"), ("--failed", "no"), ("--failed", "no", "--retryable")]
)
def test_a_decision_is_final_and_the_command_says_so(semel, outcome):
    semel.abandon("order:1", hold=False)
    said = semel.on_store("resolve", "orders", "order:1", *outcome)
    assert (said.code, said.err.splitlines()[-1]) == (0, FINAL)
    before = semel.get("order:1")
    assert semel.on_store("resolve", "orders", "order:1", "--succeeded", "2").code == 1
    assert semel.get("order:1").outcome == before.outcome
    assert "A decision is final: it cannot be resolved again." in semel("resolve", "--help").out


def test_the_reason_is_in_the_line_that_a_decision_logs(semel_sqlite, caplog):
    for key, words in (("order:1", ("--reason", "ticket 4711")), ("order:2", ())):
        semel_sqlite.abandon(key, hold=False)
        semel_sqlite.on_store("resolve", "orders", key, "--succeeded", "1", *words)
    first, second = (each for each in caplog.records if each.name == "semel.audit")
    assert first.semel["reason"] == "ticket 4711"
    assert 'reason="ticket 4711"' in first.getMessage()
    assert "reason" not in second.semel


def test_a_decision_is_reported_also_if_the_store_goes_away_right_after_it(
    semel_sqlite, monkeypatch
):
    def away(*_, **__):
        raise StoreUnavailable("it has gone away")

    semel_sqlite.abandon("order:1")
    monkeypatch.setattr(Idempotency, "peek", away)
    said = semel_sqlite.on_store("resolve", "orders", "order:1", "--succeeded", "1", "--ttl", "3d")
    assert said.code == 0
    assert said.out.startswith("resolved as succeeded")


def test_somebody_may_be_faster(semel_sqlite, monkeypatch):
    semel_sqlite.abandon("order:1")
    store = open_store(semel_sqlite.url)
    complete = type(store).complete

    def overtaken(self, identity, owner, result, ttl):
        store.renew(identity, owner, 0.0)
        store.adopt(identity, bytes(12), 60.0)
        complete(store, identity, bytes(12), Encoded("json/1", b"2"), 60.0)
        return complete(self, identity, owner, result, ttl)

    monkeypatch.setattr(type(store), "complete", overtaken)
    words = ("--succeeded", "1", "--ttl", "3d")
    said = semel_sqlite.on_store("resolve", "orders", "order:1", *words)
    assert said.code == 1
    assert "faster" in said.err
    assert store.get(Identity("orders", "order:1")).outcome.data == b"2"
    store.close()


@pytest.mark.parametrize(
    "words", [("--succeeded", "not JSON"), ("--succeeded", "1", "--retryable")]
)
def test_a_wrong_outcome_is_refused_before_anything_is_touched(semel_sqlite, words):
    semel_sqlite.abandon("order:1")
    said = semel_sqlite.on_store("resolve", "orders", "order:1", *words)
    assert said.code == 2
    assert words[0].strip("-") in said.err or "--failed" in said.err
    assert semel_sqlite.get("order:1").abandoned


# --- by the digest that errors and logs show -------------------------------------------------


@pytest.fixture
def held(semel) -> OutcomeUnknown:
    """The error of a payment whose handler raised, beside many other records."""
    for number in range(3):
        semel.succeed(f"order:{number}", scope="payments")

    def charge() -> None:
        raise ConnectionError("the reply got lost")

    with Idempotency(semel.url, policy=Policy.payment()) as engine:
        with pytest.raises(ConnectionError):
            engine.execute("order:9", charge, scope="payments", payload=1)
        with pytest.raises(OutcomeUnknown) as unknown:
            engine.execute("order:9", charge, scope="payments", payload=1)
    return unknown.value


@pytest.mark.parametrize("page", [500, 1])
@pytest.mark.parametrize("other", [False, True])
def test_the_command_that_an_error_names_decides(semel, held, page, other, monkeypatch):
    monkeypatch.setattr("semel.cli.store.PAGE", page)
    command, instead, retryable = re.findall(r"`([^`]+)`", str(held))
    named = command.replace("--succeeded JSON", f"{instead} {retryable}") if other else command
    words = shlex.split(named.replace("JSON", "'[1]'").replace("TEXT", "declined"))[1:]
    said = semel.on_store(*words)
    assert (said.code, said.err if said.code else "") == (0, "")
    record = semel.get("order:9", scope="payments")
    assert record.state is (State.FAILED if other else State.SUCCEEDED)
    if not other:
        assert record.expires_at - record.updated_at == pytest.approx(3 * 86400), "as its policy"


def test_a_record_is_shown_and_removed_by_its_digest(semel, held):
    words = ("--digest", held.scope, held.key_digest)
    shown = semel.on_store("show", *words, "--json").data
    assert (shown["key"], shown["key_digest"]) == ("order:9", held.key_digest)
    assert semel.on_store("forget", *words, "--yes").code == 0
    assert semel.get("order:9", scope="payments") is None


@pytest.mark.parametrize(
    "words", [("show",), ("forget",), ("resolve", "--succeeded", "1", "--ttl", "3d")]
)
def test_a_digest_that_no_record_has_is_said(semel, words):
    semel.succeed("order:1")
    said = semel.on_store(words[0], "--digest", "orders", "0" * 32, *words[1:])
    assert (said.code, "there is no such record" in said.err) == (1, True)


@pytest.mark.parametrize("written", ["order:1", "28ba7808", "28ba7808...", "", "é" * 32])
@pytest.mark.parametrize(
    "words", [("show",), ("forget",), ("resolve", "--succeeded", "1", "--ttl", "3d")]
)
def test_what_is_no_whole_digest_is_refused_without_reading_the_scope(semel, words, written):
    semel.succeed("order:1")
    said = semel.on_store(words[0], "--digest", "orders", written, *words[1:])
    assert said.code == 2
    assert "--digest takes a whole key_digest, which is 32 hexadecimal digits" in said.err
    assert semel.get("order:1") is not None
