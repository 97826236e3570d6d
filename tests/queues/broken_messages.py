"""Messages that are broken in every way that RabbitMQ lets through, written byte by byte.

Some of them no client library can read: it fails before semel sees the message, and closes the
connection. Which those are is said by `UNREADABLE`, and they are left out unless asked for.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import pika
from pika.exceptions import AMQPError

UNREADABLE = {
    "pika": {"time"},  # a year after 9999
    "aio_pika": {"name", "time"},  # no UTF-8 where AMQP has short strings
}
"""What the library beneath cannot read."""

NAMES = (
    "idempotency-key", "Idempotency-Key", "semel-kept", "semel-reason", "semel-queue", "x-death",
    "x-first-death-queue", "x-delivery-count", "tenant", "a", "", "x" * 255, "é", "task", "id",
)  # fmt: skip
TEXTS = (
    b"", b"m-1", b"\xff\xfe", b"\xed\xa0\x80", b"a b", b"\0", "é".encode(), b"k" * 300, b"x" * 20_000,
    b"\n", b"semel:none", b"{}", b"orders",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"null", b"[]", b'{"number": "\xff"}', b'{"number": null}', b'{"number": []}',
    b'{"number": {"a": 1}}', b'{"number": 1e999}', b'{"number": "\\ud800"}', b"[" * 50_000,
    b'{"number":' * 5_000, b"\xef\xbb\xbf{}", b'{"number": ' + b"9" * 5_000 + b"}", b"\0" * 300_000,
    b'{"number": ""}', b'{"number": "a b"}', b'{"number": true}', b'{"number": -0.0}', b"not json",
    '{"number": 7}'.encode("utf-16"),
)  # fmt: skip
SHORT_STRINGS = (15, 14, 10, 9, 7, 5, 3)
"""The bits of content type, content encoding, correlation id, reply to, id, type and application."""
HEADERS, DELIVERY_MODE, EXPIRATION, TIMESTAMP = 13, 12, 8, 6


class Raw(pika.BasicProperties):
    """Properties as they are on the wire."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self.encoded = encoded

    def encode(self) -> list[bytes]:
        return [self.encoded]


class Broken:
    """A stream of broken messages, the same for the same seed."""

    def __init__(self, seed: int, without: set[str]) -> None:
        self._dice = random.Random(seed)
        self._without = without

    def message(self) -> tuple[bytes, Raw]:
        """A body and properties."""
        dice = self._dice
        body = dice.choice(BODIES) if dice.random() < 0.7 else dice.randbytes(dice.randrange(200))
        return body, Raw(self._properties())

    def _properties(self) -> bytes:
        dice, flags, fields = self._dice, 0, b""
        for bit in range(15, 2, -1):
            if bit == 4 or dice.random() < 0.5:  # the user is checked by the broker
                continue
            flags |= 1 << bit
            if bit in SHORT_STRINGS:
                fields += self._short()
            elif bit == HEADERS:
                fields += self._table(0)
            elif bit == EXPIRATION:
                fields += _short(b"86400000")
            elif bit == TIMESTAMP:
                fields += self._time()
            elif bit == DELIVERY_MODE:  # the broker rejects others
                fields += dice.choice((b"\1", b"\2"))
            else:
                fields += dice.randbytes(1)
        return struct.pack(">H", flags) + fields

    def _short(self) -> bytes:
        text = self._dice.choice(TEXTS)[:255]
        if "name" in self._without:
            text = text.decode(errors="ignore").encode()
        return _short(text)

    def _time(self) -> bytes:
        largest = 2**31 if "time" in self._without else 2**64 - 1
        return struct.pack(">Q", self._dice.choice((0, largest // 2, largest)))

    def _table(self, depth: int) -> bytes:
        dice, inside = self._dice, b""
        for _ in range(dice.randrange(6)):
            name = dice.choice(NAMES).encode()
            if "name" not in self._without and dice.random() < 0.1:
                name = b"\xff"
            inside += _short(name) + self._value(depth + 1)
        return struct.pack(">I", len(inside)) + inside

    def _value(self, depth: int) -> bytes:
        dice = self._dice
        kind = dice.choice("tbsIlfdDSSSxATFV" if depth < 8 else "tS")
        match kind:
            case "A":
                inside = b"".join(self._value(depth + 1) for _ in range(dice.randrange(4)))
                encoded = struct.pack(">I", len(inside)) + inside
            case "F":
                encoded = self._table(depth)
            case "S" | "x":
                text = dice.choice(TEXTS)
                encoded = struct.pack(">I", len(text)) + text
            case "T":
                encoded = self._time()
            case "f" | "d":
                encoded = struct.pack(">f" if kind == "f" else ">d", dice.choice((1.5, -0.0, 1e30)))
            case "D":
                encoded = dice.randbytes(5)
            case _:
                encoded = dice.randbytes({"t": 1, "b": 1, "s": 2, "I": 4, "l": 8, "V": 0}[kind])
        return kind.encode() + encoded


def _short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def celery_messages(seed: int) -> Iterator[tuple[bytes, dict[str, Any], str]]:
    """Bodies, headers and content types of tasks that no client of Celery would send.

    A message for a task whose body is neither a list nor a text ends a worker of Celery before semel
    sees it, so there is none of those.
    """
    dice = random.Random(seed)
    values: tuple[Any, ...] = (
        None, "", "a b", "x" * 300, 5, -1, 2**40, True, [], [1], {}, {"a": 1}, "é", "\ud800", 1.5,
    )  # fmt: skip
    while True:
        arguments = dice.choice((values, [dice.choice(values)], [], {}, 5, None))
        kwargs = dice.choice(({}, {"order": dice.choice(values)}, {"other": 1}, {"": None}))
        embed = dice.choice(({}, {"callbacks": None}, {"chain": []}))
        headers = {
            "lang": "py",
            "task": dice.choice(("charge", "keyed", "keyed", "unknown")),
            "id": dice.choice(("m-1", "a b", "x" * 300, "é", "7")),
            "retries": dice.choice((0, 1)),
            "idempotency-key": dice.choice((None, "k", "a b", 5, [], {}, "é", b"\xff")),
        }
        content_type = dice.choice(("application/json",) * 5 + ("text/plain", "odd", ""))
        if dice.random() < 0.2:
            del headers["task"]
            yield dice.choice(BODIES), headers, content_type
        else:
            parts = [arguments, kwargs, embed][: dice.choice((0, 1, 2, 3, 3, 3, 3))]
            yield json.dumps(parts).encode(), headers, content_type


class Sender:
    """Publishes what the broker takes, and counts the rest."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.refused = 0
        self._connect()

    def _connect(self) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(self._url))
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()

    def send(self, body: bytes, properties: Any, queue: str) -> None:
        try:
            self._channel.basic_publish("", queue, body, properties)
        except AMQPError:  # a table that it does not understand
            self.refused += 1
            if self._connection.is_open:
                self._connection.close()
            self._connect()

    def close(self) -> None:
        self._connection.close()
