"""The files of `deploy/` do what `docs/operate/service.md` says: each is checked, and run."""

from __future__ import annotations

import configparser
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.server.running import GRACE, KEEP_ALIVE, MOST_WAITING, RESERVED
from semel.server.wire import MOST_WAIT
from server.conftest import PATIENCE, Answer

INSTALLED = "/opt/semel/bin/"


@pytest.fixture(scope="module")
def deploy(project) -> Path:
    return project / "deploy"


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SEMEL_")}
    return {**clean, "PYTHONPATH": str(Path(semel.__file__).parent.parent), **more}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def request(
    port: int, path: str, body: Any = None, token: str = "", tls: ssl.SSLContext | None = None
) -> Answer:
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=tls)
    )
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())


def is_ready(port: int, tls: ssl.SSLContext | None = None) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return request(port, "/ready", tls=tls).status == 200
    return False


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def process(command: list[str], folder: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{time.monotonic_ns()}.log").open("wb") as log:
        running = subprocess.Popen(
            command, cwd=folder, env=environment(**env), stdout=log, stderr=log
        )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def configured(tmp_path, make_token) -> str:
    """A folder as /etc/semel is; returns the token."""
    (tmp_path / "semel.toml").write_text('[scopes."shop.*"]\nlease = "10s"\n')
    token = make_token("shop", ["use"], ["shop.*"])
    (tmp_path / "tokens.toml").write_text(token.table)
    return token.text


def start(port: int, token: str, **more: Any) -> Answer:
    return request(port, "/v1/start", {"scope": "shop.pay", **more}, token)


# --- systemd -------------------------------------------------------------------------------------


@pytest.fixture
def unit(deploy) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # which lowers names
    parser.read(deploy / "semel.service")
    return parser["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(deploy, tmp_path):
    there = f"{Path(sys.executable).parent}/"
    text = (deploy / "semel.service").read_text().replace(INSTALLED, there)
    (tmp_path / "semel.service").write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / "semel.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line for line in done.stderr.splitlines() if "semel.service" in line]
    assert found == []


def test_the_unit_runs_the_service_reloads_it_and_ends_it(unit, configured, tmp_path):
    program, *arguments = shlex.split(unit["ExecStart"])
    assert program == f"{INSTALLED}semel"
    port = free_port()
    command = [sys.executable, "-m", "semel", *arguments, "--port", str(port)]
    settings = {"SEMEL_ENV": "production", "SEMEL_URL": f"sqlite:///{tmp_path / 'semel.db'}"}
    with process(command, tmp_path, **settings) as running:
        until(lambda: is_ready(port))
        assert start(port, configured, key="one").data["lease"] == 10

        (tmp_path / "semel.toml").write_text('[scopes."shop.*"]\nlease = "20s"\n')
        reload = unit["ExecReload"].replace("$MAINPID", str(running.pid))
        subprocess.run(shlex.split(reload), check=True)
        keys = iter(range(1000))
        until(lambda: start(port, configured, key=str(next(keys))).data["lease"] == 20)

        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0


def test_the_unit_waits_for_requests_and_has_files_for_those_that_wait(unit):
    assert int(unit["TimeoutStopSec"]) > GRACE
    assert int(unit["LimitNOFILE"]) >= MOST_WAITING + RESERVED


# --- the container -------------------------------------------------------------------------------


def instructions(deploy: Path) -> list[tuple[str, str]]:
    text = (deploy / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def has_index(folder: Path) -> bool:
    """Whether pip can fetch packages here."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), "h11"]
    return subprocess.run(pip, capture_output=True, check=False).returncode == 0


def test_what_the_container_file_says_builds_and_runs_the_service(
    deploy, project, configured, tmp_path
):
    if not has_index(tmp_path):
        pytest.skip("there is no package index here")
    opt = tmp_path / "opt"
    found = instructions(deploy)
    named = dict(found)
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(project)], check=True)
    building = environment(
        PATH=f"{Path(sys.base_prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        PIP_CONSTRAINT=str(project / "constraints.txt"),
        PIP_FIND_LINKS=f"{os.environ.get('PIP_FIND_LINKS', '')} {tmp_path}",
    )
    del building["PYTHONPATH"]
    for name, step in found:
        if name == "RUN":
            command = step.replace("/opt/semel", str(opt))
            subprocess.run(
                ["/bin/sh", "-euc", command],
                cwd=tmp_path,
                env=building,
                check=True,
                stdout=subprocess.DEVNULL,
            )

    def program(name: str) -> list[str]:
        text = named[name].removeprefix("CMD ") if name == "HEALTHCHECK" else named[name]
        return [part.replace("/opt/semel", str(opt)) for part in json.loads(text)]

    port = free_port()
    command = [*program("ENTRYPOINT"), *program("CMD"), "--port", str(port)]
    environ, _, value = named["ENV"].partition("=")
    settings = {environ: value, "SEMEL_URL": f"sqlite:///{tmp_path / 'semel.db'}", "PYTHONPATH": ""}
    with process(command, tmp_path, **settings) as running:
        until(lambda: is_ready(port))
        assert start(port, configured, key="one").data["status"] == "run"
        assert named["EXPOSE"] == "8600"
        check = [part.replace(":8600/", f":{port}/") for part in program("HEALTHCHECK")]
        subprocess.run(check, check=True)
        running.send_signal(signal.Signals[named["STOPSIGNAL"]])
        assert running.wait(PATIENCE) == 0
    assert subprocess.run(check, check=False, stderr=subprocess.DEVNULL).returncode != 0


# --- the balancer --------------------------------------------------------------------------------


def certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1, and its key, in one file as HAProxy wants it."""
    key, cert, both = folder / "key.pem", folder / "cert.pem", folder / "semel.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=semel", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    return both


needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None or shutil.which("openssl") is None,
    reason="there is no HAProxy, or no openssl, here",
)


@needs_haproxy
def test_two_instances_behind_haproxy_go_on_when_one_is_killed(
    deploy, configured, redis_url, tmp_path
):
    pem, ports, front = certificate(tmp_path), [free_port(), free_port()], free_port()
    text = (deploy / "haproxy.cfg").read_text()
    for shown, real in {
        "bind :8443": f"bind 127.0.0.1:{front}",
        "/etc/haproxy/semel.pem": str(pem),
        "10.0.0.11:8600": f"127.0.0.1:{ports[0]}",
        "10.0.0.12:8600": f"127.0.0.1:{ports[1]}",
    }.items():
        assert text.count(shown) == 1
        text = text.replace(shown, real)
    config = tmp_path / "haproxy.cfg"
    config.write_text(text)
    checked = subprocess.run(
        ["haproxy", "-c", "-f", str(config)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr

    tls = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    serve = [sys.executable, "-m", "semel", "serve", "--tokens", "tokens.toml", "--behind-proxy"]
    with contextlib.ExitStack() as stack:
        one, two = (
            stack.enter_context(
                process([*serve, "--port", str(port)], tmp_path, SEMEL_URL=redis_url)
            )
            for port in ports
        )
        until(lambda: all(map(is_ready, ports)))
        stack.enter_context(process(["haproxy", "-db", "-f", str(config)], tmp_path))
        until(lambda: is_ready(front, tls))

        def ask(verb: str, **fields: Any) -> Answer:
            """A client's request, sent again while no instance answers it."""
            body = {"scope": "shop.pay", **fields}
            end = time.monotonic() + PATIENCE
            while True:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    answer = request(front, f"/v1/{verb}", body, configured, tls)
                    if answer.status not in {502, 503, 504}:
                        return answer
                assert time.monotonic() < end
                time.sleep(0.05)

        owners = {f"k{n}": f"{n:024x}" for n in range(6)}
        for key, owner in owners.items():
            assert ask("start", key=key, owner=owner).data["attempt"] == 1
        one.kill()
        for key, owner in owners.items():  # what one began, two goes on with
            assert ask("renew", key=key, owner=owner).data["status"] == "renewed"
            assert ask("start", key=key, owner=owner).data["attempt"] == 1
            assert ask("start", key=key).status == 409
            assert ask("finish", key=key, owner=owner, result=key).data == {"status": "stored"}
            assert ask("start", key=key).data["result"] == key
        two.send_signal(signal.SIGTERM)
        assert two.wait(PATIENCE) == 0
        assert request(front, "/ready", tls=tls).status == 503


def test_the_balancer_waits_longer_than_a_start_may(deploy):
    text = (deploy / "haproxy.cfg").read_text()
    seconds = {name: int(n) for name, n in re.findall(r"timeout (\S+)\s+(\d+)s", text)}
    assert min(seconds["client"], seconds["server"]) > MOST_WAIT
    assert seconds["http-keep-alive"] < KEEP_ALIVE
