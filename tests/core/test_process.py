"""What a fork does: see forks.py, whose tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("forks.py")


@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_leaves_parent_and_child_whole():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(CASES)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
