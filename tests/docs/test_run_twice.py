"""The page "When can my code run twice?" is true, and the README's short table agrees with it.

Most rows of its tables are played here, on SQLite, in each of its three modes: an operation has its
effect, the case happens, the operation is called again, and the effects are counted. What needs a
paused process, a server that fails or a clock that jumps has tests of its own; they are named here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from semel import UNSET, Idempotency, OutcomeUnknown, Policy, PreviousFailure
from semel.repair import Failed, settle
from semel.testing import bypass

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts" / "run-twice.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODES = ["default", "hold", "transaction"]
LEASE = 2
CANNOT_HAPPEN = "\u2013"


class Row(NamedTuple):
    case: str
    default: str
    hold: str
    transaction: str
    help: str


def rows(text: str = PAGE) -> dict[str, Row]:
    """The rows by the first words of their case, which are bold."""
    lines = [line for line in text.splitlines() if line.startswith("| **")]
    table = [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]
    return {re.match(r"\*\*(.+?)\*\*", row.case)[1]: row for row in table}


class World:
    """An operation on a database of its own, in one of the modes."""

    patience = 20.0
    """How long a connection waits for another one that writes."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.mode = mode
        self.path = folder / "shop.db"
        self.url = f"sqlite:///{self.path}"
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE effects (key TEXT)")
        with self.engine() as idem:
            idem.peek("any")  # makes the table of records

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, isolation_level=None, timeout=self.patience)

    def engine(self, **policy) -> Idempotency:
        if self.mode == "hold":
            policy = {"abandoned": "hold", **policy}
        return Idempotency(self.url, policy=Policy(**{"lease": LEASE, **policy}))

    def operate(
        self, idem: Idempotency, key: str = "order:42", after=lambda: None, payload: object = UNSET
    ) -> object:
        """Have the effect under the key, once; `after` is called when it is done."""
        with closing(self.connect()) as connection:

            def effect() -> str:
                connection.execute("INSERT INTO effects VALUES (?)", (key,))
                after()
                return "done"

            if self.mode != "transaction":
                return idem.execute(key, effect, payload=payload)
            connection.execute("BEGIN IMMEDIATE")
            try:
                with idem.transaction(connection, key, payload=payload) as attempt:
                    if not attempt.replayed:
                        attempt.result = effect()
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            return attempt.result

    def effects(self) -> int:
        with closing(self.connect()) as connection:
            return connection.execute("SELECT count(*) FROM effects").fetchone()[0]


# --- the cases: each has the effect, lets it happen, and asks again ------------------------------


def dies(world: World) -> int:
    child = subprocess.run(
        [sys.executable, __file__, str(world.path.parent), world.mode],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    return asked_again(world)


def raises(world: World) -> int:
    def fail() -> None:
        raise TimeoutError("no answer from the bank")

    with world.engine() as idem, pytest.raises(TimeoutError):
        world.operate(idem, after=fail)
    return asked_again(world)


def expires(world: World) -> int:
    with world.engine() as idem:
        world.operate(idem)
        assert asked_again(world) == 1  # while the record is kept
        assert idem.forget("order:42")
    return asked_again(world)


def loses_the_last_commits(world: World) -> int:
    backup = world.path.with_suffix(".backup")
    with closing(world.connect()) as live, closing(sqlite3.connect(backup)) as copy:
        live.backup(copy)
    before = 0
    with world.engine() as idem:
        world.operate(idem)
    if world.mode != "transaction":
        before = world.effects()  # outside this database: it does not go away with the record
    for leftover in world.path.parent.glob("shop.db-*"):
        leftover.unlink()
    shutil.copy(backup, world.path)
    return before + asked_again(world)


def cannot_be_reached(world: World) -> int:
    runs = []
    with (
        closing(world.connect()) as other,
        world.engine(store_error="open", store_timeout=0.2) as idem,
    ):
        other.execute("BEGIN IMMEDIATE")  # now nobody can claim
        world.patience = 0.2
        for _ in range(2):
            if world.mode != "transaction":
                idem.execute("order:42", lambda: runs.append(1))
            else:
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    world.operate(idem)
        other.execute("ROLLBACK")
        world.patience = World.patience
        if not runs:
            world.operate(idem)
    return world.effects() + len(runs)


def another_key(world: World) -> int:
    with world.engine() as idem:
        world.operate(idem)
        world.operate(idem, key="order:42:retry")
    return world.effects()


def wrongly_resolved(world: World) -> int:
    assert raises(world) == 1
    with world.engine() as idem:
        settle(idem, "order:42", Failed("not done", retryable=True), ttl=60)
    return asked_again(world)


def acts_outside(world: World) -> int:
    mails = []

    def send_and_fail() -> None:
        mails.append(1)
        raise ConnectionError("the database went away")

    with world.engine() as idem:
        with suppress(ConnectionError):
            world.operate(idem, after=send_and_fail)
        world.operate(idem, after=lambda: mails.append(1))
    return len(mails)


def switched_off(world: World) -> int:
    with world.engine() as idem:
        world.operate(idem)
        with bypass():
            world.operate(idem)
    return world.effects()


def asked_again(world: World) -> int:
    with world.engine() as idem, suppress(OutcomeUnknown):
        world.operate(idem)
    return world.effects()


PLAYED = {
    "The process dies": dies,
    "The function fails": raises,
    "The record is gone": expires,
    "The database loses commits": loses_the_last_commits,
    "You let it run unprotected": cannot_be_reached,
    "The retry looks like a new operation": another_key,
    "The resolver is wrong": wrongly_resolved,
    "The transaction acts elsewhere": acts_outside,
    "semel is switched off": switched_off,
}

PAUSES = "tests/faults/test_pauses.py"
PROVED = {
    "The process is paused": {
        f"{PAUSES}::test_an_effect_after_the_pause_is_a_second_one_under_the_same_derived_key",
        f"{PAUSES}::test_a_function_that_checks_its_lease_after_the_pause_has_no_second_effect",
        f"{PAUSES}::test_under_hold_the_paused_owner_is_the_only_one_to_have_an_effect",
        f"{PAUSES}::test_an_event_loop_that_was_blocked_is_treated_like_a_pause",
        "tests/transactions/test_contention.py::test_a_duplicate_waits_for_the_commit_and_replays",
    },
    "The store is unreachable": {
        "tests/docs/test_run_twice.py::test_what_cannot_be_saved_before_the_lease_ends_runs_again_unless_it_is_held",
        "tests/faults/test_store_down.py::test_a_function_is_told_in_time_that_redis_stands_still_and_gives_way_to_a_successor",
        "tests/faults/test_saving.py::test_a_result_that_could_not_be_stored_in_time_does_not_touch_its_successor",
        "tests/transactions/test_kills.py::test_a_process_killed_inside_its_commit_leaves_both_or_none",
    },
    "The store forgets": {
        "tests/docs/test_run_twice.py::test_what_redis_alone_forgets_runs_again",
        "tests/stores/test_tiered_storm.py::test_what_redis_loses_is_replayed_from_sql_and_never_run_again",
        "tests/stores/test_tiered_storm.py::test_a_failover_that_loses_a_claim_and_a_finished_record_runs_nothing_twice",
    },
    "The store's clock jumps forward": {
        "tests/faults/test_store_clock.py::test_after_a_jump_forward_leases_end_early_and_the_late_owner_is_refused",
        "tests/faults/test_store_clock.py::test_after_a_jump_forward_retention_ends_early",
    },
}


def test_every_row_of_the_table_is_played_or_proved():
    assert set(rows()) == set(PLAYED) | set(PROVED)


@pytest.mark.parametrize(
    ("case", "mode"),
    [(c, m) for c in PLAYED for m in MODES if getattr(rows()[c], m) != CANNOT_HAPPEN],
)
def test_a_row_of_the_table_is_true(tmp_path, case, mode):
    said = getattr(rows()[case], mode)
    effects = PLAYED[case](World(tmp_path, mode))
    assert effects == {"yes": 2, "no": 1}[re.match(r"\w+", said)[0]], said


@pytest.mark.parametrize("proof", sorted(set().union(*PROVED.values())))
def test_a_proof_of_the_table_exists(proof):
    file, name = proof.split("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_what_redis_alone_forgets_runs_again(redis_url, redis_of_this_worker, abandoned):
    runs = []
    with Idempotency(redis_url, policy=Policy(abandoned=abandoned)) as idem:
        for _ in range(2):
            idem.execute("order:42", lambda: runs.append(1))
        assert len(runs) == 1
        with closing(redis_of_this_worker.client()) as client:
            client.flushall()
        idem.execute("order:42", lambda: runs.append(1))
    assert len(runs) == 2


@pytest.mark.parametrize(("mode", "runs"), [("default", 2), ("hold", 1)])
def test_what_cannot_be_saved_before_the_lease_ends_runs_again_unless_it_is_held(
    tmp_path, mode, runs
):
    world = World(tmp_path, mode)
    done = []
    with closing(world.connect()) as other:

        def work() -> None:
            done.append(1)
            other.execute("BEGIN IMMEDIATE")  # now nobody can save

        with world.engine() as reader, world.engine(store_timeout=0.2) as idem:
            idem.execute("order:42", work)
            until_abandoned(reader, "order:42")
        other.execute("ROLLBACK")
    with world.engine() as idem, suppress(OutcomeUnknown):
        idem.execute("order:42", lambda: done.append(1))
    assert len(done) == runs


@pytest.mark.parametrize(("failure", "runs"), [("forget", 2), ("retryable", 2), ("final", 1)])
def test_a_failure_that_frees_the_key_does_so_under_hold(tmp_path, failure, runs):
    world = World(tmp_path, "hold")

    def fail() -> None:
        raise TimeoutError

    with world.engine(failure=failure) as idem:
        for _ in range(2):
            with suppress(TimeoutError, PreviousFailure):
                world.operate(idem, after=fail)
    assert world.effects() == runs


@pytest.mark.parametrize("mode", MODES)
def test_another_payload_that_replaces_the_first_runs(tmp_path, mode):
    world = World(tmp_path, mode)
    with world.engine(mismatch="replace") as idem:
        for payload in (1, 2):
            world.operate(idem, payload=payload)
    assert world.effects() == 2


def until_abandoned(idem: Idempotency, key: str) -> None:
    deadline = time.monotonic() + 60
    while (record := idem.peek(key)).lease_until > record.now:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # the process that dies
    folder, mode = sys.argv[1:]
    doomed = World.__new__(World)
    doomed.mode, doomed.path = mode, Path(folder, "shop.db")
    doomed.url = f"sqlite:///{doomed.path}"
    with doomed.engine() as engine:
        doomed.operate(engine, after=die)
