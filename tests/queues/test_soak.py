"""A small soak in each mode, so that `make soak-queues` cannot rot; and its checks can fail."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from queues.deployments import with_tables
from queues.soak import check, soak


@pytest.mark.timeout(600)  # on a machine whose cores are busy a new worker takes its time
@pytest.mark.parametrize("mode", ["transactions", "leases"])
def test_killed_workers_leave_one_effect_for_each_order(
    mode, servers, postgres_of_this_worker, tmp_path
):
    database = with_tables(postgres_of_this_worker) if mode == "transactions" else None
    found = soak(servers, tmp_path, 120, time.monotonic() + 300, database)
    assert found.sent == 120
    assert found.kills > 0


KILLED, ALIVE, OTHER = 11, 12, 13
RUN = SimpleNamespace(orders={"celery": ["a"], "aio_pika": ["b"]}, killed={KILLED})


@pytest.mark.parametrize(
    ("effects", "exact"),
    [
        ([("a", ALIVE)], False),  # an order has no effect
        ([("a", ALIVE), ("b", ALIVE), ("c", ALIVE)], False),  # nobody has sent it
        ([("a", ALIVE), ("a", OTHER), ("b", ALIVE)], False),  # repeated, and nobody was killed
        ([("a", KILLED), ("a", KILLED), ("a", ALIVE), ("b", ALIVE)], False),  # twice for one kill
        ([("a", KILLED), ("a", ALIVE), ("b", ALIVE)], True),  # repeated, in a transaction
    ],
)
def test_a_soak_can_fail(effects, exact):
    with pytest.raises(AssertionError):
        check(RUN, effects, exact=exact)


def test_a_soak_counts_the_repeats_that_a_kill_explains():
    assert check(RUN, [("a", KILLED), ("a", ALIVE), ("b", ALIVE)], exact=False) == 1
