"""find: from what a client or a log line has to the record."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import closing

import pytest

from cli.conftest import OWNER
from cli.test_howto import BLOCK, PAGE
from semel import Idempotency
from semel.cli.finding import Wanted
from semel.core import run_info
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.errors import ConfigError, PayloadMismatch, about
from semel.http import problem_response
from semel.http.problems import INSTANCE
from semel.http.requests import stored_key
from semel.stores.urls import open_store

CLIENTS = "9f1c6f1e-7d0b-4a53-8c80-6f4c2a1f0d11"
LONG = "k" * 255
PAY, GRPC = "POST /pay", "/shop.Payments/Pay"

STORED = {
    "own": ("orders", "order:1"),
    "plain": ("http", CLIENTS),
    "ann's": ("http", stored_key(CLIENTS, "ann")),
    "ann's, by route": ("http", stored_key(CLIENTS, "ann", PAY)),
    "by route": ("http", stored_key(CLIENTS, None, PAY)),
    "by method": ("grpc", stored_key(CLIENTS, "a/b", GRPC)),
    "spaced": ("http", stored_key("my key/1%", "ann")),
    "long": ("http", stored_key(LONG, "ann")),
    "long, by route": ("http", stored_key(LONG, "ann", PAY)),
    "other": ("http", stored_key(f"x{CLIENTS}", "ann")),
    "other, too": ("orders", f"{CLIENTS}:item"),
}


@pytest.fixture
def filled(semel):
    store = open_store(semel.url)
    for scope, key in STORED.values():
        store.put(Identity(scope, key), Encoded("json/1", b'"ch_1"'), 600.0, owner=bytes(12))
    store.close()
    return semel


def found(said):
    names = {stored: name for name, stored in STORED.items()}
    return {names[record["scope"], record["key"]] for record in said.data}


OF_CLIENTS = {"plain", "ann's", "ann's, by route", "by route", "by method"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("order:1",), {"own"}),
        ((f"ann/{CLIENTS}",), {"ann's"}),
        ((CLIENTS,), OF_CLIENTS),
        ((f'"{CLIENTS}"',), OF_CLIENTS),
        ((f'"{CLIENTS}";v=1',), OF_CLIENTS),
        ((CLIENTS, "--scope", "grpc"), {"by method"}),
        ((CLIENTS, "--tenant", "ann"), {"ann's", "ann's, by route"}),
        ((CLIENTS, "--tenant", "a/b"), {"by method"}),
        ((CLIENTS, "--tenant", "bob"), set()),
        ((CLIENTS, "--route", PAY), {"ann's, by route", "by route"}),
        ((CLIENTS, "--tenant", "ann", "--route", PAY), {"ann's, by route"}),
        ((CLIENTS, "--route", GRPC), {"by method"}),
        (("my key/1%",), {"spaced"}),
        (("ann/my%20key%2F1%25",), {"spaced"}),
        (("ann/my key/1%",), {"spaced"}),
        ((f"a/b/@{GRPC}/{CLIENTS}",), {"by method"}),
        ((LONG,), set()),
        ((LONG, "--tenant", "ann"), {"long"}),
        ((LONG, "--tenant", "ann", "--route", PAY), {"long, by route"}),
        ((STORED["long"][1],), {"long"}),
        (("order",), set()),
    ],
)
def test_a_key_is_found_as_its_client_has_it(filled, words, expected):
    said = filled.on_store("find", *words, "--json")
    assert found(said) == expected
    assert said.code == (0 if expected else 1)


@pytest.mark.parametrize("name", ["ann's, by route", "long"])
def test_a_digest_leads_to_its_record(filled, name):
    identity = Identity(*STORED[name])
    error = about(PayloadMismatch(), identity)
    instance = json.loads(problem_response(error).body)["instance"]
    digest = identity.key_digest
    for text in (digest, digest.upper(), instance, instance.upper()):
        assert found(filled.on_store("find", text, "--json")) == {name}
    assert filled.on_store("find", instance, "--scope", "orders").code == 1
    shown = filled.on_store("show", "--digest", identity.scope, instance, "--json").data
    assert shown["key"] == identity.key


def test_a_whole_problem_or_log_line_leads_to_its_record(filled, caplog):
    identity = Identity(*STORED["ann's"])
    digest = identity.key_digest
    error = about(PayloadMismatch(), identity)
    problem = problem_response(error).body.decode()
    shown = filled.on_store("show", identity.scope, identity.key).out
    with caplog.at_level("INFO", "semel"), Idempotency(filled.url) as engine:
        engine.execute(identity.key, lambda: 1, scope=identity.scope)
    (line,) = caplog.messages
    assert line.startswith("Replayed "), line
    for text in (
        problem,
        json.dumps(json.loads(problem), indent=2),
        line,
        f"2026-11-17 16:44:09 semel INFO {line}\n",
        f"key_digest={digest.upper()}",
        json.dumps({"key_digest": digest}),
        f"{digest} is named twice: key_digest={digest} {INSTANCE}{digest}",
        shown,
    ):
        assert found(filled.on_store("find", text, "--json")) == {"ann's"}, text
        said = filled.on_store("show", "--digest", "http", text, "--json")
        assert said.data["key"] == identity.key


def test_a_text_with_two_digests_is_refused(filled):
    text = " ".join(f"key_digest={Identity(*STORED[name]).key_digest}" for name in ("own", "long"))
    for words in (("find", text), ("show", "--digest", "http", text)):
        said = filled.on_store(*words)
        assert (said.code, said.out) == (2, "")
        assert "the text has 2 key digests" in said.err


@pytest.mark.parametrize("server", ["postgres_url", "mysql_url"])
def test_records_are_found_on_every_server(semel_sqlite, request, server):
    url = request.getfixturevalue(server)
    identity = Identity(*STORED["ann's, by route"])
    with closing(open_store(url)) as store:
        store.migrate()
        store.put(identity, Encoded("json/1", b"1"), 600.0, owner=OWNER)
    for text in (CLIENTS, identity.key, identity.key_digest):
        assert found(semel_sqlite("--url", url, "find", text, "--json")) == {"ann's, by route"}
    assert semel_sqlite("--url", url, "find", "nothing").code == 1


def test_a_key_that_looks_like_a_digest_is_found(semel):
    key = "0123456789abcdef0123456789abcdef"
    semel.succeed(key)
    assert semel.on_store("find", key).lines[1][1] == key
    assert semel.on_store("find", f"urn:semel:key:{key}").code == 1


def test_the_table_is_that_of_list(filled):
    said = filled.on_store("find", "order:1")
    assert said.lines[0] == filled.on_store("list").lines[0]
    assert said.lines[1][:3] == ["orders", "order:1", "succeeded"]
    assert "ch_1" not in said.out


def test_nothing_found_says_what_may_help(filled):
    said = filled.on_store("find", LONG)
    assert (said.code, said.out) == (1, "")
    assert "none of 11 records has it; 2 of them have keys that were too long" in said.err
    assert "with its --tenant and --route" in said.err
    said = filled.on_store("find", LONG, "--tenant", "bob")
    assert "with its --route" in said.err
    said = filled.on_store("find", LONG, "--tenant", "bob", "--route", "x")
    assert said.err == (
        "none of 11 records has it; a record that has expired is gone\nfind compares whole keys\n"
    )
    said = filled.on_store("find", "x", "--scope", "orders")
    assert said.err == (
        "none of 2 records has it; a record that has expired is gone\nfind compares whole keys\n"
    )


def test_keys_that_contain_the_text_are_counted_and_named(filled):
    said = filled.on_store("find", "order:")
    assert (said.code, said.out) == (1, "")
    assert said.err.endswith("\nfind compares whole keys; 1 key contains it: order:1\n")
    said = filled.on_store("find", "my key")
    assert said.err.endswith("; 1 key contains it: ann/my%20key%2F1%25\n"), "it is stored escaped"
    said = filled.on_store("find", CLIENTS[:-1])
    assert "find compares whole keys; 7 keys contain it: " in said.err
    assert said.err.count(CLIENTS) == 3
    assert said.err.endswith(", ...\n")
    said = filled.on_store("find", f"urn:semel:key:{32 * '0'}")
    assert said.err == "none of 11 records has it; a record that has expired is gone\n"


def test_many_are_cut(filled):
    said = filled.on_store("find", CLIENTS, "--limit", "3")
    assert len(said.lines) == 4
    assert "there are more than 3: see --limit" in said.err
    assert filled.on_store("find", CLIENTS, "--limit", "5").err == ""


@pytest.mark.parametrize("page", [1, 2, 500])
def test_every_page_is_read(filled, monkeypatch, page):
    monkeypatch.setattr("semel.cli.finding.PAGE", page)
    assert found(filled.on_store("find", CLIENTS, "--json")) == OF_CLIENTS


def test_a_search_that_is_interrupted_shows_what_it_has(filled, monkeypatch):
    import semel.cli.finding

    def interrupted(*args, **filters):
        yield from list(semel.cli.store.read_pages(*args, **filters))
        raise KeyboardInterrupt

    monkeypatch.setattr("semel.cli.finding.read_pages", interrupted)
    said = filled.on_store("find", "order:1")
    assert (said.code, said.lines[1][1]) == (130, "order:1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\nb",
        "urn:semel:key:28ba",
        "urn:semel:key:",
        "\udc80",
        f'{{"instance": "{INSTANCE}28ba"}}',
    ],
)
def test_what_can_mean_no_record_is_refused(semel_sqlite, text):
    with pytest.raises(ConfigError):
        Wanted(text)
    if text.isascii():
        assert semel_sqlite.on_store("find", text).code == 2


# --- the page on repair ---------------------------------------------------------------------------

DURATION = re.compile(r"-?(\d+[dhm]\d+[hms]|\d+\.\d\ds)")
TABLES = ("semel find", "semel stuck", "semel list")


def shown_by_the_page():
    """The commands that show tables, each with the output that the page shows below it."""
    for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        for text in block.split("$ ")[1:]:
            command, _, output = text.partition("\n")
            if command.startswith(TABLES):
                yield command, output


BILL = b'{"$":"dataclass","t":"shop:Bill","v":{"total":{"$":"decimal","v":"4.20"}}}'


@pytest.fixture
def of_the_page(semel_sqlite):
    """The records that the page talks about."""
    digested = "808ab18c5e0c8319f9edbe085b0ead34"
    names = (Identity("orders.pay", f"order:{number}") for number in range(45, 100))
    abandoned = [
        (Identity("http", stored_key("order-1", "ann")), 728.0, True, "web-1:4711", "TimeoutError"),
        (Identity("orders.pay", "order:42"), 160.0, True, "web-2:815", None),
        (Identity("mails.send", "mail:7"), 400.0, False, "web-2:815", None),
    ]
    done = [
        next(identity for identity in names if identity.key_digest == digested),
        Identity("http", stored_key("order-2", "ann", PAY)),
    ]
    with closing(open_store(semel_sqlite.url)) as store:
        for identity, ago, hold, by, why in abandoned:
            info = run_info.build(by, 60.0, "json/1", why)
            store.claim(ClaimRequest(identity, OWNER, None, 60.0, 60.0, hold=hold, run_info=info))
            store.renew(identity, OWNER, -ago)
        for identity in done:
            store.put(identity, Encoded("json/1", b"1"), 86_400.0, owner=OWNER)
        store.put(
            Identity("orders.bill", "order:50"), Encoded("json/1", BILL), 3 * 86_400.0, owner=OWNER
        )
    return semel_sqlite


def words_of(table):
    """The cells of a table, whatever its times are."""
    return [DURATION.sub("TIME", line).split() for line in table.splitlines()]


@pytest.mark.parametrize(("command", "output"), [*shown_by_the_page()])
def test_a_table_of_the_page_is_what_is_shown(of_the_page, command, output):
    said = of_the_page.on_store(*shlex.split(command, comments=True)[1:])
    assert said.code == (1 if "stuck" in command else 0)
    if output:
        assert words_of(said.out) == words_of(output)
    elif "find" in command:
        assert len(said.lines) == 2


def test_the_page_shows_a_table_of_each_kind():
    shown = [command for command, output in shown_by_the_page() if output]
    assert {command.split()[1] for command in shown} == {"find", "list", "stuck"}
