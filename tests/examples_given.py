"""The payment API of one of the examples, started as its readers start it."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from servers.redis import wait_until

ROOT = Path(__file__).resolve().parents[1]


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


@contextmanager
def payments(module: str, folder: Path) -> Iterator[Api]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", f"examples.payments.{module}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--port", str(port), "--folder", str(folder)], cwd=folder, env=environment
    ) as process:
        try:

            def listening() -> bool:
                assert process.poll() is None, "the example ended by itself"
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) == 0

            wait_until(listening, "the example to listen", patience=30)
            yield Api(port, folder)
        finally:
            process.terminate()
