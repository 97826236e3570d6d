"""Requests that mean harm: they leave no record, and what is secret is said nowhere."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket

import msgspec
import pytest
from starlette.requests import Request

from semel import Idempotency
from semel.server import bodies
from semel.server.problems import Problem

OWNER = "0" * 24
JSON = {"Content-Type": "application/json"}
SECRETS = [
    "SECRET-key-1",
    "SECRET-payload-2",
    "SECRET-result-3",
    "SECRET-error-4",
    "SECRET-field-5",
]


def garbage(chance: random.Random) -> tuple[str, bytes, str]:
    """Make a request that no record may come of."""
    verb = chance.choice(["start", "renew", "finish", "fail", "keys", "send", "watch", "x"])
    kind = chance.choice(["application/json", "application/msgpack", "text/plain", "", "a/b; c"])
    good = {"scope": "s", "key": "k", "owner": OWNER, "payload": 1}
    bad = {
        "scope": ["", " ", "semel.audit", 5, None, "x" * 300],
        "key": ["", "\x00", [], "k" * 300, {}],
        "owner": ["", "z" * 24, 12, OWNER + "0"],
        "lease": [-1, 0, "1", 1e300],
        "wait": [-1, 99, None],
        "more": [1],
    }
    field = chance.choice(list(bad))
    fields = {**good, field: chance.choice(bad[field])}
    pack = chance.choice([msgspec.json.encode, msgspec.msgpack.encode])
    body = chance.choice(
        [
            pack(fields),
            chance.randbytes(chance.randrange(200)),
            pack(fields)[: chance.randrange(20)],
            b"[" * chance.randrange(5000),
            b"\xdf\xff\xff\xff\xff",
            pack([fields]),
        ]
    )
    return verb, body, kind


@pytest.mark.parametrize(
    "count", [pytest.param(2_000), pytest.param(10_000, marks=pytest.mark.more)]
)
def test_garbage_leaves_no_record(service, tmp_path, count):
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    running = service(url)
    chance = random.Random(29)
    connection = running.connection()
    statuses = set()
    for _ in range(count):
        verb, body, kind = garbage(chance)
        headers = {"Content-Type": kind} if kind else {}
        connection.request("POST", f"/v1/{verb}", body, headers)
        response = connection.getresponse()
        told = response.read()
        statuses.add(response.status)
        if response.status == 200:  # a body that was cut to `{}`, or renewals of nothing
            assert verb == "keys", (verb, body)
        else:
            assert json.loads(told)["status"] == response.status
    connection.close()
    assert max(statuses) < 500
    assert statuses >= {400, 404, 415}
    with Idempotency(url) as engine:
        assert list(engine.records()) == []
    assert "Traceback" not in running.log.read_text()


RAW = [
    b"\x00\x01\x02",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/start HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/start HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/start HTTP/1.1\r\nHost: a\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    b"GET http://evil.example/live HTTP/1.1\r\nHost: evil.example\r\n\r\n",
]


@pytest.mark.parametrize("sent", RAW)
def test_what_is_hardly_http_is_refused(centre, sent):
    with socket.create_connection(("127.0.0.1", centre.port), 60) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(65536):
            received += part
    assert b" 200 " not in received.partition(b"\r\n")[0]
    assert centre.get("/live").status == 200


def test_a_body_that_does_not_come_ends_with_an_answer(monkeypatch):
    monkeypatch.setattr(bodies, "BODY_WITHIN", 0.01)

    async def never():
        await asyncio.Event().wait()

    async def main():
        with pytest.raises(Problem) as told:
            await bodies.read_body(Request({"type": "http", "headers": []}, never))
        assert (told.value.code, told.value.field) == ("invalid_request", "body")
        assert told.value.close

    asyncio.run(main())


def test_a_body_without_end_is_read_no_further(centre):
    part = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", centre.port), 60) as connection:
        connection.sendall(
            b"POST /v1/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        sent = 0
        try:
            while sent < 1024 * 1024 * 1024:
                connection.sendall(part)
                sent += len(part)
        except OSError:
            pass
    assert sent < 64 * 1024 * 1024
    assert centre.get("/live").status == 200


def test_secrets_are_in_no_log_error_or_metric(service, tmp_path, make_token):
    shop = make_token("shop", ["use"], ["shop.*"])
    ops = make_token("ops", ["view"], ["*"])
    (tmp_path / "tokens.toml").write_text(shop.table + ops.table)
    (tmp_path / "semel.toml").write_text('[scopes."shop.held"]\nabandoned = "hold"\n')
    running = service(f"sqlite:///{tmp_path / 'semel.db'}", "--tokens", "tokens.toml")
    key, payload, result, error, field = SECRETS
    hidden = [*SECRETS, shop.text, ops.text, "semel_wrong-SECRET"]
    answers = []

    def post(verb, token=shop.text, /, **fields):
        answers.append(running.post(verb, token, **fields))
        return answers[-1].data

    for scope in ("shop.pay", "shop.held"):
        at = {"scope": scope, "key": key}
        owner = post("start", **at, payload={"card": payload})["owner"]
        post("start", **at, payload={"card": payload})
        post("start", **at, payload={"card": "another"})
        post("start", **at, fingerprint=payload)
        post("start", **at, **{field: 1})
        post("start", **at, wait=payload, lease=payload, by=[payload])
        post("start", **at, owner=payload)
        post("finish", **at, owner=OWNER, result=result)
        post("finish", **at, owner=owner, result=result, response={"status": 200, "body": result})
        post("finish", **at, owner=owner, response={"status": 1, "body": result})
        post("fail", **at, owner=owner, outcome=result)
        post("fail", **at, owner=owner, error={"type": error, "message": 5})
        post("renew", "semel_wrong-SECRET", **at, owner=owner)
        post("renew", None, **at, owner=owner)
        post("start", scope=f"other {key}", key=key)
        post("start", scope=scope, key=f"{key}\n")
        post("fail", **at, owner=owner, error={"type": "T", "message": error})
        post("start", **at, payload={"card": "another"})
    headers = {**JSON, "Authorization": f"Bearer {shop.text}"}
    bodies = (b'{"scope": "' + key.encode(), key.encode(), b'"' + payload.encode() + b'"')
    answers += [running.request("POST", "/v1/start", body, headers) for body in bodies]
    answers.append(running.get(f"/{key}", shop.text))
    answers.append(running.get(f"/v1/start?key={key}", shop.text))
    answers.append(running.get("/metrics", ops.text))
    text = answers[-1].body.decode()
    running.send_signal(signal.SIGHUP)
    running.wait_for_line("settings reloaded")
    log = running.log.read_text()
    said = [answer.body.decode() for answer in answers if answer.status != 200] + [text, log]
    for secret in hidden:
        for place in said:
            # The one name that is told back is that of a field, to the client that sent it.
            shown = place.replace(field, "") if '"field":' in place else place
            assert secret not in shown


def test_a_slow_reader_of_garbage_is_not_waited_for(centre):
    idle = [socket.create_connection(("127.0.0.1", centre.port), 60) for _ in range(50)]
    for each in idle:
        each.sendall(b"POST /v1/start HTTP/1.1\r\nHost: localhost\r\n")
    assert centre.get("/live").status == 200
    for each in idle:
        each.close()
