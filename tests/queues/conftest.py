"""What the suite shares: the servers, and for each framework a queue with two workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from queues.deployments import PRELOADED, Deployment, Servers, deployment
from queues.processes import fork_server
from servers.redis import redis_server


@pytest.fixture(scope="session")
def servers(rabbitmq) -> Iterator[Servers]:
    """The brokers, a store, and the parent of all workers."""
    with (
        fork_server(*PRELOADED) as parent,  # imports while the brokers start
        redis_server(args=("--appendonly", "yes")) as redis,
        redis_server() as store,
    ):
        yield Servers(rabbitmq, redis, store, parent)


@pytest.fixture(scope="session")
def deployments(servers, tmp_path_factory) -> Iterator[dict[str, Deployment]]:
    """Those that were started so far; each stays until the end, and its workers must end well."""
    with contextlib.ExitStack() as stack:

        class Started(dict[str, Deployment]):
            def __missing__(self, kind: str) -> Deployment:
                folder = tmp_path_factory.mktemp(kind)
                self[kind] = stack.enter_context(deployment(kind, servers, folder))
                return self[kind]

        yield Started()


@pytest.fixture
def deployed(request, deployments) -> Deployment:
    """A queue with two workers; what a test before has ended is started again."""
    found: Deployment = deployments[request.param]
    found.begin()
    return found
