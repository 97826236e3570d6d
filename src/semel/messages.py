"""The rules of messages, pure: which operation a message is, and what becomes of it.

A message is handled once by each consumer: its identity is the consumer (the scope) and its id (the
key). What happened to it is turned into a verdict:

    Ack      it is done, now or before: acknowledge it
    Later    it cannot be handled now: deliver it again, after some seconds
    Reject   it can never be handled: send it to the dead letters
    Fail     its handler raised: whatever the framework does with an error, such as a retry

Nothing here waits, touches a store or knows a broker; only the jitter is random. A message is
acknowledged when its record is finished, and not before. A problem that passes with time is never
a reason to reject a message, and one that never passes is never a reason to deliver it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, TypedDict

import msgspec
from msgspec import UNSET, Struct

from semel.core.fingerprint import fingerprint
from semel.core.keys import KeyRules, Template, check_plain, compile_template
from semel.core.policy import Policy, Rules, changed
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    IdempotencyError,
    InvalidKey,
    LeaseLost,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    RecordUnreadable,
    ResultUnavailable,
    RetryTransaction,
    SerializationError,
    ValueRejected,
    WaitTimeout,
)

__all__ = [
    "Ack",
    "Fail",
    "Later",
    "Message",
    "MessageOptions",
    "MessageRules",
    "Reject",
    "Verdict",
]

HEADER: Final = "idempotency-key"
"""The header with the id, as `semel.observe.message_headers` writes it."""

BUSY_WAIT: Final = 0.3
"""Seconds that a message waits for an attempt that runs elsewhere, until it is delivered again."""
SOONEST: Final = 1.0
"""Seconds after which a message is delivered again at the earliest."""
STORE_PAUSE: Final = 5.0
"""Seconds after which a message is delivered again that the store could not be asked about."""
LONGEST: Final = 300.0
"""Seconds after which a message that fails, is held, or cannot be rejected is delivered again."""
JITTER: Final = 0.1
"""The part of its time by which a message may come later, so that many do not come at once."""

_WAITING: Final = Policy(concurrent="wait", wait_timeout=BUSY_WAIT)
_KEPT: Final = Policy(ttl=Policy.messages().ttl)

_NAMES: Final = ("message", "headers", "body")
"""What a key template may refer to."""

_FOR_GOOD: Final = (
    InvalidKey,
    SerializationError,
    ValueRejected,
    PayloadMismatch,
    PreviousFailure,
    AttemptsExhausted,
    RecordUnreadable,
)

_STOPS: Final = (ConfigError, NestedCall)
"""Errors of the program, which no other message would get around."""


class Message(Struct, frozen=True):
    """A message as every consumer sees it, from any broker."""

    id: str | None = None
    """The broker's message ID, as the producer wrote it, or None."""
    headers: Mapping[str, Any] = {}
    body: Any = b""
    raw: Any = None
    """The client library's message object."""


class Ack(Struct, frozen=True):
    """The message is done; `replayed` says that it was done before, and nothing ran now."""

    value: Any = None
    replayed: bool = False
    has_value: bool = True
    """False: it was done before, and what its handler returned is not known."""


class Later(Struct, frozen=True):
    """The message cannot be handled now: deliver it again after `seconds`."""

    seconds: float
    reason: str
    error: IdempotencyError | None = None
    """What kept it from being handled, unless it is being handled elsewhere."""


class Reject(Struct, frozen=True):
    """The message can never be handled: send it to the dead letters, never drop it."""

    reason: str
    error: Exception
    key_digest: str | None = None
    """Which operation it was; None: the message has no key."""


class Fail(Struct, frozen=True):
    """The handler raised this, and its record is released: the framework's own retry is next."""

    error: Exception


Verdict: TypeAlias = Ack | Later | Reject | Fail

KeyOfMessage: TypeAlias = str | Callable[[Message], str | None]
PayloadOfMessage: TypeAlias = Callable[[Message], object]


class MessageOptions(TypedDict, total=False):
    """The options of every integration; what is left out has its default."""

    consumer: str
    """Who handles the message: another consumer handles the same message for itself."""
    key: KeyOfMessage | None
    """A template over `message`, `headers` and `body`, such as "order:{body.number}", or a
    function. Without one, the id is the header `idempotency-key`, else the message's own id."""
    missing: Literal["reject", "digest"]
    """What becomes of a message without an id: it is rejected, or its body's digest is its id."""
    payload: PayloadOfMessage | None
    """What has to be the same in every message with this id; without it, the body."""
    policy: Policy | None
    """Without a `ttl` here or in the engine, a message that is done is remembered for 30 days."""
    dead_letters: bool
    """Whether rejected messages have somewhere to go."""


class MessageRules:
    """The options of one consumer, checked: which messages are the same, what becomes of them."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        default_consumer: str | None,
        framework_retries: bool,
        not_done: tuple[type[BaseException], ...] = (),
        levels: Callable[[str], tuple[Policy | None, ...]],
        resolved: Callable[..., Rules],
    ) -> None:
        """`levels` are the policies below ours, `resolved` combines ours with them."""
        unknown = options.keys() - MessageOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(MessageOptions.__annotations__)
            raise ConfigError(f"there is no option {min(unknown)!r}; known: {known}")
        consumer = options.get("consumer", default_consumer)
        if not isinstance(consumer, str):
            raise ConfigError(
                'consumer must be a string, such as consumer="mailer": it names who handles the '
                f"messages, and keeps their records apart from those of others; got {consumer!r}"
            )
        try:
            KeyRules().check_scope(consumer, "name")
        except InvalidKey as error:
            raise ConfigError(f"consumer: {error}") from error
        self.consumer = consumer
        self._template, self._function = _key_source(options.get("key"))
        self._missing = _one_of("missing", options.get("missing", "reject"), "reject", "digest")
        self._payload = _function("payload", options.get("payload"))
        dead_letters = options.get("dead_letters", False)
        if not isinstance(dead_letters, bool):
            raise ConfigError(f"dead_letters must be True or False; got {dead_letters!r}")
        self.dead_letters = dead_letters
        self.framework_retries = framework_retries
        self.policy = _policy_of(
            options.get("policy"), levels(consumer), not_done, consumer, resolved
        )

    # --- which operation a message is --------------------------------------------------------

    def key_of(self, message: Message) -> str:
        """Return the id of a message; raises `InvalidKey` if it has none, or none that is usable.

        An expression that fails is an error, never a reason to look for the id elsewhere.
        """
        try:
            return self._key_of(message)
        except InvalidKey:
            raise
        except (
            Exception
        ) as error:  # here, and in `payload_of`, a message is read that anybody wrote
            raise InvalidKey(f"the key cannot be read: {described(error)}") from error

    def _key_of(self, message: Message) -> str:
        if self._template is not None:
            return self._template.render(lambda name: _part(message, name))
        if self._function is not None:
            return _by_function(self._function, message)
        key = _header_of(message)
        if key is None:
            key = message.id or None
        if key is not None:
            return key
        if self._missing == "digest":
            return f"digest-{fingerprint(message.body).hex()}"
        raise InvalidKey(
            f"the message has no id: neither a header {HEADER} nor an id of its own. Let the "
            'producer write one, or name what tells messages apart: key=..., or missing="digest"'
        )

    def payload_of(self, message: Message) -> object:
        """Return what every message with this id has to say."""
        if self._payload is None:
            return message.body
        try:
            return self._payload(message)
        except SerializationError:
            raise
        except Exception as error:
            raise SerializationError(f"the function payload= raised {described(error)}") from error

    # --- what becomes of it ------------------------------------------------------------------

    def verdict_without_run(self, error: IdempotencyError) -> Verdict:
        """Say what becomes of a message whose handler did not run, for this reason.

        Raises the error if the consumer has to stop: the program is wrong, not the message.
        """
        if isinstance(error, _STOPS):
            raise error
        match error:
            case DuplicateRequest() | ResultUnavailable():
                return Ack(replayed=True, has_value=False)
            case ConcurrentRequest() | WaitTimeout():
                return later(error.retry_after, str(error))
            case LeaseLost() | RetryTransaction():
                return later(SOONEST, str(error), error)
            case OutcomeUnknown():
                if self.dead_letters:
                    return Reject(error.text, error, error.key_digest)
                return Later(LONGEST, str(error), error)
        if isinstance(error, _FOR_GOOD):
            return Reject(error.text, error, error.key_digest)
        return later(STORE_PAUSE, str(error), error)

    def verdict_of_failure(self, error: Exception, number: int, recorded: str | None) -> Verdict:
        """Say what becomes of a message whose handler raised.

        `number` is that of the attempt, and `recorded` what the store knows of its failure.
        """
        if isinstance(error, _STOPS):
            raise error
        if recorded in {"final", "unknown"}:
            how = "failed for good" if recorded == "final" else "failed with an unknown outcome"
            return Reject(f"its handler {how}: {described(error)}", error)
        if self.framework_retries:
            return Fail(error)
        most = self.policy.max_attempts
        if most is not None and number >= most:
            return Reject(
                f"its handler failed {number} times, which is all its policy allows; the last "
                f"time with {described(error)}",
                error,
            )
        reason = f"its handler raised {described(error)}"
        return Later(min(LONGEST, SOONEST * 2.0 ** min(number - 1, 30)), reason)


def later(seconds: float, reason: str, error: IdempotencyError | None = None) -> Later:
    """Deliver a message again after these seconds, or somewhat later: many may wait for one."""
    soonest = max(SOONEST, seconds)
    return Later(soonest * (1 + JITTER * random.random()), reason, error)  # noqa: S311 - no secret


def described(error: BaseException) -> str:
    """Name an error and give its text, also if that cannot be read, or be written as UTF-8."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the error is of a user's own class
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()


def _policy_of(
    policy: object,
    levels: tuple[Policy | None, ...],
    not_done: tuple[type[BaseException], ...],
    consumer: str,
    resolved: Callable[..., Rules],
) -> Rules:
    """Combine the policy of a consumer with what messages need."""
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy must be a Policy, not {type(policy).__name__}")
    says_ttl = any(level is not None and level.ttl is not UNSET for level in (policy, *levels))
    rules = resolved(consumer, _WAITING, policy, None if says_ttl else _KEPT)
    if not_done:
        rules = changed(rules, not_done=(*rules.not_done, *not_done))
    if rules.max_attempts is not None and rules.failed_ttl < rules.ttl:
        # Else the record goes between two deliveries, and the count begins anew.
        rules = changed(rules, failed_ttl=rules.ttl)
    return rules


def _key_source(
    key: object,
) -> tuple[Template | None, Callable[[Message], str | None] | None]:
    if isinstance(key, str):
        return compile_template(key, _NAMES), None
    return None, _function("key", key, "a template, a function")


def _function(name: str, value: object, kinds: str = "a function") -> Any:
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be {kinds} or None; got {value!r}")
    check_plain(name, value)
    return value


def _one_of(name: str, value: object, *choices: str) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be {' or '.join(map(repr, choices))}; got {value!r}")
    return value


def _part(message: Message, name: str) -> Any:
    """Return what a template refers to; a body of bytes is read as JSON."""
    if name == "message":
        return message
    if name == "headers":
        return message.headers
    if not isinstance(message.body, bytes | bytearray | memoryview):
        return message.body
    try:
        return msgspec.json.decode(message.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidKey(f"the key is made from the body, which is not JSON ({error})") from error


def _by_function(function: Callable[[Message], str | None], message: Message) -> str:
    try:
        key = function(message)
    except InvalidKey:
        raise
    except Exception as error:
        raise InvalidKey(f"the function key= raised {described(error)}") from error
    if key is None:
        raise InvalidKey("the function key= found no id in the message")
    if not isinstance(key, str | bytes | bytearray):
        kind = type(key).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise InvalidKey(
            f"key= returned {article} {kind}; return a string, such as f'order:{{order_id}}'"
        )
    return _text(key, "what key= returned")


def _header_of(message: Message) -> str | None:
    """Find the id that the producer wrote into the headers, in whatever case it wrote the name."""
    headers = message.headers
    if not headers:
        return None
    value = headers.get(HEADER)
    if value is None:
        value = next((headers[name] for name in headers if str(name).lower() == HEADER), None)
    return None if value is None else _text(value, f"the header {HEADER}")


def _text(value: object, source: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidKey(f"{source} has bytes that are no text") from error
    raise InvalidKey(f"{source} has {type(value).__name__}, not a string")
