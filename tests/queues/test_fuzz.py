"""A few broken messages for every consumer; `make fuzz-queues` sends 10,000."""

from __future__ import annotations

import time

import pytest

from queues.fuzz import FUZZED, fuzz_celery

FEW = 200
SECONDS = 60


@pytest.mark.parametrize("kind", FUZZED)
def test_broken_messages_stop_no_consumer(virtual_host, kind):
    found = FUZZED[kind](virtual_host, FEW, time.monotonic() + SECONDS)
    found.check()
    assert found.sent >= FEW


def test_broken_messages_stop_no_worker_of_celery(virtual_host):
    assert fuzz_celery(virtual_host, 50, time.monotonic() + SECONDS) == 50
