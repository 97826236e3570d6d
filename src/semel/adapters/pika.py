"""pika: a callback that handles every message once.

    consumer = once(idem, handle, queue="orders", consumer="mailer")
    channel.basic_qos(prefetch_count=10)
    channel.basic_consume("orders", consumer)
    consumer.run(channel)

The handler runs on a thread of its own, while pika's thread answers the heartbeats of the broker:
a handler may take as long as it needs. What becomes of the message is carried out on pika's thread,
for a channel is used by one thread only.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial, wraps
from itertools import chain, repeat
from typing import Any, Final, Literal, NamedTuple, assert_never, cast

from msgspec import Struct

from semel.adapters._sync.consuming import Consumer
from semel.adapters.rabbitmq import (
    ENDED_INSIDE,
    EXCHANGE,
    Acknowledge,
    DeadLetter,
    DelayQueue,
    DelayQueues,
    Delivery,
    Publish,
    RabbitRules,
    Step,
    Unwritable,
    check_handler,
    check_not_async,
    check_size,
    failure_of,
    one_run,
    stable_id,
    with_id,
)
from semel.core.optional import Needed
from semel.core.policy import Policy
from semel.core.stop import Stop
from semel.errors import ConfigError
from semel.events import logger
from semel.messages import KeyOfMessage, PayloadOfMessage, Verdict
from semel.sync import Idempotency

with Needed("semel[pika]", by=__name__):
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
    from pika.exceptions import (
        AMQPChannelError,
        AMQPError,
        ChannelWrongStateError,
        ConnectionWrongStateError,
        UnroutableError,
    )
    from pika.frame import Header, Method
    from pika.spec import Basic, BasicProperties

__all__ = ["PikaConsumer", "Received", "once", "properties"]

_RECONNECT: Final = (1.0, 2.0, 5.0, 10.0)
"""Seconds between two connections; the last of them from then on."""

_LOOK: Final = 0.2
"""Seconds between two looks at whether the consumer has to stop: a signal must not take locks."""


class Received(NamedTuple):
    """The parts of a pika message: `message.raw`."""

    method: Basic.Deliver
    properties: BasicProperties
    body: bytes


def once(
    idempotency: Idempotency,
    handle: Callable[..., object],
    *,
    queue: str,
    consumer: str | None = None,
    key: KeyOfMessage | None = None,
    missing: Literal["reject", "digest"] = "reject",
    payload: PayloadOfMessage | None = None,
    policy: Policy | None = None,
    dead_letters: bool | str = False,
    transaction: Callable[[], Any] | None = None,
    threads: int = 1,
    delay_queues: DelayQueues = "quorum",
) -> PikaConsumer:
    """Return a callback for `basic_consume` that calls `handle(message)` once for each message.

    `queue` is the queue of the messages, which a message doesn't name. `consumer` names who handles
    them; the default is `queue`. `key` says which messages are the same, `missing` what happens to
    one without an id, and `payload` what must match. `policy` wins over the policy of the engine
    (`idempotency`). `dead_letters` is True if the queue has a dead-letter exchange, or the name of
    a queue for rejected messages. `delay_queues` is the type of the queues in which messages wait.
    With `transaction`, such as `Session.begin`, `handle(session, message)` and the record are one
    commit. `threads` is how many messages run at the same time.

    Examples:
        >>> callback = once(idem, print, queue="orders", dead_letters="orders.dead")
    """
    if not isinstance(queue, str):
        raise ConfigError("queue= is needed: the queue that the messages are in")
    rules = RabbitRules(
        consumer=consumer, queue=queue, dead_letters=dead_letters, delay_queues=delay_queues
    )
    if not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"threads must be a number from 1 on; got {threads!r}")
    options = {
        "key": key, "missing": missing, "payload": payload, "policy": policy,
        "dead_letters": bool(dead_letters),
    }  # fmt: skip
    check_not_async(handle)
    handled = Consumer(
        idempotency,
        _failing(handle) if callable(handle) else handle,
        options,
        default_consumer=rules.consumer,
        transaction=transaction,
    )
    check_handler(handle, in_transaction=transaction is not None)
    return PikaConsumer(handled, rules, threads)


def properties(
    part: str | None = None,
    *,
    message_id: str | None = None,
    headers: Mapping[str, Any] | None = None,
    **fields: Any,
) -> BasicProperties:
    """Return the properties of a message with an id that is the same each time you send it.

    `part` names the message within the running operation, as in `Attempt.derive`; `message_id` is
    your own id. `headers` and `fields` are those of `pika.BasicProperties`.

    Examples:
        >>> properties(message_id="order-42", delivery_mode=2).message_id
        'order-42'
    """
    found = stable_id(part, message_id)
    return BasicProperties(message_id=found, headers=with_id(headers, found), **fields)


class _Work(Struct, eq=False):
    """A message between its delivery and its end."""

    channel: BlockingChannel
    received: Received
    delivery: Delivery
    _begin: threading.Lock
    handled: bool = False

    @property
    def is_over(self) -> bool:
        """Nothing more can be done: its connection was lost with the callback for its end."""
        return self.handled and not self.channel.is_open

    def begin(self) -> bool:
        """Take it, to handle it or to give it back; False = that is done already."""
        return self._begin.acquire(blocking=False)

    def acknowledge(self) -> None:
        self.channel.basic_ack(self.received.method.delivery_tag)

    def reject(self, *, requeue: bool) -> None:
        self.channel.basic_reject(self.received.method.delivery_tag, requeue=requeue)

    def give_back(self) -> None:
        """Let the broker deliver it again, unless that is done: its channel may be closed."""
        with suppress(ChannelWrongStateError):
            self.reject(requeue=True)


class PikaConsumer:
    """A callback for `basic_consume`, created by `once`; it can serve one channel after another."""

    def __init__(self, handled: Consumer, rules: RabbitRules, threads: int) -> None:
        self._handled = handled
        self._rules = rules
        self._threads = ThreadPoolExecutor(threads, f"semel-{handled.rules.consumer}")
        self._publishers: dict[BlockingConnection, _Publisher] = {}
        self._works: set[_Work] = set()
        """Those that have not ended. Several threads change it, each in one step."""
        self._stop = Stop()
        self._error: BaseException | None = None
        self._one_run = threading.Lock()

    def __call__(
        self,
        channel: BlockingChannel,
        method: Basic.Deliver,
        properties: BasicProperties,
        body: bytes,
    ) -> None:
        """Take a message; pika calls this."""
        if self._error is not None:
            raise self._error
        if not isinstance(channel, BlockingChannel):
            raise ConfigError(
                "semel.adapters.pika needs a channel of a BlockingConnection; for asyncio there is "
                f"semel.adapters.aio_pika. Got {type(channel).__name__}"
            )
        delivery = self._rules.received(
            method.exchange,
            method.routing_key,
            message_id=properties.message_id,
            headers=properties.headers,
            expiration=properties.expiration,
        )
        if delivery.delayed:
            properties.headers, properties.message_id = delivery.headers, delivery.id
            properties.expiration = delivery.expiration
            method.exchange, method.routing_key = delivery.exchange, delivery.routing_key
        work = _Work(channel, Received(method, properties, body), delivery, threading.Lock())
        self._works.add(work)
        self._threads.submit(self._handle, work)

    def _handle(self, work: _Work) -> None:
        """Handle a message; this is a thread of ours."""
        if self._error is not None or not work.begin():
            return
        ended: Verdict | BaseException
        try:
            message = work.delivery.message(work.received.body, work.received)
            ended = self._handled.handle(message, message)
        except BaseException as error:  # noqa: BLE001 - it is raised on pika's thread
            self._error = ended = error
        work.handled = True
        try:
            work.channel.connection.add_callback_threadsafe(partial(self._ended, work, ended))
        except ConnectionWrongStateError:
            # The broker delivers it again: what it did is in its record.
            self._works.discard(work)

    def _ended(self, work: _Work, ended: Verdict | BaseException) -> None:
        """Carry out what became of a message; this is pika's thread."""
        self._works.discard(work)
        if isinstance(ended, BaseException):
            raise ended
        with suppress(ChannelWrongStateError):  # closed: the broker delivers it again
            self._carry_out(self._rules.step(ended, work.delivery), work)

    def _carry_out(self, step: Step, work: _Work) -> None:
        match step:
            case Acknowledge():
                work.acknowledge()
            case DeadLetter():
                work.reject(requeue=False)
            case Publish():
                self._publish(work, step)
            case _:
                assert_never(step)

    def _publish(self, work: _Work, publish: Publish) -> None:
        connection = work.channel.connection
        following: Step | None
        try:
            self._publisher(connection).publish(connection, work.received, publish)
        except (AMQPChannelError, Unwritable) as error:
            returned = isinstance(error, UnroutableError)
            following = self._rules.instead(publish, error, returned=returned)
        else:
            following = Acknowledge()
        if following is None:
            connection.call_later(publish.seconds, work.give_back)
        else:
            self._carry_out(following, work)

    def _publisher(self, connection: BlockingConnection) -> _Publisher:
        found = self._publishers.get(connection)
        if found is None:
            still_open = {each: its for each, its in self._publishers.items() if each.is_open}
            self._publishers = {**still_open, connection: (found := _Publisher())}
        return found

    # --- the end ------------------------------------------------------------------------------

    def stop(self) -> None:
        """End `run`, this one and every later one; safe in signal handlers and any thread."""
        self._stop.set()

    def run(
        self,
        channel: BlockingChannel | Callable[[], BlockingChannel],
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        grace: float = 30.0,
    ) -> bool:
        """Consume from `channel` until `stop` or one of these `signals`; then `drain`.

        `channel` can be a function that connects and returns a channel that consumes. semel calls
        it again if the connection is lost or RabbitMQ cancels the consumer, as it does when a
        queue is deleted. Running handlers get `grace` seconds to end; return False if some did
        not. Raise what stops the consumer; for a plain channel, also `ConnectionError` when
        RabbitMQ cancels it. Only the main thread receives signals, so pass none elsewhere. A
        second `run` beside the first raises `ConfigError`.
        """
        with one_run(self._one_run):
            if isinstance(channel, BlockingChannel):
                with _received(signals, self.stop):
                    self._consume(channel)
                return self.drain(channel, grace=grace)
            with _received(signals, self.stop):
                return self._consume_again(channel, grace)

    def _consume_again(self, connect: Callable[[], BlockingChannel], grace: float) -> bool:
        """Consume, and connect again whenever the connection or the channel is lost."""
        channel, pauses = None, chain(_RECONNECT, repeat(_RECONNECT[-1]))
        while not self._stop.is_set():
            try:
                channel = connect()
                pauses = chain(_RECONNECT, repeat(_RECONNECT[-1]))
                self._consume(channel)
                if self._stop.is_set():
                    return self.drain(channel, grace=grace)
            except (AMQPError, OSError) as error:
                logger.warning(
                    "no connection to RabbitMQ; connecting again: %s [consumer=%s]",
                    error or type(error).__name__,
                    self._handled.rules.consumer,
                )
            if channel is not None:  # perhaps only the channel is gone
                with suppress(AMQPError):
                    channel.connection.close()
            self._stop.wait(next(pauses))
        return self._wait_for_end(grace, time.sleep)

    def _consume(self, channel: BlockingChannel) -> None:
        channel.add_on_cancel_callback(_consumer_cancelled)
        self._publisher(channel.connection).bind_again(
            channel.connection, cast("str", self._rules.queue)
        )
        self._look(channel)
        channel.start_consuming()

    def _look(self, channel: BlockingChannel) -> None:
        if self._stop.is_set():
            channel.stop_consuming()
        else:
            channel.connection.call_later(_LOOK, partial(self._look, channel))

    def drain(self, channel: BlockingChannel, *, grace: float = 30.0) -> bool:
        """Take no new message from the `channel`, and wait for running handlers.

        Messages that have not begun go back to their queue. Return False if handlers still run
        after `grace` seconds: their messages go back when the connection closes.
        """
        channel.stop_consuming()
        return self._wait_for_end(grace, channel.connection.process_data_events)

    def _wait_for_end(self, grace: float, wait: Callable[[float], object]) -> bool:
        """Return what has not begun to the queue, and wait for the rest."""
        self._handled.wait_no_longer()
        for work in list(self._works):
            if work.begin():
                self._works.discard(work)
                work.give_back()
        deadline = time.monotonic() + grace
        while self._running() and (left := deadline - time.monotonic()) > 0:
            wait(min(left, _LOOK))
        if self._running():
            logger.warning(
                "%d messages were still running after %g s; RabbitMQ will redeliver them "
                "[consumer=%s]",
                len(self._works), grace, self._handled.rules.consumer,
            )  # fmt: skip
        return not self._works

    def _running(self) -> bool:
        self._works.difference_update([work for work in list(self._works) if work.is_over])
        return bool(self._works)


class _Publisher:
    """A channel of its own on a consumer's connection, with confirmations."""

    def __init__(self) -> None:
        self._channel: BlockingChannel | None = None
        self._declared: set[str] = set()

    def publish(self, connection: BlockingConnection, received: Received, publish: Publish) -> None:
        """Publish a message, and wait for the confirmation."""
        try:
            self._publish(connection, received, publish)
        except AMQPChannelError:
            # Someone may have deleted the delay queue, or its exchange.
            self._declared.clear()
            self._publish(connection, received, publish)

    def _publish(
        self, connection: BlockingConnection, received: Received, publish: Publish
    ) -> None:
        sent = BasicProperties(**vars(received.properties))
        sent.headers, sent.expiration, sent.user_id = dict(publish.headers), None, None
        channel = self._opened(connection)
        header = Header(channel.channel_number, len(received.body), sent)
        # What was agreed with the broker is not public.
        check_size(header.marshal, cast("Any", connection)._impl.params.frame_max)  # noqa: SLF001
        if publish.delay is not None:
            self._declare(channel, publish.delay)
        channel.basic_publish(
            publish.exchange, publish.routing_key, received.body, sent, mandatory=True
        )

    def _opened(self, connection: BlockingConnection) -> BlockingChannel:
        if self._channel is None or not self._channel.is_open:
            self._declared.clear()
            self._channel = connection.channel()
            self._channel.confirm_delivery()
        return self._channel

    def _declare(self, channel: BlockingChannel, delay: DelayQueue) -> None:
        if delay.name not in self._declared:
            channel.exchange_declare(EXCHANGE, "direct", durable=True)
            channel.queue_declare(delay.name, durable=True, arguments=dict(delay.arguments))
            channel.queue_bind(delay.name, EXCHANGE, delay.name)
            self._declared.add(delay.name)
        # Each time: a queue that was deleted and declared again is not bound.
        channel.queue_bind(delay.target, EXCHANGE, delay.target)

    def bind_again(self, connection: BlockingConnection, queue: str) -> None:
        """Let delayed messages come back to a queue that was deleted and declared again."""
        with suppress(AMQPChannelError):  # nothing was ever delayed, or there is no such queue
            channel = self._opened(connection)
            channel.exchange_declare(EXCHANGE, passive=True)
            channel.queue_bind(queue, EXCHANGE, queue)


def _failing(handle: Callable[..., object]) -> Callable[..., object]:
    """Turn a cancellation, as of an event loop that a handler runs, into a failure of it."""

    @wraps(handle)
    def handler(*args: Any) -> object:
        try:
            return handle(*args)
        except ENDED_INSIDE as error:
            raise failure_of(error) from error

    return handler


def _consumer_cancelled(frame: Method[Basic.Cancel]) -> None:
    """End what pika waits for; without this, it waits for the channel's other consumers."""
    raise ConnectionError(
        f"RabbitMQ ended the consumer {frame.method.consumer_tag}: was its queue deleted?"
    )


@contextmanager
def _received(signals: Sequence[signal.Signals], stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first of these signals; the second one does what it did before."""
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def receive(_number: int, _frame: object) -> None:
        restore()
        stop()

    if signals and threading.current_thread() is not threading.main_thread():
        raise ConfigError("only the main thread receives signals: pass run(..., signals=())")
    try:
        for each in signals:
            before[each] = signal.signal(each, receive)
        yield
    finally:
        restore()
