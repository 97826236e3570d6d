"""A fork of a process with running attempts: the child has connections, owner ids and a timer of
its own, and neither renews nor saves what it inherited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("forking.py")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture
def forked(kind, store_url):
    done = subprocess.run(
        [sys.executable, PROGRAM, kind, store_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_child_leaves_inherited_attempts_alone_and_works_by_itself(forked, store_url):
    parent, child = forked["parent"], forked["child"]
    assert (child["inherited"], child["timer"]) == (0, None)
    assert child["result"] == "lease lost", "it may not save what it inherited"
    assert not parent["abandoned"], "the parent went on renewing"
    assert parent["stored"] == parent["result"] == "the parent's"
    # A store in memory is a copy of the child's own; any other is the one that both use.
    shared = store_url != "memory://"
    assert child["running"] == ("PROCESSING" if shared else None)
    assert child["replay"] == ("before" if shared else "again")
    assert parent["replay"] == "before"
    assert len({*parent["owners"], *child["owners"]}) == 10, "no owner id was given twice"
