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


@pytest.fixture(params=["url", "object"])
def by(request):
    """What the engine is given: a URL, or a store object."""
    return request.param


@pytest.fixture
def forked(kind, store_url, by):
    done = subprocess.run(
        [sys.executable, PROGRAM, kind, store_url, by],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_child_leaves_inherited_attempts_alone_and_works_by_itself(kind, forked, store_url, by):
    parent, child = forked["parent"], forked["child"]
    if (kind, by) == ("asyncio", "object") and store_url.startswith("redis:"):
        # The child's loop is another one, which the connections of a store object cannot follow.
        assert "belongs to another event loop; open one per loop" in child["error"]
        return
    assert (child["inherited"], child["timer"]) == (0, None)
    assert child["result"] == "lease lost", "it may not save what it inherited"
    assert not parent["abandoned"], "the parent went on renewing"
    assert parent["stored"] == parent["result"] == "the parent's"
    # A store opened anew in memory is empty; as an object it is copied; any other is shared.
    known = store_url != "memory://" or by == "object"
    assert child["running"] == ("PROCESSING" if known else None)
    assert child["replay"] == ("before" if known else "again")
    assert parent["replay"] == "before"
    assert len({*parent["owners"], *child["owners"]}) == 10, "no owner id was given twice"
