"""aio-pika: a callback that handles every message once.

    consumer = once(idem, handle, consumer="mailer")
    await queue.consume(consumer)

aio-pika cancels a callback when its connection is lost. So each message is handled in a task of its
own, which goes on to its end: the broker delivers the message again, and its record says that it is
done. aio-pika and its connections may be robust or not.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, assert_never, cast

from semel.adapters.consuming import AsyncConsumer, AsyncRunning
from semel.adapters.rabbitmq import (
    NO_ID,
    Acknowledge,
    DeadLetter,
    DelayQueues,
    Delivery,
    Publish,
    RabbitRules,
    check_async,
    check_handler,
    stable_id,
    with_id,
)
from semel.aio import AsyncIdempotency
from semel.core.optional import Needed
from semel.core.policy import Policy
from semel.errors import ConfigError
from semel.events import logger
from semel.messages import KeyOfMessage, PayloadOfMessage

with Needed("semel[aio-pika]", by=__name__):
    from aio_pika import Message
    from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
    from aio_pika.exceptions import CONNECTION_EXCEPTIONS
    from aiormq.abc import AbstractChannel, AbstractConnection
    from aiormq.exceptions import (
        AMQPChannelError,
        ChannelInvalidStateError,
        DeliveryError,
        PublishError,
    )

__all__ = ["AioPikaConsumer", "message", "once"]

_NOT_TAKEN: Final = (DeliveryError, AMQPChannelError, ChannelInvalidStateError)
"""What aiormq raises when the broker did not take a message, though it is there."""
_NOT_SENT: Final = (*_NOT_TAKEN, ValueError, TypeError)
"""The same, and what it raises for headers that cannot be written as they were read."""
_CANCELLING: Final = 2.0
"""Seconds to tell the broker that a consumer ends."""


def once(
    idempotency: AsyncIdempotency,
    handle: Callable[..., Awaitable[object]],
    *,
    consumer: str | None = None,
    queue: str | None = None,
    key: KeyOfMessage | None = None,
    missing: Literal["reject", "digest"] = "reject",
    payload: PayloadOfMessage | None = None,
    policy: Policy | None = None,
    dead_letters: bool | str = False,
    transaction: Callable[[], Any] | None = None,
    delay_queues: DelayQueues = "quorum",
) -> AioPikaConsumer:
    """Return a callback for `queue.consume` that calls `handle(message)` once for each message.

    `consumer` names who handles the messages; it is `queue` unless given. `queue` is needed where
    messages come through an exchange. `key` says which messages are the same, `missing` what
    becomes of one without an id, `payload` what has to be equal. `policy` wins over that of the
    engine (`idempotency`). `dead_letters` is True if the queue has a dead-letter exchange, or the
    name of a queue for rejected messages. `delay_queues` is the type of the queues in which
    messages wait. With
    `transaction`, such as `Session.begin`, `handle(session, message)` and the record are one
    commit.

    Examples:
        >>> async def handle(message):
        ...     await send(message.body)
        >>> callback = once(idem, handle, consumer="mailer")
    """
    rules = RabbitRules(
        consumer=consumer, queue=queue, dead_letters=dead_letters, delay_queues=delay_queues
    )
    options = {
        "key": key, "missing": missing, "payload": payload, "policy": policy,
        "dead_letters": bool(dead_letters),
    }  # fmt: skip
    check_async(handle)
    handled = AsyncConsumer(
        idempotency, handle, options, default_consumer=rules.consumer, transaction=transaction
    )
    check_handler(handle, in_transaction=transaction is not None)
    return AioPikaConsumer(handled, rules)


def message(
    body: bytes,
    part: str | None = None,
    *,
    message_id: str | None = None,
    headers: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Message:
    """Return a message with an id that is the same whenever it is sent; aio-pika makes up others.

    `part` names the message within the operation that runs, as in `Attempt.derive`; `message_id` is
    an id of your own. `body`, `headers` and `fields` are those of `aio_pika.Message`.

    Examples:
        >>> message(b"{}", message_id="order-42", delivery_mode=2).message_id
        'order-42'
    """
    found = stable_id(part, message_id)
    return Message(body, message_id=found, headers=with_id(headers, found), **fields)


class AioPikaConsumer:
    """A callback for `queue.consume`, made by `once`."""

    def __init__(self, handled: AsyncConsumer, rules: RabbitRules) -> None:
        self._handled = handled
        self._rules = rules
        self._running = AsyncRunning()
        self._publishers: dict[AbstractConnection, _Publisher] = {}
        self._stop = asyncio.Event()
        self._draining = False
        self._error: Exception | None = None

    async def __call__(self, message: AbstractIncomingMessage) -> None:
        """Take a message; aio-pika calls this."""
        # Else it is not acknowledged, and goes back to its queue with the connection's end.
        if not self._draining and self._error is None:
            self._running.start(self._handle(message))

    async def _handle(self, message: AbstractIncomingMessage) -> None:
        try:
            delivery = self._received(message)
            given = delivery.message(message.body, message)
            verdict = await self._handled.handle(given, given)
            step = self._rules.step(verdict, delivery)
        except asyncio.CancelledError:
            await self._settle(_give_back(message))
            raise
        except Exception as error:  # noqa: BLE001 - the consumer stops with it
            await self._stop_with(error, message)
            return
        match step:
            case Acknowledge():
                await self._settle(_acknowledge(message))
            case DeadLetter():
                await self._settle(_dead_letter(message))
            case Publish():
                await self._settle(self._publish(message, step))
            case _:
                assert_never(step)

    def _received(self, message: AbstractIncomingMessage) -> Delivery:
        if message.processed:
            raise ConfigError(
                "consume(..., no_ack=True) takes a message off its queue before it is handled: "
                "leave no_ack out"
            )
        given = cast("Any", message)
        delivery = self._rules.received(
            message.exchange or "",
            message.routing_key or "",
            message_id=message.message_id,
            headers=message.headers,
            expiration=None if given.expiration is None else str(round(given.expiration * 1000)),
        )
        if delivery.delayed:
            given.headers, given.message_id = dict(delivery.headers), delivery.id
            if delivery.expiration is not None:
                given.expiration = int(delivery.expiration) / 1000  # seconds, as aio-pika has it
        return delivery

    async def _settle(self, sending: Awaitable[None]) -> None:
        """Send what becomes of a message; without its connection the broker delivers it again."""
        try:
            await sending
        except CONNECTION_EXCEPTIONS as error:
            logger.info("the connection of a message is gone: it is delivered again (%s)", error)

    async def _publish(self, message: AbstractIncomingMessage, publish: Publish) -> None:
        publisher = self._publisher(message.channel.connection)
        following: Publish | None = publish
        while following is not None:
            try:
                await publisher.publish(message, following)
            except _NOT_SENT as error:
                returned = isinstance(error, PublishError)
                self._rules.log_unpublished(following, error, returned=returned)
                following = following.otherwise
            else:
                await _acknowledge(message)
                return
        asyncio.get_running_loop().call_later(
            publish.seconds, lambda: self._running.start(self._settle(_give_back(message)))
        )

    def _publisher(self, connection: AbstractConnection) -> _Publisher:
        found = self._publishers.get(connection)
        if found is None:
            still_open = {each: its for each, its in self._publishers.items() if each.is_opened}
            self._publishers = {**still_open, connection: (found := _Publisher())}
        return found

    # --- the end ------------------------------------------------------------------------------

    async def _stop_with(self, error: Exception, message: AbstractIncomingMessage) -> None:
        """End the consumer: the program is wrong, and no message is acknowledged any more."""
        logger.error(
            "a consumer stops, and acknowledges nothing more [consumer=%s]",
            self._handled.rules.consumer,
            exc_info=error,
        )
        self._error = self._error or error
        self._stop.set()
        await self._settle(_cancel_consumer(message))

    def stop(self) -> None:
        """Let `run` end, this one and every other; for signal handlers of the event loop."""
        self._stop.set()

    async def run(
        self,
        queue: AbstractQueue,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        grace: float = 30.0,
    ) -> bool:
        """Consume `queue` until `stop` or one of these `signals`; then `drain`.

        Those that are handled get `grace` seconds to end; False = some did not. Raises what stops
        the consumer, and `ConnectionError` when the channel is closed, which a robust one is only
        by its own `close`.
        """
        if self._error is not None:
            raise self._error
        if self._rules.queue is None:
            self._rules.queue = queue.name
        with _received(signals, self.stop):
            tag = await queue.consume(self)
            stopped = asyncio.ensure_future(self._stop.wait())
            closed = asyncio.ensure_future(queue.channel.closed())
            try:
                await asyncio.wait((stopped, closed), return_when=asyncio.FIRST_COMPLETED)
                lost = closed.done()
            finally:
                stopped.cancel()
                closed.cancel()
        self._draining = True
        if not lost:
            await self._settle(_cancel(queue, tag))
        ended = await self.drain(grace=grace)
        if lost:
            raise ConnectionError(f"the channel of the queue {queue.name} was closed")
        return ended

    async def drain(self, *, grace: float = 30.0) -> bool:
        """Take no new message, and wait for those that are handled; cancel the consumer before.

        What still runs after `grace` seconds is cancelled, and goes back to its queue (False).
        Raises what stopped the consumer.
        """
        self._draining = True
        try:
            late = await self._running.drain(grace)
        finally:
            self._draining = False
        if late:
            logger.warning(
                "%d messages were still handled after %g s: they go back to their queue "
                "[consumer=%s]",
                late, grace, self._handled.rules.consumer,
            )  # fmt: skip
        if self._error is not None:
            raise self._error
        return not late


# `message.ack()` waits until the socket has taken it, one turn of the loop for each message.


async def _acknowledge(message: AbstractIncomingMessage) -> None:
    await message.channel.basic_ack(message.delivery_tag or 0, wait=False)


async def _dead_letter(message: AbstractIncomingMessage) -> None:
    await message.channel.basic_reject(message.delivery_tag or 0, requeue=False)


async def _give_back(message: AbstractIncomingMessage) -> None:
    await message.channel.basic_reject(message.delivery_tag or 0, requeue=True)


async def _cancel_consumer(message: AbstractIncomingMessage) -> None:
    await message.channel.basic_cancel(message.consumer_tag or "")


async def _cancel(queue: AbstractQueue, tag: str) -> None:
    # A robust channel waits for a broker that is away, as long as it takes.
    await asyncio.wait_for(queue.cancel(tag), _CANCELLING)


class _Publisher:
    """A channel of its own on a consumer's connection, with confirmations."""

    def __init__(self) -> None:
        self._channel: AbstractChannel | None = None
        self._declared: set[str] = set()
        self._lock = asyncio.Lock()

    async def publish(self, message: AbstractIncomingMessage, publish: Publish) -> None:
        """Publish a message, and wait for the confirmation."""
        # One at a time: aiormq finds a message that was returned by its id, and two may share one.
        async with self._lock:
            try:
                await self._publish(message, publish)
            except _NOT_TAKEN:
                # Someone may have deleted the delay queue, or its exchange.
                self._declared.clear()
                await self._publish(message, publish)

    async def _publish(self, message: AbstractIncomingMessage, publish: Publish) -> None:
        properties = message.properties
        properties.headers, properties.expiration = dict(publish.headers), None
        properties.user_id, properties.message_id = None, message.message_id or NO_ID
        channel = await self._opened(message.channel.connection)
        await self._declare(channel, publish)
        await channel.basic_publish(
            message.body, exchange=publish.exchange, routing_key=publish.routing_key,
            properties=properties, mandatory=True,
        )  # fmt: skip

    async def _opened(self, connection: AbstractConnection) -> AbstractChannel:
        if self._channel is None or self._channel.is_closed:
            self._declared.clear()
            self._channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        return self._channel

    async def _declare(self, channel: AbstractChannel, publish: Publish) -> None:
        delay = publish.delay
        if delay is None or delay.name in self._declared:
            return
        await channel.exchange_declare(delay.name, exchange_type="fanout", durable=True)
        await channel.queue_declare(delay.name, durable=True, arguments=dict(delay.arguments))
        await channel.queue_bind(delay.name, delay.name)
        self._declared.add(delay.name)


@contextmanager
def _received(signals: Sequence[signal.Signals], stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first of these signals; the second one does what it did before."""
    loop = asyncio.get_running_loop()
    waiting = set(signals)

    def restore() -> None:
        while waiting:
            loop.remove_signal_handler(waiting.pop())

    def receive() -> None:
        restore()
        stop()

    try:
        for each in signals:
            loop.add_signal_handler(each, receive)
        yield
    finally:
        restore()
