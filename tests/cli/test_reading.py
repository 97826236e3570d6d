"""list, show and counts: what an operator sees."""

from __future__ import annotations

import datetime as dt
import sqlite3
from contextlib import closing

import pytest

from semel import AttemptsExhausted, Idempotency, Policy
from semel.cli import formatting
from semel.core.records import Identity


@pytest.fixture
def filled(semel):
    semel.succeed("order:1", {"charge": "ch_1"})
    semel.succeed("order:2", [1])
    semel.succeed("parcel:1", scope="parcels")
    semel.fail("order:3", final=True)
    semel.fail("order:4", final=False)
    semel.abandon("order:5")
    semel.run("order:6")
    semel.exhaust("order:7")
    return semel


def keys(said):
    return sorted(line[1] for line in said.lines[1:])


def test_list_shows_every_record_with_its_state(filled):
    said = filled.on_store("list")
    assert said.code == 0
    assert said.lines[0] == ["SCOPE", "KEY", "STATE", "ATTEMPT", "HELD", "AGE", "LEFT"]
    assert {line[1]: (line[0], line[2], line[4]) for line in said.lines[1:]} == {
        "order:1": ("orders", "succeeded", "-"),
        "order:2": ("orders", "succeeded", "-"),
        "parcel:1": ("parcels", "succeeded", "-"),
        "order:3": ("orders", "failed", "-"),
        "order:4": ("orders", "retryable", "-"),
        "order:5": ("orders", "abandoned", "yes"),
        "order:6": ("orders", "processing", "no"),
        "order:7": ("orders", "exhausted", "no"),
    }
    assert "ch_1" not in said.out


def test_list_can_be_narrowed(filled):
    assert keys(filled.on_store("list", "--scope", "parcels")) == ["parcel:1"]
    assert keys(filled.on_store("list", "--prefix", "order:1")) == ["order:1"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("processing", ["order:6"]),
        ("abandoned", ["order:5"]),
        ("exhausted", ["order:7"]),
        ("succeeded", ["order:1", "order:2", "parcel:1"]),
        ("failed", ["order:3"]),
        ("retryable", ["order:4"]),
    ],
)
def test_list_knows_every_state_that_it_shows(filled, state, expected):
    said = filled.on_store("list", "--state", state)
    assert keys(said) == expected
    assert {line[2] for line in said.lines[1:]} == {state}
    assert len(filled.on_store("list", "--state", state, "--limit", "1").lines) == 2


def test_held_is_told_of_what_runs(filled):
    shown = {each["key"]: each["held"] for each in filled.on_store("list", "--json").data}
    assert (shown["order:1"], shown["order:5"], shown["order:6"]) == (None, True, False)


def test_list_says_when_there_is_more(filled):
    said = filled.on_store("list", "--limit", "2")
    assert len(said.lines) == 3
    assert "--limit" in said.err
    assert filled.on_store("list", "--limit", "8").err == ""


def test_list_reads_page_by_page(filled, monkeypatch):
    monkeypatch.setattr("semel.cli.reading.PAGE", 2)
    assert len(keys(filled.on_store("list"))) == 8


def test_results_are_shown_only_when_asked_for(filled):
    said = filled.on_store("list", "--result")
    assert '{"charge":"ch_1"}' in said.out
    assert "ValueError: declined" in said.out


def test_list_for_programs(filled):
    said = filled.on_store("list", "--json", "--prefix", "order:1")
    (record,) = said.data
    assert record["state"] == "succeeded"
    assert record["key_digest"] == Identity("orders", "order:1").digest.hex()
    assert record["size"] > 0
    assert "result" not in record
    assert dt.datetime.fromisoformat(record["expires_at"]) > dt.datetime.now(dt.UTC)
    (record,) = filled.on_store("list", "--json", "--result", "--prefix", "order:1").data
    assert record["result"] == {"charge": "ch_1"}


def test_a_list_without_a_line_says_so(filled):
    said = filled.on_store("list", "--scope", "elsewhere")
    assert said == (0, "no record\n", "")
    said = filled.on_store("list", "--prefix", "rcel")
    assert (said.code, said.out) == (0, "no record\n")
    assert "--prefix is the beginning of the stored key" in said.err
    assert "semel find KEY" in said.err
    assert filled.on_store("list", "--scope", "elsewhere", "--json").data == []


def test_show_tells_everything_about_one_record(filled):
    said = filled.on_store("show", "orders", "order:1")
    assert said.code == 0
    fields = {line[0]: line[1] for line in said.lines}
    assert (fields["key"], fields["state"], fields["attempt"]) == ("order:1", "succeeded", "1")
    assert fields["lease_until"] == "-"
    assert "ch_1" not in said.out
    data = filled.on_store("show", "orders", "order:5", "--json", "--result").data
    assert (data["state"], data["held"], data["result"]) == ("abandoned", True, None)
    assert data["expires_at"] is None


def test_show_tells_why_a_result_cannot_be_shown(semel):
    semel.succeed("order:1", object())
    assert "no result is available" in semel.on_store("show", "orders", "order:1", "--result").out


def test_show_of_nothing_is_said(semel):
    said = semel.on_store("show", "orders", "nothing")
    assert (said.code, said.out) == (1, "")
    assert "no such record" in said.err


def test_list_by_age(filled, monkeypatch):
    assert len(keys(filled.on_store("list", "--age", "0"))) == 8
    assert keys(filled.on_store("list", "--age", "1h")) == []
    old = {"order:2": 7200.0, "order:5": 3600.0}
    monkeypatch.setattr("semel.cli.reading.age", lambda record: old.get(record.key, 1.0))
    assert sorted(keys(filled.on_store("list", "--age", "1h"))) == ["order:2", "order:5"]
    assert keys(filled.on_store("list", "--age", "1h", "--state", "abandoned")) == ["order:5"]


def test_a_text_that_a_terminal_would_obey_is_shown(semel_sqlite):
    table = formatting.columns(("KEY",), [("\x1b[31mred",), ("größe",)])
    assert table.splitlines()[1:] == ["\\x1b[31mred", "größe"]
    assert formatting.pairs({"key": "\x07"}) == "key  \\x07"


def test_counts_are_counted(filled):
    expected = {"processing": 1, "abandoned": 2, "succeeded": 3, "failed": 2}
    assert filled.on_store("counts", "--json").data == expected
    shown = {name: int(number) for name, number in filled.on_store("counts").lines}
    assert shown == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00s"),
        (0.256, "0.26s"),
        (-3.0, "-3.00s"),
        (60.0, "1m0s"),
        (3725.0, "1h2m"),
        (90000.0, "1d1h"),
        (-200000.0, "-2d7h"),
    ],
)
def test_durations_are_written_in_two_units(seconds, text):
    assert formatting.duration(seconds) == text


def test_what_no_call_runs_again_is_shown_as_exhausted_with_what_to_do(semel):
    semel.exhaust("order:7")
    shown = semel.on_store("show", "orders", "order:7")
    assert "state        exhausted\n" in shown.out
    assert "why          lease ended; no attempt left\n" in shown.out
    assert "calls get AttemptsExhausted\n" in shown.out
    assert "to run it again: semel forget orders order:7, then send it again\n" in shown.out
    assert "the next call runs it again" not in shown.out
    assert "--retryable" not in shown.out
    assert "lease ended; no attempt left" in semel.on_store("stuck").out
    said = semel.on_store("resolve", "orders", "order:7", "--failed", "no", "--retryable")
    first, second = said.out.splitlines()
    no_attempt_left = "no attempt is left, so calls get AttemptsExhausted until you forget it"
    assert first == f"resolved as retryable: {no_attempt_left} or it expires"
    assert second.endswith("; a call after that runs again")
    with Idempotency(semel.url) as engine, pytest.raises(AttemptsExhausted):
        engine.execute("order:7", pytest.fail, scope="orders", policy=Policy(max_attempts=1))
    semel.on_store("forget", "orders", "order:7")
    with Idempotency(semel.url) as engine:
        ran = engine.execute("order:7", lambda: 1, scope="orders", policy=Policy(max_attempts=1))
    assert ran == 1


def test_what_has_failed_as_often_as_its_policy_allows_is_shown_as_exhausted_too(semel):
    def decline() -> None:
        raise ValueError("declined")

    allowed = Policy(max_attempts=2)
    with Idempotency(semel.url) as engine:
        for state in ("retryable", "exhausted"):
            with pytest.raises(ValueError, match="declined"):
                engine.execute("order:7", decline, scope="orders", policy=allowed)
            assert keys(semel.on_store("list", "--state", state)) == ["order:7"]
        assert keys(semel.on_store("list", "--state", "retryable")) == []
        with pytest.raises(AttemptsExhausted):
            engine.execute("order:7", pytest.fail, scope="orders", policy=allowed)
        shown = semel.on_store("show", "orders", "order:7")
        assert "state        exhausted\n" in shown.out
        assert "error        ValueError\n" in shown.out
        assert "to run it again: semel forget orders order:7, then send it again\n" in shown.out
        assert "resolve" not in shown.out
        semel.on_store("forget", "orders", "order:7")
        assert engine.execute("order:7", lambda: 1, scope="orders", policy=allowed) == 1


def test_a_failure_that_cannot_be_read_says_nothing_of_attempts(semel_sqlite):
    semel_sqlite.fail("order:7", final=False)
    with closing(sqlite3.connect(semel_sqlite.url.removeprefix("sqlite:///"))) as connection:
        connection.execute("UPDATE idempotent_record SET result_payload = x'00'")
        connection.commit()
    assert keys(semel_sqlite.on_store("list", "--state", "retryable")) == ["order:7"]


def test_what_is_held_waits_for_a_decision_however_often_it_was_tried(semel_sqlite):
    semel_sqlite.exhaust("order:7", hold=True)
    shown = semel_sqlite.on_store("show", "orders", "order:7")
    assert "state        abandoned\n" in shown.out
    assert "to decide: semel resolve orders order:7" in shown.out
    said = semel_sqlite.on_store("resolve", "orders", "order:7", "--failed", "no", "--retryable")
    assert said.out.startswith("resolved as retryable: no attempt is left")
    assert "state        exhausted\n" in semel_sqlite.on_store("show", "orders", "order:7").out


def test_show_prints_the_keys_that_its_attempts_sent_downstream(filled):
    identity = Identity("orders", "order:5")
    call = "POST https://bank.example/charges"
    asked = ("show", "orders", "order:5", "--derive", "capture", "--derive", call)
    sent = {
        "capture": identity.derive("capture"),
        call: identity.derive("POST:https://bank.example/charges"),
    }
    assert filled.on_store(*asked, "--json").data["derived"] == sent
    printed = filled.on_store(*asked).out
    assert all(f"derived {part}" in printed and key in printed for part, key in sent.items())
    assert "derived" not in filled.on_store("show", "orders", "order:5", "--json").data


def test_a_part_that_no_attempt_can_send_is_rejected(filled):
    said = filled.on_store("show", "orders", "order:5", "--derive", "")
    assert (said.code, said.out) == (2, "")
    assert "the part of a derived key is empty" in said.err
