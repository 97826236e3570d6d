"""Every line of "Security" in the web rules, on every stack."""

from __future__ import annotations

import contextlib
import pickle
import sqlite3

import pytest

from semel.core.stored_answers import StoredAnswer, pack_answer
from web.client import Connection, head
from web.handlers import SECRETS
from web.serve import STACKS
from web.workers import nothing_runs

BODY = b'{"amount": 5, "card": "4000-secret-card"}'
MIB = 1024 * 1024
STREAMING = [name for name, stack in STACKS.items() if not stack.reads_ahead]


def as_user(name):
    return [("X-User", name)]


@pytest.fixture
def database(folder):
    """The workers' database, to read and to damage."""
    path = folder.store("sqlite").removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, timeout=10)) as connection:
        yield connection


def dump(folder):
    """Every byte that the store has on disk."""
    path = folder.store("sqlite").removeprefix("sqlite:///")
    found = b""
    for end in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError), open(path + end, "rb") as file:  # noqa: PTH123
            found += file.read()
    return found


def test_no_tenant_gets_the_answer_of_another(on, key, run, folder):
    client = on("tenant")
    client.post("/pay", key=key, body=BODY, lines=as_user("ann"), run=run)
    eve = client.post("/pay", key=key, body=BODY, lines=as_user("eve"), run=run)
    assert not eve.replayed
    for tried in (f"ann/{key}", f"ann%2F{key}", f"../ann/{key}"):
        answer = client.post("/pay", key=tried, body=BODY, lines=as_user("eve"), run=run)
        assert not answer.replayed
    assert not on().post("/pay", key=f"ann/{key}", body=BODY, run=run).replayed
    assert folder.runs(run) == 6


def test_scopes_with_delimiters_in_them_do_not_collide(on, key, run, folder):
    users = ("a", "a/b", "a%2Fb", "a/", "/a", "@a", "%~a", "a b", "a%20b")
    answers = {
        on("tenant").post("/pay", key=f"b/{key}", body=BODY, lines=as_user(user), run=run).body
        for user in users
    }
    assert len(answers) == len(users)
    assert folder.runs(run) == len(users)


def test_a_revoked_user_gets_no_replay(on, key, run, folder):
    """Authorization is placed before the integration, so it runs before any replay."""
    user = f"ann-{key}"
    told = {"key": key, "body": BODY, "lines": as_user(user), "run": run}
    assert on("tenant").post("/pay", **told).status == 201
    assert on("tenant").post("/pay", **told).replayed
    folder.revoke(user)
    assert on("tenant").post("/pay", **told).status == 403


def test_no_secret_and_no_cookie_is_in_the_store(on, key, run, folder):
    assert on().post("/secret", key=key, body=BODY, run=run).status == 201
    stored = dump(folder)
    assert b'{"secret": false}' in stored
    for secret in (*SECRETS, "4000-secret-card"):
        assert secret.encode() not in stored


def test_a_refusal_does_not_poison_the_key(on, key, run, folder):
    lines = as_user(key)
    assert on("tenant").post("/pay", key=key, body=BODY, run=run).status == 401
    assert on("tenant").post("/status/401", key=key, body=BODY, lines=lines, run=run).status == 401
    assert on("tenant").post("/status/422", key=key, body=BODY, lines=lines, run=run).status == 422
    first = on("tenant").post("/pay", key=key, body=BODY, lines=lines, run=run)
    assert first.status == 201
    assert on("tenant").post("/pay", key=key, body=b"{}", lines=lines, run=run).status == 422
    assert on("tenant").post("/pay", key=key, body=BODY, lines=lines, run=run).body == first.body
    assert folder.runs(run) == 3


def test_a_key_of_a_megabyte_is_refused(on, worker, run, folder):
    before = worker.memory()
    for _ in range(5):
        connection = Connection(worker.port)
        with contextlib.suppress(OSError):  # a server may close before it has read so much
            lines = [("Host", "default.sqlite"), ("Connection", "close"), ("X-Run", run)]
            lines.append(("Idempotency-Key", b"k" * MIB))
            connection.send(head("POST", "/pay", lines))
        raw = connection.raw()
        assert raw == b"" or int(raw.split(b" ")[1]) in {400, 431}
        assert b"kkkk" not in raw
    assert folder.runs(run) == 0
    assert "kkkk" not in worker.log()
    assert worker.memory() - before < 32 * MIB
    assert on().post("/pay", run=run).status == 201


@pytest.mark.parametrize("stack", STREAMING)
def test_an_endless_body_is_refused_with_flat_memory(on, worker, key, run, folder):
    before, sent = worker.memory(), 0
    lines = [
        ("Host", "default.sqlite"),
        ("X-Run", run),
        ("Idempotency-Key", key),
        ("Transfer-Encoding", "chunked"),
    ]
    connection = Connection(worker.port).send(head("POST", "/pay", lines))
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with contextlib.suppress(OSError):  # refused: nobody reads any more
        while not connection.has_answer():
            connection.send(chunk)
            sent += len(chunk)
            assert sent < 64 * MIB, "somebody reads on and on"
    assert connection.status() in {413, None}
    connection.close()
    assert worker.memory() - before < 48 * MIB
    assert folder.runs(run) == 0
    assert on().post("/pay", key=key, run=run).status == 201


@pytest.mark.parametrize("inside", [b"\0", b"\n", b"\r", b"\r\n "])
def test_line_ends_and_nul_in_a_key_run_nothing(on, key, run, folder, inside):
    """Some servers refuse them, some fold the lines into one; the next header must not be lost."""
    told = {"key": key.encode() + inside + b"b", "body": BODY, "run": run}
    answer = on("tenant").post("/pay", lines=as_user("ann"), **told)
    assert answer.status in {400, 401}
    assert folder.runs(run) == 0


@pytest.mark.parametrize("profile", ["default", "small"])
def test_the_body_of_a_refused_request_is_not_taken_for_another(on, run, folder, profile):
    """Refused before its body was read, on a connection that stays open."""
    inner = head("POST", "/pay", [("Host", on().host), ("X-Run", run), ("Content-Length", "0")])
    body = inner.ljust(5000, b"x")
    lines = [
        ("Host", on(profile).host),
        ("Idempotency-Key", "bad key" if profile == "default" else "good-key"),
        ("Content-Length", str(len(body))),
    ]
    connection = Connection(on().port).send(head("POST", "/pay", lines) + body)
    connection.until(b"}")
    raw = connection.end().raw()
    assert raw.split(b" ")[1] in {b"400", b"413"}
    assert raw.count(b"HTTP/1.1 201") == 0
    assert folder.runs(run) == 0


def test_a_header_with_an_underscore_is_no_key(on, key, run, folder):
    smuggled = [("Idempotency_Key", key)]
    first, again = (on().post("/pay", lines=smuggled, body=BODY, run=run) for _ in range(2))
    assert first.body != again.body
    both = on().post("/pay", key=key, lines=[("Idempotency_Key", "other")], body=BODY, run=run)
    assert both.status == 201
    assert on().post("/pay", key=key, body=BODY, run=run).body == both.body
    assert folder.runs(run) == 3


def test_a_spoofed_marker_of_a_replay_changes_nothing(on, key, run, folder):
    spoofed = [("Idempotent-Replayed", "true")]
    first = on().post("/pay", key=key, body=BODY, lines=spoofed, run=run)
    assert not first.replayed
    assert on().post("/pay", key=key, body=BODY, lines=spoofed, run=run).body == first.body
    assert folder.runs(run) == 1


class Exploit:
    """Would write into the ledger if anybody loaded it."""

    def __init__(self, ledger, run):
        self._told = ledger, run

    def __reduce__(self):
        ledger, run = self._told
        return (exec, (f"open({str(ledger)!r}, 'a').write({run + chr(10)!r})",))


@pytest.mark.parametrize("kind", ["pickle", "garbage", "another version"])
def test_whatever_lies_in_the_store_runs_nothing(on, key, folder, database, kind):
    assert on().post("/pay", key=key, body=BODY, run=key).status == 201
    damage = {
        "pickle": pickle.dumps(Exploit(folder.root / "ledger", key)),
        "garbage": b"\xff\x00garbage",
        "another version": b"\x94\x63\xcc\xc8\x90\xc4\x00",
    }[kind]
    with database:
        changed = database.execute(
            "update idempotent_record set result_payload = ? where idem_key = ?", (damage, key)
        )
    assert changed.rowcount == 1
    answer = on().post("/pay", key=key, body=BODY, run=key)
    assert answer.status in {409, 500, 503}
    assert answer.code in {"result_unavailable", "record_unreadable", "idempotency_error"}
    assert folder.runs(key) == 1


def test_no_cookie_and_no_line_end_comes_out_of_the_store(on, key, folder, database):
    """Whatever wrote it there: another program can write to a store, too."""
    assert on().post("/pay", key=key, body=BODY, run=key).status == 201
    lines = (
        (b"set-cookie", b"session=attacker"),
        (b"x-a", b"1\r\nX-Injected: yes"),
        (b"x-b", b"kept"),
    )
    forged = pack_answer(StoredAnswer(201, lines, b"forged"))
    with database:
        database.execute(
            "update idempotent_record set result_payload = ? where idem_key = ?", (forged, key)
        )
    answer = on().post("/pay", key=key, body=BODY, run=key)
    assert (answer.status, answer.body, answer.header("x-b")) == (201, b"forged", "kept")
    assert (answer.header("set-cookie"), answer.header("x-injected")) == (None, None)
    assert folder.runs(key) == 1


def test_with_encryption_the_body_is_not_in_the_store(on, key, run, folder):
    first = on("encrypted").post("/echo", key=key, body=b"plain-text-of-" + key.encode(), run=run)
    assert b"plain-text-of-" + key.encode() not in dump(folder)
    again = on("encrypted").post("/echo", key=key, body=b"plain-text-of-" + key.encode(), run=run)
    assert again.replayed
    assert again.body == first.body


def test_no_request_of_these_left_a_record_behind_that_runs(on, records):
    nothing_runs(records)
