"""Celery: tasks that are handled once, however often their message is delivered.

`task_class` makes the task class of an application; a task says `idempotent=` to use it, and every
other task stays as Celery has it. What happens to a delivery:

    done          the value is the task's result: the function ran, or its stored value is returned
    not now       the same message, with the same id and count of retries, is sent again
    failed        the error is raised where Celery's own retries see it
    never         the error is raised, and no retry follows

The record is claimed inside of what `autoretry_for` adds to a task, so that an error that may be
retried is released before it is. A direct call, `task(...)`, has no message: it calls the function.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from time import sleep
from typing import Any, ClassVar, Final, NoReturn, Self, TypeAlias, TypedDict, assert_never, cast
from uuid import NAMESPACE_OID, uuid5

from semel.adapters._sync.consuming import Consumer
from semel.adapters.celery_worker import (
    DEFAULTS,
    check_worker,
    counts_chord_parts_twice,
    request_class,
    stop_worker,
)
from semel.core.codec import returned_by
from semel.core.keys import Arguments
from semel.core.optional import Needed, have
from semel.core.policy import Policy, Rules
from semel.decorating import Arrived, key_maker, payload_maker
from semel.errors import (
    ConcurrentRequest,
    ConfigError,
    IdempotencyError,
    InvalidKey,
    NestedCall,
    ResultUnavailable,
    SerializationError,
    did_you_mean,
)
from semel.events import logger
from semel.messages import LONGEST, SOONEST, Ack, Fail, Later, Message, Verdict
from semel.messages import Reject as Rejected
from semel.sync import Idempotency

with Needed("semel[celery]", by=__name__):
    from celery import Task, signals
    from celery.backends.base import DisabledBackend
    from celery.exceptions import Ignore, Reject, Retry
    from celery.states import SUCCESS
    from celery.utils.threads import LocalStack
    from kombu.entity import Queue
    from kombu.serialization import registry

__all__ = ["IdempotentTask", "TaskOptions", "task_class"]

NOT_DONE: Final = (Retry, Reject, Ignore)
"""What a task raises to say that this delivery is not its last one."""

NOT_KEPT: Final = "the task was done before, and its value is not kept"


class TaskOptions(TypedDict, total=False):
    """The options of a task, `@app.task(idempotent={...})`; True means the defaults."""

    consumer: str
    """Whose records these are: the name of the task, unless given."""
    key: str | Callable[..., str] | None
    """A template over the arguments, such as "order:{order_id}", or a function of them. Without
    one, the key is the header `idempotency-key` of the message, else the id of the task."""
    payload: str | Sequence[str] | Callable[..., object] | None
    """The arguments that have to be the same in every message with this key, or a function of them;
    all arguments, unless given."""
    policy: Policy | None
    dead_letters: bool
    """Whether the queue has a dead-letter exchange: a task that fails is rejected to it."""
    transaction: Callable[[], AbstractContextManager[Any]] | None
    """Opens a transaction, such as `Session.begin`: the function gets its session before the other
    arguments, and the record is committed with its rows."""


IdempotentOption: TypeAlias = bool | TaskOptions


class IdempotentTask(Task):  # type: ignore[misc]  # Celery has no types
    """The base class of what `task_class` returns."""

    abstract = True
    idempotency: Idempotency
    """The engine of these tasks."""
    idempotent: IdempotentOption = False
    """The options of this task; False: it is a task like any other."""

    # For semel itself, under names that no application uses.
    semel_delivery: Delivery | None = None
    semel_settings: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Note what the class says, for Celery writes settings into every class that it binds."""
        super().__init_subclass__(**options)
        cls.semel_settings = _own_settings(cls)

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Make a task; one that is turned on handles messages, with the settings for that."""
        # Here and not in __init__, which the task classes of an application define as they like;
        # and before Celery wraps `run` in its own retries, which have to be around ours.
        task = cast("Self", super().__new__(cls))
        if cls.idempotent is not False:
            task.semel_delivery = Delivery(task, cls.idempotency, cls.idempotent)
            task.run = task.semel_delivery.wrapped()
            settings = {**DEFAULTS, **_said(cls), "Request": request_class(cls.Request)}
            if task.semel_delivery.dead_letters:
                # A message whose task has failed is rejected, which is how it gets there.
                settings |= {"acks_on_failure": False, "acks_on_failure_or_timeout": False}
            for name, value in settings.items():
                setattr(cls, name, value)
        return task

    def apply_async(self, *args: Any, **options: Any) -> Any:
        """Send a message, as Celery does; a chord is rejected where its parts would count twice."""
        if self.semel_delivery is not None and options.get("chord") is not None:
            self.semel_delivery.check_chord()
        return super().apply_async(*args, **options)

    def retry(self, *args: Any, **options: Any) -> Any:
        """Send the task again, as Celery does, unless its message was judged already."""
        error: Any = options.get("exc")
        # Inside of its delivery it is the function that asks, perhaps with the error of another
        # task, and outside of it `autoretry_for`.
        inside = _running.get() == (self.name, self.request.id)
        if isinstance(error, BaseException) and error is _ended.get() and not inside:
            raise error
        return super().retry(*args, **options)


def task_class(idempotency: Idempotency | str, *, base: type[Any] = Task) -> type[IdempotentTask]:
    """Return a task class for your application: `Celery("shop", task_cls=task_class(idem))`.

    `idempotency` is an engine, or the URL of its store. `base` is the application's own task class.

    Examples:
        >>> from celery import Celery
        >>> app = Celery("shop", task_cls=task_class(idem))
        >>> @app.task(idempotent={"key": "order:{order_id}"})
        ... def ship(order_id):
        ...     return f"shipped {order_id}"
        >>> ship.apply((42,)).get()
        'shipped 42'
    """
    engine = Idempotency(idempotency) if isinstance(idempotency, str) else idempotency
    if not isinstance(engine, Idempotency):
        raise ConfigError(
            f"task_class needs an Idempotency or a URL, not {type(engine).__name__}: Celery "
            "tasks are plain functions"
        )
    if not (isinstance(base, type) and issubclass(base, Task)):
        raise ConfigError(f"base must be a Celery task class; got {base!r}")
    if issubclass(base, IdempotentTask):
        raise ConfigError(f"{base.__name__} was already made by task_class")
    names = {"abstract": True, "idempotency": engine, "__module__": base.__module__}
    return cast("type[IdempotentTask]", type("Task", (IdempotentTask, base), names))


def _own_settings(kind: type) -> dict[str, Any]:
    own = vars(kind)
    return {name: own[name] for name in DEFAULTS if own.get(name) is not None}


def _said(cls: type[IdempotentTask]) -> dict[str, Any]:
    """Collect what a task and its bases say of acknowledging."""
    said: dict[str, Any] = {}
    for kind in reversed(cls.__mro__):
        if issubclass(kind, IdempotentTask):
            said |= vars(kind)["semel_settings"]
        elif kind is not Task:
            said |= _own_settings(kind)
    return said


def _options(idempotent: object) -> TaskOptions:
    if idempotent is True:
        return {}
    if not isinstance(idempotent, Mapping):
        raise ConfigError(
            f"idempotent must be True, False or a dictionary of options; got {idempotent!r}"
        )
    unknown = idempotent.keys() - TaskOptions.__annotations__.keys()
    if unknown:
        name, known = min(unknown), TaskOptions.__annotations__
        raise ConfigError(
            f"idempotent has no option {name!r}; known: {', '.join(known)}"
            f"{did_you_mean(name, known)}"
        )
    return cast("TaskOptions", idempotent)


# --- how a message is handled --------------------------------------------------------------------

_running: ContextVar[tuple[str, str] | None] = ContextVar("semel_celery_running", default=None)
"""The task that is being handled, by name and id: a call inside of it is a direct call."""

_ended: ContextVar[BaseException | None] = ContextVar("semel_celery_ended", default=None)
"""The error that ended the last delivery, if Celery's own retries must not follow it."""


def _end(error: Exception) -> NoReturn:
    """Raise an error that `autoretry_for` must leave alone."""
    _ended.set(error)
    raise error


def _give_back(error: Exception) -> NoReturn:
    """Leave the message in its queue, from where it is delivered again at once."""
    with suppress(Exception):  # also after a soft time limit
        sleep(SOONEST)
    _end(Reject(error, requeue=True))


class Delivery:
    """How the messages of one task are handled; Celery's request says which message it is."""

    def __init__(self, task: Any, engine: Idempotency, idempotent: object) -> None:
        self._task = task
        self._run: Callable[..., Any] = task.run
        self._engine = engine
        name = task.name or type(task).__name__
        if inspect.iscoroutinefunction(self._run):
            raise ConfigError(
                f"the task {name} is async; Celery does not await tasks: make it a plain function"
            )
        with _naming(name):
            self._options = _options(idempotent)
            self._begin = self._options.get("transaction")
        self._signature = _signature(name, self._run, in_transaction=self._begin is not None)
        self._arguments = Arguments(name, self._signature)
        with _naming(name):  # wrong options are an error now
            self._key = self._of_arguments(name, "key", key_maker)
            self._payload = self._of_arguments(name, "payload", payload_maker) or self._arguments_of
            made = self._consumer(name)
        self._made = made if task.name else None  # else Celery names it when it is registered
        if self._begin is not None and hasattr(task, "__header__"):
            # What `delay` checks arguments with: the session is not among them.
            type(task).__header__ = staticmethod(partial(task.__header__, None))

    def _of_arguments(self, name: str, option: str, maker: Callable[..., Any]) -> Any:
        """Read an option that is about arguments, as one about messages."""
        given = self._options.get(option)
        if given is None:
            return None
        try:
            of_call = maker(name, self._arguments, given)
        except ConfigError as error:
            session = next(iter(inspect.signature(self._run).parameters), None)
            if self._begin is None or repr(session) not in str(error):
                raise
            raise ConfigError(
                f"{error}; with transaction= the first parameter, {session!r}, is the session"
            ) from error.__cause__
        wrong = InvalidKey if option == "key" else SerializationError

        def of_message(message: Message) -> Any:
            args, kwargs = tuple(message.body["args"]), message.body["kwargs"]
            try:
                values = self._arguments.mapping(args, kwargs)
            except TypeError as error:
                reason = str(error).removeprefix(f"{name}() ")
                raise wrong(
                    f"the message does not fit {name}({', '.join(self._arguments.names)}): {reason}"
                ) from error
            return of_call(Arrived(args, kwargs, values))

        return of_message

    def _arguments_of(self, message: Message) -> object:
        """Return the arguments of a message by name, however the producer has written the call."""
        try:
            values = self._arguments.mapping(tuple(message.body["args"]), message.body["kwargs"])
            return self._arguments.without_defaults(values)
        except (TypeError, ValueError):  # they do not fit, which the function says by itself
            return message.body

    def _consumer(self, name: str) -> Consumer:
        options: dict[str, Any] = {**self._options, "key": self._key, "payload": self._payload}
        options.pop("transaction", None)
        return Consumer(
            self._engine,
            _handler(self._run),
            options,
            default_consumer=name,
            framework_retries=True,
            keeps_value=True,
            not_done=NOT_DONE,
            transaction=self._begin,
        )

    @property
    def consumer(self) -> Consumer:
        """What claims, runs and judges."""
        if self._made is None:
            self._made = self._consumer(self._task.name)
        return self._made

    @property
    def policy(self) -> Rules:
        """The policy that counts for this task."""
        return self.consumer.rules.policy

    @property
    def dead_letters(self) -> bool:
        """Whether the task says that its queue has a dead-letter exchange."""
        return self._options.get("dead_letters", False)

    def wrapped(self) -> Callable[..., Any]:
        """Return what takes the place of the task's own `run`."""

        @wraps(self._run)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.deliver(args, kwargs)

        # `self.retry(kwargs=...)` asks which arguments a message has: a session is none of them.
        run.__signature__ = self._signature  # type: ignore[attr-defined]
        return run

    def deliver(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Handle the message of Celery's current request; without one, call the function."""
        request = _request_of_message(self._task)
        if request is None or _running.get() == (self._task.name, request.id):
            return self._run(*args, **kwargs)
        _ended.set(None)
        verdict = self._verdict(request, args, kwargs)
        match verdict:
            case Ack():
                return self._value(verdict, request)
            case Later():
                return self._send_again(verdict, request)
            case Rejected():
                _end(verdict.error)
            case Fail():
                _ended.set(None)  # a task that was run inside may have ended with the same error
                raise verdict.error
            case _:
                assert_never(verdict)

    def _verdict(self, request: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verdict:
        _name_callbacks(request)
        if request.chord is not None:
            try:
                self.check_chord()
            except ConfigError as error:
                return Rejected(str(error), error)
        message = Message(
            id=_id_of(request),
            headers=request.headers or {},
            body={"args": list(args), "kwargs": dict(kwargs)},
            raw=request,
        )
        before = _running.set((self._task.name, request.id))
        try:
            return self.consumer.handle(message, (args, kwargs))
        except (ConfigError, NestedCall) as error:
            _end(stop_worker(self._task, request, error))
        except IdempotencyError as error:  # the engine was closed: somebody else has to look
            _end(Reject(error, requeue=True))
        finally:
            _running.reset(before)

    def check_chord(self) -> None:
        """Raise a `ConfigError` if the result backend would count a part of a chord twice."""
        backend = self._task.backend
        if counts_chord_parts_twice(backend):
            raise ConfigError(
                f"{self._task.name} is idempotent and part of a chord, and the result backend "
                f"{type(backend).__name__} counts a part again each time its message is "
                "delivered: the chord would go on without its other parts. Use the Redis or the "
                "database backend for chords of idempotent tasks"
            )

    def _value(self, verdict: Ack, request: Any) -> Any:
        if verdict.has_value:
            return verdict.value
        # To store None as the result would hide what the first delivery has stored.
        linked = bool(request.callbacks or request.chain or request.chord)
        redelivered = bool((request.delivery_info or {}).get("redelivered"))
        if request.is_eager or not (linked or redelivered):
            raise Ignore(NOT_KEPT)
        has_result = not (
            self._ignores_result(request) or isinstance(self._task.backend, DisabledBackend)
        )
        if has_result and (known := self._known_result(request)) is not None:
            return known["result"]
        if request.chord or (redelivered and (linked or has_result)):
            # The worker of the first delivery ended before it had stored and sent the value, or
            # a chord waits for it: what waits has to know that it will not come.
            logger.error(
                "task %s [%s] already ran, but its result is lost and something waits for it; "
                "failing the task",
                self._task.name,
                request.id,
            )
            _end(ResultUnavailable(NOT_KEPT))
        if linked:
            logger.warning(
                "task %s [%s] already ran, and its result is not kept; its callbacks are not sent "
                "again",
                self._task.name,
                request.id,
            )
        raise Ignore(NOT_KEPT)

    def _known_result(self, request: Any) -> Mapping[str, Any] | None:
        """Look whether the result backend has the value of this task."""
        for pause in (0.0, SOONEST):  # another worker may be about to store it
            try:
                sleep(pause)
                known = self._task.backend.get_task_meta(request.id, cache=False)
            except Exception as error:  # noqa: BLE001 - whatever it is, this message stays
                _give_back(error)
            if known["status"] == SUCCESS:
                return cast("Mapping[str, Any]", known)
        return None

    def _ignores_result(self, request: Any) -> bool:
        """Return whether Celery stores no result for this message."""
        said = vars(request).get("ignore_result")
        return bool(self._task.ignore_result if said is None else said)

    def _send_again(self, verdict: Later, request: Any) -> NoReturn:
        """Send the same message with a countdown, and only then acknowledge this one."""
        if request.is_eager:
            _end(verdict.error or ConcurrentRequest(verdict.reason, retry_after=verdict.seconds))
        # With another serializer, the arguments might be others, or could not be sent.
        content_type = (request.properties or {}).get("content_type")
        serializer = registry.type_to_name.get(content_type, self._task.serializer)
        again = self._task.signature_from_request(
            request,
            countdown=verdict.seconds,
            retries=request.retries,
            ignore_result=self._ignores_result(request),
            serializer=serializer,
            argsrepr=vars(request).get("argsrepr"),  # what may be shown of the arguments
            kwargsrepr=vars(request).get("kwargsrepr"),
        )
        try:
            # A connection of its own, as the application's may not wait for confirmations.
            with self._task.app.connection_for_write(
                transport_options={"confirm_publish": True}
            ) as connection:
                if connection.transport.driver_type == "amqp":
                    _send_to_own_queue(again, self._task.app, request.delivery_info or {})
                again.apply_async(connection=connection, add_to_parent=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, this message stays
            _give_back(error)
        logger.log(
            logging.WARNING if verdict.seconds >= LONGEST else logging.INFO,
            "task %s [%s] will be redelivered in %.1f s: %s",
            self._task.name,
            request.id,
            verdict.seconds,
            verdict.reason,
        )
        raise Ignore(f"redelivered in {verdict.seconds:.1f} s: {verdict.reason}")


def _request_of_message(task: Any) -> Any:
    """Return the request of the message that is handled here; None: there is none."""
    # A `__call__` of the application pushes another one, up to Celery 5.4 an empty one.
    for request in reversed(task.request_stack.stack):
        if not request.called_directly:
            return request
    return None


def _send_to_own_queue(again: Any, app: Any, came_by: Mapping[str, Any]) -> None:
    """Address a message to the queue that it came from: its exchange may have others, too."""
    exchange, routing_key = came_by.get("exchange"), came_by.get("routing_key")
    queues = list(app.amqp.queues.consume_from.values())
    if not exchange:
        queues = [queue for queue in queues if queue.name == routing_key]
    else:
        queues = [queue for queue in queues if queue.exchange.name == exchange]
        if queues and queues[0].exchange.type == "direct":
            queues = [queue for queue in queues if queue.routing_key == routing_key]
    if len(queues) > 1:
        raise LookupError(
            f"several queues of this worker get messages from the exchange {exchange}, and semel "
            "can't tell which of them held this one"
        )
    for queue in queues:
        again.options.pop("exchange", None)
        again.options.pop("routing_key", None)
        # Through the default exchange. A queue that goes with its worker is not made again.
        own = Queue(queue.name)  # type: ignore[no-untyped-call]  # kombu has few types
        again.set(queue=own, declare=[] if queue.auto_delete else [queue])


def _id_of(request: Any) -> str:
    """Return the id of a task; one that has replaced itself goes on as another operation."""
    # `self.replace` sends a task with the same id while the one that it replaces still runs. What
    # follows in a chain has the same mark, and an id of its own.
    nesting = request.replaced_task_nesting
    if nesting and request.parent_id == request.id:
        return f"{request.id}:{nesting}"
    return cast("str", request.id)


@contextmanager
def _naming(task: str) -> Iterator[None]:
    """Say in a `ConfigError` which task it is about, once."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{task}: {str(error).removeprefix(f'{task}: ')}") from error.__cause__


def _signature(name: str, run: Callable[..., Any], *, in_transaction: bool) -> inspect.Signature:
    """Read the parameters of a task; the session of a transaction is none of them."""
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the parameters of {name} cannot be read: {error}") from error
    parameters = list(signature.parameters.values())
    if in_transaction and not parameters:
        raise ConfigError(
            f"the task {name} has no parameters: with transaction= the first one is the session"
        )
    return signature.replace(parameters=parameters[1 if in_transaction else 0 :])


def _handler(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make a handler that gets the arguments of a call as one; a session comes before it."""

    def handler(*given: Any) -> Any:
        *session, (args, kwargs) = given
        return run(*session, *args, **kwargs)

    handler.__annotations__ = {"return": returned_by(run)}
    return handler


def _name_callbacks(request: Any) -> None:
    """Set an id for the tasks of `link=`: each delivery sends them, and they are the same tasks."""
    # Copies: in a program that is always eager, these are its own signatures.
    request.callbacks = [
        _with_id(callback, f"{_id_of(request)}:{number}")
        for number, callback in enumerate(request.callbacks or ())
    ]


def _with_id(callback: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    options = callback.get("options")
    if options is None or callback.get("subtask_type"):
        return callback
    return {**callback, "options": {"task_id": str(uuid5(NAMESPACE_OID, name)), **options}}


def _check(instance: Any, **_: Any) -> None:
    tasks = instance.app.tasks.values()
    check_worker(instance, [task for task in tasks if getattr(task, "semel_delivery", None)])
    for task in tasks:
        # Celery takes any option of a task, whether its class knows it or not.
        if getattr(task, "idempotent", None) and not isinstance(task, IdempotentTask):
            logger.error(
                "Celery task %s sets idempotent= but is not protected: its class was not made "
                "by task_class. Derive it from the application's class, app.Task",
                task.name,
            )


have("celery", Task(), "signature_from_request", "request_stack", "Request")
have("celery", LocalStack(), "stack")
have("kombu", registry, "type_to_name")
signals.celeryd_after_setup.connect(_check, weak=False)
