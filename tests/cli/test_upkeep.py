"""purge, reconcile and migrate: once by hand, or again and again as a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines.facade import wait_until
from semel import State
from semel.core.records import Encoded, Identity
from semel.core.stop import Stop
from semel.stores.urls import open_store

RESOLVERS = """
from semel.repair import Failed, Succeeded, Unknown

resolvers = {
    "orders": lambda record: Succeeded(record.key),
    "parcels": lambda record: Unknown("no answer"),
}
not_a_mapping = 1
"""


@pytest.fixture
def resolvers() -> str:
    """A module of the application, in the working directory."""
    name = f"resolvers_of_{time.monotonic_ns()}"
    Path(f"{name}.py").write_text(RESOLVERS)
    return name


def test_purge_removes_what_expired_and_what_was_abandoned_long_ago(semel):
    with contextlib.closing(open_store(semel.url)) as store:
        for number in range(5):
            store.put(Identity("old", str(number)), Encoded("json/1", b"1"), 0.01, owner=bytes(12))
    semel.abandon("free", hold=False)
    semel.abandon("held")
    time.sleep(0.05)
    said = semel.on_store("purge", "--batch", "2", "--pause", "0", "--abandoned-after", "10ms")
    # Redis removes what has expired by itself.
    assert said.out.strip() in {"removed 6 records", "removed 1 records"}
    assert semel.get("free") is None
    assert semel.get("held") is not None
    assert semel.on_store("purge").out.strip() == "removed 0 records"


def test_reconcile_resolves_what_is_stuck(semel, resolvers):
    semel.abandon("order:1")
    words = ("reconcile", "--resolvers", f"{resolvers}:resolvers", "--older-than", "0")
    said = semel.on_store(*words)
    assert said.code == 0
    assert said.out.startswith("resolved 1, unresolved 0, gave up 0")
    assert semel.get("order:1").state is State.SUCCEEDED


def test_reconcile_says_that_it_leaves_what_is_not_stuck_for_long(semel_sqlite, resolvers):
    semel_sqlite.abandon("order:1")
    words = ("reconcile", "--resolvers", f"{resolvers}:resolvers")
    said = semel_sqlite.on_store(*words)
    assert said.code == 0
    assert said.out.startswith("resolved 0, ")
    assert "stuck for less than 10m0s are left: see --older-than" in said.err
    assert "--older-than" not in semel_sqlite.on_store(*words, "--older-than", "0").err


def test_reconcile_tells_by_its_exit_code_what_is_left(semel, resolvers, tmp_path):
    semel.abandon("parcel:1", scope="parcels")
    audit = tmp_path / "audit.jsonl"
    said = semel.on_store(
        *("reconcile", "--resolvers", f"{resolvers}:resolvers", "--older-than", "0", "--full"),
        *("--max-tries", "1", "--by", "by hand", "--audit", str(audit)),
    )
    assert said.code == 1
    assert said.out.startswith("resolved 0, unresolved 1, gave up 1")
    assert "waiting for a person 1" in said.out
    decisions = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [each["decision"] for each in decisions] == ["Unresolved", "GaveUp"]
    assert decisions[0]["by"].startswith("by hand@")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_colon", "module:attribute"),
        ("no.such.module:resolvers", "no module no.such.module"),
        ("MODULE:missing", "has no missing"),
        ("MODULE:not_a_mapping", "must be a mapping"),
    ],
)
def test_resolvers_that_cannot_be_had_are_named(semel_sqlite, resolvers, path, complaint):
    said = semel_sqlite.on_store("reconcile", "--resolvers", path.replace("MODULE", resolvers))
    assert said.code == 2
    assert complaint in said.err


def test_a_module_that_misses_another_one_is_not_hidden(semel_sqlite):
    Path("broken_resolvers.py").write_text("import a_module_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        semel_sqlite.on_store("reconcile", "--resolvers", "broken_resolvers:resolvers")


def test_a_store_without_tables_has_nothing_to_migrate(redis_url, semel_sqlite):
    said = semel_sqlite("--url", redis_url, "migrate")
    assert (said.code, said.out.strip()) == (
        0,
        "this store creates what it needs by itself: nothing to migrate",
    )


def test_migrate_makes_the_table_of_a_new_sqlite_database(semel_sqlite):
    words = ("--url", "sqlite:///new.db?table=payments", "migrate")
    for _ in range(2):  # safe to repeat
        assert semel_sqlite(*words).out.strip() == "the table is at version 1"
    with contextlib.closing(sqlite3.connect("new.db")) as database:
        found = database.execute("SELECT table_name, version FROM semel_schema").fetchall()
        assert found == [("payments", 1)]
        assert database.execute("SELECT count(*) FROM payments").fetchone() == (0,)
    assert semel_sqlite("--url", "sqlite:///new.db?table=payments", "doctor").code == 0


def test_what_migrate_prints_makes_the_same_table(semel_sqlite):
    said = semel_sqlite("--url", "sqlite:///by-hand.db?table=payments", "migrate", "--print")
    assert not Path("by-hand.db").exists(), "it runs nothing"
    with contextlib.closing(sqlite3.connect("by-hand.db")) as database:
        database.executescript(said.out)
    semel_sqlite("--url", "sqlite:///by-semel.db?table=payments", "migrate")

    def schema(path):
        with contextlib.closing(sqlite3.connect(path)) as database:
            rows = database.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
            return [(name, sql and " ".join(sql.split())) for name, sql in rows]

    assert schema("by-hand.db") == schema("by-semel.db")
    assert semel_sqlite("--url", "sqlite:///by-hand.db?table=payments", "doctor").code == 0


def test_of_two_tiers_the_one_behind_is_migrated(semel_sqlite):
    Path("semel.toml").write_text(
        'url = "redis://127.0.0.1:1/0"\nbehind = "sqlite:///behind.db"\n'  # no Redis is needed
    )
    assert semel_sqlite("migrate").out.strip() == "the table is at version 1"
    assert Path("behind.db").exists()


# --- again and again ---------------------------------------------------------------------


@contextlib.contextmanager
def process(url: str, *words: str):
    """Run the command as a process."""
    command = [sys.executable, "-m", "semel", "--url", url, *words]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def test_reconcile_goes_on_until_it_is_told_to_stop(semel, resolvers):
    words = ("reconcile", "--resolvers", f"{resolvers}:resolvers", "--older-than", "0")
    with process(semel.url, *words, "--every", "20ms") as running:
        assert running.stdout.readline().startswith("resolved 0")
        semel.abandon("order:1")
        wait_until(lambda: semel.get("order:1").state is State.SUCCEEDED)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def test_a_loop_prints_its_first_round_and_then_only_news(semel, resolvers, monkeypatch, capsys):
    rounds = iter(["", "order:1", "", "", "order:2", "order:3", ""])

    class Stopped(Stop):
        def wait(self, timeout):
            key = next(rounds, None)
            if key:
                semel.abandon(key)
            return key is None

    monkeypatch.setattr("semel.cli.upkeep.Stop", Stopped)
    monkeypatch.setattr("semel.cli.upkeep.signal.signal", lambda *_: None)
    words = ("reconcile", "--resolvers", f"{resolvers}:resolvers", "--older-than", "0")
    said = semel.on_store(*words, "--every", "1m")
    resolved = [line.split(",")[0] for line in said.out.splitlines()]
    assert resolved == [f"resolved {number}" for number in (0, 1, 0, 1, 1, 0)], (
        "rounds that found nothing are told once"
    )


def test_a_signal_lets_reconcile_finish_the_record_in_hand_and_no_other(semel, tmp_path):
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    Path("holding.py").write_text(
        f"""import time
from pathlib import Path
from semel.repair import Succeeded

def resolve(record):
    with Path({str(entered)!r}).open("a") as file:
        file.write(record.key + "\\n")
    while not Path({str(gate)!r}).exists():
        time.sleep(0.01)
    return Succeeded("found out")

resolvers = {{"orders": resolve}}
"""
    )
    for number in range(5):
        semel.abandon(f"order:{number}")
    words = ("reconcile", "--resolvers", "holding:resolvers", "--older-than", "0", "--every", "1h")
    with process(semel.url, *words) as running:
        wait_until(entered.exists)
        running.send_signal(signal.SIGTERM)
        # The process has the signal, and its handler runs, before the resolver looks again.
        wait_until(lambda: not pending(running.pid, signal.SIGTERM))
        gate.touch()
        assert running.wait(60) == 0
        assert running.stdout.readline().startswith("resolved 1, ")
    assert len(entered.read_text().splitlines()) == 1
    ended = [semel.get(f"order:{number}").state is State.SUCCEEDED for number in range(5)]
    assert sum(ended) == 1


def pending(pid: int, number: signal.Signals) -> bool:
    """Tell whether a signal has not reached a process yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = (
        line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    )
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def test_purge_goes_on_until_it_is_told_to_stop(semel_sqlite):
    with process(semel_sqlite.url, "purge", "--every", "10ms") as running:
        assert running.stdout.readline() == "removed 0 records\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0


def test_a_store_that_is_down_for_a_while_does_not_end_it(own_redis):
    with process(own_redis.url, "purge", "--abandoned-after", "1h", "--every", "20ms") as running:
        assert running.stdout.readline() == "removed 0 records\n"
        own_redis.kill()
        assert "trying again" in running.stderr.readline()
        own_redis.restart()
        wait_until(lambda: own_redis.calls("evalsha", "eval") > 0)  # it asks the new server
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
