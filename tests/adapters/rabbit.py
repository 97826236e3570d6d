"""What the tests of RabbitMQ's clients share: a connection of the test's own."""

from __future__ import annotations

import contextlib
import time

import pika
from pika.frame import Header

PATIENCE = 30.0


class Broker:
    """A virtual host, with a connection to look at it and to publish."""

    def __init__(self, host, user="guest"):
        self.host = host
        self.user = user
        self.connection = self.connect()
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        if user == "guest":
            self.declare("orders")

    def connect(self, heartbeat=None):
        url = self.host.url.replace("guest:guest", f"{self.user}:{self.user}")
        parameters = pika.URLParameters(url)
        parameters.heartbeat = heartbeat
        return pika.BlockingConnection(parameters)

    def declare(self, name, **arguments):
        self.channel.queue_declare(name, durable=True, arguments=arguments)

    def publish(self, message_id="m-1", body=b"{}", *, exchange="", to="orders", **properties):
        fields = {"delivery_mode": 2, **properties}
        self.channel.basic_publish(
            exchange, to, body, pika.BasicProperties(message_id=message_id, **fields),
            mandatory=True,
        )  # fmt: skip

    def publish_full(self, message_id="full", *, exchange="", to="orders", room=0):
        """Publish a message whose headers leave `room` bytes of their frame."""
        properties = pika.BasicProperties(
            message_id=message_id, delivery_mode=2, headers={"tenant": ""}
        )
        frame = len(Header(1, len(b"full"), properties).marshal())
        properties.headers["tenant"] = "t" * (self.connection._impl.params.frame_max - frame - room)
        self.channel.basic_publish(exchange, to, b"full", properties, mandatory=True)

    def publish_raw(self, headers):
        """Publish a message whose texts are these bytes, as a producer in another language may."""
        properties = pika.BasicProperties(message_id="m-1", headers=headers)
        encode = properties.encode
        properties.encode = lambda: [
            piece.replace(b"x\0\0\0\1\xff", b"S\0\0\0\1\xff") for piece in [b"".join(encode())]
        ]
        self.channel.basic_publish("", "orders", b"{}", properties, mandatory=True)

    def bind_shop(self, queue="orders"):
        """Let a queue get the messages of an exchange."""
        self.channel.exchange_declare("shop", "topic")
        self.channel.queue_bind(queue, "shop", "#")

    def get(self, queue):
        """Take a message off a queue, and return its properties and body."""
        deadline = time.monotonic() + PATIENCE
        while True:
            _, properties, body = self.channel.basic_get(queue, auto_ack=True)
            if properties is not None:
                return properties, body
            assert time.monotonic() < deadline, f"nothing in {queue}"
            time.sleep(0.02)

    def close(self):
        with contextlib.suppress(pika.exceptions.AMQPError):
            self.connection.close()


def full(**changes):
    """Every property that a producer can write."""
    return {
        "content_type": "application/json", "content_encoding": "utf-8", "priority": 3,
        "correlation_id": "c", "reply_to": "answers", "expiration": "60000",
        "timestamp": 1_700_000_000, "type": "order", "app_id": "shop",
        "delivery_mode": 2, **changes,
    }  # fmt: skip


def circle():
    """The history of a message that went through the queue before, without being rejected."""
    return [
        {
            "count": 1,
            "reason": "expired",
            "queue": "orders",
            "exchange": "",
            "routing-keys": ["orders"],
        }
    ]
