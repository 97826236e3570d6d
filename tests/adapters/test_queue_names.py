"""Which queue a consumer of RabbitMQ is for: delayed messages go back to it, and no message tells."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from semel import AsyncIdempotency, ConfigError, Idempotency, InvalidKey, OutcomeUnknown
from semel.adapters import aio_pika, pika
from semel.messages import Message, MessageRules
from semel.transactions.links import AsyncSQLAlchemyLink


async def handle(message):
    """Do nothing."""


def test_pika_needs_the_name_of_the_queue():
    with Idempotency("memory://") as idem, pytest.raises(ConfigError, match="queue= is needed"):
        pika.once(idem, print, queue=None, consumer="mailer")


async def test_a_consumer_of_one_queue_does_not_run_on_another():
    async with AsyncIdempotency("memory://") as idem:
        consumer = aio_pika.once(idem, handle, queue="orders")
        with pytest.raises(ConfigError, match="handles the queue orders, not bills"):
            await consumer.run(SimpleNamespace(name="bills"))


# --- a consumer that RabbitMQ has ended, step by step ------------------------------------------


async def nothing(*_, **__):
    """Do nothing."""


async def for_ever():
    await asyncio.Event().wait()


async def test_a_consumer_looks_for_its_queue_until_it_is_there(monkeypatch):
    answers, begun = [False, True], []

    async def is_there(*_):
        return answers.pop(0)

    monkeypatch.setattr(aio_pika, "_is_there", is_there)
    monkeypatch.setattr(aio_pika, "_CONSUME_AGAIN", (0.0,))
    async with AsyncIdempotency("memory://") as idem:
        consumer = aio_pika.once(idem, handle, queue="orders")

        async def begin(_, tag):
            begun.append(tag)
            if len(begun) == 2:
                consumer.stop()

        async def underlay():
            return SimpleNamespace(consumers={}, connection=None)

        channel = SimpleNamespace(is_closed=True, closed=for_ever, get_underlay_channel=underlay)
        monkeypatch.setattr(consumer, "_begin", begin)
        queue = SimpleNamespace(name="orders", channel=channel, cancel=nothing)
        assert await consumer._consume(queue) is False
    assert (len(set(begun)), answers) == (2, [])


async def test_a_queue_is_asked_for_on_a_channel_of_its_own():
    async def channel(**_):
        return SimpleNamespace(queue_declare=nothing, close=nothing)

    assert await aio_pika._is_there(SimpleNamespace(channel=channel), "orders")


async def test_the_end_of_the_event_loop_ends_a_handler(monkeypatch):
    def gone(_):
        raise GeneratorExit

    async with AsyncIdempotency("memory://") as idem:
        consumer = aio_pika.once(idem, handle, queue="orders")
        monkeypatch.setattr(consumer, "_received", gone)
        with pytest.raises(GeneratorExit):
            await consumer._handle(None)


def test_a_key_that_cannot_be_read_is_the_fault_of_the_message(monkeypatch):
    def unreadable(*_):
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "invalid start byte")

    monkeypatch.setattr(MessageRules, "_key_of", unreadable)
    with Idempotency("memory://") as idem:
        consumer = pika.once(idem, print, queue="orders")
        with pytest.raises(InvalidKey, match="the key cannot be read: UnicodeDecodeError"):
            consumer._handled.rules.key_of(Message(body=b""))


async def test_a_session_whose_transaction_has_ended_takes_no_statement():
    link = AsyncSQLAlchemyLink.__new__(AsyncSQLAlchemyLink)
    link._core = SimpleNamespace(invalidated=False)
    link._nested = SimpleNamespace(is_active=False)
    with pytest.raises(OutcomeUnknown):
        await link.execute(None)
