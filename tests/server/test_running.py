"""`semel serve`: where it listens, what a signal does, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import resource
import signal
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from types import SimpleNamespace

import pytest
import uvicorn

from semel.cli import main
from semel.errors import ConfigError
from semel.server import connections, running
from semel.server.running import RESERVED, Options, check_address, most_waiting

PATIENCE = 60.0
HEADERS = {"Content-Type": "application/json"}


def gauge(running, token=None):
    lines = running.get("/metrics", token).body.decode().splitlines()
    return int(next(line for line in lines if line.startswith("semel_service_waiting ")).split()[1])


def eventually(condition, what):
    end = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < end, what
        time.sleep(0.01)


# --- where it listens ------------------------------------------------------------------------------


def options(**changes):
    given = {
        "url": None,
        "store_prefix": None,
        "host": "127.0.0.1",
        "port": 0,
        "tokens": None,
        "tls_cert": None,
        "tls_key": None,
        "behind_proxy": False,
        "max_waiting": None,
        "max_waiting_per_token": None,
        "grace": 1.0,
    }
    return Options(**given | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host": "0.0.0.0"}, "without --tokens the service listens on this machine only"),  # noqa: S104
        ({"host": "::"}, "without --tokens"),
        ({"host": "centre.example", "behind_proxy": True}, "without --tokens"),
        ({"host": "10.0.0.1", "tokens": "t"}, "must not travel in plain text"),
        ({"tls_cert": "c"}, "go together"),
        ({"tls_key": "k"}, "go together"),
    ],
)
def test_where_strangers_could_listen_or_ask_it_does_not_start(changes, says):
    with pytest.raises(ConfigError, match=says):
        check_address(options(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"host": "localhost"},
        {"host": "127.9.9.9"},
        {"host": "::1"},
        {"host": "0.0.0.0", "tokens": "t", "behind_proxy": True},  # noqa: S104
        {"host": "0.0.0.0", "tokens": "t", "tls_cert": "c", "tls_key": "k"},  # noqa: S104
    ],
)
def test_where_it_may_listen(changes):
    check_address(options(**changes))


def test_waiting_starts_stay_below_the_file_limit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert most_waiting(None) == 256 - RESERVED
    assert most_waiting(100) == 100
    with pytest.raises(ConfigError, match=r"raise the limit \(ulimit -n"):
        most_waiting(300)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert most_waiting(None) == 1000
    assert most_waiting(5000) == 5000
    assert running.most_connections() == math.inf


def test_it_lives_when_more_starts_wait_than_it_may_open_files(service):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))  # a child inherits it
    try:
        running = service("memory://")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert running.post("start", scope="s", key="k", lease=3600).status == 200
    body = json.dumps({"scope": "s", "key": "k", "wait": 25}).encode()
    polls = []
    for _ in range(300):
        connection = running.connection()
        connection.request("POST", "/v1/start", body, HEADERS)
        polls.append(connection)
    eventually(lambda: gauge(running) == 256 - RESERVED, "as many starts to wait as may")
    assert running.get("/live").status == 200
    running.send_signal(signal.SIGTERM)
    codes = [json.loads(each.getresponse().read())["code"] for each in polls]
    assert codes.count("concurrent_request") == 256 - RESERVED
    assert codes.count("too_many_waiting") == 300 - codes.count("concurrent_request")
    for each in polls:
        each.close()
    assert running.process.wait(PATIENCE) == 0


def test_a_port_that_is_taken_is_said(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--store", "memory://", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["65536", "-1", "http", "9" * 5000])
def test_a_port_that_is_none(capsys, port):
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--port={port}"])
    assert ended.value.code == 2
    assert "must be a port" in capsys.readouterr().err


def test_a_service_cannot_be_switched_off(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMEL_DISABLED", "true")
    assert main(["serve"]) == 2
    assert "cannot run unprotected" in capsys.readouterr().err


def make_certificate(folder):
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*make, *names, *files], cwd=folder, check=True, capture_output=True)


def test_it_answers_over_tls(service, tmp_path, make_token):
    make_certificate(tmp_path)
    shop = make_token("shop", ["use"], ["*"])
    (tmp_path / "tokens.toml").write_text(shop.table)
    certificate = ("--tls-cert", "cert.pem", "--tls-key", "key.pem")
    running = service("memory://", "--host", "0.0.0.0", "--tokens", "tokens.toml", *certificate)  # noqa: S104
    assert running.url.startswith("https://0.0.0.0:")
    context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    connection = http.client.HTTPSConnection("localhost", running.port, context=context)
    connection.request(
        "POST", "/v1/keys", b"{}", {**HEADERS, "Authorization": f"Bearer {shop.text}"}
    )
    assert connection.getresponse().status == 200
    connection.close()


def test_a_certificate_that_is_none_is_said(capsys, tmp_path):
    (tmp_path / "cert.pem").write_text("nothing")
    path = str(tmp_path / "cert.pem")
    words = ["serve", "--store", "memory://", "--port", "0", "--tls-cert", path, "--tls-key", path]
    assert main(words) == 2
    assert "--tls-cert, --tls-key: cannot be used" in capsys.readouterr().err


def test_it_listens_on_ipv6_too(service):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        running = service("memory://", "--host", "::1")
    except RuntimeError as error:
        if "cannot listen" in str(error):
            pytest.skip("no IPv6 here")
        raise
    assert running.url.startswith("http://[::1]:")
    connection = http.client.HTTPConnection("::1", running.port, timeout=PATIENCE)
    connection.request("GET", "/live")
    assert connection.getresponse().status == 200
    connection.close()


def test_the_settings_name_the_store_and_the_prefix(service, tmp_path):
    (tmp_path / "other.toml").write_text('[scopes."pay.*"]\nlease = "7s"\n')
    running = service("memory://", "--config", "other.toml")
    assert running.post("start", scope="pay.card", key="k").data["lease"] == 7.0


def test_it_answers_soon_after_its_start(service, record_property):
    began = monotonic()
    running = service()
    assert running.post("start", scope="s", key="k").data["status"] == "run"
    record_property("seconds_to_the_first_answer", monotonic() - began)


# --- signals ---------------------------------------------------------------------------------------


def test_a_hangup_reads_rules_and_tokens_again(service, tmp_path, make_token):
    shop, new = (make_token(name, ["use"], ["*"]) for name in ("shop", "new"))
    rules, tokens = tmp_path / "semel.toml", tmp_path / "tokens.toml"
    rules.write_text('[scopes."pay.*"]\nlease = "7s"\n')
    tokens.write_text(shop.table)
    running = service("memory://", "--tokens", "tokens.toml")

    def lease(token, key):
        return running.post("start", token.text, scope="pay.card", key=key).data.get("lease")

    assert (lease(shop, "1"), lease(new, "1")) == (7.0, None)
    rules.write_text('[scopes."pay.*"]\nlease = "8s"\n')
    tokens.write_text(shop.table + new.table)
    running.send_signal(signal.SIGHUP)
    running.wait_for_line("settings reloaded: rules and tokens")
    assert (lease(shop, "2"), lease(new, "3")) == (8.0, 8.0)

    rules.write_text('[scopes."pay.*"]\nlease = "9s"\n')
    tokens.write_text("[tokens.shop]")
    running.send_signal(signal.SIGHUP)
    running.wait_for_line("settings not reloaded, the old ones stay")
    assert "tokens.shop.sha256" in running.log.read_text()
    assert (lease(shop, "4"), lease(new, "5")) == (8.0, 8.0)

    tokens.write_text(new.table)
    rules.write_text('prefix = "other:"\n[scopes."pay.*"]\nlease = "soon"\n')
    running.send_signal(signal.SIGHUP)
    running.wait_for_line('scopes."pay.*".lease')
    assert (lease(shop, "6"), lease(new, "7")) == (8.0, 8.0)

    rules.write_text('prefix = "other:"\n')
    running.send_signal(signal.SIGHUP)
    running.wait_for_line("restart the service to use them")
    eventually(lambda: lease(shop, "8") is None, "the old token to be unknown")
    assert lease(new, "9") == 30.0


def test_a_token_that_is_taken_back_gets_nothing_more(service, tmp_path, make_token):
    one, other = (make_token(name, ["use", "view"], ["*"]) for name in ("one", "other"))
    file = tmp_path / "tokens.toml"
    file.write_text(one.table + other.table)
    running = service(f"sqlite:///{tmp_path / 'semel.db'}", "--tokens", "tokens.toml")
    owner = "0" * 24
    running.post("start", one.text, scope="s", key="k", owner=owner)
    with ThreadPoolExecutor(2) as pool:
        fields = {"scope": "s", "key": "k", "wait": 25}
        taken = pool.submit(running.post, "start", one.text, **fields)
        kept = pool.submit(running.post, "start", other.text, **fields)
        eventually(lambda: gauge(running, other.text) == 2, "both to wait")
        file.write_text(other.table)
        running.send_signal(signal.SIGHUP)
        told = taken.result(PATIENCE)
        assert (told.status, told.data["code"]) == (409, "concurrent_request")
        assert running.post("start", one.text, **fields).status == 401
        assert running.post("fail", other.text, scope="s", key="k", owner=owner).status == 200
        assert kept.result(PATIENCE).data["attempt"] == 2


def test_a_hangup_without_tokens_reads_the_rules(service, tmp_path):
    running = service("memory://")
    (tmp_path / "semel.toml").write_text("[policy]\nlease = 11\n")
    running.send_signal(signal.SIGHUP)
    running.wait_for_line("settings reloaded: rules")
    assert running.post("start", scope="s", key="k").data["lease"] == 11.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_an_answer_for_every_start_that_waits(
    service, number, record_property
):
    running = service()
    assert running.post("start", scope="s", key="k", lease=3600).status == 200
    waiting = []
    body = json.dumps({"scope": "s", "key": "k", "wait": 25}).encode()
    for _ in range(100):
        connection = running.connection()
        connection.request("POST", "/v1/start", body, HEADERS)
        waiting.append(connection)
    eventually(lambda: gauge(running) == 100, "100 starts to wait")
    began = monotonic()
    running.send_signal(number)
    for connection in waiting:
        response = connection.getresponse()
        assert response.status == 409
        assert json.loads(response.read())["code"] == "concurrent_request"
        assert response.headers["Retry-After"] == "1"
        assert response.headers["Connection"] == "close"
        connection.close()
    assert running.process.wait(PATIENCE) == 0
    record_property("seconds_to_the_end", monotonic() - began)
    assert "Traceback" not in running.log.read_text()


def test_a_request_that_runs_is_finished_before_the_end(service):
    running = service()
    connection = running.connection()
    connection.putrequest("POST", "/v1/start")
    body = json.dumps({"scope": "s", "key": "k"}).encode()
    for name, value in {**HEADERS, "Content-Length": str(len(body))}.items():
        connection.putheader(name, value)
    connection.endheaders(body[:5])
    running.get("/live")  # by now the request has begun
    running.send_signal(signal.SIGTERM)

    def refused():
        try:
            socket.create_connection(("127.0.0.1", running.port), PATIENCE).close()
        except OSError:
            return True
        return False

    eventually(refused, "the service to listen no more")
    connection.send(body[5:])
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["status"]) == (200, "run")
    connection.close()
    assert running.process.wait(PATIENCE) == 0


def test_what_does_not_end_within_the_grace_is_ended(service):
    running = service("memory://", "--grace", "1s")
    connection = running.connection()
    connection.putrequest("POST", "/v1/start")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    running.get("/live")
    running.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE) == 0
    connection.close()


# --- connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST /v1/start HTTP/1.1\r\nHost: localhost\r\n"])
def test_connections_that_ask_nothing_leave_room_for_requests(service, sent):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        running = service()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    running.post("start", scope="s", key="k", lease=3600)
    waiting = running.connection()
    waiting.request("POST", "/v1/start", b'{"scope": "s", "key": "k", "wait": 25}', HEADERS)
    eventually(lambda: gauge(running) == 1, "a start to wait")
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            address = ("127.0.0.1", running.port)
            idle = stack.enter_context(socket.create_connection(address, PATIENCE))
            idle.sendall(sent)
        assert running.get("/live").status == 200
        assert running.post("start", scope="s", key="l").data["status"] == "run"
        assert gauge(running) == 1
    assert "out of system resource" not in running.log.read_text()
    running.send_signal(signal.SIGTERM)
    assert waiting.getresponse().status == 409
    waiting.close()


def test_a_head_without_an_end_is_read_no_further(service):
    running = service()
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n")
        size = 0
        with contextlib.suppress(ConnectionError):
            while size < 100_000_000:
                line = b"X-%d: %s\r\n" % (size, b"x" * 1000)
                connection.sendall(line * 10)
                size += 10 * len(line)
    assert size < 20_000_000
    assert running.get("/live").status == 200


def test_trailers_without_an_end_are_read_no_further(service):
    running = service()
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        )
        size = 0
        with contextlib.suppress(ConnectionError):
            while size < 200_000_000:
                connection.sendall(b"X-Y: %s\r\n" % (b"x" * 1000) * 100)
                size += 100_000
    assert size < 100_000_000
    assert running.get("/live").status == 200


async def test_a_connection_ends_whose_request_does_not_come(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_WITHIN", 0.05)
    http = SimpleNamespace(cycle=None, eof_received=lambda: None)
    for name in ("connection_made", "data_received", "connection_lost"):
        setattr(http, name, lambda *_: None)
    all_of_them = connections.Connections(lambda: http, 10)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(all_of_them, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"G")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()
    # Later requests of a connection, too; one that runs may take its time.
    http.cycle = SimpleNamespace(response_complete=False, more_body=False)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 0.2)
    http.cycle.response_complete = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 0.2)
    writer.write(b"G")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()
    server.close()


async def test_a_connection_with_a_request_that_runs_is_closed_for_no_other():
    told, closed = [], []

    def protocol():
        cycle = SimpleNamespace(response_complete=False, more_body=False)
        named = ("connection_made", "data_received", "connection_lost")
        more = ("pause_writing", "resume_writing")
        calls = {name: (lambda *_, name=name: told.append(name)) for name in (*named, *more)}
        return SimpleNamespace(cycle=cycle, **calls)

    all_of_them = connections.Connections(protocol, 2)
    opened = [all_of_them() for _ in range(4)]
    for each in opened[:3]:
        each.connection_made(SimpleNamespace(abort=lambda each=each: closed.append(each)))
    assert closed == []
    opened[1]._http.cycle.response_complete = True
    opened[3].connection_made(SimpleNamespace(abort=None))
    assert closed == [opened[1]]
    opened[1].data_received(b"late")  # it is not counted again
    opened[1].pause_writing()
    opened[1].resume_writing()
    assert told[-3:] == ["data_received", "pause_writing", "resume_writing"]
    for each in opened:
        each.connection_lost(None)
    assert not all_of_them._open


async def test_a_connection_ends_whose_handshake_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "HEAD_WITHIN", 0.05)
    make_certificate(tmp_path)
    files = {"ssl_certfile": tmp_path / "cert.pem", "ssl_keyfile": tmp_path / "key.pem"}
    server = running.Server(uvicorn.Config(None, lifespan="off", log_config=None, **files))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    listener, _ = running.listen("127.0.0.1", 0)
    with listener:
        await server.startup([listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        with contextlib.suppress(ConnectionError):
            # Before asyncio's own limit, which is 60 seconds.
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        server.servers[0].close()


def test_a_client_that_still_sends_gets_its_answer(service, tmp_path, make_token):
    (tmp_path / "tokens.toml").write_text(make_token("shop", ["use"], ["*"]).table)
    running = service(f"sqlite:///{tmp_path / 'semel.db'}", "--tokens", "tokens.toml")
    connection = running.connection()
    connection.putrequest("POST", "/v1/start")
    connection.putheader("Content-Length", str(1 << 20))
    connection.endheaders()
    for _ in range(16):
        connection.send(b"x" * (1 << 16))
    assert connection.getresponse().status == 401
    connection.close()


# --- a store that is down --------------------------------------------------------------------------


def test_without_its_store_it_lives_but_is_not_ready(service, tmp_path, make_token):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    shop = make_token("shop", ["use"], ["*"])
    boss = make_token("boss", ["use", "operate"], ["*"])
    (tmp_path / "tokens.toml").write_text(shop.table + boss.table)
    quickly = {"SEMEL_STORE_TIMEOUT": "1"}
    running = service(f"redis://127.0.0.1:{port}", "--tokens", "tokens.toml", env=quickly)
    assert running.get("/live").status == 200
    ready = running.get("/ready")
    assert (ready.status, ready.data["code"]) == (503, "store_error")
    for token, shown in ((shop, False), (boss, True)):
        answer = running.post("start", token.text, scope="s", key="the-secret-key")
        assert (answer.status, answer.data["code"]) == (503, "store_error")
        assert answer.headers["retry-after"] == "1"
        assert (str(port) in answer.data["detail"]) is shown
    assert "the-secret-key" not in running.log.read_text()
