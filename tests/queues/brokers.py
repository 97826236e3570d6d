"""The test's side of a queue: it sends messages, and counts what is left of them.

Every kind of queue has the same few methods. `left` counts all messages that the broker still has
for the workers: those that wait, those that are delayed, and those that a worker has not
acknowledged. Where it is 0, every message has come to an end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import celery
import pika

from queues.workers import DEAD, DEAD_LETTERS, KEYED, QUEUE, configured
from servers.rabbitmq import VirtualHost
from servers.redis import RedisServer

Send: TypeAlias = Callable[[str, str, str | None], None]
"""Sends an order: its name, what its handler has to do, and the id of its message."""


class Broker(Protocol):
    """A queue of one broker, for workers of one framework."""

    def sending(self) -> AbstractContextManager[Send]: ...
    def left(self) -> int: ...
    def dead(self) -> list[str]: ...
    def consumers(self) -> set[str]: ...
    def miss_the_workers(self) -> None: ...
    def close(self) -> None: ...


class Amqp:
    """Plain messages on RabbitMQ, for workers with pika or aio-pika."""

    def __init__(self, host: VirtualHost) -> None:
        self.host = host
        with self._channel() as channel:
            channel.queue_declare(DEAD, durable=True)
            channel.queue_declare(QUEUE, durable=True, arguments=DEAD_LETTERS)

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Any]:
        connection = pika.BlockingConnection(pika.URLParameters(self.host.url))
        try:
            channel = connection.channel()
            channel.confirm_delivery()
            yield channel
        finally:
            connection.close()

    @contextlib.contextmanager
    def sending(self) -> Iterator[Send]:
        with self._channel() as channel:

            def send(order: str, plan: str, message_id: str | None) -> None:
                body = json.dumps({"order": order, "plan": plan})
                properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
                channel.basic_publish("", QUEUE, body, properties, mandatory=True)

            yield send

    def left(self) -> int:
        unacknowledged = sum(depth.unacknowledged for depth in self.host.depths().values())
        # Asked of the queues themselves: what quorum queues tell about themselves is seconds old.
        waiting = self.host.server.evaluate(
            "lists:sum([begin {ok, Ready, _} = rabbit_amqqueue:stat(Queue), Ready end || "
            f'Queue <- rabbit_amqqueue:list(<<"{self.host.name}">>), '
            f'element(4, amqqueue:get_name(Queue)) =/= <<"{DEAD}">>]).'
        )
        return unacknowledged + int(waiting)

    def dead(self) -> list[str]:
        """The orders whose messages were dead-lettered; they stay where they are."""
        with self._channel() as channel:
            count = channel.queue_declare(DEAD, passive=True).method.message_count
            found = [channel.basic_get(DEAD)[2] for _ in range(count)]
        return [order_in(body) for body in found]  # unacknowledged, they return to the queue

    def consumers(self) -> set[str]:
        """The channels that consume the queue; a new connection has new ones."""
        found = self.host.server.evaluate(
            "[list_to_binary(pid_to_list(proplists:get_value(channel_pid, Consumer))) || "
            f'Consumer <- rabbit_amqqueue:consumers_all(<<"{self.host.name}">>)].'
        )
        return set(found)

    def miss_the_workers(self) -> None:
        """RabbitMQ delivers again what a worker had when its connection ended."""

    def close(self) -> None:
        """Nothing is open between two messages."""


def order_in(body: bytes) -> str:
    """The order of a message, as pika's producers and Celery's write it."""
    read = json.loads(body)
    return str(read[1]["order"] if isinstance(read, list) else read["order"])


class CeleryApp:
    """A producer of tasks, and the states of their results."""

    def __init__(self, url: str, results: str, *, dead_letters: bool) -> None:
        self._app = configured(
            celery.Celery(QUEUE, broker=url), dead_letters=dead_letters, results=results
        )
        self._app.conf.broker_transport_options = {"confirm_publish": True}
        self._sent: dict[str, str] = {}

    def send(self, order: str, plan: str, message_id: str | None) -> None:
        """Send a task; one without an id of its own goes to the task that needs another one."""
        told = {"order": order, "plan": plan}
        if message_id is None:
            result = self._app.send_task(KEYED, kwargs=told)
        else:
            result = self._app.send_task(QUEUE, kwargs=told, task_id=message_id)
        self._sent[result.id] = order

    def failed(self) -> list[str]:
        """The orders whose tasks have failed for good, by their results."""
        states = {task: self._app.AsyncResult(task).state for task in self._sent}
        return [self._sent[task] for task, state in states.items() if state == "FAILURE"]

    def close(self) -> None:
        self._app.close()


class CeleryOnRabbitMQ(Amqp):
    """Celery's messages on RabbitMQ."""

    def __init__(self, host: VirtualHost, results: str) -> None:
        super().__init__(host)
        self.app = CeleryApp(host.url, results, dead_letters=True)

    @contextlib.contextmanager
    def sending(self) -> Iterator[Send]:
        yield self.app.send

    def close(self) -> None:
        self.app.close()


class CeleryOnRedis:
    """Celery's messages on Redis, which has no dead letters: a task that is rejected has failed."""

    def __init__(self, server: RedisServer, results: str) -> None:
        self._server = server
        self.app = CeleryApp(server.url, results, dead_letters=False)

    @contextlib.contextmanager
    def sending(self) -> Iterator[Send]:
        yield self.app.send

    def left(self) -> int:
        with contextlib.closing(self._server.client()) as client:
            return int(client.llen(QUEUE)) + int(client.hlen("unacked"))

    def dead(self) -> list[str]:
        return self.app.failed()

    def consumers(self) -> set[str]:
        """The connections that wait for a message: a worker that is busy has none."""
        with contextlib.closing(self._server.client()) as client:
            return {one["id"] for one in client.client_list() if one["cmd"] == "brpop"}

    def miss_the_workers(self) -> None:
        """Let the visibility timeout pass, an hour: then what was not acknowledged comes again."""
        with contextlib.closing(self._server.client()) as client:
            for tag, _ in client.zscan_iter("unacked_index"):
                client.zadd("unacked_index", {tag: 0}, xx=True)

    def close(self) -> None:
        self.app.close()
