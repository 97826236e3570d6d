"""A process that forks is measured without a lock that its child could wait for, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import NoneType

import pytest
from coverage import Coverage

from measuring import not_measured, unmeasured

TESTS = Path(__file__).resolve().parent.parent

# The hooks are registered before those of semel: so the lock is taken last, and at the fork itself,
# as if a thread were inside the tracer just then.
FORKS_WHILE_TRACED = """
import os, signal, sys
from coverage import Coverage

measuring = Coverage(data_file=None, source_pkgs=["semel"], concurrency="thread", config_file=False)
measuring.start()
traced = measuring._collector
os.register_at_fork(before=traced.lock_data, after_in_parent=traced.unlock_data)
sys.path.insert(0, sys.argv[1])
from measuring import measure_without_lock
measure_without_lock()
from semel import Idempotency
idem = Idempotency("memory://")
child = os.fork()
if child == 0:
    idem.execute("a", lambda: "done")
    os._exit(0)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(30)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_is_forked_while_a_thread_is_traced_goes_on():
    ran = subprocess.run(
        [sys.executable, "-c", FORKS_WHILE_TRACED, TESTS],
        env=unmeasured(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "0\n", "it had to be killed"


def test_the_tests_themselves_are_measured_without_lock():
    measuring = Coverage.current()
    if measuring is None:
        pytest.skip("nobody measures them now")
    collector = measuring._collector
    assert collector.data_lock is None
    assert {tracer.lock_data for tracer in (collector, *collector.tracers)} == {NoneType}


def test_a_program_can_be_started_that_nobody_measures(monkeypatch):
    monkeypatch.setenv("COVERAGE_PROCESS_CONFIG", "{}")
    assert "COVERAGE_PROCESS_CONFIG" not in unmeasured()
    assert unmeasured()["PATH"] == os.environ["PATH"]


MEASURED = """
import sys
from coverage import Coverage

measuring = Coverage(data_file=None, source_pkgs=["semel"], config_file=False)
measuring.start()
sys.path.insert(0, sys.argv[1])
from measuring import not_measured
import semel.guards as before
with not_measured():
    import semel.observe.tally as meanwhile
import semel.repair as later
measuring.stop()
data = measuring.get_data()
print(*(bool(data.lines(module.__file__)) for module in (before, meanwhile, later)))
"""


def test_what_is_not_measured_leaves_what_was_and_what_comes_later():
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, TESTS],
        env=unmeasured(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True False True\n"


def test_programs_that_are_started_meanwhile_are_not_measured_either(monkeypatch):
    if Coverage.current() is None:
        pytest.skip("nobody measures the tests now")
    monkeypatch.setenv("COVERAGE_PROCESS_CONFIG", "{}")
    with not_measured():
        assert "COVERAGE_PROCESS_CONFIG" not in os.environ
    assert os.environ["COVERAGE_PROCESS_CONFIG"] == "{}"
