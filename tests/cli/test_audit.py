"""audit: who did what; and the commands that do nothing unless that can be written down first."""

from __future__ import annotations

import contextlib
import getpass
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from semel.core.records import AUDIT_SCOPE, Identity
from semel.stores.urls import open_store

DIGEST = Identity("orders", "order:1").key_digest
WHO = ("--by", "anna", "--reason", "ticket 7")
REFUSED = "the entry in the audit trail could not be written, so nothing was done"


def entries(semel, *words):
    return semel.on_store("audit", "--json", *words).data


def test_each_action_is_listed_with_who_when_what_and_why(semel):
    semel.abandon("order:1")
    for words in (
        ("resolve", "orders", "order:1", "--succeeded", '"1"', "--ttl", "3d"),
        ("show", "orders", "order:1", "--result"),
        ("list", "--result"),
        ("forget", "orders", "order:1"),
        ("purge",),
    ):
        assert semel.on_store(*words, *WHO).code == 0, words
    found = entries(semel)
    told = [(each["action"], each["details"], each["scope"], each["key_digest"]) for each in found]
    assert told == [
        ("purge", "expired", None, None),
        ("forget", "succeeded", "orders", DIGEST),
        ("view", "", "orders", DIGEST),
        ("view", "", "orders", DIGEST),
        ("resolve", "succeeded", "orders", DIGEST),
    ]
    assert {each["reason"] for each in found} == {"ticket 7"}
    assert all(each["by"].startswith("anna@") for each in found)
    assert all(
        abs(datetime.fromisoformat(each["at"]).timestamp() - time.time()) < 600 for each in found
    )


def test_a_reconciliation_is_listed_with_its_decisions(semel, tmp_path, monkeypatch):
    module = f"resolvers_of_{time.monotonic_ns()}"
    (tmp_path / f"{module}.py").write_text(
        "from semel.repair import Succeeded\nresolvers = {'orders': lambda record: Succeeded(1)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    semel.abandon("order:1")
    words = ("reconcile", "--resolvers", f"{module}:resolvers", "--older-than", "0")
    assert semel.on_store(*words, "--by", "night", "--reason", "outage 3").code == 0
    decided, run = entries(semel)
    assert (decided["action"], decided["key_digest"]) == ("resolve", DIGEST)
    assert (run["action"], run["details"]) == ("reconcile", "1 records")
    assert {each["reason"] for each in (decided, run)} == {"outage 3"}
    assert all(each["by"].startswith("night@") for each in (decided, run))


def test_a_reconciliation_names_the_user_unless_told_otherwise(semel_sqlite, tmp_path, monkeypatch):
    module = f"resolvers_of_{time.monotonic_ns()}"
    (tmp_path / f"{module}.py").write_text(
        "from semel.repair import Succeeded\nresolvers = {'orders': lambda record: Succeeded(1)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOGNAME", "bert")
    semel_sqlite.abandon("order:1")
    words = ("reconcile", "--resolvers", f"{module}:resolvers", "--older-than", "0")
    assert semel_sqlite.on_store(*words).code == 0
    assert [each["by"].partition("@")[0] for each in entries(semel_sqlite)] == ["bert", "bert"]


def test_entries_are_listed_as_a_table(semel_sqlite):
    semel_sqlite.succeed("order:1")
    semel_sqlite.on_store("forget", "orders", "order:1", *WHO)
    semel_sqlite.on_store("purge", "--by", "cron")
    head, purged, forgotten = semel_sqlite.on_store("audit").lines
    assert head == ["AT", "ACTION", "DETAILS", "SCOPE", "KEY", "DIGEST", "BY", "REASON"]
    assert forgotten[1:5] == ["forget", "succeeded", "orders", DIGEST]
    assert forgotten[6:] == ["ticket", "7"]
    assert purged[1:5] == ["purge", "expired", "-", "-"]
    assert purged[6:] == ["-"]


def test_what_a_terminal_would_obey_is_shown_instead(semel_sqlite, monkeypatch):
    # A program of another release may have written it as it is.
    monkeypatch.setattr("semel.repair._sync.audit.process_name", lambda: "web\x1b[2J")
    semel_sqlite.on_store("purge")
    out = semel_sqlite.on_store("audit").out
    assert "\x1b" not in out
    assert r"web\x1b[2J" in out


@pytest.mark.parametrize("name", ["web-\udcff", "web-\x1b", "web-\n", "x" * 10_000 + "web-?"])
def test_a_process_with_an_odd_name_can_act_and_its_log_stays_one_printable_line(
    semel, monkeypatch, caplog, name
):
    semel.abandon("order:1", hold=False)
    monkeypatch.setenv("SEMEL_NAME", name)
    resolved = semel.on_store("resolve", "orders", "order:1", "--failed", "no", "--by", "anna")
    assert resolved.code == 0
    (entry,) = entries(semel)
    assert entry["by"].startswith("anna@")
    assert entry["by"].endswith("web-?")
    assert len(entry["by"]) <= 5 + 200
    (line,) = [each.getMessage() for each in caplog.records if each.name == "semel.audit"]
    assert f"by={entry['by']}" in line
    assert line.isprintable()


def test_entries_are_found_by_scope_key_digest_age_and_number(semel):
    for scope in ("orders", "parcels"):
        semel.succeed("order:1", scope=scope)
        semel.on_store("forget", scope, "order:1")
    assert [each["scope"] for each in entries(semel, "--scope", "parcels")] == ["parcels"]
    by_key = entries(semel, "--scope", "orders", "--key", "order:1")
    assert by_key == entries(semel, "--key-digest", DIGEST.upper())
    assert [each["key_digest"] for each in by_key] == [DIGEST]
    assert entries(semel, "--scope", "parcels", "--key-digest", DIGEST) == []
    said = semel.on_store("audit", "--limit", "1", "--json")
    assert [each["scope"] for each in said.data] == ["parcels"]
    assert "there are more than 1: see --limit" in said.err
    assert len(entries(semel, "--since", "1h")) == 2
    assert semel.on_store("audit", "--since", "1ms").out.strip() == (
        "the audit trail has no such entries"
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--key", "order:1"), "--key needs --scope"),
        (("--key-digest", "28ba"), "--key-digest takes a whole key_digest"),
        (("--key-digest", DIGEST, "--scope", "a", "--key", "b"), "not allowed with"),
        (("--since", "0"), "longer than 0"),
        (("--scope", "a", "--key", "\udcff"), "a scope or a key that is not printable"),
    ],
)
def test_filters_that_name_nothing_are_refused(semel_sqlite, words, complaint):
    said = semel_sqlite.on_store("audit", *words)
    assert (said.code, complaint in said.err) == (2, True)


def test_what_shows_no_result_has_no_entry(semel):
    semel.succeed("order:1")
    semel.run("order:2")
    for words in (
        ("list",),
        ("show", "orders", "order:1"),
        ("show", "orders", "order:2", "--result"),
        ("show", "orders", "nothing", "--result"),
        ("counts",),
        ("stuck",),
        ("forget", "orders", "nothing"),
    ):
        semel.on_store(*words)
    assert entries(semel) == []


def test_without_a_name_it_is_the_user(semel_sqlite, monkeypatch):
    semel_sqlite.on_store("purge")

    def no_user():
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", no_user)
    semel_sqlite.on_store("purge")
    monkeypatch.undo()
    unnamed, named = entries(semel_sqlite)
    assert named["by"].startswith(f"{getpass.getuser()}@")
    assert unnamed["by"].startswith(f"uid-{os.getuid()}@")


def test_the_trail_is_not_in_lists_and_counts_unless_it_is_named(semel):
    semel.succeed("order:1")
    semel.on_store("purge")
    assert [each["key"] for each in semel.on_store("list", "--json").data] == ["order:1"]
    assert semel.on_store("counts", "--json").data["succeeded"] == 1
    (entry,) = semel.on_store("list", "--scope", AUDIT_SCOPE, "--json").data
    for words in (
        ("forget", AUDIT_SCOPE, entry["key"]),
        ("forget", "--digest", AUDIT_SCOPE, entry["key_digest"]),
        ("show", AUDIT_SCOPE, entry["key"]),
        ("resolve", AUDIT_SCOPE, entry["key"], "--failed", "no"),
    ):
        said = semel.on_store(*words)
        assert (said.code, said.out) == (2, "")
        assert "reserved for the audit trail" in said.err
        assert "`semel audit` lists them" in said.err
    assert len(entries(semel)) == 1


def test_nothing_is_done_or_shown_where_the_entry_cannot_be_written(
    semel_sqlite, tmp_path, monkeypatch
):
    semel = semel_sqlite
    semel.succeed("order:1", "a secret result")
    semel.abandon("order:2")
    semel.abandon("order:3", hold=False)
    (tmp_path / "settled.py").write_text(
        "from semel.repair import Succeeded\nresolvers = {'orders': lambda record: Succeeded(1)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(sqlite3.connect(semel.url.removeprefix("sqlite:///"))) as database:
        database.execute(
            "CREATE TRIGGER no_entries BEFORE INSERT ON idempotent_record "
            f"WHEN NEW.biz_type = '{AUDIT_SCOPE}' BEGIN SELECT RAISE(ABORT, 'no entries'); END"
        )
    before = records(semel)
    for words in (
        ("resolve", "orders", "order:2", "--succeeded", '"1"', "--ttl", "3d"),
        ("forget", "orders", "order:1"),
        ("purge", "--abandoned-after", "1ms"),
        ("reconcile", "--resolvers", "settled:resolvers", "--older-than", "0"),
        ("show", "orders", "order:1", "--result"),
        ("list", "--result"),
    ):
        said = semel.on_store(*words)
        assert (said.code, said.out) == (1, ""), words
        assert REFUSED in said.err
        assert "no entries" in said.err
    assert records(semel) == before
    assert entries(semel) == []
    assert semel.on_store("show", "orders", "order:1").code == 0


def records(semel):
    with contextlib.closing(open_store(semel.url)) as store:
        return [replace(record, now=0.0) for record in store.scan().records]


READ_ONLY = """
import contextlib, json, os, sqlite3
from pathlib import Path
from semel.cli import main

def run(*words):
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return main(["--url", "sqlite:///semel.db", *words])

WORDS = [
    ["show", "orders", "order:1", "--result"],
    ["list", "--result"],
    ["forget", "orders", "order:1"],
    ["resolve", "orders", "order:2", "--succeeded", '"1"', "--ttl", "3d"],
    ["purge", "--abandoned-after", "1ms"],
    ["reconcile", "--resolvers", "settled:resolvers", "--older-than", "0"],
]
for words in (["show", "orders", "nothing", "--result"], ["resolve", "orders", "nothing", "--failed", "no"],
              ["forget", "orders", "nothing"], ["reconcile", "--resolvers", "settled:no_resolvers"]):
    run(*words)  # imports everything, which another user may not be able to read
reader = sqlite3.connect("semel.db")
reader.execute("SELECT count(*) FROM idempotent_record").fetchall()  # keeps the files of the log
for file in (*Path().glob("semel.db*"), Path()):
    file.chmod(0o555)
if os.getuid() == 0:  # whom file modes do not stop
    os.setgid(65534)
    os.setuid(65534)
codes = [run(*words) for words in WORDS]
print(json.dumps([run("show", "orders", "order:1"), codes]))
"""


def test_nothing_is_done_or_shown_where_the_file_is_read_only(semel_sqlite, capsys):
    with (
        tempfile.TemporaryDirectory() as name
    ):  # not below the folder of the tests, which is ours alone
        folder = Path(name)
        semel = type(semel_sqlite)(f"sqlite:///{folder / 'semel.db'}", capsys)
        semel.on_store("migrate")
        semel.succeed("order:1")
        semel.abandon("order:2")
        semel.abandon("order:3", hold=False)
        (folder / "settled.py").write_text(
            "from semel.repair import Succeeded\n"
            "resolvers, no_resolvers = {'orders': lambda record: Succeeded(1)}, {}\n"
        )
        before = records(semel)
        ran = subprocess.run(
            [sys.executable, "-c", READ_ONLY],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        for file in (folder, *folder.glob("semel.db*")):
            file.chmod(0o755)
        assert ran.stdout == "[0, [1, 1, 1, 1, 1, 1]]\n", ran.stderr
        assert ran.stderr.count(REFUSED) == 6
        assert ran.stderr.count("is read-only") == 6
        assert records(semel) == before
        assert entries(semel) == []
