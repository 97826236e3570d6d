"""Schemathesis reads the FastAPI example's OpenAPI and tries to prove it wrong, over real sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples_given import payments

pytestmark = pytest.mark.usefixtures("not_measured")

FRESH_KEYS = Path(__file__).with_name("fresh_keys.py")


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with payments("on_fastapi", tmp_path_factory.mktemp("payments")) as api:
        yield api


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "run",
    [
        # With a key of its own for each request, valid data is accepted.
        {"hooks": FRESH_KEYS, "checks": ["--checks", "all"]},
        # With any key, one that was used before is refused, whatever the data.
        {"hooks": None, "checks": ["--exclude-checks", "positive_data_acceptance"]},
    ],
    ids=["fresh keys", "any keys"],
)
def test_the_api_is_as_its_openapi_says(api, run, tmp_path, monkeypatch):
    if run["hooks"] is not None:
        monkeypatch.setenv("SCHEMATHESIS_HOOKS", str(run["hooks"]))
    ran = subprocess.run(
        [
            *(
                sys.executable,
                "-c",
                "from schemathesis.cli import schemathesis; schemathesis()",
                "run",
            ),
            f"http://127.0.0.1:{api.port}/openapi.json",
            *("--max-examples", "25", "--seed", "1", "--no-color"),
            *run["checks"],
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "3 tested" in ran.stdout.lower() or "Tested: 3" in ran.stdout
