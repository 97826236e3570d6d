"""What all clients of RabbitMQ share: how a verdict on a message is carried out.

    Ack      acknowledge
    Later    publish the message to a delay queue, wait for the confirmation, acknowledge
    Reject   to the dead letters; without any, it stays and is delivered again

A delay queue keeps messages for one of the `STEPS`. Then RabbitMQ moves them to the default
exchange, with the routing key that they came with: the name of their queue. A message is published
before it is acknowledged, so a crash between the two delivers it twice, and its record tells.

This module decides, and writes the log. It never talks to a broker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias, assert_never

import msgspec
from msgspec import Meta, Struct

from semel.core.attempts import current_attempt
from semel.errors import ConfigError
from semel.events import logger
from semel.messages import HEADER, LONGEST, Ack, Fail, Later, Message, Reject, Verdict

DelayQueues: TypeAlias = Literal["quorum", "classic"]

STEPS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)
"""Seconds after which a message may be delivered again; others are rounded up to the next."""

DELAY: Final = "semel.later."
"""How the names of the delay queues begin, and those of their exchanges."""

KEPT: Final = "semel-kept"
"""The header of a message that was published again: what the broker would not take a second time.

This is the expiration, which would end the delay; `CC`, which would send copies; and
`x-death`, for which RabbitMQ may take the message for one that goes in circles, and drop it. The
user is not kept: RabbitMQ has checked who sent a message, and nobody can check a header.
"""

NO_ID: Final = "semel:none"
"""The id on the wire of a message that has none: aio-pika would make one up."""

REASON: Final = "semel-reason"
ERROR: Final = "semel-error"
CONSUMER: Final = "semel-consumer"
QUEUE: Final = "semel-queue"

_LONGEST_TEXT: Final = 1000
"""Characters of a reason in a header: all headers of a message have to fit into one frame."""

_DEATHS: Final = "x-death"
_COPIES: Final = "CC"
_COUNT: Final = "x-delivery-count"
_FIRST_AND_LAST: Final = tuple(
    f"x-{which}-death-{what}"
    for which in ("first", "last")
    for what in ("queue", "exchange", "reason")
)
_BROKERS_OWN: Final = frozenset((_DEATHS, _COPIES, _COUNT, *_FIRST_AND_LAST))


class Delivery(Struct, eq=False):
    """A message from RabbitMQ, as its producer wrote it, however often it was delayed."""

    queue: str
    id: str | None
    headers: Mapping[str, Any]
    expiration: str | None
    """Milliseconds, as the broker writes them."""
    delayed: bool = False
    """It was published again, so the client's own message differs from this."""
    told: bool = False
    """The log says already that it cannot be rejected."""

    def message(self, body: bytes, raw: object) -> Message:
        """Return it as the handler gets it."""
        return Message(self.id, self.headers, body, raw)


class DelayQueue(Struct, frozen=True):
    """A queue that keeps messages for some seconds, and a fanout exchange of the same name."""

    name: str
    arguments: Mapping[str, Any]


class Acknowledge(Struct, frozen=True):
    """Acknowledge the message."""


class DeadLetter(Struct, frozen=True):
    """Reject the message: RabbitMQ moves it to the queue's dead-letter exchange."""


class Publish(Struct, frozen=True):
    """Publish the message, mandatory, and acknowledge it when the broker has confirmed that.

    If the broker refuses, do what comes next in its stead. None = keep it for `seconds`, and give
    it back.
    """

    exchange: str
    routing_key: str
    headers: Mapping[str, Any]
    delay: DelayQueue | None
    seconds: float
    otherwise: Publish | None = None


Step: TypeAlias = Acknowledge | DeadLetter | Publish

ACKNOWLEDGE: Final = Acknowledge()
DEAD_LETTER: Final = DeadLetter()


class RabbitRules:
    """The options of one consumer that are RabbitMQ's own, checked."""

    def __init__(
        self,
        *,
        consumer: str | None,
        queue: str | None,
        dead_letters: bool | str,
        delay_queues: DelayQueues,
    ) -> None:
        if queue is not None and not (isinstance(queue, str) and queue):
            raise ConfigError(f"queue must be the name of a queue, or None; got {queue!r}")
        if not isinstance(dead_letters, bool) and not (
            isinstance(dead_letters, str) and dead_letters
        ):
            raise ConfigError(
                "dead_letters must be True (the queue has a dead-letter exchange), the name of a "
                f"queue for rejected messages, or False; got {dead_letters!r}"
            )
        if queue is not None and dead_letters == queue:
            raise ConfigError(f"dead_letters must be another queue than {queue!r} itself")
        if delay_queues not in ("quorum", "classic"):
            raise ConfigError(f"delay_queues must be 'quorum' or 'classic'; got {delay_queues!r}")
        if consumer is None and queue is None:
            raise ConfigError(
                'say who handles the messages, as in consumer="mailer", or from which queue they '
                'come, as in queue="orders": neither was given'
            )
        self.consumer = queue if consumer is None else consumer
        self.queue = queue
        self.dead_letters = dead_letters
        self._kind: DelayQueues = delay_queues

    def received(
        self,
        exchange: str,
        routing_key: str,
        *,
        message_id: str | None,
        headers: Mapping[str, Any] | None,
        expiration: str | None,
    ) -> Delivery:
        """Take a message as the broker sent it; what was kept is where it was before."""
        given = {} if headers is None else headers
        queue = self._queue_of(exchange, routing_key, given)
        found = None if message_id == NO_ID else message_id
        kept = _kept(given.get(KEPT))
        if kept is None:
            return Delivery(queue, found, given, expiration)
        headers = _restored(given, kept.headers)
        return Delivery(queue, found, headers, kept.expiration, delayed=True, told=kept.told)

    def _queue_of(self, exchange: str, routing_key: str, headers: Mapping[str, Any]) -> str:
        if self.queue is not None:
            return self.queue
        if exchange == "" and _COPIES not in headers:
            return routing_key  # the default exchange: its routing keys are the queues' names
        raise ConfigError(
            f"a message came through the exchange {exchange!r}, and does not tell which queue it "
            "was in, which is needed to deliver it again: say once(..., queue=...)"
        )

    def step(self, verdict: Verdict, delivery: Delivery) -> Step:
        """Say how to carry out a verdict."""
        match verdict:
            case Ack():
                return ACKNOWLEDGE
            case Later(seconds=seconds):
                return self._delayed(delivery, seconds)
            case Reject():
                return self._rejected(verdict, delivery)
            case Fail(error=error):  # for frameworks with a retry of their own
                raise error
            case _:
                assert_never(verdict)

    def _rejected(self, verdict: Reject, delivery: Delivery) -> Step:
        target, error = self.dead_letters, type(verdict.error).__name__
        if target is False:
            if not delivery.told:
                self._log(
                    "a message cannot be handled, and there are no dead letters: it is delivered "
                    "again every 300 s until it can be",
                    verdict.reason,
                    delivery,
                )
                delivery.told = True
            return self._delayed(delivery, LONGEST)
        if target is True:
            self._log(
                "a message cannot be handled: RabbitMQ moves it to the dead-letter exchange of its "
                "queue, and drops it if there is none",
                verdict.reason,
                delivery,
            )
            return DEAD_LETTER
        self._log(
            f"a message cannot be handled: it goes to the queue {target}", verdict.reason, delivery
        )
        headers = _again(delivery) | {
            REASON: verdict.reason[:_LONGEST_TEXT],
            ERROR: error,
            CONSUMER: self.consumer,
            QUEUE: delivery.queue,
        }
        stays = self._delayed(delivery, LONGEST)
        return Publish("", str(target), headers, None, LONGEST, otherwise=stays)

    def _delayed(self, delivery: Delivery, seconds: float) -> Publish:
        delay = delay_queue(seconds, self._kind)
        return Publish(delay.name, delivery.queue, _again(delivery), delay, seconds)

    def _log(self, what: str, reason: str, delivery: Delivery) -> None:
        logger.error("%s: %s [consumer=%s queue=%s]", what, reason, self.consumer, delivery.queue)

    def log_unpublished(self, publish: Publish, error: Exception, *, returned: bool) -> None:
        """Write to the log that the broker did not take a message, or found no queue for it."""
        then = (
            f"it stays with this consumer, and goes back to its queue after {publish.seconds:g} s"
            if publish.otherwise is None
            else "it is delivered again after 300 s"
        )
        if returned and publish.delay is None:
            logger.error(
                "there is no queue %s: declare it. RabbitMQ returned a message for it, so %s "
                "[consumer=%s]",
                publish.routing_key,
                then,
                self.consumer,
            )
            return
        logger.error(
            "RabbitMQ did not take a message for %s, so %s. May this user configure and write "
            "it? (%s: %s) [consumer=%s]",
            publish.exchange or publish.routing_key,
            then,
            type(error).__name__,
            error,
            self.consumer,
        )


def check_async(handle: object) -> None:
    """Reject a handler that is certainly not async; a lambda may return a coroutine."""
    function = _function_of(handle)
    if (
        inspect.isfunction(function)
        and not inspect.iscoroutinefunction(function)
        and not inspect.isasyncgenfunction(function)
        and function.__name__ != "<lambda>"
    ):
        raise ConfigError(
            "the handler is not async and would block the event loop: make it `async def`, or use "
            "semel.adapters.pika"
        )


def check_not_async(handle: Any) -> None:
    """Reject an async handler, which no thread would await."""
    # Not what is behind a wrapper: that may run an event loop.
    if any(map(inspect.iscoroutinefunction, (handle, type(handle).__call__))):
        raise ConfigError(
            "the handler is async, and pika does not await it: make it a plain function, or use "
            "semel.adapters.aio_pika"
        )


def _function_of(handle: Any) -> object:
    """Find the function of a handler: that of a partial, of an object, or behind a wrapper."""
    while True:
        inner = handle.func if isinstance(handle, partial) else handle
        inner = inspect.unwrap(inner, stop=inspect.iscoroutinefunction)
        if inner is handle:
            break
        handle = inner
    if inspect.iscoroutinefunction(handle) or inspect.isroutine(handle) or inspect.isclass(handle):
        return getattr(handle, "__func__", handle)
    return inspect.unwrap(type(handle).__call__, stop=inspect.iscoroutinefunction)


def check_handler(handle: Callable[..., object], *, in_transaction: bool) -> None:
    """Reject a handler that could never be called, or whose body would never run."""
    if any(kind(handle) for kind in (inspect.isgeneratorfunction, inspect.isasyncgenfunction)):
        raise ConfigError(
            "the handler is a generator, whose body would never run: it must not yield"
        )
    given = ("session", "message") if in_transaction else ("message",)
    try:
        inspect.signature(handle).bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"the handler is called as handle({', '.join(given)}), which it does not take: {error}"
        ) from error
    except ValueError:
        return  # a function in C that does not tell its parameters


def delay_queue(seconds: float, kind: DelayQueues = "quorum") -> DelayQueue:
    """Return the queue for this delay: that of the next step, or of the longest."""
    step = next((step for step in STEPS if step >= seconds), STEPS[-1])
    arguments: dict[str, Any] = {"x-message-ttl": step * 1000, "x-dead-letter-exchange": ""}
    if kind == "quorum":
        # Only so RabbitMQ waits for the other queue's confirmation before it forgets a message.
        arguments |= {
            "x-queue-type": "quorum",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    return DelayQueue(f"{DELAY}{kind}.{step}", arguments)


def stable_id(part: str | None, message_id: str | None) -> str:
    """Return the id of a message that is sent: a given one, or one of the running attempt.

    `part` names the message within the operation, as in `Attempt.derive`.
    """
    if (part is None) == (message_id is None):
        raise ConfigError(
            "a message needs either part= (what it is within the running operation) or "
            "message_id= (an id that is the same whenever this message is sent)"
        )
    if message_id is not None:
        if not (isinstance(message_id, str) and message_id):
            raise ConfigError(f"message_id must be a text; got {message_id!r}")
        return message_id
    attempt = current_attempt()
    if attempt is None:
        raise ConfigError(
            "part= makes the id of a message from the operation that runs, and none runs here: "
            "send it from a protected function, or say message_id="
        )
    return attempt.derive(str(part))


def with_id(headers: Mapping[str, Any] | None, message_id: str) -> dict[str, Any]:
    """Add the id to the headers: a bridge to another broker may keep no properties."""
    return {**(headers or {}), HEADER: message_id}


def _again(delivery: Delivery) -> dict[str, Any]:
    """Return the headers of a message that is published again."""
    sent: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in delivery.headers.items():
        if name not in _BROKERS_OWN:
            sent[name] = value
        elif name != _COUNT:  # a count of deliveries begins anew: this one did not fail
            own[name] = value
    kept = {
        "headers": own,
        "expiration": delivery.expiration,
        "told": delivery.told,
    }
    sent[KEPT] = {name: value for name, value in kept.items() if value}
    return sent


class _Kept(Struct):
    """What `KEPT` has."""

    headers: dict[str, Any] = {}
    expiration: Annotated[str, Meta(pattern="^[0-9]{1,15}$")] | None = None
    told: bool = False


def _kept(header: object) -> _Kept | None:
    """Read what was kept; None if it is not as we wrote it: anybody can write a header."""
    try:
        return msgspec.convert(header, _Kept)
    except (msgspec.ValidationError, RecursionError):
        return None


def _restored(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers of a message as they were before its delays."""
    headers = {name: value for name, value in given.items() if name not in _BROKERS_OWN}
    del headers[KEPT]
    if _COUNT in given:
        headers[_COUNT] = given[_COUNT]
    before = {name: value for name, value in own.items() if name in _BROKERS_OWN}
    deaths = [*_other_deaths(given.get(_DEATHS)), *_other_deaths(before.get(_DEATHS))]
    return {**headers, **before, **({_DEATHS: deaths} if deaths else {})}


def _other_deaths(deaths: object) -> list[Any]:
    """List the queues that moved a message on, without the delay queues."""
    listed = deaths if isinstance(deaths, list) else []
    return [
        each
        for each in listed
        if not (isinstance(each, Mapping) and str(each.get("queue")).startswith(DELAY))
    ]
