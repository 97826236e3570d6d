"""Tokens: their file, what each right and scope permits, and rates."""

from __future__ import annotations

import json
import re

import pytest

from semel import Idempotency
from semel.cli import main
from semel.core.run_info import read
from semel.errors import ConfigError
from semel.server.problems import Problem
from semel.server.tokens import ANYONE, RIGHTS, Caller, Tokens, checked_table, new_token

SUM = "0" * 64
OWNER = "0" * 24


# --- the file --------------------------------------------------------------------------------------


def load(tmp_path, text, before=None):
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    return Tokens.load(path, before)


def table(**fields):
    good = {"sha256": SUM, "rights": ["use"], "scopes": ["*"]} | fields
    return "[tokens.shop]\n" + "".join(
        f"{name} = {json.dumps(value)}\n" for name, value in good.items() if value is not None
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is not valid TOML"),
        ("a = " + "[" * 5000, "is not valid TOML"),
        ("[token.shop]", "token: is not known"),
        ("tokens = 1", "tokens: must be a table"),
        ("tokens.shop = 1", "tokens.shop: must be a table"),
        ('[tokens."a b"]\nsha256 = 1', "tokens.a b: a name has"),
        (table(sha256="secret"), r"tokens.shop.sha256: must be the 64 hex digits"),
        (table(sha256=None), r"tokens.shop.sha256: must be"),
        (table(sha256=SUM.replace("0", "A")), r"tokens.shop.sha256: must be"),
        (table(rights=[]), r"tokens.shop.rights: must be a list of some of use, store"),
        (table(rights=["admin"]), r"tokens.shop.rights: must be"),
        (table(rights=[["use"]]), r"tokens.shop.rights: must be"),
        (table(rights="use"), r"tokens.shop.rights: must be"),
        (table(scopes=[]), r"tokens.shop.scopes: must be"),
        (table(scopes="*"), r"tokens.shop.scopes: must be"),
        (table(scopes=["a b"]), r"tokens.shop.scopes: must be"),
        (table(scopes=[1]), r"tokens.shop.scopes: must be"),
        (table(rate=0), r"tokens.shop.rate: must be"),
        (table(rate=True), r"tokens.shop.rate: must be"),
        (table(rate="5"), r"tokens.shop.rate: must be"),
        (table(scope=["*"]), r"tokens.shop.scope: is not known; did you mean scopes"),
        (
            table() + table().replace("shop", "twin"),
            r"tokens.twin.sha256: is the one of tokens.shop",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says) as error:
        load(tmp_path, text)
    assert "secret" not in str(error.value)


def test_all_mistakes_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, table(rate=0, scopes=[]))
    assert {"rate", "scopes"} <= set(re.findall(r"shop\.(\w+)", str(error.value)))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"tokens\.toml: cannot be read"):
        Tokens.load(tmp_path / "tokens.toml")


def test_a_token_is_known_by_its_sum_alone(tmp_path):
    text, digest = new_token()
    file = checked_table("shop", {"sha256": digest, "rights": ["use"], "scopes": ["a.*"]})
    assert text not in file
    tokens = load(tmp_path, file)
    for header in (f"Bearer {text}", f"bearer  {text}"):
        assert tokens.authenticate({"authorization": header}).name == "shop"
    for header in ("", text, "Bearer", f"Basic {text}", f"Bearer {text}x", f"Bearer {digest}", "ü"):
        with pytest.raises(Problem) as refused:
            tokens.authenticate({"authorization": header})
        assert refused.value.code == "unauthorized"
    with pytest.raises(Problem):
        tokens.authenticate({})


def test_a_new_file_keeps_what_is_known_of_unchanged_tokens(tmp_path):
    text, digest = new_token()
    fields = {"sha256": digest, "rights": ["use"], "scopes": ["*"], "rate": 1}
    header = {"authorization": f"Bearer {text}"}
    first = load(tmp_path, checked_table("shop", fields))
    same = load(tmp_path, checked_table("shop", fields), first)
    assert same.authenticate(header) is first.authenticate(header)
    other = load(tmp_path, checked_table("shop", fields | {"rate": 2}), first)
    assert other.authenticate(header) is not first.authenticate(header)


def test_the_command_makes_a_token(capsys, tmp_path):
    words = ["token", "new", "shop", "--scope", "shop.*", "--scope", "x", "--right", "use"]
    assert main([*words, "--right", "view", "--rate", "5"]) == 0
    printed = capsys.readouterr()
    token = printed.err.split(": ")[-1].strip()
    assert token.startswith("semel_")
    assert token not in printed.out
    caller = load(tmp_path, printed.out).authenticate({"authorization": f"Bearer {token}"})
    assert (caller.name, caller.rights, caller.scopes, caller.rate) == (
        "shop",
        {"use", "view"},
        {"shop.*", "x"},
        5,
    )


def test_the_command_refuses_what_the_file_could_not_have(capsys):
    assert main(["token", "new", "a b", "--scope", "x y"]) == 2
    assert "name" in capsys.readouterr().err


def test_the_command_gives_the_right_to_use(capsys):
    assert main(["token", "new", "shop", "--scope", "*"]) == 0
    assert 'rights = ["use"]' in capsys.readouterr().out


# --- what a caller may -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "permitted"),
    [("a.b", True), ("a.", True), ("x", True), ("xy", False), ("a", False), (None, False)],
)
def test_scopes_are_exact_or_patterns(scope, permitted):
    caller = Caller("shop", frozenset({"use"}), frozenset({"a.*", "x"}))
    assert caller.may("use", scope) is permitted
    assert not caller.may("view", scope)


def test_all_scopes_need_the_pattern_for_all():
    assert Caller("ops", frozenset({"view"}), frozenset({"*"})).may("view", None)
    assert all(ANYONE.may(right, None) for right in RIGHTS)
    assert ANYONE.may_operate


def test_a_rate_lets_a_seconds_worth_through_and_then_says_when(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("semel.server.tokens.time.monotonic", lambda: now)
    caller = Caller("shop", rate=10)
    caller.count(10)
    with pytest.raises(Problem) as refused:
        caller.count()
    assert refused.value.code == "rate_limited"
    assert refused.value.retry_after == pytest.approx(0.1)
    now += 0.2
    caller.count(2)
    now += 0.9
    with pytest.raises(Problem) as refused:
        caller.count(100)  # a batch needs a second's worth ...
    assert refused.value.retry_after == pytest.approx(0.1)
    now += 0.2
    caller.count(100)
    with pytest.raises(Problem) as refused:
        caller.count()  # ... and the next request waits for the rest
    assert refused.value.retry_after == pytest.approx(9.1)
    now += 1000
    caller.count(10)


def test_a_slow_rate_lets_one_through(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("semel.server.tokens.time.monotonic", lambda: now)
    caller = Caller("shop", rate=0.1)
    caller.count()
    with pytest.raises(Problem) as refused:
        caller.count()
    assert refused.value.retry_after == pytest.approx(10)
    now += 10
    caller.count()


# --- over sockets ----------------------------------------------------------------------------------

VERBS = {
    "start": {"scope": "shop.pay", "key": "k", "owner": "f" * 24},
    "renew": {"scope": "shop.pay", "key": "k", "owner": OWNER},
    "finish": {"scope": "shop.pay", "key": "k", "owner": OWNER, "result": "stolen"},
    "fail": {"scope": "shop.pay", "key": "k", "owner": OWNER},
}


def test_another_tenants_token_is_forbidden_and_changes_nothing(service, tmp_path, make_token):
    shop = make_token("shop", ["use"], ["shop.*"])
    others = [
        make_token("billing", ["use", "store", "view", "operate"], ["billing.*", "shop", "shop.p"]),
        make_token("reader", ["view", "store", "operate"], ["*"]),
    ]
    tables = [each.table for each in (shop, *others)]
    (tmp_path / "tokens.toml").write_text("".join(tables))
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    running = service(url, "--tokens", "tokens.toml")
    mine = {**VERBS["start"], "owner": OWNER, "by": "web-1"}
    assert running.post("start", shop.text, **mine).data["status"] == "run"
    with Idempotency(url) as engine:
        before = engine.peek("k", scope="shop.pay")
        assert read(before.run_info).by == "web-1@shop"
        for token in others:
            for verb, fields in VERBS.items():
                answer = running.post(verb, token.text, **fields)
                assert (answer.status, answer.data["code"]) == (403, "forbidden")
        assert running.post("keys", others[1].text).status == 403
        for verb, fields in (*VERBS.items(), ("keys", {})):
            for token in (None, "semel_wrong"):
                answer = running.post(verb, token, **fields)
                assert (answer.status, answer.data["code"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
        after = engine.peek("k", scope="shop.pay")
        assert (after.owner, after.lease_until) == (before.owner, before.lease_until)
        assert len(list(engine.records())) == 1
    assert running.post("keys", shop.text).status == 200
    assert running.post("finish", shop.text, **VERBS["finish"]).status == 200


def test_metrics_need_the_right_to_view_and_the_rest_no_token(service, tmp_path, make_token):
    ops = make_token("prometheus", ["view"], ["*"])
    shop = make_token("shop", ["use", "view"], ["shop.*"])
    (tmp_path / "tokens.toml").write_text(ops.table + shop.table)
    running = service("memory://", "--tokens", "tokens.toml")
    assert running.get("/metrics", ops.text).status == 200
    assert running.get("/metrics", shop.text).status == 403
    assert running.get("/metrics").status == 401
    for path in ("/", "/live", "/ready", "/openapi.json"):
        assert running.get(path).status == 200
    assert running.request("GET", "/live", None, {"Host": "semel.example"}).status == 200


def test_a_rate_counts_starts_and_no_renewals(service, tmp_path, make_token):
    slow = make_token("slow", ["use"], ["*"], rate=0.001)
    (tmp_path / "tokens.toml").write_text(slow.table)
    running = service("memory://", "--tokens", "tokens.toml")
    owner = running.post("start", slow.text, scope="s", key="k").data["owner"]
    for _ in range(3):
        answer = running.post("start", slow.text, scope="s", key="k2")
        assert (answer.status, answer.data["code"]) == (429, "rate_limited")
        assert int(answer.headers["retry-after"]) >= 1
        fields = {"scope": "s", "key": "k", "owner": owner}
        assert running.post("renew", slow.text, **fields).status == 200
    assert running.post("finish", slow.text, **fields, result=1).status == 200


def test_run_info_names_the_token_where_the_client_names_no_one(service, tmp_path, make_token):
    shop = make_token("shop", ["use"], ["*"])
    (tmp_path / "tokens.toml").write_text(shop.table)
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    running = service(url, "--tokens", "tokens.toml")
    running.post("start", shop.text, scope="s", key="k")
    with Idempotency(url) as engine:
        assert read(engine.peek("k", scope="s").run_info).by == "shop"
