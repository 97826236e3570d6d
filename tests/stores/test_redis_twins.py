"""The sync and the async Redis store are twins: the stores are generated, the transports are not."""

from __future__ import annotations

import inspect

import pytest

from semel.core.process import ForkAware
from semel.stores.redis.cluster import AsyncClusterTransport, ClusterTransport
from semel.stores.redis.tasks import AsyncServerTransport
from semel.stores.redis.threads import ServerTransport


@pytest.mark.parametrize(
    ("plain", "asynchronous"),
    [(ServerTransport, AsyncServerTransport), (ClusterTransport, AsyncClusterTransport)],
)
def test_the_transports_have_the_same_public_methods(plain, asynchronous):
    def public(kind):
        return {
            name
            for name, _ in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in vars(ForkAware)
        }

    assert public(plain) == public(asynchronous)
