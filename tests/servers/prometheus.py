"""The programs of Prometheus: promtool, and a private server that scrapes one address.

with prometheus_server(folder, "127.0.0.1:8000", rules) as server:
    server.query("semel_store_up")      # the samples, as Prometheus gives them
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from servers.redis import free_port, wait_until

UNPACKED = Path(__file__).resolve().parents[2] / ".servers"
PATIENCE = 60.0
"""For what takes a moment, on a machine whose cores others may keep busy."""


def binary(name: str) -> str:
    """One of the programs, from PATH or where `make servers` unpacked it."""
    found = shutil.which(name) or shutil.which(name, path=UNPACKED)
    if found is not None:
        return found
    message = f"Prometheus is missing ({name} is not on PATH): run make servers"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def promtool(*words: object, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool to its end."""
    command = [binary("promtool"), *map(str, words)]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


class PrometheusServer:
    """A server that scrapes its target every second."""

    def __init__(self, port: int) -> None:
        self._port = port

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate an expression now."""
        return self._data("/api/v1/query", query=expression)["result"]

    def alerts(self) -> set[str]:
        """The alerts that fire or are about to."""
        return {alert["labels"]["alertname"] for alert in self._data("/api/v1/alerts")["alerts"]}

    def is_ready(self) -> bool:
        try:
            return self._get("/-/ready")[0] == 200
        except OSError:
            return False

    def _data(self, path: str, **parameters: str) -> dict[str, Any]:
        status, body = self._get(f"{path}?{urlencode(parameters)}")
        assert status == 200, body
        return json.loads(body)["data"]

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()


@contextlib.contextmanager
def prometheus_server(folder: Path, target: str, rules: Path) -> Iterator[PrometheusServer]:
    """A server of one's own, stopped in the end."""
    port = free_port()
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "shop", "static_configs": [{"targets": [target]}]}],
    }
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    command = [
        binary("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process,
    ):
        server = PrometheusServer(port)
        try:

            def answers() -> bool:
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                return server.is_ready()

            wait_until(answers, "Prometheus to answer", patience=PATIENCE)
            yield server
        finally:
            process.terminate()
