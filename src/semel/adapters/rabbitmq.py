"""What all clients of RabbitMQ share: how a verdict on a message is carried out.

    Ack      acknowledge
    Later    publish the message to a delay queue, wait for the confirmation, acknowledge
    Reject   to the dead letters; without any, it stays and is delivered again

A delay queue keeps the messages of one queue for one of the `STEPS`. Then RabbitMQ moves them back
through `EXCHANGE`, which only consumers may write to. A message is published before it is
acknowledged, so a crash between the two delivers it twice, and its record tells.

This module decides, and writes the log. It never talks to a broker.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias, assert_never

import msgspec
from msgspec import Meta, Struct

from semel.core.attempts import current_attempt
from semel.errors import ConfigError
from semel.events import logger
from semel.messages import (
    HEADER,
    LONGEST,
    Ack,
    Fail,
    Later,
    Message,
    Reject,
    Verdict,
    described,
)

DelayQueues: TypeAlias = Literal["quorum", "classic"]

STEPS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)
"""Seconds after which a message may be delivered again; others are rounded up to the next."""

DELAY: Final = "semel.later."
"""How the names of the delay queues begin, and that of their exchange."""

EXCHANGE: Final = f"{DELAY}exchange"
"""The direct exchange by which a message gets into a delay queue, and back from it."""

KEPT: Final = "semel-kept"
"""The header of a message that was published again: what would be lost or do harm otherwise.

This is where it was published first: its exchange and its routing key; the expiration, which would
end the delay; `CC`, which would send copies; and `x-death`, for which RabbitMQ may take the message
for one that goes in circles, and drop it. The user is not kept: RabbitMQ has checked who sent a
message, and no program can check a header.
"""

_LONGEST_NAME: Final = 255
"""Bytes of the name of a queue."""

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
    exchange: str
    routing_key: str
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
    """A queue that keeps messages of the queue `target` for some seconds, and moves them back.

    Both are bound to `EXCHANGE` by their names.
    """

    name: str
    target: str
    arguments: Mapping[str, Any]


class Acknowledge(Struct, frozen=True):
    """Acknowledge the message."""


class DeadLetter(Struct, frozen=True):
    """Reject the message: RabbitMQ moves it to the queue's dead-letter exchange."""


class Publish(Struct, frozen=True):
    """Publish the message, mandatory, and acknowledge it when the broker has confirmed that.

    If the broker refuses, or the message is `Unwritable`, do what comes next in its stead. None =
    keep it for `seconds`, and give it back.
    """

    exchange: str
    routing_key: str
    headers: Mapping[str, Any]
    delay: DelayQueue | None
    seconds: float
    if_rejected: Publish | None = None
    if_unwritable: DeadLetter | Publish | None = None
    key_digest: str | None = None
    """Which operation goes to the dead letters; None: the message has no key, or comes again."""


Step: TypeAlias = Acknowledge | DeadLetter | Publish


class Unwritable(Exception):
    """The properties of a message cannot be written, or do not fit into one frame."""


def check_size(marshal: Callable[[], bytes], frame_max: int) -> None:
    """Raise `Unwritable` for properties on which the broker would close the connection."""
    try:
        size = len(marshal())
    except Exception as error:  # what a producer wrote may be read, and not be written again
        raise Unwritable(described(error)) from error
    if size > frame_max > 0:
        raise Unwritable(f"its properties take {size} bytes, and a frame has {frame_max}")


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
                "consumer= or queue= is needed, and neither was given: pass who handles the "
                'messages, such as consumer="mailer", or their queue, such as queue="orders"'
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
        queue = self.queue
        if queue is None:
            raise ConfigError(
                "a message doesn't name its queue, which semel needs to deliver it "
                "again: pass once(..., queue=...), or use run(), which knows it"
            )
        given = {} if headers is None else headers
        found = None if message_id == NO_ID else message_id
        if not _was_delayed(exchange, given.get(_DEATHS)):
            # Also if a producer wrote it: after a delay it would count as ours.
            own = {name: value for name, value in given.items() if name != KEPT}
            return Delivery(queue, exchange, routing_key, found, own, expiration)
        kept = _kept(given.get(KEPT, {}))
        return Delivery(
            queue,
            kept.exchange,
            queue if kept.routing_key is None else kept.routing_key,
            found,
            _restored(given, kept.headers),
            kept.expiration,
            delayed=True,
            told=kept.told,
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
                    verdict,
                    delivery,
                )
                delivery.told = True
            return self._delayed(delivery, LONGEST)
        if target is True:
            self._log(
                "a message cannot be handled: RabbitMQ moves it to the dead-letter exchange of its "
                "queue, and drops it if there is none",
                verdict,
                delivery,
            )
            return DEAD_LETTER
        self._log(f"a message cannot be handled: it goes to the queue {target}", verdict, delivery)
        headers = _again(delivery) | {
            REASON: verdict.reason[:_LONGEST_TEXT],
            ERROR: error,
            CONSUMER: self.consumer,
            QUEUE: delivery.queue,
        }
        stays = self._delayed(delivery, LONGEST)
        bare = self._bare(delivery, LONGEST)
        digest = verdict.key_digest
        return Publish("", str(target), headers, None, LONGEST, stays, bare, digest)

    def _delayed(self, delivery: Delivery, seconds: float) -> Publish:
        delay = delay_queue(delivery.queue, seconds, self._kind)
        headers, bare = _again(delivery), self._bare(delivery, seconds)
        return Publish(EXCHANGE, delay.name, headers, delay, seconds, if_unwritable=bare)

    def _bare(self, delivery: Delivery, seconds: float) -> DeadLetter | Publish | None:
        """Say how to reject a message that cannot be written with what semel adds to it."""
        target = self.dead_letters
        if not isinstance(target, str):
            return DEAD_LETTER if target else None
        # Nor with what its producer wrote: the rest of it is still there for a person to see.
        naked = Publish("", target, {QUEUE: delivery.queue}, None, seconds)
        return Publish("", target, _as_sent(delivery), None, seconds, if_unwritable=naked)

    def _log(self, what: str, verdict: Reject, delivery: Delivery) -> None:
        logger.error(
            "%s: %s [consumer=%s queue=%s key_digest=%s]",
            what,
            verdict.reason,
            self.consumer,
            delivery.queue,
            verdict.key_digest or "-",
        )

    def instead(
        self, publish: Publish, error: Exception, *, returned: bool
    ) -> DeadLetter | Publish | None:
        """Say what to do with a message that was not published, and write it to the log.

        `returned` says that the broker found no queue for it.
        """
        unwritable = isinstance(error, Unwritable)
        step = publish.if_unwritable if unwritable else publish.if_rejected
        if step is None:
            seconds = publish.seconds
            then = f"it stays with this consumer, and goes back to its queue after {seconds:g} s"
        elif isinstance(step, Publish) and step.delay is not None:
            then = "it will be delivered again after 300 s"
        else:
            then = "it goes to the dead letters with fewer headers"
        if unwritable:
            logger.error(
                "message not published again, so %s: %s [consumer=%s key_digest=%s]",
                then,
                error,
                self.consumer,
                publish.key_digest or "-",
            )
        elif returned and publish.delay is None:
            logger.error(
                "RabbitMQ returned a message because there is no queue %s, so %s; declare the "
                "queue [consumer=%s key_digest=%s]",
                publish.routing_key,
                then,
                self.consumer,
                publish.key_digest or "-",
            )
        else:
            logger.error(
                "RabbitMQ rejected a message for %s, so %s; check that this user may configure and "
                "write it (%s: %s) [consumer=%s key_digest=%s]",
                publish.routing_key,
                then,
                type(error).__name__,
                error,
                self.consumer,
                publish.key_digest or "-",
            )
        return step


ENDED_INSIDE: Final = (asyncio.CancelledError, GeneratorExit)
"""What a handler may raise by itself, and what asyncio raises in a handler that it ends."""


def failure_of(error: BaseException) -> RuntimeError:
    """Return the failure of a handler that raised one of `ENDED_INSIDE` by itself."""
    return RuntimeError(
        f"the handler raised {type(error).__name__}, and nothing outside of it had ended it: it "
        "canceled its own task, or something that it waited for was canceled"
    )


@contextmanager
def one_run(lock: threading.Lock) -> Iterator[None]:
    """Reject a `run` of a consumer beside another one, whose messages its end would end."""
    if not lock.acquire(blocking=False):
        raise ConfigError(
            "run() was called while this consumer is running: make another one with once()"
        )
    try:
        yield
    finally:
        lock.release()


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


def delay_queue(target: str, seconds: float, kind: DelayQueues = "quorum") -> DelayQueue:
    """Return the delay queue of a queue for these seconds: the next step, or the longest."""
    step = next((step for step in STEPS if step >= seconds), STEPS[-1])
    arguments: dict[str, Any] = {
        "x-message-ttl": step * 1000,
        "x-dead-letter-exchange": EXCHANGE,
        "x-dead-letter-routing-key": target,
    }
    if kind == "quorum":
        # Only so RabbitMQ waits for the other queue's confirmation before it forgets a message.
        arguments |= {
            "x-queue-type": "quorum",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    name = f"{DELAY}{kind}.{step}.{target}"
    if len(name.encode()) > _LONGEST_NAME:
        name = f"{DELAY}{kind}.{step}.{hashlib.sha256(target.encode()).hexdigest()}"
    return DelayQueue(name, target, arguments)


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
            raise ConfigError(f"message_id must be a string; got {message_id!r}")
        return message_id
    attempt = current_attempt()
    if attempt is None:
        raise ConfigError(
            "part= makes the id of a message from the operation that runs, and none runs here: "
            "send it from a protected function, or pass message_id="
        )
    return attempt.derive(str(part))


def with_id(headers: Mapping[str, Any] | None, message_id: str) -> dict[str, Any]:
    """Add the id to the headers: a bridge to another broker may keep no properties."""
    return {**(headers or {}), HEADER: message_id}


def _as_sent(delivery: Delivery) -> dict[str, Any]:
    """Return the headers that may be published again as they are."""
    return {name: value for name, value in delivery.headers.items() if name not in _BROKERS_OWN}


def _again(delivery: Delivery) -> dict[str, Any]:
    """Return the headers of a message that is published again."""
    # Not `_COUNT`: a count of deliveries begins anew, for this one did not fail.
    own = {
        name: value
        for name, value in delivery.headers.items()
        if name in _BROKERS_OWN and name != _COUNT
    }
    kept = {
        "exchange": delivery.exchange,
        "headers": own,
        "expiration": delivery.expiration,
        "told": delivery.told,
    }
    kept = {name: value for name, value in kept.items() if value}
    if delivery.routing_key != delivery.queue:
        kept["routing_key"] = delivery.routing_key
    # Nothing to keep is nothing to add: a message that fills its frame can still be delayed.
    return _as_sent(delivery) | ({KEPT: kept} if kept else {})


class _Kept(Struct):
    """What `KEPT` has."""

    exchange: Any = ""
    routing_key: Any = None
    headers: dict[str, Any] = {}
    expiration: Annotated[str, Meta(pattern="^[0-9]{1,15}$")] | None = None
    told: bool = False


def _kept(header: object) -> _Kept:
    """Read what was kept; nothing if it is not as we wrote it."""
    try:
        return msgspec.convert(header, _Kept)
    except (msgspec.ValidationError, RecursionError):
        return _Kept()


def _was_delayed(exchange: str, deaths: object) -> bool:
    """Return whether a message comes from a delay queue, and got there through our exchange.

    Only then is `KEPT` ours. The broker names the exchange of a delivery, and only who may write to
    ours can send through it. But the default exchange leads into every queue, also into a delay
    queue. So the broker's note about the last queue must name our exchange, too. A producer can
    write such a note; RabbitMQ ignores it since version 4, and older versions count it up.
    """
    last = deaths[0] if isinstance(deaths, list) and deaths else None
    return exchange == EXCHANGE and isinstance(last, Mapping) and last.get("exchange") == EXCHANGE


def _restored(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers of a message as they were before its delays."""
    headers = {name: value for name, value in given.items() if name not in _BROKERS_OWN}
    headers.pop(KEPT, None)
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
