"""Kill workers at random while they handle thousands of messages, many of them duplicates.

    make soak-queues                             10,000 messages in each mode, within MINUTES=30
    make soak-queues MESSAGES=1000 MINUTES=5

Two workers of Celery and two of aio-pika share the messages of a run; three of ten are duplicates.
In the end no message is left and none is among the dead letters. In transactions each order has
exactly one effect. With leases an order is repeated for each worker that was killed while it handled
the order, and by nothing else: repeats are counted. The first difference ends the run with an error.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from queues.deployments import PRELOADED, Deployment, Servers, deployment, with_tables
from queues.ledger import PATIENCE, eventually
from queues.processes import Worker, fork_server
from servers.postgres import PostgresServer, postgres_server
from servers.rabbitmq import rabbitmq_server
from servers.redis import redis_server

KINDS = ("celery_rabbitmq", "aio_pika")
DUPLICATES = 0.3
BACKLOG = 200
"""Messages that wait in a queue, at most: while some do, a kill meets work."""
SETTINGS: dict[str, Any] = {"prefetch": 10, "lease": 5, "max_attempts": None}
"""A message may meet any number of kills. A worker of aio-pika handles ten messages at a time."""
PAUSES = (0.05, 1.0)
"""Seconds between two kills of a run."""


class Found(NamedTuple):
    """What one run has shown."""

    sent: int
    orders: int
    kills: int
    repeats: int
    seconds: float


class Run:
    """Messages for the workers of two frameworks, which are killed meanwhile."""

    def __init__(self, deployed: list[Deployment], messages: int, deadline: float) -> None:
        self._deployed = deployed
        self._share = messages // len(deployed)
        self._deadline = deadline
        self.orders: dict[str, list[str]] = {one.kind: [] for one in deployed}
        self.sent = 0
        self.killed: set[int] = set()
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Send and kill until all messages are sent, then let the workers finish."""
        producers = [
            threading.Thread(target=self._guarded, args=(self._send, one), daemon=True)
            for one in self._deployed
        ]
        for producer in producers:
            producer.start()
        while any(producer.is_alive() for producer in producers):
            self._kill_one(random.choice(self._deployed))
            time.sleep(random.uniform(*PAUSES))
        for producer in producers:
            producer.join()
        if self._errors:
            raise self._errors[0]
        for one in self._deployed:
            one.start()
            one.settled()

    def _guarded(self, work: Callable[[Deployment], None], one: Deployment) -> None:
        try:
            work(one)
        except BaseException as error:
            self._errors.append(error)

    def _send(self, one: Deployment) -> None:
        """Send this kind's share, in an order that mixes duplicates with new messages."""
        orders = self.orders[one.kind]
        with one.sending() as send:
            for number in range(self._share):
                if time.monotonic() > self._deadline:
                    return
                if number % BACKLOG == 0:
                    eventually(lambda: one.queue.left() < BACKLOG, "the workers to go on")
                if orders and random.random() < DUPLICATES:
                    order = random.choice(orders[-BACKLOG:])
                else:
                    order = one.order()
                    orders.append(order)
                send(order, "linger", order)  # a kill meets it after its effect
                with self._lock:
                    self.sent += 1

    def _kill_one(self, one: Deployment) -> None:
        """Kill a worker that has handled something, and start another one."""
        worker: Worker = random.choice(one.workers)
        self._await_progress(one, worker)
        worker.kill()
        self.killed.add(worker.pid)
        one.start()

    def _await_progress(self, one: Deployment, worker: Worker) -> None:
        """Wait until this worker has begun to handle an order, or there is nothing for it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and one.queue.left():
            if any(note.worker == worker.pid for note in one.ledger.notes("began")):
                return
            time.sleep(0.02)


def check(run: Run, effects: list[tuple[str, int]], *, exact: bool) -> int:
    """Compare the effects with the orders; returns how many were repeated."""
    by_order: dict[str, list[int]] = defaultdict(list)
    for order, worker in effects:
        by_order[order].append(worker)
    orders = {order for orders in run.orders.values() for order in orders}
    assert set(by_order) == orders, "an order has no effect, or nobody has sent it"
    repeated = {order: workers for order, workers in by_order.items() if len(workers) > 1}
    assert not (exact and repeated), repeated
    for order, workers in repeated.items():
        # One repeat for each kill that met the order, and each kill meets it once.
        assert max(Counter(workers).values()) == 1, f"{order}: one worker has repeated it"
        assert len(set(workers) - run.killed) <= 1, f"{order}: repeated without a kill"
    return sum(len(workers) - 1 for workers in repeated.values())


def soak(
    servers: Servers, folder: Path, messages: int, deadline: float, database: str | None
) -> Found:
    """Have one run: with a database in its transactions, else with leases."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        deployed = []
        for kind in KINDS:
            own = folder / kind
            own.mkdir(parents=True)
            deployed.append(
                stack.enter_context(deployment(kind, servers, own, database, **SETTINGS))
            )
        run = Run(deployed, messages, deadline)
        run.run()
        effects = [
            (note.order, note.worker) for one in deployed for note in one.ledger.notes("effect")
        ]
    if database is not None:
        with psycopg.connect(database) as connection:
            effects = connection.execute("SELECT order_id, worker FROM effects").fetchall()
    repeats = check(run, effects, exact=database is not None)
    orders = sum(map(len, run.orders.values()))
    return Found(run.sent, orders, len(run.killed), repeats, time.monotonic() - began)


@contextlib.contextmanager
def started() -> Iterator[tuple[Servers, PostgresServer]]:
    with (
        fork_server(*PRELOADED) as parent,
        redis_server() as redis,
        redis_server() as store,
        postgres_server() as postgres,
        rabbitmq_server() as rabbitmq,
    ):
        yield Servers(rabbitmq, redis, store, parent), postgres


def main() -> int:
    messages = int(os.environ.get("MESSAGES", "10000"))
    deadline = time.monotonic() + 60 * float(os.environ.get("MINUTES", "30"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of the servers' own stop
    enough = True
    with (
        started() as (servers, postgres),
        tempfile.TemporaryDirectory(prefix="semel-soak-") as name,
    ):
        modes = {"transactions": with_tables(postgres), "leases": None}
        left = len(modes)
        for mode, database in modes.items():
            now = time.monotonic()
            found = soak(
                servers, Path(name) / mode, messages, now + (deadline - now) / left, database
            )
            left -= 1
            enough &= found.sent == messages
            print(
                f"{mode}: {found.sent} of {messages} messages for {found.orders} orders in "
                f"{found.seconds:.0f} s, {found.kills} kills, {found.repeats} effects repeated; "
                "no message is left",
                flush=True,
            )
    print("all messages done" if enough else "the time was up before all messages were sent")
    return 0


if __name__ == "__main__":
    sys.exit(main())
