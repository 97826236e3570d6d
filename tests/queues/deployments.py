"""A deployment: one queue, two workers that consume it, and what a test may do to them.

Workers reach the broker and the store through proxies, so that a test can cut their connections.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from queues.brokers import Amqp, Broker, CeleryOnRabbitMQ, CeleryOnRedis, Send
from queues.ledger import Ledger, Note, eventually
from queues.processes import ForkServer, Worker
from queues.workers import QUEUE
from semel import Idempotency, LeaseLost, Policy, Record
from servers.postgres import PostgresServer
from servers.proxy import Proxy, proxy_to
from servers.rabbitmq import RabbitMQServer
from servers.redis import RedisServer

KINDS = ("celery_rabbitmq", "celery_redis", "pika", "aio_pika")
ON_RABBITMQ = ("celery_rabbitmq", "pika", "aio_pika")
WORKERS = 2
POLICY = {"lease": 2, "store_timeout": 1, "max_attempts": 2}
ENDS = frozenset({"Ack", "Reject"})
"""The verdicts after which a message does not come again."""
PRELOADED = (
    "queues.workers",
    "semel.adapters.celery",
    "semel.adapters.pika",
    "semel.adapters.aio_pika",
    "semel.stores.redis",
    "celery.bin.worker",
)
"""What the workers import."""


class Servers(NamedTuple):
    """What all deployments share."""

    rabbitmq: RabbitMQServer
    redis: RedisServer
    """The broker: it writes to disk, so that messages outlive a restart."""
    store: RedisServer
    parent: ForkServer


class Deployment:
    """One queue, and the workers on it."""

    def __init__(
        self, kind: str, servers: Servers, folder: Path, queue: Broker, settings: dict[str, Any]
    ) -> None:
        self.kind = kind
        self.queue = queue
        self.ledger = Ledger(folder)
        self.workers: list[Worker] = []
        self.servers = servers
        self.to_broker: Proxy | None = settings.pop("to_broker", None)
        self.to_store: Proxy | None = settings.pop("to_store", None)
        self._folder, self._settings = folder, settings
        self._label, self._numbers = os.urandom(3).hex(), itertools.count(1)
        self.sent: Counter[str] = Counter()

    @property
    def is_celery(self) -> bool:
        return self.kind.startswith("celery")

    # --- workers ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Have two workers that take messages."""
        self.workers = [worker for worker in self.workers if worker.code is None]
        program = f"queues.workers:{'celery' if self.is_celery else self.kind}_worker"
        new = [
            self.servers.parent.start(program, self._folder, **self._settings)
            for _ in range(WORKERS - len(self.workers))
        ]
        self.workers += new

        def ready() -> bool:
            for worker in new:
                assert worker.code is None, self.log()[-4000:]
            taking = {note.worker for note in self.ledger.notes("ready")}
            return taking >= {worker.pid for worker in new}

        eventually(ready, "the workers to take messages")

    def start_again(self) -> None:
        """Replace a worker that was killed; a worker of Celery replaces its own processes."""
        if not self.is_celery:
            eventually(lambda: any(one.code is not None for one in self.workers), "a worker's end")
            self.start()

    def stop(self) -> None:
        """Stop the workers, as a deployment does: each has to end by itself."""
        running = [worker for worker in self.workers if worker.code is None]
        for worker in running:
            worker.terminate()
        codes = [worker.ended() for worker in running]
        assert codes == [0] * len(codes), self.log()[-4000:]
        self.workers.clear()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def worker_of(self, note: Note) -> Worker:
        """The worker that has noted this."""
        return next(worker for worker in self.workers if worker.pid == note.worker)

    @contextlib.contextmanager
    def store_away(self) -> Iterator[None]:
        """Keep the workers from the store while the block runs."""
        assert self.to_store is not None
        self.to_store.refusing = True
        self.to_store.cut_all()
        try:
            yield
        finally:
            self.to_store.refusing = False

    @contextlib.contextmanager
    def claimed_elsewhere(self, order: str) -> Iterator[None]:
        """Claim an order before the workers do; afterwards, it is as if that had never been."""
        with (
            Idempotency(self.servers.store.url, policy=Policy(lease=POLICY["lease"])) as idem,
            contextlib.suppress(LeaseLost),  # the record that is to be saved is not there
            idem.attempt(order, scope=QUEUE),
        ):
            yield
            idem.forget(order, scope=QUEUE)

    # --- messages --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a test: only what it sends is waited for, whatever a test before has left."""
        for order in self.sent:
            self.ledger.let_go(order)
        self.sent.clear()
        self.start()

    def order(self) -> str:
        """The name of a new order, which no other deployment has."""
        return f"{self.kind}-{self._label}-{next(self._numbers)}"

    def send(self, order: str, plan: str = "run", **others: Any) -> str:
        """Send a message; its id is the name of the order, if not another one is given."""
        with self.sending() as send:
            send(order, plan, others.get("message_id", order))
        return order

    @contextlib.contextmanager
    def sending(self) -> Iterator[Send]:
        """Send many messages."""
        with self.queue.sending() as send:

            def counted(order: str, plan: str, message_id: str | None) -> None:
                self.sent[order] += 1
                send(order, plan, message_id)

            yield counted

    def settled(self, *, dead: str | None = None) -> None:
        """Wait until no message is left; `dead` is the order that was rejected, if one was.

        Each has come to an end by a verdict: one that Celery has just taken from Redis is not
        among those that Redis counts.
        """

        def ended() -> bool:
            ends = Counter(
                note.order for note in self.ledger.notes("verdict") if note.more["kind"] in ENDS
            )
            return ends >= self.sent and self.queue.left() == 0

        eventually(ended, "every message to come to an end")
        expected = [] if dead is None else [dead]
        eventually(
            lambda: [order for order in self.queue.dead() if order in self.sent] == expected,
            f"the dead letters to be {expected}",
        )

    def effects(self, order: str) -> int:
        return self.ledger.count("effect", order)

    def record(self, order: str) -> Record | None:
        with Idempotency(self.servers.store.url) as idem:
            return idem.peek(order, scope=QUEUE)


@contextlib.contextmanager
def deployment(
    kind: str,
    servers: Servers,
    folder: Path,
    database: str | None = None,
    *,
    prefetch: int = 1,
    **policy: Any,
) -> Iterator[Deployment]:
    """Deploy workers of one kind on a queue of their own; with a database, in its transactions."""
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {
            "database": database,
            "prefetch": prefetch,
            "policy": {**POLICY, **policy},
        }
        results = servers.redis.url.removesuffix("/0") + "/1"
        queue: Broker
        if kind == "celery_redis":
            to_broker = stack.enter_context(proxy_to(servers.redis.port))
            queue = CeleryOnRedis(servers.redis, results)
            settings["connect"] = to_broker.url
            settings["transport"] = {
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            }
        else:
            host = stack.enter_context(servers.rabbitmq.virtual_host())
            to_broker = stack.enter_context(proxy_to(servers.rabbitmq.port))
            queue = CeleryOnRabbitMQ(host, results) if kind == "celery_rabbitmq" else Amqp(host)
            settings["connect"] = host.url_at(to_broker.port)
        stack.callback(queue.close)
        if kind.startswith("celery"):
            settings |= {"results": results, "dead_letters": kind == "celery_rabbitmq"}
        if database is None:
            settings["to_store"] = stack.enter_context(proxy_to(servers.store.port))
            settings["store"] = settings["to_store"].url
        else:
            settings["store"] = database
        deployed = Deployment(kind, servers, folder, queue, {**settings, "to_broker": to_broker})
        stack.callback(deployed.kill)
        deployed.start()
        yield deployed
        deployed.ledger.let_go()  # a test that has failed may have left one that waits
        deployed.stop()
        assert queue.left() == 0


def with_tables(postgres: PostgresServer) -> str:
    """A database with the table of effects and that of the records."""
    url = postgres.fresh_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE effects (order_id TEXT NOT NULL, worker INTEGER NOT NULL)")
    with Idempotency(url) as idem:
        idem.peek("any")
    return url
