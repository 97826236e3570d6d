"""Broken messages without end: headers, encodings, sizes, types.

    make fuzz-queues                     10,000 messages for each consumer
    make fuzz-queues COUNT=1000 MINUTES=3

Among them are good ones. Each of those is handled once, no message stays in its queue, none is
lost, and the consumer never stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aio_pika as client
import pika

from adapters.celery_workers import Shop
from queues.broken_messages import UNREADABLE, Broken, Sender, celery_messages
from semel import AsyncIdempotency, Idempotency
from semel.adapters import aio_pika as semel_aio_pika
from semel.adapters import pika as semel_pika
from semel.messages import Message
from servers.rabbitmq import VirtualHost, rabbitmq_server

EACH = 50
"""One good message in so many."""
KEY = "order:{body.number}"


def number_of(message: Message) -> int:
    return json.loads(message.body)["number"]


class Fuzz:
    """One queue with broken and good messages, and what was done with them."""

    def __init__(self, host: VirtualHost, kind: str, count: int, deadline: float) -> None:
        self._host = host
        self._deadline = deadline
        self.handled: Counter[int] = Counter()
        sender, broken = Sender(host.url), Broken(count, UNREADABLE[kind])
        for queue in ("orders", "dead"):
            sender._channel.queue_declare(queue, durable=True)
        self.good = range(1_000_000, 1_000_000 + count // EACH)
        for number in range(count):
            sender.send(*broken.message(), "orders")
            if number % EACH == EACH - 1:
                body = json.dumps({"number": self.good[number // EACH]}).encode()
                sender.send(body, pika.BasicProperties(), "orders")
        self.refused = sender.refused
        self.sent = count - sender.refused + len(self.good)
        sender.close()

    def handle(self, message: Message) -> None:
        self.handled[number_of(message)] += 1

    def over(self) -> bool:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{self._host.depths()} after {len(self.handled)} were handled")
        return self._host.depth("orders") == (0, 0)

    def check(self) -> None:
        """Every good message was handled once, and what was not handled is among the dead."""
        assert all(self.handled[number] == 1 for number in self.good), self.handled
        dead = self._host.depth("dead").ready
        assert dead + len(self.handled) <= self.sent
        assert dead > self.sent // 2, f"{dead} of {self.sent} were rejected"
        waiting = {n: d for n, d in self._host.depths().items() if n not in ("orders", "dead")}
        assert sum(map(sum, waiting.values())) == 0, waiting


def fuzz_pika(host: VirtualHost, count: int, deadline: float) -> Fuzz:
    """Feed a consumer of pika."""
    fuzz = Fuzz(host, "pika", count, deadline)
    with Idempotency("memory://") as idem:
        consumer = semel_pika.once(idem, fuzz.handle, queue="orders", key=KEY, dead_letters="dead")
        connection = pika.BlockingConnection(pika.URLParameters(host.url))
        channel = connection.channel()
        channel.basic_qos(prefetch_count=50)
        channel.basic_consume("orders", consumer)
        with stopping(fuzz.over, consumer.stop):
            assert consumer.run(channel, signals=())
        connection.close()
    return fuzz


def fuzz_aio_pika(host: VirtualHost, count: int, deadline: float) -> Fuzz:
    """Feed a consumer of aio-pika, on a connection that does not connect again."""
    fuzz = Fuzz(host, "aio_pika", count, deadline)

    async def handle(message: Message) -> None:
        fuzz.handle(message)

    async def main() -> None:
        async with AsyncIdempotency("memory://") as idem, await client.connect(host.url) as opened:
            channel = await opened.channel()
            await channel.set_qos(prefetch_count=50)
            queue = await channel.get_queue("orders")
            consumer = semel_aio_pika.once(
                idem, handle, consumer="orders", key=KEY, dead_letters="dead"
            )
            loop = asyncio.get_running_loop()
            with stopping(fuzz.over, lambda: loop.call_soon_threadsafe(consumer.stop)):
                assert await consumer.run(queue, signals=())

    asyncio.run(main())
    return fuzz


@contextmanager
def stopping(over: Callable[[], bool], stop: Callable[[], Any]) -> Iterator[None]:
    """Stop a consumer when all is over, or the time; raises what `over` raised."""
    errors: list[BaseException] = []
    ended = threading.Event()

    def look() -> None:
        try:
            while not ended.is_set() and not over():
                time.sleep(0.1)
        except BaseException as error:
            errors.append(error)
        stop()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def fuzz_celery(host: VirtualHost, count: int, deadline: float) -> int:
    """Feed a worker of Celery; the good tasks run once each. Returns how many were sent."""
    sender, messages = Sender(host.url), celery_messages(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shop = Shop(
            folder,
            broker=host.url,
            backend=f"db+sqlite:///{folder}/results.db",
            store=f"sqlite:///{folder}/store.db",
            pool="solo",
        )
        sender._channel.queue_declare("celery", durable=True)
        good = range(1_000_000, 1_000_000 + count // EACH)
        try:
            for number in range(count):
                body, headers, content_type = next(messages)
                properties = pika.BasicProperties(
                    content_type=content_type, content_encoding="utf-8", headers=headers
                )
                sender.send(body, properties, "celery")
                if number % EACH == EACH - 1:
                    shop.client.send_task("charge", (good[number // EACH],))
            shop.start()
            while host.depth("celery") != (0, 0):
                assert time.monotonic() < deadline, host.depths()
                assert shop.worker.poll() is None, shop.log[-4000:]
                time.sleep(0.2)
            effects = Counter((folder / "effects").read_text().splitlines())
            assert all(effects[f"charge {number}"] == 1 for number in good), effects
        finally:
            shop.close()
            sender.close()
    return count - sender.refused


FUZZED: dict[str, Callable[[VirtualHost, int, float], Fuzz]] = {
    "pika": fuzz_pika,
    "aio_pika": fuzz_aio_pika,
}


def main() -> int:
    for name in ("semel", "pika", "pamqp"):  # what is wrong with each message
        logging.getLogger(name).setLevel(logging.CRITICAL)
    count = int(os.environ.get("COUNT", "10000"))
    minutes = float(os.environ.get("MINUTES", "15"))
    deadline = time.monotonic() + minutes * 60
    with rabbitmq_server() as server:
        for kind, fuzz in FUZZED.items():
            with server.virtual_host() as host:
                found = fuzz(host, count, deadline)
                found.check()
                print(f"{kind}: {found.sent} messages, {found.refused} refused by the broker")
        with server.virtual_host() as host:
            print(f"celery: {fuzz_celery(host, count, deadline)} messages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
