"""Real uWSGI, as it comes: it forks its workers in C, and Python does not see the fork.

| fault | expected |
|---|---|
| 53 a fork that Python does not see | owner ids, timers, leases and connections of its own; no double run, leases renewed |

See also tests/faults/test_forks.py, where C code forks without a server.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.facade import wait_until
from semel import Idempotency
from semel.core.records import Record
from servers.redis import HOST, free_port

APP = Path(__file__).with_name("workers") / "uwsgi_app.py"
ORDERS = [f"order-{number}" for number in range(5)]


@contextlib.contextmanager
def uwsgi(url: str, ledger: Path, folder: Path, abandoned: str) -> Iterator[int]:
    """Start a master with two workers; the application is loaded before they are forked."""
    port = free_port()
    command = [
        Path(sys.executable).with_name("uwsgi"),
        *("--http-socket", f"{HOST}:{port}", "--master", "--processes", "2", "--enable-threads"),
        *("--wsgi-file", APP, "--callable", "app", "--die-on-term", "--need-app"),
    ]
    paths = os.pathsep.join((str(APP.parent), *sys.path))
    settings = {"SEMEL_URL": url, "LEDGER": str(ledger), "FOLDER": str(folder)}
    environment = {**os.environ, **settings, "ABANDONED": abandoned, "PYTHONPATH": paths}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: "spawned uWSGI worker 2" in (folder / "log").read_text())
        yield port
    finally:
        for each in ORDERS:  # no worker waits any longer, whatever has failed
            (folder / each).touch()
        server.terminate()
        server.wait(60)


def post(port: int, key: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
        connection.request("POST", "/pay", headers={"Idempotency-Key": key, "Content-Length": "0"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def check_that_it_is_renewed(url: str) -> None:
    def running() -> Record:
        return next(record for record in outside.records() if not record.outcome)

    with Idempotency(url) as outside:
        began = running()
        wait_until(lambda: running().lease_until > began.lease_until)
        assert running().owner == began.owner


@pytest.mark.fault(53)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_duplicates_in_two_workers_run_once_and_keep_their_leases(
    shared_url, ledger, tmp_path, abandoned
):
    answers: dict[str, tuple[int, str]] = {}

    def pay(port: int, key: str) -> None:
        answers[key] = post(port, key)

    ledger.path.touch()
    with uwsgi(shared_url, ledger.path, tmp_path, abandoned) as port:
        for key in ORDERS:
            first = threading.Thread(target=pay, args=(port, key))
            first.start()
            wait_until(lambda key=key: any(entry.key == key for entry in ledger.entries()))
            # Its worker is busy, so the other one answers this.
            assert post(port, key)[0] == 409
            if key == ORDERS[-1]:
                check_that_it_is_renewed(shared_url)
            (tmp_path / key).touch()
            first.join(60)
            assert answers[key][0] == 201
            assert post(port, key) == answers[key]
    assert Counter(entry.key for entry in ledger.entries()) == dict.fromkeys(ORDERS, 1)
