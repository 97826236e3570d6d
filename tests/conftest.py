"""What every test may ask for: places of its own in the real stores, and strictness.

Servers are private, started when first asked for and once per worker; each test finds them empty.
A warning is an error (pyproject.toml), so an unclosed connection fails the run; collecting garbage
after each module pins it to the module that left it open.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from measuring import measure_without_lock, not_measured
from selecting import ALL, left_for_more
from servers.brokers import kafka_cluster, nats_server, sqs_server
from servers.mariadb import MariaDBServer, mariadb_server
from servers.postgres import PostgresServer, postgres_server
from servers.rabbitmq import RabbitMQServer, VirtualHost, rabbitmq_server
from servers.redis import RedisServer, redis_server

ROOT = Path(__file__).resolve().parent.parent

# One core may be busy with another worker: time says nothing about correctness here.
unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
some = 100 if os.environ.get(ALL) else 50
settings.register_profile("ci", derandomize=True, max_examples=some, **unhurried)
settings.register_profile("fuzz", max_examples=20_000, **unhurried)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


measure_without_lock()


LONGEST = (
    "queues/test_queues.py",
    "clients/test_clients.py",
    "benchmarks/test_smoke.py",
    "proof/test_store_model.py",
    "transactions/test_kills.py",
    "engines/test_signals.py",
    "observe/test_tally.py",
    "observe/test_alerts.py",
    "examples/test_payments_schema.py",
    "adapters/test_session_kills.py",
    "adapters/test_celery_workers.py",
    "docs/test_promises.py",
    "docs/test_site.py",
    "faults/test_cluster.py",
    "faults/test_table_locks.py",
    "schedules/test_processes.py",
    "stores/test_redis_failover.py",
    "transactions/test_howto.py",
    "project/test_checkout.py",
    "server/test_two_instances.py",
)
"""Files of few tests that take long. Workers share files: one that began last would be left alone."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave some to `make test-more`, and begin with the longest files."""
    left = left_for_more(config, items)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    count = Counter(item.path for item in items)
    longest = {ROOT / "tests" / name for name in LONGEST}
    items.sort(key=lambda item: (item.path not in longest, -count[item.path]))


@pytest.fixture(scope="session")
def project() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module", name="not_measured")
def _not_measured() -> Iterator[None]:
    """For modules that cost much and reach no line that others do not: see `measuring`."""
    with not_measured():
        yield


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A database file of the test's own."""
    return f"sqlite:///{tmp_path / 'semel.db'}"


@pytest.fixture(scope="session")
def redis_of_this_worker() -> Iterator[RedisServer]:
    """One private Redis for all tests of a worker that do not break it."""
    with redis_server() as server:
        yield server


@pytest.fixture
def redis_url(redis_of_this_worker: RedisServer) -> str:
    """A private Redis, empty."""
    with contextlib.closing(redis_of_this_worker.client()) as client:
        client.flushall()
    return redis_of_this_worker.url


@pytest.fixture(scope="session")
def mariadb_of_this_worker() -> Iterator[MariaDBServer]:
    """One private MariaDB for all tests of a worker that do not break it."""
    with mariadb_server() as server:
        yield server


@pytest.fixture
def mysql_url(mariadb_of_this_worker: MariaDBServer) -> str:
    """An empty database in a private MariaDB."""
    return mariadb_of_this_worker.database()


@pytest.fixture(scope="session")
def postgres_of_this_worker() -> Iterator[PostgresServer]:
    """One private PostgreSQL for all tests of a worker that do not break it."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_of_this_worker: PostgresServer) -> str:
    """An empty database in a private PostgreSQL."""
    return postgres_of_this_worker.emptied_database()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQServer]:
    """One private RabbitMQ for all tests of a worker; one that ends it starts it again."""
    with rabbitmq_server() as server:
        yield server


@pytest.fixture
def virtual_host(rabbitmq: RabbitMQServer) -> Iterator[VirtualHost]:
    """An empty virtual host in a private RabbitMQ: its `url` is for clients."""
    with rabbitmq.virtual_host() as host:
        yield host


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres", "mysql"])
def store_url(request) -> str:
    """An empty store of each kind in turn, for what must hold on all of them."""
    if request.param == "memory":
        return "memory://"
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def kafka_address() -> Iterator[str]:
    """A private Kafka cluster without topics."""
    with kafka_cluster() as address:
        yield address


@pytest.fixture
def sqs_url() -> Iterator[str]:
    """A private SQS without queues."""
    with sqs_server() as url:
        yield url


@pytest.fixture
def nats_url() -> Iterator[str]:
    """A private NATS with an empty JetStream."""
    with nats_server() as url:
        yield url
