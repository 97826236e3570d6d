"""A fork of a process with running attempts: the child has connections, owner ids and a timer of
its own, and neither renews nor saves what it inherited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextvars import Context
from functools import partial
from pathlib import Path

import pytest

from semel import Idempotency, LeaseLost, Policy
from semel.core.records import Identity
from semel.stores.sql.sqlite import SQLiteStore
from stores.sqlite_helpers import in_a_fork

PROGRAM = Path(__file__).with_name("forking.py")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(params=["url", "object"])
def by(request):
    """What the engine is given: a URL, or a store object."""
    return request.param


@pytest.fixture(params=["seen", "unseen"])
def forked(kind, store_url, by, request):
    done = subprocess.run(
        [sys.executable, PROGRAM, kind, store_url, by, request.param],
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


def test_a_child_does_not_wait_for_a_run_that_its_parent_leads(tmp_path):
    store = SQLiteStore(tmp_path / "semel.db")
    idem = Idempotency(store, policy=Policy(wait_timeout=5.0))
    in_child = []

    def forking():
        with idem.attempt("k"):
            assert store.forget(Identity("default", "k"))  # only the parent thinks that it runs
            # In a context of its own: it is not the attempt itself that asks for its key.
            alone = partial(Context().run, idem.execute, "k", lambda: "the child's")
            in_child.append(in_a_fork(alone))

    with pytest.raises(LeaseLost):
        forking()
    assert in_child == ["the child's"]
    assert idem.execute("k", lambda: "again") == "the child's"
    idem.close()
    store.close()


def test_a_child_does_not_answer_from_the_cache_of_its_parent():
    with Idempotency("memory://", cache=2) as idem:
        assert idem.execute("k", lambda: "the parent's") == "the parent's"
        # Its store was opened anew, and does not know the key.
        assert in_a_fork(lambda: idem.execute("k", lambda: "the child's")) == "the child's"
        assert idem.execute("k", lambda: "again") == "the parent's"
