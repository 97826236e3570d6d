"""Real processes, one run per slot: scripts of cron, APScheduler, and beats of Celery.

Clocks that are wrong belong to the programs. Each effect is counted outside the library.
"""

from __future__ import annotations

import contextlib
import json
import math
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
        [("2026-03-28T03:30", skew) for skew in (0, -2, 2)],
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
    assert cron.effects() == ["2026-03-28 1", "2026-03-29 1", "2026-10-25 1"]


def test_after_a_crash_a_script_on_standby_takes_over_and_so_does_a_later_start(cron):
    now = berlin("2026-11-17T03:30")
    dying = cron(now, HANGS="yes")
    dying.hear("started")
    assert cron(now).ended()[-1] == "False", "without standby it does not wait"
    waiting = [cron(now, STANDBY="yes") for _ in range(2)]
    dying.process.kill()
    assert sorted(one.ended()[-1] for one in waiting) == ["False", "True"]
    assert cron.effects() == ["2026-11-17 2"]

    dying = cron(now + 86400, HANGS="yes")
    dying.hear("started")
    dying.process.kill()
    wait_until(lambda: cron(now + 86400).ended()[-1] == "True", "a start after the lease")
    assert cron.effects() == ["2026-11-17 2", "2026-11-18 2"]


# --- APScheduler ---------------------------------------------------------------------------


@pytest.fixture
def schedulers(start, redis_url):
    """Three processes with the same job; their clocks differ by two seconds."""

    def started(**told: object) -> list[Program]:
        first = math.ceil(time.time()) + 3
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
    # Until each of them has come to some run times that another one had.
    wait_until(lambda: sum(len(one.said("ran")) for one in programs) >= 4, "four run times")
    wait_until(lambda: sum(len(one.said("skipped")) for one in programs) >= 4, "those that skip")
    for program in programs:
        program.process.stdin.close()
    for program in programs:
        assert program.said("failed") == [], program.ended()
    ran = [key for program in programs for key in program.said("ran")]
    assert len(ran) == len(set(ran)) >= 4
    assert all(key.startswith("report@20") for key in ran)


def test_an_apscheduler_on_standby_takes_over_after_a_crash(schedulers):
    programs = schedulers(EVERY=3600, STANDBY="yes", FIRST="hangs")
    wait_until(lambda: any(one.said("started") for one in programs), "the first run")
    (dying,) = [one for one in programs if one.said("started")]
    dying.process.kill()
    others = [one for one in programs if one is not dying]
    wait_until(lambda: any(one.said("ran") for one in others), "the second run")
    wait_until(lambda: any(one.said("skipped") for one in others), "the one that skips")
    assert [len(one.said("ran")) for one in sorted(others, key=lambda one: one.said("ran"))] == [
        0,
        1,
    ]
    assert dying.said("ran") == []


# --- Celery beat ---------------------------------------------------------------------------


def due(second: int) -> str:
    """The id of the task that is due at this second."""
    key = f"report@{datetime.fromtimestamp(second, UTC).isoformat()}"
    return str(uuid5(NAMESPACE, f"celery.beat:{key}"))


def test_beats_send_each_due_task_once_though_one_dies_while_it_sends(
    start, redis_of_this_worker, redis_url, tmp_path
):
    began = int(time.time())
    command = ["-m", "celery", "-A", "beats", "beat", "-S", "beats:Beat", "-l", "INFO"]
    died = tmp_path / "died"

    def beat(name: str, **told: object) -> Program:
        schedule = ["-s", str(tmp_path / name), "--pidfile", ""]
        broker = redis_url.removesuffix("/0") + "/1"
        return start(*command, *schedule, URL=redis_url, BROKER=broker, DIED=died, **told)

    # Ahead of the others, the first one sends all tasks until it dies.
    beats = [beat("a", SKEW=2, DIES_AT=3), beat("b", SKEW=0), beat("c", SKEW=0)]
    with contextlib.closing(redis_of_this_worker.client(db=1)) as broker:

        def sent() -> list[str]:
            messages = [json.loads(each) for each in broker.lrange("celery", 0, -1)]
            return [message["headers"]["id"] for message in messages]

        wait_until(lambda: beats[0].process.poll() is not None, "the first beat to die")
        missing = died.read_text()
        wait_until(lambda: missing in sent() and len(sent()) >= 6, "the other beats to go on")
        for one in beats[1:]:
            one.process.terminate()
        for one in beats[1:]:
            one.ended()
        ids = sent()
    assert len(ids) == len(set(ids))
    known = {due(second) for second in range(began - 5, int(time.time()) + 5)}
    assert set(ids) <= known
    assert any("is sent by another beat" in line for one in beats for line in one.lines)
