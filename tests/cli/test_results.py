"""resolve with a result of every kind, and --result: what is given, and what is shown."""

from __future__ import annotations

import io
import json
import shlex
import sys
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace

import pytest

from cli.conftest import OWNER
from semel import Idempotency, Policy, State
from semel.core.codec import omitted
from semel.core.encryption import EncryptedCodec
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.core.run_info import build
from semel.core.stored_answers import (
    StoredAnswer,
    StoredMessage,
    pack_answer,
    pack_message,
    unpack_answer,
    unpack_message,
)
from semel.stores.urls import open_store

PAID = {"$": "decimal", "v": "4.20"}


@dataclass
class Receipt:
    charge: str
    paid: Decimal


PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


def leave(semel, codec, key="r-1", *, scope="http"):
    """Leave a held attempt of a program whose policy keeps outcomes for 3 days."""
    identity, info = Identity(scope, key), build("web-1:4711", 3 * 86400, codec)
    with closing(open_store(semel.url)) as store:
        claim = ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=True, run_info=info)
        store.claim(claim)
        store.renew(identity, OWNER, 0.0)


def put(semel, codec, data, key="r-1", *, scope="http"):
    with closing(open_store(semel.url)) as store:
        store.put(Identity(scope, key), Encoded(codec, data), 3600.0, owner=OWNER)


def answer_of(semel, key="r-1"):
    record = semel.get(key, scope="http")
    assert record.outcome.codec == "http/1"
    return unpack_answer(record.outcome.data)


# --- resolve ----------------------------------------------------------------------------------


def test_resolve_gives_an_http_request_its_answer(semel):
    leave(semel, "http/1")
    said = semel.on_store(
        *("resolve", "http", "r-1", "--status", "201", "--header", "Location: /o/7"),
        *("--header", "Content-Type:application/json", "--body", '{"id": 7}'),
    )
    assert (said.code, said.out.splitlines()[0]) == (
        0,
        "resolved as succeeded: retries get HTTP 201 and 9 bytes",
    )
    assert answer_of(semel) == StoredAnswer(
        201, ((b"location", b"/o/7"), (b"content-type", b"application/json")), b'{"id": 7}'
    )
    assert semel.get("r-1", scope="http").remaining == pytest.approx(3 * 86400, abs=60)
    assert "3d0h" in said.out


def test_an_answer_needs_no_header_and_no_body(semel_sqlite):
    leave(semel_sqlite, "http/1")
    assert semel_sqlite.on_store("resolve", "http", "r-1", "--status", "204").code == 0
    assert answer_of(semel_sqlite) == StoredAnswer(204, (), b"")


def test_a_body_may_come_from_a_file(semel_sqlite, tmp_path):
    leave(semel_sqlite, "http/1")
    file = tmp_path / "receipt.png"
    file.write_bytes(PNG)
    words = ("--status", "200", "--header", "Content-Type: image/png", "--body", f"@{file}")
    assert semel_sqlite.on_store("resolve", "http", "r-1", *words).code == 0
    assert answer_of(semel_sqlite).body == PNG


def test_a_body_may_come_from_the_standard_input(semel_sqlite, monkeypatch):
    leave(semel_sqlite, "http/1")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"piped")))
    words = ("--status", "200", "--header", "Content-Type: text/plain", "--body", "@-")
    said = semel_sqlite.on_store("resolve", "http", "r-1", *words)
    assert said.code == 0
    assert answer_of(semel_sqlite).body == b"piped"


def test_a_standard_input_that_is_closed_is_no_body(semel_sqlite, monkeypatch):
    leave(semel_sqlite, "http/1")
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it after <&-
    said = semel_sqlite.on_store("resolve", "http", "r-1", "--status", "200", "--body", "@-")
    assert (said.code, said.err) == (2, "semel: the standard input is closed\n")
    assert semel_sqlite.get("r-1", scope="http").outcome is None


def test_a_body_is_stored_as_the_shell_gave_it(semel_sqlite):
    leave(semel_sqlite, "http/1")
    body = "caf\udce9 é"  # how Python reads a byte that is no UTF-8
    words = ("--status", "200", "--header", "Content-Type: text/plain", "--body", body)
    assert semel_sqlite.on_store("resolve", "http", "r-1", *words).code == 0
    assert answer_of(semel_sqlite).body == b"caf\xe9 \xc3\xa9"


def test_a_body_without_its_type_is_refused_unless_that_is_said(semel):
    """Without its type clients cannot read it, and it could not be resolved again."""
    leave(semel, "http/1")
    before = semel.get("r-1", scope="http")
    words = ("resolve", "http", "r-1", "--status", "200", "--header", "X-A: 1", "--body", "{}")
    said = semel.on_store(*words)
    assert (said.code, said.out) == (2, "")
    assert "--header 'Content-Type: application/json'" in said.err
    assert "--header 'Content-Type:'" in said.err
    after = semel.get("r-1", scope="http")
    assert (after.owner, after.outcome) == (before.owner, None)
    assert semel.on_store(*words, "--header", "content-type:").code == 0
    assert answer_of(semel) == StoredAnswer(200, ((b"x-a", b"1"),), b"{}")


@pytest.mark.parametrize("status", ["500", "503", "599"])
def test_an_answer_of_a_failure_is_refused(semel_sqlite, status):
    leave(semel_sqlite, "http/1")
    said = semel_sqlite.on_store("resolve", "http", "r-1", "--status", status)
    assert (said.code, said.out) == (2, "")
    assert f"status {status} says that the request failed" in said.err
    assert "use --failed TEXT, with --retryable" in said.err
    assert semel_sqlite.get("r-1", scope="http").abandoned


RECEIPT = {"$": "dataclass", "t": f"{__name__}:Receipt", "v": {"charge": "ch_1", "paid": PAID}}


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_what_show_and_list_show_is_what_succeeded_takes(semel, codec):
    """The type is that which other callers of the scope get: not a dict that looks like it."""
    policy = Policy(abandoned="hold", codec=codec)
    receipt = Receipt("ch_1", Decimal("4.20"))

    def charge():
        raise ConnectionError("the reply got lost")

    with Idempotency(semel.url, policy=policy) as engine:
        engine.execute("o-1", lambda: (receipt,), scope="payments")
        with pytest.raises(ConnectionError):
            engine.execute("o-2", charge, scope="payments")
    tree = {"$": "tuple", "v": [RECEIPT]}
    text = shown(semel, "o-1", scope="payments")
    assert json.loads(text) == tree
    (line,) = semel.on_store("list", "--state", "succeeded", "--result").lines[1:]
    assert json.dumps(tree, separators=(",", ":")).startswith("".join(line[7:]).removesuffix("..."))
    given = text.replace("ch_1", "ch_2")
    said = semel.on_store("resolve", "payments", "o-2", "--succeeded", given)
    assert said.code == 0, said.err
    with Idempotency(semel.url, policy=policy) as engine:
        again = engine.execute("o-2", charge, scope="payments")
    assert again == (Receipt("ch_2", Decimal("4.20")),)
    assert type(again[0].paid) is Decimal


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('{"$": "shop.Receipt", "charge": "ch_1"}', "the tag 'shop.Receipt' is not known"),
        ('{"$": "decimal", "v": 4.20}', "'decimal' is never written as float"),
        ("[" * 100_000 + "]" * 100_000, "--succeeded takes the result as JSON"),
    ],
    ids=lambda text: text[:30],
)
def test_a_result_that_no_codec_writes_is_refused(semel_sqlite, given, reason):
    leave(semel_sqlite, "json/1")
    before = semel_sqlite.get("r-1", scope="http")
    said = semel_sqlite.on_store("resolve", "http", "r-1", "--succeeded", given)
    assert (said.code, said.out) == (2, "")
    assert reason in said.err
    after = semel_sqlite.get("r-1", scope="http")
    assert (after.owner, after.outcome) == (before.owner, None)


def test_resolve_gives_a_grpc_call_its_message(semel, tmp_path):
    leave(semel, "grpc/1", scope="grpc")
    file = tmp_path / "order.bin"
    file.write_bytes(b"\x08\x07")
    said = semel.on_store("resolve", "grpc", "r-1", "--message", f"@{file}")
    assert (said.code, said.out.splitlines()[0]) == (
        0,
        "resolved as succeeded: retries get a message of 2 bytes",
    )
    record = semel.get("r-1", scope="grpc")
    assert unpack_message(record.outcome.data) == StoredMessage(0, message=b"\x08\x07")
    assert record.remaining == pytest.approx(3 * 86400, abs=60)


@pytest.mark.parametrize(
    ("codec", "words", "instead"),
    [
        ("http/1", ("--succeeded", "{}"), "--status, --header and --body"),
        ("http/1", ("--message", "@FILE"), "--status, --header and --body"),
        ("grpc/1", ("--succeeded", "{}"), "--message @FILE"),
        ("grpc/1", ("--status", "200"), "--message @FILE"),
        ("json/1", ("--status", "200"), "--succeeded JSON"),
        ("json/1", ("--message", "@FILE"), "--succeeded JSON"),
        ("aesgcm/1+json/1", ("--succeeded", "{}"), "'aesgcm/1+json/1', which is not known here"),
        ("aesgcm/1+json/1", ("--status", "200"), "'aesgcm/1+json/1', which is not known here"),
    ],
)
def test_what_the_codec_does_not_read_is_refused_before_anything_is_stored(
    semel, tmp_path, codec, words, instead
):
    leave(semel, codec)
    before = semel.get("r-1", scope="http")
    file = tmp_path / "message"
    file.write_bytes(b"")
    said = semel.on_store(
        "resolve", "http", "r-1", *(word.replace("@FILE", f"@{file}") for word in words)
    )
    assert said.code == 2
    assert codec in said.err
    assert instead in said.err
    after = semel.get("r-1", scope="http")
    assert (after.owner, after.fence, after.outcome) == (before.owner, before.fence, None)
    said = semel.on_store("resolve", "http", "r-1", "--failed", "never sent", "--retryable")
    assert said.code == 0, "a failure needs no codec"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--succeeded", "1", "--body", "x"), "--header and --body go with --status"),
        (("--failed", "no", "--header", "A: b"), "--header and --body go with --status"),
        (("--status", "200", "--retryable"), "--retryable goes with --failed"),
        (("--status", "200", "--succeeded", "1"), "not allowed with"),
        (("--status", "created"), "whole number"),
        (("--status", "1000"), "200 to 599"),
        (("--status", "401"), "never stored"),
        (("--status", "200", "--header", "Location"), "--header takes a whole line"),
        (("--status", "200", "--header", "Set-Cookie: a=b"), "set-cookie is never stored"),
        (("--status", "200", "--body", "@missing"), "--body: missing cannot be read: No such file"),
        (("--status", "200", "--body", "@"), "--body: no file is named behind the @"),
        (("--status", "200", "--body", "@/"), "--body: / cannot be read: Is a directory"),
        (("--status", "200", "--body", "@/dev/zero"), "/dev/zero has more than 100,000,000 bytes"),
        (("--succeeded", "[" * 10_000), "--succeeded takes the result as JSON"),
        (("--message", "@missing"), "--message: missing cannot be read"),
        (("--message", "0807"), "--message @FILE"),
    ],
)
def test_a_wrong_answer_is_refused_before_anything_is_touched(semel_sqlite, words, reason):
    leave(semel_sqlite, "grpc/1" if words[0] == "--message" else "http/1")
    before = semel_sqlite.get("r-1", scope="http")
    said = semel_sqlite.on_store("resolve", "http", "r-1", *words)
    assert said.code == 2
    assert reason in said.err
    assert semel_sqlite.get("r-1", scope="http").owner == before.owner


def test_the_policy_of_the_attempt_counts_for_more_than_the_settings(semel, tmp_path):
    settings = tmp_path / "semel.toml"
    settings.write_text('[scopes.orders]\nttl = "1h"\nfailed_ttl = "10m"\n')
    for key, words, kept in (
        ("a", ("--succeeded", "1"), 3 * 86400),
        ("b", ("--failed", "no"), 3 * 86400),
        ("c", ("--failed", "no", "--retryable"), 600),
        ("d", ("--succeeded", "1", "--ttl", "2d"), 2 * 86400),
    ):
        leave(semel, "json/1", key, scope="orders")
        said = semel.on_store("--config", str(settings), "resolve", "orders", key, *words)
        assert said.code == 0, said.err
        assert semel.get(key).remaining == pytest.approx(kept, abs=60), key


def test_a_payment_of_a_program_is_kept_as_its_policy_says(semel):
    def charge():
        raise ConnectionError("the reply got lost")

    with Idempotency(semel.url) as engine, pytest.raises(ConnectionError):
        engine.execute("o-1", charge, scope="payments", payload=1, policy=Policy.payment())
    said = semel.on_store("resolve", "payments", "o-1", "--succeeded", '"ch_1"')
    assert said.code == 0, said.err
    record = semel.get("o-1", scope="payments")
    assert record.state is State.SUCCEEDED
    assert record.remaining == pytest.approx(3 * 86400, abs=60)


@pytest.mark.parametrize(
    ("codec", "given"),
    [
        ("http/1", "--status 201 --header 'Content-Type: text/plain' --body made"),
        ("grpc/1", "--message @FILE"),
        ("json/1", "--succeeded 7"),
        ("msgpack/1", "--succeeded 7"),
    ],
)
def test_show_has_the_command_that_decides(semel, tmp_path, codec, given):
    leave(semel, codec, "ann/k$1")
    said = semel.on_store("show", "http", "ann/k$1").out.splitlines()[-1]
    command, _, failed = said.removeprefix("to decide: semel ").partition("; or ")
    assert failed == "--failed TEXT, with --retryable if the next call may run"
    *words, _ = shlex.split(command)[:4]
    options = {word for word in shlex.split(command) if word.startswith("--")}
    assert options == {word for word in shlex.split(given) if word.startswith("--")}
    file = tmp_path / "message"
    file.write_bytes(b"")
    more = (word.replace("@FILE", f"@{file}") for word in shlex.split(given))
    assert semel.on_store(*words, *more).code == 0


def test_the_command_that_decides_can_be_typed_whatever_the_key_is(semel_sqlite):
    leave(semel_sqlite, "json/1", "-k1")
    said = semel_sqlite.on_store("show", "http", "--", "-k1").out.splitlines()[-1]
    command = said.removeprefix("to decide: semel ").partition(" --succeeded")[0]
    assert command == f"resolve --digest http {Identity('http', '-k1').key_digest}"
    assert semel_sqlite.on_store(*shlex.split(command), "--succeeded", "7").code == 0
    assert semel_sqlite.get("-k1", scope="http").state is State.SUCCEEDED


def test_show_has_the_command_for_records_that_say_little(semel):
    semel.abandon("o-2")
    said = semel.on_store("show", "orders", "o-2").out
    assert "not held" not in said
    assert "to decide: semel resolve orders o-2 --ttl TIME --succeeded JSON; or --failed" in said
    semel.abandon("o-1", hold=False)
    said = semel.on_store("show", "orders", "o-1").out
    assert "\nnot held: the next call runs it again, and nothing has to be decided\n" in said
    assert "to decide before that: semel resolve orders o-1 --succeeded JSON; or --failed" in said
    leave(semel, "aesgcm/1+json/1")
    said = semel.on_store("show", "http", "r-1").out
    assert "to decide: semel resolve http r-1 --failed TEXT, " in said
    assert "its codec is known to its program alone" in said
    for key in ("running", "done"):
        (semel.run if key == "running" else semel.succeed)(key)
        assert "to decide" not in semel.on_store("show", "orders", key).out
    assert semel.on_store("show", "http", "r-1", "--json").data["held"] is True


# --- show -------------------------------------------------------------------------------------


def shown(semel, key="r-1", *, scope="http"):
    """What stands below the fields of a record."""
    said = semel.on_store("show", scope, key, "--result")
    assert said.code == 0
    return said.out.split("\n\n", 1)[1]


def listed(semel):
    (record,) = semel.on_store("list", "--result").lines[1:]
    return " ".join(record[7:])


def data(semel):
    (record,) = semel.on_store("list", "--json", "--result").data
    return record["result"]


def test_an_http_answer_is_shown_with_headers_and_body(semel):
    lines = ((b"location", b"/o/7"), (b"content-type", b"application/json"))
    put(semel, "http/1", pack_answer(StoredAnswer(201, lines, b'{"id": 7}')))
    assert shown(semel) == (
        'HTTP 201, 9 bytes\nlocation: /o/7\ncontent-type: application/json\n\n{"id": 7}\n'
    )
    assert listed(semel) == "HTTP 201, 9 bytes"
    assert data(semel) == {
        "status": 201,
        "headers": [["location", "/o/7"], ["content-type", "application/json"]],
        "body": '{"id": 7}',
    }


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        (b"text/plain; charset=latin-1", "café".encode("latin-1"), "café"),
        (b'text/plain; Charset="UTF-16"', "café".encode("utf-16"), "café"),
        (b"text/plain", "café".encode(), "café"),
        (b"", b"line\n\tline", "line\n\tline"),
    ],
)
def test_a_text_is_decoded_as_its_type_says(semel_sqlite, content_type, body, text):
    put(
        semel_sqlite,
        "http/1",
        pack_answer(StoredAnswer(200, ((b"content-type", content_type),), body)),
    )
    assert shown(semel_sqlite).endswith(f"\n\n{text}\n")
    assert data(semel_sqlite)["body"] == text


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (b"image/png", PNG),
        (b"text/plain", b"\xff\xfe"),
        (b"text/plain; charset=no-such-one", b"abc"),
        (b"text/plain; charset=undefined", b"abc"),  # a codec of Python that refuses any text
        (b"text/plain; charset=utf-7", b"+2AA-"),  # half a character
        (b"text/plain; charset=punycode", b"abc"),  # for names of hosts, and slow
        (b"text/plain", b"\x1b[2J"),
    ],
)
def test_what_is_no_text_is_shown_as_its_size_and_first_bytes(semel_sqlite, content_type, body):
    put(
        semel_sqlite,
        "http/1",
        pack_answer(StoredAnswer(200, ((b"content-type", content_type),), body)),
    )
    text = shown(semel_sqlite)
    more = " ..." if len(body) > 32 else ""
    assert text.startswith(f"HTTP 200, {len(body)} bytes\n")
    assert text.endswith(f"\n\n{body[:32].hex(' ')}{more}\n")
    assert data(semel_sqlite)["body"] == {"size": len(body), "hex": body.hex()}


def test_a_long_body_is_cut_for_a_person_only(semel_sqlite):
    body = b"0123456789" * 2000
    put(semel_sqlite, "http/1", pack_answer(StoredAnswer(200, (), body)))
    text = shown(semel_sqlite)
    assert len(text) < 11_000
    assert text.endswith("89... (20000 characters; --json shows all)\n")
    assert data(semel_sqlite)["body"] == body.decode()


def test_an_answer_without_a_body_is_shown(semel_sqlite):
    put(semel_sqlite, "http/1", pack_answer(StoredAnswer(204, (), b"")))
    assert shown(semel_sqlite) == "HTTP 204, 0 bytes\n\n\n"
    put(semel_sqlite, "http/1", pack_answer(StoredAnswer(200, (), None)), "r-2")
    assert shown(semel_sqlite, "r-2") == "HTTP 200, too large to be kept\n"
    shown_as = semel_sqlite.on_store("show", "http", "r-2", "--result", "--json").data
    assert shown_as["result"] == {"status": 200, "headers": [], "body": None}


def test_a_terminal_gets_no_control_characters(semel_sqlite):
    hostile = ((b"x-hostile", b"\x1b]0;title\x07\x9b2J"),)
    put(semel_sqlite, "http/1", pack_answer(StoredAnswer(200, hostile, "\x9b2J".encode())))
    text = shown(semel_sqlite)
    assert "\\x1b]0;title\\x07\\x9b2J" in text
    assert text.endswith("\n\n\\x9b2J\n")
    put(semel_sqlite, "json/1", '"a\x9bb"'.encode(), "r-2", scope="orders")
    assert shown(semel_sqlite, "r-2", scope="orders") == '"a\\u009bb"\n'


def test_json_for_a_terminal_has_no_control_characters_and_says_the_same(semel_sqlite):
    hostile = "é\x9b2J\x7f\u202e\u200b\U000e0041"
    put(semel_sqlite, "json/1", json.dumps(hostile).encode())
    said = semel_sqlite.on_store("show", "http", "r-1", "--result", "--json")
    assert "é\\u009b2J\\u007f\\u202e\\u200b\\udb40\\udc41" in said.out
    assert said.data["result"] == hostile


def test_a_number_that_python_does_not_write_in_decimal_is_shown(semel_sqlite):
    tree = {"$": "int", "v": f"-0x{'f' * 4000}"}
    put(semel_sqlite, "json/1", json.dumps(tree).encode())
    assert json.loads(shown(semel_sqlite)) == tree
    assert data(semel_sqlite) == tree


@pytest.mark.parametrize(
    ("stored", "text", "line", "for_programs"),
    [
        (
            StoredMessage(0, message=b"\x08\x07"),
            "gRPC OK, 2 bytes\n\n08 07\n",
            "gRPC OK, 2 bytes",
            {"code": "OK", "details": "", "message": {"size": 2, "hex": "0807"}},
        ),
        (
            StoredMessage(0),
            "gRPC OK, too large to be kept\n",
            "gRPC OK, too large to be kept",
            {"code": "OK", "details": "", "message": None},
        ),
        (
            StoredMessage(5, "no such\norder"),
            "gRPC NOT_FOUND: no such\norder\n",
            "gRPC NOT_FOUND: no such order",
            {"code": "NOT_FOUND", "details": "no such\norder", "message": None},
        ),
    ],
    ids=repr,
)
def test_a_grpc_answer_is_shown(semel_sqlite, stored, text, line, for_programs):
    put(semel_sqlite, "grpc/1", pack_message(stored))
    assert shown(semel_sqlite) == text
    assert listed(semel_sqlite) == line
    assert data(semel_sqlite) == for_programs


def test_a_value_is_shown_as_a_tree_without_its_classes(semel):
    tree = {"$": "dataclass", "t": "shop:Receipt", "v": {"paid": {"$": "decimal", "v": "9.90"}}}
    put(semel, "json/1", json.dumps(tree).encode())
    assert json.loads(shown(semel)) == tree
    assert listed(semel) == json.dumps(tree, separators=(",", ":"))
    assert data(semel) == tree


def test_a_long_value_is_cut_in_a_list(semel_sqlite):
    put(semel_sqlite, "json/1", json.dumps("x" * 500).encode())
    assert listed(semel_sqlite) == f'"{"x" * 99}...'
    assert shown(semel_sqlite) == f'"{"x" * 500}"\n'


def test_encrypted_results_and_other_codecs_are_shown_as_bytes(semel):
    codec = EncryptedCodec(keys={"1": b"0123456789abcdef"}, primary="1")
    with Idempotency(semel.url, policy=Policy(codec=codec)) as engine:
        engine.execute("r-1", lambda: "secret", scope="http")
    stored = semel.get("r-1", scope="http").outcome.data
    text = shown(semel)
    summary = f"{len(stored)} bytes of codec aesgcm/1+json/1, which cannot be read here"
    assert text == f"{summary}\n\n{stored[:32].hex(' ')} ...\n"
    assert listed(semel) == summary
    assert data(semel) == {"codec": codec.name, "size": len(stored), "hex": stored.hex()}


def test_omitted_results_and_failures_are_told_in_words(semel):
    with closing(open_store(semel.url)) as store:
        store.put(Identity("orders", "o-1"), omitted("it has 5 GB"), 60.0, owner=OWNER)
    assert shown(semel, "o-1", scope="orders") == "no result is available: it has 5 GB\n"
    semel.fail("o-2", final=True)
    assert shown(semel, "o-2", scope="orders") == "ValueError: declined\n"
    semel.abandon("o-3")
    assert shown(semel, "o-3", scope="orders").startswith(
        "no result: the operation has not ended\n"
    )
    assert "RESULT" in semel.on_store("list", "--result").lines[0]
    told = {
        each["key"]: each["result"] for each in semel.on_store("list", "--json", "--result").data
    }
    assert told == {
        "o-1": "no result is available: it has 5 GB",
        "o-2": "ValueError: declined",
        "o-3": None,
    }
    in_list = {line[1]: " ".join(line[7:]) for line in semel.on_store("list", "--result").lines[1:]}
    assert in_list == {**told, "o-3": "-"}
