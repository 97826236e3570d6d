"""stuck: every abandoned attempt, and an exit code for those that have waited too long."""

from __future__ import annotations

import msgspec
import pytest

from semel import Idempotency, Policy
from semel.cli import formatting
from semel.core import run_info
from semel.core.records import Identity, Record, State


def keys(said):
    return [line[1] for line in said.lines[1:]]


def test_nothing_stuck_is_said(semel):
    nothing = semel.on_store("stuck")
    assert (nothing.code, nothing.out) == (0, "nothing is stuck\n")
    assert semel.on_store("stuck", "--json").data == []


def test_every_abandoned_attempt_is_listed_and_only_old_ones_are_an_alert(semel):
    semel.abandon("order:1")
    semel.abandon("order:2", ago=120.0, hold=False)
    semel.run("order:3")
    said = semel.on_store("stuck")
    assert (said.code, keys(said)) == (0, ["order:2", "order:1"]), "the oldest first"
    assert said.lines[0] == ["SCOPE", "KEY", "ATTEMPT", "HELD", "STUCK", "BY", "WHY"]
    assert said.lines[1][:4] == ["orders", "order:2", "1", "no"]
    assert said.lines[1][4].startswith("2m")
    for older_than, code in (("3m", 0), ("2m", 1), ("0", 1)):
        said = semel.on_store("stuck", "--older-than", older_than)
        assert (said.code, keys(said)) == (code, ["order:2", "order:1"])
    semel.abandon("order:4", ago=301.0)
    assert semel.on_store("stuck").code == 1


def test_stuck_for_programs(semel):
    semel.abandon("order:1", ago=60.0)
    (told,) = semel.on_store("stuck", "--json").data
    assert (told["key"], told["held"]) == ("order:1", True)
    assert 60.0 <= told["stuck_seconds"] < 120.0


def test_many_are_cut_and_counted_as_more(semel):
    for number in range(3):
        semel.abandon(f"order:{number}")
    said = semel.on_store("stuck", "--limit", "2")
    assert len(keys(said)) == 2
    assert "there are more than 2: see --limit" in said.err
    assert semel.on_store("stuck", "--limit", "3").err == ""
    said = semel.on_store("watch", "--count", "1", "--limit", "2")
    assert "more than 2 stuck, at least 2 of them held, the oldest for " in said.out


def test_one_scope_is_listed_however_many_there_are_of_others(semel):
    for number in range(7):
        semel.abandon(f"order:{number}", ago=900.0 - number)
    semel.abandon("k1", scope="http", ago=60.0)
    semel.abandon("k2", scope="http")
    said = semel.on_store("stuck", "--scope", "http", "--limit", "1")
    assert (said.code, keys(said)) == (0, ["k1"]), "older ones of other scopes do not count"
    assert "there are more than 1: see --limit" in said.err
    said = semel.on_store("stuck", "--scope", "http", "--limit", "2")
    assert (keys(said), said.err) == (["k1", "k2"], "")
    assert semel.on_store("stuck", "--scope", "http", "--older-than", "1m").code == 1
    assert [r["key"] for r in semel.on_store("stuck", "--scope", "http", "--json").data] == [
        "k1",
        "k2",
    ]
    said = semel.on_store("watch", "--count", "1", "--scope", "http")
    assert (said.code, "2 stuck, 2 of them held" in said.out, "order:" in said.out) == (
        0,
        True,
        False,
    )
    assert semel.on_store("stuck", "--scope", "orders").code == 1


def test_an_empty_scope_says_what_others_have(semel):
    semel.abandon("order:1")
    semel.succeed("k1", scope="http")
    for words in (("stuck",), ("watch", "--count", "1")):
        said = semel.on_store(*words, "--scope", "http")
        assert "nothing is stuck in http; 1 in other scopes\n" in said.out
        assert (said.code, said.err) == (0, "")
    semel.on_store("forget", "orders", "order:1", "--yes")
    assert semel.on_store("stuck", "--scope", "http").out == "nothing is stuck in http\n"


@pytest.mark.parametrize(
    ("info", "by", "why"),
    [
        (b"", "-", "-"),
        (b"damaged", "-", "-"),
        (run_info.build("web-1:4711", 60.0, "json"), "web-1:4711", "lease ended"),
        (run_info.build("web-1:4711", 60.0, "json", "TimeoutError"), "web-1:4711", "TimeoutError"),
    ],
)
def test_who_ran_it_and_why_it_stands_still(info, by, why):
    record = Record(
        identity=Identity("orders", "order:1"),
        state=State.PROCESSING,
        owner=bytes(12),
        number=2,
        fence=7,
        hold=True,
        created_at=1000.0,
        updated_at=1000.0,
        lease_until=1010.0,
        now=1130.0,
        run_info=info,
    )
    row = formatting.stuck_row(record)
    assert row == ("orders", "order:1", "2", "yes", "2m0s", by, why)
    shown = formatting.fields(record)
    known = None if by == "-" else by
    assert (shown["by"], shown["why"]) == (known, None if why == "-" else why)
    running = msgspec.structs.replace(record, lease_until=1140.0)
    assert formatting.fields(running)["why"] is None
    assert shown["codec"] == (None if known is None else "json")


def test_a_parked_attempt_names_its_process_and_its_exception(semel, monkeypatch):
    monkeypatch.setenv("SEMEL_NAME", "night-worker-3")

    def charge():
        raise TimeoutError("the bank does not answer")

    policy = Policy(abandoned="hold")
    with Idempotency(semel.url, policy=policy) as engine, pytest.raises(TimeoutError):
        engine.execute("order:1", charge, scope="payments")
    said = semel.on_store("stuck")
    assert said.lines[1][:2] == ["payments", "order:1"]
    assert said.lines[1][-2:] == ["night-worker-3", "TimeoutError"]
    shown = semel.on_store("show", "payments", "order:1", "--json").data
    assert (shown["by"], shown["why"]) == ("night-worker-3", "TimeoutError")
