"""Times so far ahead that a float does not hold their microseconds (about the year 2242 and on)."""

from __future__ import annotations

import contextlib

import pytest

from semel import open_async_store, open_store
from semel.core.records import Claimed, ClaimRequest, Encoded, Identity
from semel.testing import StoreDriver

ERROR = Encoded("json", b'"no"')
CENTURIES = 300 * 365.25 * 86_400
FIRST, SECOND = b"first".ljust(12), b"second".ljust(12)


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=[open_store, open_async_store])
def store(request, url):
    with contextlib.closing(StoreDriver(request.param(url))) as driver:
        yield driver


def test_a_record_that_is_kept_for_centuries_can_be_claimed_again(store):
    # Not every number of microseconds is one that a float rounds; some of these are.
    for number in range(20):
        identity = Identity("orders", str(number))
        store.claim(ClaimRequest(identity, FIRST, None, 60.0, 60.0))
        assert store.fail(
            identity, FIRST, ERROR, retryable=True, keep_fingerprint=True, ttl=CENTURIES
        )
        again = store.claim(ClaimRequest(identity, SECOND, None, 60.0, 60.0))
        assert isinstance(again, Claimed)
        assert again.number == 2
