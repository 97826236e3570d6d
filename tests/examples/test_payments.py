"""The payment API on each framework, started as its readers start it, asked over real sockets."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest

from servers.redis import wait_until

ROOT = Path(__file__).resolve().parents[2]
ORDER = {"account": "ann", "amount": 500, "currency": "EUR"}


class Api:
    """A running example."""

    def __init__(self, port, folder):
        self.port, self.folder = port, folder

    def send(self, method, path, body=None, key=None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        try:
            connection.request(
                method, path, json.dumps(body) if body is not None else None, headers
            )
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), dict(answer.getheaders())
        finally:
            connection.close()

    def charges(self):
        db = sqlite3.connect(self.folder / "payments.db")
        try:
            return db.execute("SELECT COUNT(*) FROM payments").fetchone()[0]
        finally:
            db.close()


@pytest.fixture(params=["on_fastapi", "on_flask", "on_django"])
def api(request, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        f"examples.payments.{request.param}",
        "--port",
        str(port),
        "--folder",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        try:

            def listening() -> bool:
                assert process.poll() is None, "the example ended by itself"
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) == 0

            wait_until(listening, "the example to listen", patience=30)
            yield Api(port, tmp_path)
        finally:
            process.terminate()


def test_a_payment_is_charged_once_however_often_it_is_sent(api):
    status, first, headers = api.send("POST", "/payments", ORDER, "order-1")
    assert status == 201
    assert first == {"number": 1, **ORDER, "state": "charged"}
    assert "Idempotent-Replayed" not in {name.title() for name in headers}

    status, again, headers = api.send("POST", "/payments", dict(reversed(ORDER.items())), "order-1")
    assert (status, again) == (201, first)
    assert {name.title(): value for name, value in headers.items()}["Idempotent-Replayed"] == "true"

    with ThreadPoolExecutor(8) as clients:
        sent = list(
            clients.map(lambda _: api.send("POST", "/payments", ORDER, "order-2")[0], range(8))
        )
    assert set(sent) <= {201, 409}
    assert api.send("POST", "/payments", ORDER, "order-2")[0] == 201
    assert api.charges() == 2

    assert api.send("POST", "/payments", ORDER)[0] == 400
    assert api.send("POST", "/payments", {**ORDER, "amount": 6}, "order-1")[0] == 422
    assert api.send("POST", "/payments", ORDER | {"currency": "XXX"}, "order-3")[0] in {409, 422}
    assert (
        api.send("POST", "/payments", ORDER, "order-3")[0] == 201
    )  # a refusal does not use up the key

    assert api.send("POST", "/payments/1/refund", {}, "refund-1")[1]["state"] == "refunded"
    assert api.send("POST", "/payments/1/refund", {}, "refund-1")[1]["state"] == "refunded"
    assert api.send("POST", "/payments/1/refund", {}, "refund-2")[0] == 409
    assert api.send("GET", "/payments/1")[1]["state"] == "refunded"
    assert api.send("GET", "/payments/99")[0] == 404
    assert api.send("POST", "/payments/1/refund", {}, "order-1")[0] == 422  # another route
