"""Real processes, one run per slot: scripts of cron, APScheduler, and beats of Celery.

Clocks that are wrong belong to the programs. Each effect is counted outside the library.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid5
from zoneinfo import ZoneInfo

import pytest

from semel.adapters.celery_beat import NAMESPACE
from semel.core.schedules import in_utc

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE = 60.0


class Program:
    """A running program, by the lines that it prints."""

    def __init__(self, command: list[str], **told: object) -> None:
        environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=PROGRAMS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.strip())
            self._news.put(line.strip())
        self._news.put(None)

    def hear(self, what: str) -> str:
        """Wait for a line that begins so."""
        while True:
            line = self._news.get(timeout=PATIENCE)
            assert line is not None, f"it never said {what}, but {self.lines}"
            if line.startswith(what):
                return line

    def said(self, what: str) -> list[str]:
        """The rest of all lines that begin so."""
        return [line.removeprefix(what).strip() for line in self.lines if line.startswith(what)]

    def ended(self) -> list[str]:
        """All lines, at its end."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return self.lines

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[object]:
    with contextlib.ExitStack() as running:

        def started(*command: str, **told: object) -> Program:
            program = Program([sys.executable, *command], **told)
            running.callback(program.close)
            return program

        yield started


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


# --- scripts that cron starts on every machine ---------------------------------------------


def berlin(text: str, *, fold: int = 0) -> float:
    local = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    return local.timestamp()


@pytest.fixture
def cron(start, sqlite_url, tmp_path):
    """Start the script, at this time of its own clock."""
    ledger = tmp_path / "ledger"
    ledger.touch()

    def script(now: float, **told: object) -> Program:
        return start("cron_script.py", URL=sqlite_url, LEDGER=ledger, NOW=now, **told)

    script.effects = lambda: ledger.read_text().splitlines()
    return script


def test_of_three_scripts_one_runs_in_each_slot_and_clocks_may_differ(cron):
    starts = [
        # On the shortest day cron may start it before and after the hour that does not exist.
        [("2026-03-29T01:59:59.5", 0), ("2026-03-29T03:00", -2), ("2026-03-29T03:30", 0)],
        # Half a second before midnight is the next day already.
        [("2026-10-24T23:59:59.5", 0), ("2026-10-25T00:00:02", -2), ("2026-10-25T00:00", 2)],
    ]
    for scripts in starts:
        running = [cron(berlin(now), SKEW=skew) for now, skew in scripts]
        assert sorted(one.ended()[-1] for one in running) == ["False", "False", "True"]
    # The hour that comes twice is in a day that was done.
    twice = [cron(berlin("2026-10-25T02:30", fold=fold)) for fold in (0, 1)]
    assert [one.ended()[-1] for one in twice] == ["False", "False"]
    assert cron.effects() == ["2026-03-29 1", "2026-10-25 1"]


def test_after_a_crash_a_script_on_standby_takes_over(cron):
    now = berlin("2026-11-17T03:30")
    dying = cron(now, HANGS="yes", LEASE=2)
    dying.hear("started")
    assert cron(now).ended()[-1] == "False", "without standby it does not wait"
    waiting = [cron(now, STANDBY="yes") for _ in range(2)]
    dying.process.kill()
    assert sorted(one.ended()[-1] for one in waiting) == ["False", "True"]
    assert cron.effects() == ["2026-11-17 2"]


# --- APScheduler ---------------------------------------------------------------------------


@pytest.fixture
def schedulers(start, redis_url):
    """Three processes with the same job; their clocks differ by two seconds."""

    def started(**told: object) -> list[Program]:
        first = int(time.time())
        kinds = [("threads", 0), ("asyncio", -2), ("threads", 2)]
        programs = [
            start("scheduled.py", URL=redis_url, KIND=kind, SKEW=skew, START=first, **told)
            for kind, skew in kinds
        ]
        for program in programs:
            program.hear("scheduling")
        return programs

    return started


def test_of_three_apschedulers_one_runs_each_run_time(schedulers):
    programs = schedulers(EVERY=1)

    def came_to(program: Program) -> int:
        return len(program.said("ran")) + len(program.said("skipped"))

    wait_until(lambda: all(came_to(one) >= 4 for one in programs), "four run times in each")
    for program in programs:
        program.process.stdin.close()
    for program in programs:
        assert program.said("failed") == [], program.ended()
    ran = [key for program in programs for key in program.said("ran")]
    assert len(ran) == len(set(ran)) >= 4
    assert all(key.startswith("report@20") for key in ran)


def test_an_apscheduler_on_standby_takes_over_after_a_crash(schedulers):
    programs = schedulers(EVERY=3600, STANDBY="yes", FIRST="hangs", LEASE=2)
    wait_until(lambda: any(one.said("started") for one in programs), "the first run")
    (dying,) = [one for one in programs if one.said("started")]
    dying.process.kill()
    others = [one for one in programs if one is not dying]
    wait_until(lambda: any(one.said("ran") for one in others), "the second run")
    wait_until(lambda: any(one.said("skipped") for one in others), "the one that skips")
    assert sorted(len(one.said("ran")) for one in others) == [0, 1]
    assert dying.said("ran") == []


# --- Celery beat ---------------------------------------------------------------------------


def due(second: int) -> str:
    """The id of the task that is due at this second."""
    key = f"report@{in_utc(datetime.fromtimestamp(second, UTC))}"
    return str(uuid5(NAMESPACE, f"celery.beat:{key}"))


def test_of_all_beats_one_sends_each_due_task_though_another_one_dies_while_it_sends(
    start, redis_of_this_worker, redis_url, tmp_path
):
    began = int(time.time())
    command = ["-m", "celery", "-A", "beats", "beat", "-S", "beats:Beat", "-l", "INFO"]
    broker_url = redis_url.removesuffix("/0") + "/1"

    def beat(name: str, **told: object) -> Program:
        schedule = ["-s", str(tmp_path / name), "--pidfile", ""]
        return start(*command, *schedule, URL=redis_url, BROKER=broker_url, **told)

    beats = [beat(name, SKEW=0) for name in "ab"]
    for one in beats:
        one.hear("[")  # its first line in the log: it has started
    # Two seconds ahead of the others, the third one claims a task before them, and dies.
    ahead = beat("c", SKEW=2, DIES=tmp_path / "died")
    wait_until(lambda: ahead.process.poll() is not None, "the beat that is ahead to die")
    missing = (tmp_path / "died").read_text()
    with contextlib.closing(redis_of_this_worker.client(db=1)) as broker:

        def sent() -> list[str]:
            messages = [json.loads(each) for each in broker.lrange("celery", 0, -1)]
            return [message["headers"]["id"] for message in messages]

        def skipped() -> bool:
            return any("by another beat" in line for one in beats for line in one.lines)

        wait_until(lambda: missing in sent(), "another beat to send it")
        wait_until(skipped, "a beat that comes second")
        for one in beats:
            one.process.terminate()
        for one in beats:
            one.ended()
        ids = sent()
    assert len(ids) == len(set(ids))
    assert set(ids) <= {due(second) for second in range(began - 5, int(time.time()) + 5)}
