"""forget and resolve: what a person decides."""

from __future__ import annotations

import getpass
import json
import logging
import re
import shlex
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime
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
from semel.repair import forget_finished
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


def test_the_old_finished_records_of_a_scope_are_forgotten_together(semel):
    semel.succeed("order:1")
    semel.fail("order:2", final=True)
    semel.fail("order:3", final=False)
    semel.abandon("order:4")
    semel.abandon("order:5", hold=False)
    semel.run("order:6")
    semel.succeed("parcel:1", scope="parcels")
    words = ("forget", "--scope", "orders", "--older-than", "0", "--reason", "ticket 7")
    said = semel.on_store(*words)
    assert (said.code, said.out) == (2, "")
    assert "3 records of orders that ended 0.00s ago or before would be forgotten" in said.err
    assert "--yes" in said.err
    assert semel.get("order:1") is not None
    assert semel.on_store("forget", "--scope", "orders", "--older-than", "1h").out == (
        "forgot 0 records\n"
    )
    assert semel.on_store(*words, "--yes").out == "forgot 3 records\n"
    left = [number for number in range(1, 7) if semel.get(f"order:{number}") is not None]
    assert left == [4, 5, 6]
    assert semel.get("parcel:1", scope="parcels") is not None
    (entry,) = semel.on_store("audit", "--scope", "orders", "--json").data
    assert (entry["action"], entry["key_digest"], entry["reason"]) == ("forget", None, "ticket 7")
    assert entry["details"] == "finished for 0 s"


def test_old_records_are_forgotten_batch_by_batch_and_what_begins_meanwhile_stays(semel):
    for number in range(5):
        semel.succeed(f"order:{number}")
    semel.fail("order:5", final=False)
    steps = []

    def begin(so_far):
        steps.append(so_far)
        with closing(open_store(semel.url)) as store:
            store.claim(ClaimRequest(Identity("orders", "order:5"), OWNER, None, 600.0, 600.0))

    with Idempotency(semel.url) as engine:
        begin(0)
        assert (
            forget_finished(engine, "orders", older_than=0, batch=2, pause=0, progress=begin) == 5
        )
    assert len(steps) > 2
    assert semel.get("order:5").state is State.PROCESSING


def test_a_person_is_asked_before_old_records_are_forgotten(semel_sqlite, monkeypatch):
    semel_sqlite.succeed("order:1")
    words = ("forget", "--scope", "orders", "--older-than", "0")
    monkeypatch.setattr("semel.cli.deciding.can_ask", lambda: True)
    asked = []
    monkeypatch.setattr("semel.cli.deciding.confirmed", asked.append)
    said = semel_sqlite.on_store(*words)
    assert (said.code, said.err) == (1, "nothing was forgotten\n")
    assert "1 records of orders" in asked[0]
    monkeypatch.setattr("semel.cli.deciding.confirmed", lambda _: True)
    assert semel_sqlite.on_store(*words).out == "forgot 1 records\n"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("orders",),
        ("orders", "order:1", "--scope", "orders", "--older-than", "1h"),
        ("--scope", "orders"),
        ("--older-than", "1h"),
        ("--scope", "orders", "--older-than", "1h", "--digest"),
    ],
)
def test_forget_takes_a_record_or_a_scope_with_an_age(semel_sqlite, words):
    said = semel_sqlite.on_store("forget", *words)
    assert (said.code, said.out) == (2, "")


@dataclass
class Receipt:
    id: str
    day: date | None = None


PLAIN = '{"id": "ch_1", "day": "2026-01-01"}'


def test_a_result_of_another_form_than_that_of_a_finished_record_needs_a_word(semel):
    semel.succeed("order:0", Receipt("ch_0", date(2026, 1, 1)))
    semel.abandon("order:1")
    words = ("resolve", "orders", "order:1", "--ttl", "1h", "--succeeded")
    said = semel.on_store(*words, PLAIN)
    assert (said.code, said.out) == (2, "")
    assert "result is object, and that of the similar call" in said.err
    assert ":Receipt (order:0)" in said.err
    assert "--like order:0" in said.err
    assert semel.get("order:1").abandoned
    assert semel.on_store(*words, PLAIN, "--yes").code == 0
    with Idempotency(semel.url) as engine:
        assert engine.execute("order:1", Receipt, scope="orders") == json.loads(PLAIN)


def test_a_result_takes_its_form_from_a_finished_record(semel):
    semel.succeed("order:0", Receipt("ch_0", date(2026, 1, 1)))
    semel.succeed("order:9", "a newer one of another form")
    semel.abandon("order:1")
    words = ("resolve", "orders", "order:1", "--ttl", "1h", "--succeeded")
    assert semel.on_store(*words, PLAIN, "--like", "order:0").code == 0
    with Idempotency(semel.url) as engine:
        found = engine.execute("order:1", Receipt, scope="orders", returns=Receipt)
    assert found == Receipt("ch_1", date(2026, 1, 1))


def test_a_result_of_the_same_form_needs_no_word(semel):
    semel.succeed("order:0", Receipt("ch_0"))
    semel.abandon("order:1")
    tagged = semel.on_store("show", "orders", "order:0", "--json", "--result").data["result"]
    given = json.dumps(tagged).replace("ch_0", "ch_1")
    words = ("resolve", "orders", "order:1", "--ttl", "1h", "--succeeded", given)
    assert semel.on_store(*words).code == 0


def test_a_person_is_asked_about_a_result_of_another_form(semel_sqlite, monkeypatch):
    semel_sqlite.succeed("order:0", 5)
    semel_sqlite.abandon("order:1")
    words = ("resolve", "orders", "order:1", "--ttl", "1h", "--succeeded", '"5"')
    monkeypatch.setattr("semel.cli.deciding.can_ask", lambda: True)
    monkeypatch.setattr("semel.cli.deciding.confirmed", lambda _: False)
    assert semel_sqlite.on_store(*words).err == "nothing was decided\n"
    assert semel_sqlite.get("order:1").abandoned
    monkeypatch.setattr("semel.cli.deciding.confirmed", lambda _: True)
    assert semel_sqlite.on_store(*words).code == 0


def test_like_names_a_finished_record_of_a_function(semel_sqlite):
    semel_sqlite.fail("order:2", final=True)
    semel_sqlite.abandon("order:1")
    with Idempotency(semel_sqlite.url, policy=Policy(max_result_bytes=1)) as engine:
        engine.execute("order:3", lambda: "large", scope="orders")
    for key in ("order:1", "order:2", "order:3", "order:4"):
        words = ("--succeeded", "1", "--like", key)
        said = semel_sqlite.on_store("resolve", "orders", "order:1", *words)
        assert (said.code, said.out) == (2, "")
        assert f"--like: orders {key} is no finished record" in said.err
    said = semel_sqlite.on_store("resolve", "orders", "order:1", "--failed", "x", "--like", "a")
    assert "--like goes with --succeeded" in said.err


def test_show_of_a_failed_record_says_the_type_of_the_error_and_not_its_text(semel):
    semel.fail("order:1", final=True)
    semel.succeed("order:2")
    semel.run("order:3")
    shown = semel.on_store("show", "orders", "order:1")
    assert ["error", "ValueError"] in shown.lines
    assert "declined" not in shown.out
    for key in ("order:2", "order:3"):
        assert semel.on_store("show", "orders", key, "--json").data["error"] is None


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
    assert "A decision is final: " in semel("resolve", "--help").out


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
        semel.succeed(f"order:{number}", [number], scope="payments")

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
