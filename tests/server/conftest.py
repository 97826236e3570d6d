"""The service as a process of its own, on a free port, and clients that speak to it over sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import semel

PATIENCE = 60.0
SEMEL = (sys.executable, "-m", "semel")


class Answer(NamedTuple):
    """A response, its body read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


class RunningService:
    """`semel serve` as a child process."""

    def __init__(
        self, folder: Path, url: str, arguments: tuple[str, ...], environ: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.log = folder / f"service-{time.monotonic_ns()}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SEMEL_")}
        environment["PYTHONPATH"] = str(Path(semel.__file__).parent.parent)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*SEMEL, "serve", "--store", url, "--port", "0", *arguments],
                cwd=folder,
                env={**environment, **environ},
                stdout=log,
                stderr=log,
            )
        line = self.wait_for_line("semel serves ")
        self.url = line.split("semel serves ")[1].strip()
        self.port = int(self.url.rpartition(":")[2])

    def wait_for_line(self, text: str) -> str:
        """Return the first line of the log that has this text."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in self.log.read_text().splitlines():
                if text in line:
                    return line
            if self.process.poll() is not None:
                raise RuntimeError(f"the service has ended: {self.log.read_text()[-3000:]}")
            time.sleep(0.01)
        raise TimeoutError(f"no line {text!r}: {self.log.read_text()[-3000:]}")

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            lines = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, lines, response.read())

    def post(self, verb: str, /, token: str | None = None, **fields: Any) -> Answer:
        """Send one verb as JSON: `post("start", scope=..., key=...)`."""
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return self.request("POST", f"/v1/{verb}", json.dumps(fields).encode(), headers)

    def get(self, path: str, token: str | None = None) -> Answer:
        return self.request(
            "GET", path, None, {} if token is None else {"Authorization": f"Bearer {token}"}
        )

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """End it with SIGTERM, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


Serve = Callable[..., RunningService]


RULES = """
[scopes."held*"]
abandoned = "hold"
[scopes.guard]
duplicate = "reject"
[scopes.small]
max_result_bytes = 20
[scopes."bounded.*"]
bounds = { lease = [5, 600] }
[scopes."bounded.short"]
bounds = { lease = [1, "2s"] }
lease = "1s"
[scopes."bounded.short.*"]
ttl = "1h"
[scopes.once]
max_attempts = 1
[scopes.newest]
mismatch = "replace"
[scopes.paid]
preset = "payment"
[scopes.impatient]
wait_timeout = "100ms"
[scopes.rejecting]
concurrent = "reject"
message = "one at a time, please"
[scopes.failing]
failure = "final"
[scopes.packed]
codec = "msgpack"
"""
"""A semel.toml with a scope for each rule that a test is about."""


@pytest.fixture(scope="module")
def centre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service on SQLite with `RULES`, for all tests of a module; each uses keys of its own."""
    folder = tmp_path_factory.mktemp("centre")
    (folder / "semel.toml").write_text(RULES)
    running = RunningService(folder, f"sqlite:///{folder / 'semel.db'}", (), {})
    yield running
    assert running.stop() == 0


@pytest.fixture
def service(tmp_path: Path, sqlite_url: str) -> Iterator[Serve]:
    """Starts services: `service(url, "--tokens", "tokens.toml", env={"SEMEL_TTL": "1h"})`.

    Without a URL the store is a new SQLite file. Relative paths are in `tmp_path`.
    """
    running: list[RunningService] = []

    def start(
        url: str = sqlite_url, *arguments: str, env: Mapping[str, str] | None = None
    ) -> RunningService:
        running.append(RunningService(tmp_path, url, arguments, env or {}))
        return running[-1]

    yield start
    for each in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.stop()
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


class MadeToken(NamedTuple):
    """A token, and its table for the tokens file."""

    text: str
    table: str


@pytest.fixture
def make_token() -> Callable[..., MadeToken]:
    """Makes tokens as `semel token new` does: `make_token("shop", ["use"], ["shop.*"], rate=5)`."""
    from semel.server.tokens import checked_table, new_token

    def make(name: str, rights: list[str], scopes: list[str], **more: Any) -> MadeToken:
        text, digest = new_token()
        fields = {"sha256": digest, "rights": rights, "scopes": scopes, **more}
        return MadeToken(text, checked_table(name, fields))

    return make
