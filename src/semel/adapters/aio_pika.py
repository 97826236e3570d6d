"""aio-pika: a callback that handles every message once.

    consumer = once(idem, handle, consumer="mailer")
    await consumer.run(queue)

aio-pika cancels a callback when its connection is lost. So each message is handled in a task of its
own, which goes on to its end: the broker delivers the message again, and its record says that it is
done. aio-pika and its connections may be robust or not.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import chain, repeat
from typing import Any, Final, Literal, assert_never, cast
from uuid import uuid4

from semel.adapters.consuming import AsyncConsumer, AsyncRunning
from semel.adapters.rabbitmq import (
    ENDED_INSIDE,
    EXCHANGE,
    NO_ID,
    Acknowledge,
    DeadLetter,
    DelayQueue,
    DelayQueues,
    Delivery,
    Publish,
    RabbitRules,
    Step,
    Unwritable,
    check_async,
    check_handler,
    check_size,
    failure_of,
    one_run,
    stable_id,
    with_id,
)
from semel.aio import AsyncIdempotency
from semel.core.optional import Needed
from semel.core.policy import Policy
from semel.engine.colours.tasks import finished, is_cancelled
from semel.errors import ConfigError
from semel.events import logger
from semel.messages import STORE_PAUSE, KeyOfMessage, PayloadOfMessage, later

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
    from pamqp.frame import marshal
    from pamqp.header import ContentHeader

__all__ = ["AioPikaConsumer", "message", "once"]

_NOT_TAKEN: Final = (DeliveryError, AMQPChannelError, ChannelInvalidStateError)
"""What aiormq raises when the broker did not take a message, though it is there."""
_CANCELLING: Final = 2.0
"""Seconds to tell the broker that a consumer ends."""
_LOOK: Final = 0.5
"""Seconds between two looks at whether the broker still has the consumer."""
_CONSUME_AGAIN: Final = (1.0, 2.0, 5.0, 10.0)
"""Seconds between two tries to consume a queue that is not there; the last of them from then on."""


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

    `consumer` names who handles the messages; the default is `queue`. `queue` is the queue of the
    messages, which a message doesn't name; `run` knows it, too. `key` says which messages are the
    same, `missing` what happens to one without an id, and `payload` what must match. `policy` wins
    over the policy of the engine (`idempotency`). `dead_letters` is True if the queue has a
    dead-letter exchange, or the name of a queue for rejected messages. `delay_queues` is the type
    of the queues in which messages wait. With `transaction`, such as `Session.begin`,
    `handle(session, message)` and the record are one commit.

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
        idempotency,
        _in_its_own_task(handle) if callable(handle) else handle,
        options,
        default_consumer=rules.consumer,
        transaction=transaction,
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
    """Return a message with an id that is the same each time you send it, unlike aio-pika's own.

    `part` names the message within the running operation, as in `Attempt.derive`; `message_id` is
    your own id. `body`, `headers`, and `fields` are those of `aio_pika.Message`.

    Examples:
        >>> message(b"{}", message_id="order-42", delivery_mode=2).message_id
        'order-42'
    """
    found = stable_id(part, message_id)
    return Message(body, message_id=found, headers=with_id(headers, found), **fields)


class AioPikaConsumer:
    """A callback for `queue.consume`, created by `once`."""

    def __init__(self, handled: AsyncConsumer, rules: RabbitRules) -> None:
        self._handled = handled
        self._rules = rules
        self._running = AsyncRunning()
        self._publishers: dict[AbstractConnection, _Publisher] = {}
        self._returning = AsyncRunning()
        """Messages that came after `stop`: they go back when the broker has canceled the run."""
        self._canceled = asyncio.Event()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None
        self._one_run = threading.Lock()

    async def __call__(self, message: AbstractIncomingMessage) -> None:
        """Take a message; aio-pika calls this."""
        # Else it is not acknowledged, and goes back to its queue with the connection's end.
        if self._error is None:
            self._running.start(self._handle(message))

    async def _handle(self, message: AbstractIncomingMessage) -> None:
        try:
            delivery = self._received(message)
            step = await self._step(message, delivery)
        except asyncio.CancelledError:
            await self._settle(_give_back(message))
            raise
        except GeneratorExit:  # the event loop is gone, and with it the connection
            raise
        except BaseException as error:  # noqa: BLE001 - the consumer stops with it
            await self._stop_with(error, message)
            return
        await self._settle(self._carry_out(step, message))

    async def _step(self, message: AbstractIncomingMessage, delivery: Delivery) -> Step:
        given = delivery.message(message.body, message)
        try:
            verdict = await self._handled.handle(given, given)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Of a client of the store, or of the database.
            verdict = later(STORE_PAUSE, "something that it waited for was canceled")
        return self._rules.step(verdict, delivery)

    async def _carry_out(self, step: Step, message: AbstractIncomingMessage) -> None:
        match step:
            case Acknowledge():
                await _acknowledge(message)
            case DeadLetter():
                await _dead_letter(message)
            case Publish():
                await self._publish(message, step)
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
            given.exchange, given.routing_key = delivery.exchange, delivery.routing_key
            if delivery.expiration is not None:
                given.expiration = int(delivery.expiration) / 1000  # seconds, as aio-pika has it
        return delivery

    async def _settle(self, sending: Awaitable[None]) -> None:
        """Send what becomes of a message; without its connection the broker delivers it again."""
        with _even_if_lost():
            await sending

    async def _publish(self, message: AbstractIncomingMessage, publish: Publish) -> None:
        publisher = self._publisher(message.channel.connection)
        following: Step | None
        try:
            await publisher.publish(message, publish)
        except (*_NOT_TAKEN, Unwritable) as error:
            returned = isinstance(error, PublishError)
            following = self._rules.instead(publish, error, returned=returned)
        else:
            following = Acknowledge()
        if following is not None:
            await self._carry_out(following, message)
            return
        asyncio.get_running_loop().call_later(
            publish.seconds, lambda: self._running.start(self._settle(_give_back(message)))
        )

    def _publisher(self, connection: AbstractConnection) -> _Publisher:
        found = self._publishers.get(connection)
        if found is None:
            still_open = {each: its for each, its in self._publishers.items() if each.is_opened}
            self._publishers = {**still_open, connection: (found := _Publisher(connection))}
        return found

    # --- the end ------------------------------------------------------------------------------

    async def _stop_with(self, error: BaseException, message: AbstractIncomingMessage) -> None:
        """End the consumer: the program is wrong, and no message is acknowledged any more."""
        logger.error(
            "consumer stopped by an error; it acknowledges nothing more [consumer=%s]",
            self._handled.rules.consumer,
            exc_info=error,
        )
        self._error = self._error or error
        self._stop.set()
        await self._settle(_cancel_consumer(message))

    def stop(self) -> None:
        """End `run`, this one and every later one; for signal handlers of the event loop."""
        self._stop.set()

    async def run(
        self,
        queue: AbstractQueue,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        grace: float = 30.0,
    ) -> bool:
        """Consume `queue` until `stop` or one of these `signals`; then `drain`.

        Running handlers get `grace` seconds to end; return False if some did not. Raise what stops
        the consumer, and `ConnectionError` when the channel is closed, which a robust one is only
        by its own `close`. If RabbitMQ cancels the consumer because the queue was deleted, it
        consumes again when a queue of this name exists. A second `run` beside the first raises
        `ConfigError`.
        """
        if self._error is not None:
            raise self._error
        if self._rules.queue not in {None, queue.name}:
            raise ConfigError(
                f"this consumer handles the queue {self._rules.queue}, not {queue.name}: make "
                "another one with once()"
            )
        with one_run(self._one_run):
            self._rules.queue = queue.name
            with _received(signals, self.stop):
                lost = await self._consume(queue)
            ended = await self.drain(grace=grace)
        if lost:
            raise ConnectionError(f"the channel of the queue {queue.name} was closed")
        return ended

    async def _consume(self, queue: AbstractQueue) -> bool:
        """Consume a queue until `stop`; True if the channel was closed before.

        If the broker ends the consumer, because the queue was deleted, consume again when there is
        such a queue. A robust connection may be quicker, and does not know every queue.
        """
        tag, pauses, bound = _new_tag(), None, None
        self._canceled.clear()
        waiting = [asyncio.ensure_future(each) for each in (self._stop.wait(), _closed(queue))]
        try:
            await self._begin(queue, tag)
            while True:
                pause = _LOOK if pauses is None else next(pauses)
                await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                stopped, closed = (each.done() for each in waiting)
                if stopped or closed:
                    return closed
                channel = await _channel_of(queue)
                if channel is None or tag in channel.consumers:
                    pauses = None
                    if channel is not bound and channel is not None:
                        # The connection has restored its consumers, and perhaps the queue itself.
                        bound = channel
                        await self._settle(self._bind_again(channel, queue))
                elif pauses is None:
                    logger.warning(
                        "RabbitMQ canceled a consumer; consuming again when the queue %s exists "
                        "[consumer=%s]",
                        queue.name,
                        self._handled.rules.consumer,
                    )
                    pauses = chain(_CONSUME_AGAIN, repeat(_CONSUME_AGAIN[-1]))
                elif await _is_there(channel.connection, queue.name):
                    await self._settle(_cancel(queue, tag))
                    tag = _new_tag()
                    with _even_if_lost():  # the next look tries again
                        await self._begin(queue, tag)
                        pauses = None
        finally:
            # Also if this is canceled: a consumer that is left on goes on handling.
            for each in waiting:
                each.cancel()
            await self._end(queue, tag)

    async def _begin(self, queue: AbstractQueue, tag: str) -> None:
        await queue.consume(self._take, consumer_tag=tag)
        channel = await queue.channel.get_underlay_channel()
        await self._settle(self._bind_again(channel, queue))

    async def _take(self, message: AbstractIncomingMessage) -> None:
        if self._stop.is_set():
            self._returning.start(self._return(message))
        else:
            await self(message)

    async def _return(self, message: AbstractIncomingMessage) -> None:
        await self._canceled.wait()  # Before, the broker would deliver it here again.
        await self._settle(_give_back(message))

    async def _end(self, queue: AbstractQueue, tag: str) -> None:
        """Cancel a consumer, and give back what came after `stop`."""
        try:
            if not queue.channel.is_closed:
                await self._settle(_cancel(queue, tag))
        finally:
            self._canceled.set()
        await self._returning.drain(_CANCELLING)

    async def _bind_again(self, channel: Any, queue: AbstractQueue) -> None:
        await self._publisher(channel.connection).bind_again(queue.name)

    async def drain(self, *, grace: float = 30.0) -> bool:
        """Wait for running handlers; cancel the consumer before you call it.

        What still runs after `grace` seconds is canceled and goes back to its queue; then return
        False. Raise what stopped the consumer.
        """
        self._handled.wait_no_longer()
        late = await self._running.drain(grace)
        if late:
            logger.warning(
                "%d messages were still running after %g s; RabbitMQ will redeliver them "
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
    # A robust channel waits for a broker that is down, as long as it takes.
    async with asyncio.timeout(_CANCELLING):
        await queue.cancel(tag)


def _new_tag() -> str:
    return f"semel-{uuid4().hex}"


async def _closed(queue: AbstractQueue) -> None:
    await queue.channel.closed()


async def _channel_of(queue: AbstractQueue) -> Any:
    """Return the channel beneath that of a queue; None while a robust one connects again."""
    with _even_if_lost(logging.DEBUG):
        async with asyncio.timeout(_LOOK):
            return await queue.channel.get_underlay_channel()
    return None


async def _is_there(connection: AbstractConnection, queue: str) -> bool:
    """Ask for a queue, on a channel of its own: the broker closes it if there is none."""
    with _even_if_lost(logging.DEBUG):
        async with asyncio.timeout(_CANCELLING):
            channel = await connection.channel(publisher_confirms=False)
            await channel.queue_declare(queue, passive=True)
            await channel.close()
            return True
    return False


def _in_its_own_task(
    handle: Callable[..., Awaitable[object]],
) -> Callable[..., Awaitable[object]]:
    """Run a handler in its own task: if it cancels that task, it fails.

    A cancellation from outside reaches the task that handles the message.
    """

    @wraps(handle)
    async def handler(*args: Any) -> object:
        task = asyncio.get_running_loop().create_task(_ended(handle, args))
        try:
            value, error = await task
        except asyncio.CancelledError as canceled:  # no await of the handler met it
            value, error = None, canceled
        try:
            if error is None:
                return value
            if isinstance(error, ENDED_INSIDE) and not is_cancelled():
                raise failure_of(error) from error
            raise error
        finally:
            del task, error  # They hold this frame, by a traceback.

    return handler


async def _ended(
    handle: Callable[..., Awaitable[object]], args: tuple[Any, ...]
) -> tuple[object, BaseException | None]:
    """Return what a handler returned or raised: a task's SystemExit would end the event loop."""
    try:
        return await finished(handle(*args)), None
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        return None, error


class _Publisher:
    """A channel of its own on a consumer's connection, with confirmations."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
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
        properties.headers, properties.expiration = _writable(publish.headers), None
        properties.user_id, properties.message_id = None, message.message_id or NO_ID
        channel = await self._opened()
        header = ContentHeader(body_size=len(message.body), properties=properties)
        frame_max = self._connection.connection_tune.frame_max
        check_size(lambda: marshal(header, channel.number), frame_max)
        if publish.delay is not None:
            await self._declare(channel, publish.delay)
        await channel.basic_publish(
            message.body, exchange=publish.exchange, routing_key=publish.routing_key,
            properties=properties, mandatory=True,
        )  # fmt: skip

    async def _opened(self) -> AbstractChannel:
        if self._channel is None or self._channel.is_closed:
            self._declared.clear()
            self._channel = await self._connection.channel(
                publisher_confirms=True, on_return_raises=True
            )
        return self._channel

    async def _declare(self, channel: AbstractChannel, delay: DelayQueue) -> None:
        if delay.name not in self._declared:
            await channel.exchange_declare(EXCHANGE, exchange_type="direct", durable=True)
            await channel.queue_declare(delay.name, durable=True, arguments=dict(delay.arguments))
            await channel.queue_bind(delay.name, EXCHANGE, delay.name)
            self._declared.add(delay.name)
        # Each time: a queue that was deleted and declared again is not bound.
        await channel.queue_bind(delay.target, EXCHANGE, delay.target)

    async def bind_again(self, queue: str) -> None:
        """Let delayed messages come back to a queue that was deleted and declared again."""
        async with self._lock:
            with suppress(*_NOT_TAKEN):  # nothing was ever delayed, or there is no such queue
                channel = await self._opened()
                await channel.exchange_declare(EXCHANGE, passive=True)
                await channel.queue_bind(queue, EXCHANGE, queue)


@contextmanager
def _even_if_lost(level: int = logging.INFO) -> Iterator[None]:
    """Log, and drop, the error of a connection or a channel that was closed."""
    try:
        yield
    except Exception as error:
        # aiormq raises a bare Exception in the requests that are under way when it closes.
        if not (isinstance(error, CONNECTION_EXCEPTIONS) or type(error) is Exception):
            raise
        logger.log(
            level,
            "connection or channel lost; RabbitMQ will redeliver what was not acknowledged (%r)",
            error,
        )


def _writable(value: Any) -> Any:
    """Return a header as aiormq can write it: it reads a text that is no UTF-8 as bytes."""
    match value:
        case bytes():
            return bytearray(value)
        case Mapping():
            return {name: _writable(each) for name, each in value.items()}
        case list():
            return [_writable(each) for each in value]
    return value


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
