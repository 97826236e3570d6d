"""The workers of the suite, one function for each framework: a small program as a user writes it.

Each consumes the queue `mailer` until it gets a SIGTERM. `connect` is the URL of the broker, `store`
that of the engine, `database` a PostgreSQL where orders are rows, written in one transaction with
their records.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import aio_pika
import celery
import pika
from celery import signals
from kombu import Queue
from pika.exceptions import AMQPError
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from queues.ledger import Ledger, Refused, handle, handle_async
from semel import AsyncIdempotency, Idempotency, Policy, messages
from semel.adapters import consuming
from semel.adapters._sync import consuming as consuming_of_threads
from semel.adapters._sync.consuming import Consumer
from semel.adapters.consuming import AsyncConsumer
from semel.core.attempts import Lease
from semel.engine.outcomes import LeaseEvents
from semel.messages import Message, Verdict

QUEUE = "mailer"
DEAD = "mailer.dead"
KEYED = "mailer.keyed"
"""A task whose id is one of its arguments."""
DEAD_LETTERS = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
INSERT = text("INSERT INTO effects VALUES (:order_id, :worker)")


def with_psycopg(url: str) -> str:
    """The URL as SQLAlchemy takes it, with psycopg as its driver."""
    return url.replace("postgresql://", "postgresql+psycopg://")


def order_of(message: Message) -> str:
    """The order that a message is about, whichever framework brought it."""
    body = message.body if isinstance(message.body, dict) else json.loads(message.body)
    return str(body.get("kwargs", body)["order"])


def note_everything(ledger: Ledger) -> None:
    """Note each message that reaches the rules of semel, their verdict, and what semel warns of.

    A store that is back is asked after a second, not five: tests wait for it.
    """
    for module in (messages, consuming, consuming_of_threads):
        module.STORE_PAUSE = 1.0

    def noted(record: logging.LogRecord) -> bool:
        ledger.note("log", text=record.getMessage())
        return True

    logging.getLogger("semel").addFilter(noted)  # a handler would keep the line from the log
    renewed = LeaseEvents.renewed

    def note_renewal(self: LeaseEvents, lease: Lease, answer: Any, sent: float) -> None:
        if answer is True:
            ledger.note("renewed", lease.identity.key, owner=lease.owner.hex(), sent=sent)
        renewed(self, lease, answer, sent)

    LeaseEvents.renewed = note_renewal
    of_threads, of_tasks = Consumer.handle, AsyncConsumer.handle

    def note_verdict(message: Message, verdict: Verdict) -> None:
        more = {name: getattr(verdict, name, None) for name in ("replayed", "reason")}
        ledger.note("verdict", order_of(message), kind=type(verdict).__name__, **more)

    def handled(self: Consumer, message: Message, *args: Any) -> Any:
        ledger.note("delivered", order_of(message))
        verdict = of_threads(self, message, *args)
        note_verdict(message, verdict)
        return verdict

    async def handled_async(self: AsyncConsumer, message: Message, *args: Any) -> Any:
        ledger.note("delivered", order_of(message))
        verdict = await of_tasks(self, message, *args)
        note_verdict(message, verdict)
        return verdict

    Consumer.handle = handled
    AsyncConsumer.handle = handled_async


PULSE = 0.05
STARVED = 0.1


class Waits:
    """How long the threads in a folder of /proc were ready to run while others had the cores."""

    def __init__(self, threads: Path) -> None:
        self._threads = threads
        self._before = self._read()

    def since_last(self) -> float:
        """Seconds since the last call; what a thread that has ended had waited takes none away."""
        before, self._before = self._before, self._read()
        return sum(now - before.get(name, 0) for name, now in self._before.items()) / 1e9

    def _read(self) -> dict[str, int]:
        found = {}
        for thread in self._threads.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found[thread.name] = int((thread / "schedstat").read_text().split()[1])
        return found


def note_starvation(ledger: Ledger) -> None:
    """Note when this process did not run, by a thread that should run often.

    `queued` says for how long its threads were ready to run while other processes had the cores.
    Where that is short, the process has kept itself from running.
    """

    def beat() -> None:
        woken, waits = time.monotonic(), Waits(Path("/proc/self/task"))
        while True:
            time.sleep(PULSE)
            began, woken = woken, time.monotonic()
            late, queued = woken - began - PULSE, waits.since_last()
            if late > STARVED:
                ledger.note("starved", seconds=late, queued=queued)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


# --- Celery --------------------------------------------------------------------------------------


def configured(app: celery.Celery, *, dead_letters: bool, results: str) -> celery.Celery:
    """What producers and workers of the queue have to agree on."""
    arguments = DEAD_LETTERS if dead_letters else None
    app.conf.update(
        task_default_queue=QUEUE,
        task_queues=[Queue(QUEUE, routing_key=QUEUE, queue_arguments=arguments)],
        result_backend=results,
        broker_connection_retry_on_startup=True,
        worker_enable_remote_control=False,
    )
    return app


def celery_worker(
    folder: Path,
    *,
    connect: str,
    store: str,
    results: str,
    dead_letters: bool,
    database: str | None,
    prefetch: int,
    policy: dict[str, Any],
    transport: dict[str, Any] | None = None,
) -> None:
    from semel.adapters.celery import task_class

    ledger = Ledger(folder)
    note_everything(ledger)
    idem = Idempotency(store, policy=Policy(**policy))
    app = celery.Celery(QUEUE, broker=connect, task_cls=task_class(idem))
    configured(app, dead_letters=dead_letters, results=results)
    app.conf.broker_transport_options = transport or {}
    app.conf.worker_prefetch_multiplier = prefetch
    options: dict[str, Any] = {"dead_letters": dead_letters}
    retrying = {"autoretry_for": (Refused,), "max_retries": 3, "default_retry_delay": 1}

    if database is None:

        @app.task(name=QUEUE, bind=True, idempotent=options, **retrying)
        def mailer(self: celery.Task, order: str, plan: str) -> str:
            return handle(ledger, order, plan, self.request.retries)

        @app.task(name=KEYED, idempotent={**options, "key": "{customer}"})
        def keyed(order: str, plan: str, customer: str | None = None) -> str:
            return handle(ledger, order, plan)

    else:
        begin = sessionmaker(create_engine(with_psycopg(database))).begin

        @app.task(name=QUEUE, idempotent={**options, "transaction": begin})
        def in_transaction(session: Session, order: str, plan: str) -> str:
            session.execute(INSERT, {"order_id": order, "worker": os.getpgrp()})
            return handle(ledger, order, plan)

    @signals.worker_ready.connect(weak=False)
    def ready(sender: Any, **_: Any) -> None:
        ledger.note("ready")
        # A worker that has nothing to do looks every five seconds whether it was told to stop.
        sender.timer.call_repeatedly(0.1, lambda: None)

    flags = ["--without-mingle", "--without-gossip", "--without-heartbeat", "--concurrency=1"]
    flags.append(f"--hostname={os.getpid()}")
    app.worker_main(["worker", "--loglevel=INFO", "--pool=prefork", *flags])


# --- pika ----------------------------------------------------------------------------------------


def pika_worker(
    folder: Path,
    *,
    connect: str,
    store: str,
    database: str | None,
    prefetch: int,
    policy: dict[str, Any],
) -> None:
    from semel.adapters.pika import once

    ledger = Ledger(folder)
    note_everything(ledger)
    note_starvation(ledger)

    def mail(message: Message) -> None:
        order = json.loads(message.body)
        handle(ledger, order["order"], order["plan"])

    def mail_in_transaction(session: Session, message: Message) -> None:
        session.execute(INSERT, {"order_id": order_of(message), "worker": os.getpgrp()})
        mail(message)

    options: dict[str, Any] = {"queue": QUEUE, "dead_letters": True, "threads": prefetch}
    with Idempotency(store, policy=Policy(**policy)) as idem:
        if database is None:
            consumer = once(idem, mail, **options)
        else:
            begin = sessionmaker(create_engine(with_psycopg(database))).begin
            consumer = once(idem, mail_in_transaction, transaction=begin, **options)
        stopped = False
        while not stopped:
            # The broker is away for a moment when a test cuts connections, or restarts it.
            with contextlib.suppress(AMQPError, OSError):
                connection = pika.BlockingConnection(pika.URLParameters(connect))
                with contextlib.closing(connection):
                    channel = connection.channel()
                    channel.basic_qos(prefetch_count=prefetch)
                    channel.basic_consume(QUEUE, consumer)
                    ledger.note("ready")
                    stopped = consumer.run(channel)
            time.sleep(0.1)


# --- aio-pika ------------------------------------------------------------------------------------


def aio_pika_worker(folder: Path, **settings: Any) -> None:
    asyncio.run(_consume(Ledger(folder), **settings))


async def _consume(
    ledger: Ledger,
    *,
    connect: str,
    store: str,
    database: str | None,
    prefetch: int,
    policy: dict[str, Any],
) -> None:
    from semel.adapters.aio_pika import once

    note_everything(ledger)
    note_starvation(ledger)

    async def mail(message: Message) -> None:
        order = json.loads(message.body)
        await handle_async(ledger, order["order"], order["plan"])

    async def mail_in_transaction(session: AsyncConnection, message: Message) -> None:
        told = {"order_id": order_of(message), "worker": os.getpgrp()}
        await session.execute(INSERT, told)
        await mail(message)

    options: dict[str, Any] = {"queue": QUEUE, "dead_letters": True}
    async with AsyncIdempotency(store, policy=Policy(**policy)) as idem:
        if database is None:
            consumer = once(idem, mail, **options)
        else:
            begin = create_async_engine(with_psycopg(database)).begin
            consumer = once(idem, mail_in_transaction, transaction=begin, **options)
        connection = await aio_pika.connect_robust(connect, reconnect_interval=0.2)
        async with connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=prefetch)
            queue = await channel.get_queue(QUEUE)
            ledger.note("ready")
            assert await consumer.run(queue)
