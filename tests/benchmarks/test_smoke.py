"""Every group of benchmarks runs, with tiny counts, so that none of them can rot.

Alternatives take part where they are installed (`make bench` does that); elsewhere the report has
to name them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers import mariadb, postgres, rabbitmq, redis

pytestmark = [
    pytest.mark.timeout(300),  # some start a dozen processes, on a machine that is busy
    pytest.mark.usefixtures("not_measured"),
]

ROOT = Path(__file__).resolve().parents[2]

NEEDS = {
    "async_rates": (redis.binary, postgres.binaries, mariadb.binary),
    "sync_rates": (redis.binary, postgres.binaries, mariadb.binary),
    "storms": (redis.binary, postgres.binaries),
    "wakeups": (redis.binary, postgres.binaries),
    "payloads": (redis.binary, postgres.binaries),
    "memory": (redis.binary, postgres.binaries),
    "growth": (postgres.binaries,),
    "overhead": (),
    "tally": (),
    "renewal": (redis.binary, postgres.binaries),
    "imports": (),
    "web": (redis.binary,),
    "service": (redis.binary,),
    "queues": (rabbitmq.program, redis.binary, postgres.binaries),
}
"""What a group cannot do without; asking for it skips the test where it is not here."""


LONG = frozenset(
    {
        "storms",
        "web",
        "service",
        "wakeups",
        "payloads",
        "async_rates",
        "sync_rates",
        "renewal",
        "queues",
    }
)
"""Groups that take more than ten seconds: `make bench-smoke` tries them, too."""

tries_all = pytest.mark.skipif(
    "BENCH_SMOKE" not in os.environ, reason="takes long: make bench-smoke"
)


def smoke(group: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke", "--only", group],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "default"},  # the alternatives have some of their own
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=tries_all if name in LONG else ()) for name in NEEDS]
)
def test_a_group_runs_and_reports(group):
    for needed in NEEDS[group]:
        needed()
    report = smoke(group)
    assert "## Targets" in report
    assert f"{group} " in report.splitlines()[-1]
    tables = [
        line for line in report.partition("## All figures")[2].splitlines() if line[:1] == "|"
    ]
    assert any("semel" in line for line in tables)


def test_a_group_that_fails_fails_the_run_and_is_named_in_the_report():
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke", "--only", "no_such_group"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "no_such_group failed" in ran.stderr
    assert "- no_such_group: it failed" in ran.stdout


@tries_all
def test_this_checkout_is_compared_with_another_commit():
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.paired",
            "HEAD",
            "--rounds",
            "2",
            "--seconds",
            "0.01",
            "--only",
            "memory: replay",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.count("memory: replay") == 6, (
        ran.stderr
    )  # threads and tasks, few and many; FastAPI
    assert "scenarios are slower" in ran.stdout
