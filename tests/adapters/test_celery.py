"""Celery tasks in this process: by Celery's own tracer, as a worker's process runs them, and eagerly.

Real workers on real brokers are in test_celery_workers.py.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import ClassVar

import pytest
from celery import Celery, Task, chord, signals
from celery.app.trace import trace_task
from celery.backends import cache
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.worker.request import Request
from kombu import Exchange, Queue

from semel import Idempotency, Policy, current_attempt, open_store
from semel.adapters import celery as adapter
from semel.adapters import celery_worker
from semel.adapters.celery import task_class
from semel.adapters.celery_worker import counts_chord_parts_twice, problems, request_class
from semel.aio import AsyncIdempotency
from semel.engine import outcomes
from semel.engine._sync import runs
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    ConfigError,
    InvalidKey,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    ResultUnavailable,
    SerializationError,
    StoreUnavailable,
)
from semel.events import ResultNotStored
from semel.messages import SOONEST, Message
from semel.testing import FaultyStore, Refuse

NOW = {"max_retries": 2, "countdown": 0}


@pytest.fixture
def idem() -> Iterator[Idempotency]:
    with Idempotency("memory://") as engine:
        yield engine


@pytest.fixture
def shop(idem):
    return application(idem)


class Shop(Celery):
    """An application whose tasks no other application gets to see."""

    def task(self, *args, **options):
        return super().task(*args, **{**options, "shared": False})


def application(idem, *, broker="memory://", backend="cache+memory://", **options) -> Celery:
    cache._DUMMY_CLIENT_CACHE.clear()
    shop = Shop(
        "shop",
        task_cls=task_class(idem, **options),
        broker=broker,
        backend=backend,
        set_as_current=False,
    )
    shop.conf.task_publish_retry = False
    shop.conf.broker_transport_options = {"max_retries": 1, "interval_max": 0.1}
    return shop


class Deliveries(list):
    """What the function of a task was called with, each time it ran."""

    def task(self, app, *, result=None, raises=None, **options):
        @app.task(name="charge", **options)
        def charge(order):
            self.append(order)
            if raises is not None:
                raise raises
            return result

        return charge


@pytest.fixture
def ran() -> Deliveries:
    return Deliveries()


def delivered(task, *args, key="message-1", **request):
    """Run a task as the process of a worker does, and return what the worker gets to see."""
    told = {"id": key, "is_eager": False, "delivery_info": {}, **request}
    outcome = trace_task(task, key, list(args), {}, told, app=task.app)
    return outcome.retval if outcome.info is None else outcome.info


def messages(app, queue="celery"):
    """Take the messages out of a queue of the memory broker."""
    with (
        app.connection_for_read() as connection,
        contextlib.closing(connection.SimpleQueue(queue)) as taken,
    ):
        while True:
            try:
                message = taken.get(block=False)
            except taken.Empty:
                return
            message.ack()
            yield message


# --- what a task says --------------------------------------------------------------------------


@dataclass
class Receipt:
    number: int
    items: tuple[str, ...]


def test_a_duplicate_gets_the_stored_value_in_its_own_type(shop, ran):
    @shop.task(idempotent=True)
    def charge(order: int) -> Receipt:
        ran.append(order)
        return Receipt(order, ("tea",))

    first, second = (charge.apply((7,), task_id="a").get() for _ in range(2))
    assert first == second == Receipt(7, ("tea",))
    assert ran == [7]
    assert charge.apply((7,), task_id="b").get() == first
    assert ran == [7, 7]


def test_an_attempt_is_running_while_the_function_is(shop):
    @shop.task(idempotent=True)
    def charge():
        return current_attempt().derive("mail")

    assert charge.apply(task_id="a").get() == charge.apply(task_id="a").get()


def test_a_task_that_says_nothing_is_celerys_own(shop):
    def charge(order):
        return order

    ours = shop.task(name="charge")(charge)
    theirs = Celery("other", set_as_current=False).task(name="charge", shared=False)(charge)
    assert ours.run is charge is theirs.run
    for name in (
        "acks_late",
        "reject_on_worker_lost",
        "acks_on_failure",
        "acks_on_timeout",
        "Request",
    ):
        assert getattr(ours, name, None) == getattr(theirs, name, None), name
    assert [ours.apply((each,), task_id="a").get() for each in (1, 2)] == [1, 2]


def test_a_task_that_is_idempotent_is_acknowledged_when_its_record_is_finished(shop, ran):
    charge = ran.task(shop, idempotent=True)
    assert charge.acks_late
    assert charge.reject_on_worker_lost
    assert not charge.acks_on_timeout
    assert charge.acks_on_failure_or_timeout


def test_what_a_task_says_of_acknowledging_counts(shop, ran):
    charge = ran.task(
        shop, idempotent=True, acks_late=False, reject_on_worker_lost=False, acks_on_timeout=True
    )
    assert not charge.acks_late
    assert not charge.reject_on_worker_lost
    assert charge.acks_on_timeout


def test_what_celery_writes_into_a_base_is_not_what_it_says(idem, ran):
    class Careless(Task):
        reject_on_worker_lost = False

    shop = application(idem, base=Careless)

    class Base(shop.Task):
        acks_on_timeout = True

    assert Base.app is shop  # which binds the class
    assert Base.acks_late is False
    charge = ran.task(shop, base=Base, idempotent=True)
    assert charge.acks_late
    assert not charge.reject_on_worker_lost
    assert charge.acks_on_timeout


@pytest.mark.parametrize(
    ("idempotent", "message"),
    [
        ("yes", "^charge: idempotent must be True, False or a dictionary"),
        ({"ttl": 5}, "^charge: idempotent has no option 'ttl'; known: consumer, key, payload, policy, dead_letters, transaction"),
        ({"key": "order:{number}"}, "^charge: the key template 'order:{number}' is wrong"),
        ({"key": 5}, "^charge: key must be a template"),
        ({"payload": "number"}, "^charge: payload must name arguments"),
        ({"consumer": ""}, "^charge: consumer: the name is empty"),
        ({"policy": "job"}, "^charge: policy must be a Policy"),
        ({"dead_letters": "yes"}, "^charge: dead_letters must be True or False"),
        ({"transaction": "Session"}, "^charge: transaction must be a function"),
        ({"transaction": print}, "^charge: transaction= needs an engine"),
        ({"transaction": print, "key": "{order}"}, "there are none; with transaction= the first parameter, 'order', is the session"),
        ({"transaction": print, "payload": ["order"]}, "with transaction= the first parameter, 'order', is the session"),
        ({"transaction": print, "key": "{number}"}, "there is no argument 'number'; there are none$"),
    ],
)  # fmt: skip
def test_wrong_options_are_an_error_when_the_task_is_made(shop, ran, idempotent, message):
    with pytest.raises(ConfigError, match=message):
        ran.task(shop, idempotent=idempotent)._get_current_object()


def test_the_parameters_of_a_task_have_to_be_readable(shop):
    class Charge(shop.Task):
        idempotent = True
        run = staticmethod(dict)

    with pytest.raises(ConfigError, match="parameters of Charge cannot be read"):
        Charge()


def test_an_async_function_is_no_task(shop):
    async def charge(): ...

    said = "^the task charge is async; Celery does not await tasks: make it a plain function$"
    with pytest.raises(ConfigError, match=said):
        shop.task(name="charge", idempotent=True)(charge)._get_current_object()


def test_a_task_without_parameters_has_none_for_a_session(shop):
    def charge(): ...

    said = "^the task charge has no parameters: with transaction= the first one is the session$"
    with pytest.raises(ConfigError, match=said):
        shop.task(name="charge", idempotent={"transaction": print})(charge)._get_current_object()
    with pytest.raises(ConfigError, match=r"^charge: .* no argument 'order'; there are none$"):
        shop.task(name="charge", idempotent={"key": "{order}"})(charge)._get_current_object()


def test_task_class_takes_an_engine_or_a_url(sqlite_url):
    made = task_class(sqlite_url)
    assert isinstance(made.idempotency, Idempotency)
    made.idempotency.close()
    with pytest.raises(ConfigError, match="not AsyncIdempotency"):
        task_class(AsyncIdempotency("memory://"))
    with pytest.raises(ConfigError, match="base must be a Celery task class"):
        task_class("memory://", base=dict)
    with pytest.raises(ConfigError, match="already made by task_class"):
        task_class("memory://", base=made)


# --- which messages are the same ---------------------------------------------------------------


def test_a_key_is_made_from_the_arguments_however_they_come(shop, ran):
    charge = ran.task(shop, idempotent={"key": "order:{order}", "payload": "order"})
    assert charge.apply((7,)).successful()
    assert charge.apply(kwargs={"order": 7}).successful()
    assert charge.apply((8,)).successful()
    assert ran == [7, 8]


UNSAID = object()


def test_a_call_is_the_same_however_it_is_written(shop, ran):
    @shop.task(idempotent=True)
    def charge(order, currency="EUR", note=UNSAID, *more, **others):
        ran.append(order)

    same = [
        charge.apply((7,), task_id="a"),
        charge.apply((7, "EUR"), task_id="a"),
        charge.apply(kwargs={"currency": "EUR", "order": 7}, task_id="a"),
    ]
    others = [
        charge.apply((7, "USD"), task_id="a"),
        charge.apply((7, "EUR", None), task_id="a"),
        charge.apply((7,), {"tip": 1}, task_id="a"),
        charge.apply((True,), task_id="a"),
    ]
    assert [each.state for each in same] == ["SUCCESS"] * 3
    assert [type(each.result) for each in others] == [PayloadMismatch] * 4
    assert ran == [7]


def test_a_message_stays_the_same_where_its_task_has_a_new_parameter(shop, ran):
    @shop.task(name="charge", idempotent=True)
    def before(order):
        ran.append(order)

    assert before.apply((7,), task_id="a").successful()
    shop.tasks.unregister("charge")

    @shop.task(name="charge", idempotent=True)
    def after(order, currency="EUR"):
        ran.append(order)

    assert after.apply((7,), task_id="a").successful()
    assert ran == [7]


def test_arguments_that_do_not_fit_are_an_error_of_the_function(shop, ran):
    charge = ran.task(shop, idempotent=True)
    result = charge.apply((7, 8))
    assert isinstance(result.result, TypeError)
    assert "takes 1 positional argument but 2 were given" in str(result.result)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"key": "{order}"}, InvalidKey),
        ({"key": lambda order, amount: order}, InvalidKey),
        ({"payload": "amount"}, SerializationError),
    ],
)
def test_a_message_that_does_not_fit_its_task_has_no_key_and_no_payload(shop, options, kind):
    @shop.task(name="shop.charge", typing=False, idempotent=options)
    def charge(order, amount): ...

    error = charge.apply((7,)).result
    assert isinstance(error, kind)
    assert str(error).startswith(
        "the message does not fit shop.charge(order, amount): missing a required argument: 'amount'"
    )


def test_a_key_may_be_a_function_of_the_arguments(shop, ran):
    charge = ran.task(shop, idempotent={"key": lambda order: f"order-{order}"})
    charge.apply((7,))
    charge.apply((7,))
    assert ran == [7]


def test_the_object_of_a_bound_task_is_no_argument(shop, ran):
    @shop.task(bind=True, idempotent={"key": "{order}"})
    def charge(self, order):
        ran.append((self.name, order))

    charge.apply((7,))
    charge.apply((7,))
    assert ran == [(charge.name, 7)]


def test_the_header_is_the_key_where_no_expression_is(shop, ran):
    charge = ran.task(shop, idempotent=True)
    for _ in range(2):
        charge.apply((7,), headers={"idempotency-key": "order-7"})
    assert ran == [7]


def test_a_message_whose_key_cannot_be_made_fails_and_is_not_retried(shop, ran):
    charge = ran.task(
        shop,
        idempotent={"key": "order:{order.number}"},
        autoretry_for=(Exception,),
        retry_kwargs=NOW,
    )
    result = charge.apply((7,))
    assert isinstance(result.result, InvalidKey)
    assert ran == []


def test_arguments_that_do_not_fit_are_named(shop, ran):
    charge = ran.task(shop, idempotent={"key": "{order}"})
    result = charge.apply((7, 8))
    assert isinstance(result.result, InvalidKey)
    said = "the message does not fit charge(order): too many positional arguments"
    assert str(result.result).startswith(said)


def test_another_payload_fails_and_runs_nothing(shop, ran):
    charge = ran.task(shop, idempotent=True)
    charge.apply((7,), task_id="a")
    assert isinstance(charge.apply((8,), task_id="a").result, PayloadMismatch)
    assert ran == [7]


def test_payload_says_which_arguments_are_compared(shop, ran):
    @shop.task(idempotent={"payload": lambda order, note: order})
    def by_function(order, note):
        ran.append(note)

    @shop.task(idempotent={"payload": ["order"]})
    def by_name(order, note):
        ran.append(note)

    for task in (by_function, by_name):
        task.apply((7, "a"), task_id="a")
        assert task.apply((7, "b"), task_id="a").successful()
        assert isinstance(task.apply((8, "a"), task_id="a").result, PayloadMismatch)
    assert ran == ["a", "a"]


def test_two_tasks_with_one_consumer_share_their_records(shop, ran):
    @shop.task(idempotent={"consumer": "mailer"})
    def first():
        ran.append("first")

    @shop.task(idempotent={"consumer": "mailer"})
    def second():
        ran.append("second")

    first.apply(task_id="a")
    second.apply(task_id="a")
    assert ran == ["first"]


# --- what becomes of a failure -----------------------------------------------------------------


def test_an_error_is_retried_by_celery_under_the_same_id(shop, ran):
    @shop.task(bind=True, idempotent=True, autoretry_for=(OSError,), retry_kwargs=NOW)
    def charge(self):
        ran.append(self.request.retries)
        if self.request.retries < 2:
            raise OSError
        return "paid"

    assert charge.apply(task_id="a").get() == "paid"
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("policy", [Policy(failure="final"), Policy(abandoned="hold")])
def test_an_error_that_is_recorded_is_not_retried(shop, ran, policy):
    charge = ran.task(
        shop,
        raises=OSError("declined"),
        idempotent={"policy": policy},
        autoretry_for=(Exception,),
        retry_kwargs=NOW,
    )
    result = charge.apply((7,), task_id="a")
    assert isinstance(result.result, OSError)
    assert "in charge" in result.traceback
    assert ran == [7]


def test_an_error_that_is_the_one_of_a_task_inside_is_retried(shop, ran):
    inside = ran.task(
        shop, raises=OSError("declined"), idempotent={"policy": Policy(failure="final")}
    )

    @shop.task(bind=True, idempotent=True, autoretry_for=(OSError,), retry_kwargs=NOW)
    def outer(self):
        ran.append(self.request.retries)
        inside.apply((7,), task_id=f"inside-{self.request.retries}", throw=True)

    outer.apply(task_id="a")
    assert ran == [0, 7, 1, 7, 2, 7]


def test_a_task_may_retry_itself_with_the_error_of_a_task_inside(shop, ran):
    inside = ran.task(
        shop, raises=OSError("declined"), idempotent={"policy": Policy(failure="final")}
    )

    @shop.task(bind=True, idempotent=True, max_retries=2)
    def outer(self):
        ran.append(self.request.retries)
        try:
            inside.apply((7,), task_id=f"inside-{self.request.retries}", throw=True)
        except OSError as error:
            raise self.retry(exc=error, countdown=0) from error

    outer.apply(task_id="a")
    assert ran == [0, 7, 1, 7, 2, 7]


def test_a_replacement_does_not_collide_with_the_task_that_it_replaces(shop, ran):
    replaced = {"replaced_task_nesting": 1, "parent_id": "message-1"}

    @shop.task(bind=True, idempotent=True)
    def charge(self, number):
        ran.append(number)
        if number == 0:
            return "paid"
        try:
            self.replace(self.s(number - 1))
        except Ignore:
            # Another worker takes the replacement as soon as it is there.
            (sent,) = messages(shop)
            with ThreadPoolExecutor() as other:
                assert other.submit(take, sent).result(30) == "paid"
            raise

    def take(sent):
        return delivered(charge, *sent.payload[0], key=sent.headers["id"], **replaced)

    assert delivered(charge, 1).state == "IGNORED"
    assert shop.AsyncResult("message-1").get() == "paid"
    assert delivered(charge, 0, **replaced) == "paid"
    assert ran == [1, 0]


def test_what_follows_a_replacement_is_the_same_task_as_before(shop, ran):
    mail = ran.task(shop, idempotent=True)
    for nesting in (0, 1):
        delivered(mail, 7, replaced_task_nesting=nesting, parent_id="message-0")
    assert ran == [7]


def test_a_retry_of_the_task_itself_is_not_a_failure_under_hold(shop, ran):
    @shop.task(bind=True, idempotent={"policy": Policy(abandoned="hold")}, max_retries=None)
    def charge(self):
        ran.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "paid"

    assert charge.apply(task_id="a").get() == "paid"
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("raised", [Reject("not here"), Ignore("not now"), Retry("soon")])
def test_a_task_that_is_not_done_runs_again_under_hold(shop, ran, raised):
    charge = ran.task(shop, raises=raised, idempotent={"policy": Policy(abandoned="hold")})
    for _ in range(2):
        assert delivered(charge, 7).retval is raised
    assert ran == [7, 7]


def test_a_held_message_is_delivered_again_later_or_fails_with_dead_letters(shop, ran, caplog):
    hold = Policy(abandoned="hold")
    held = ran.task(shop, raises=OSError("cut"), idempotent={"policy": hold})
    assert delivered(held, 7).state == "FAILURE"
    assert delivered(held, 7).state == "IGNORED"
    (again,) = messages(shop)
    assert again.headers["eta"]
    assert "task charge [message-1] will be redelivered in 300.0 s" in caplog.text
    assert "semel resolve" in caplog.text

    @shop.task(idempotent={"policy": hold, "dead_letters": True})
    def lettered():
        raise OSError("cut")

    assert not lettered.acks_on_failure_or_timeout
    assert delivered(lettered).state == "FAILURE"
    assert isinstance(delivered(lettered).retval, OutcomeUnknown)


def test_attempts_end(shop, ran):
    charge = ran.task(
        shop,
        raises=OSError("cut"),
        idempotent={"policy": Policy(max_attempts=2, failure="retryable")},
        autoretry_for=(OSError,),
        retry_kwargs={"max_retries": None, "countdown": 0},
    )
    assert isinstance(charge.apply((7,), task_id="a").result, AttemptsExhausted)
    assert ran == [7, 7]


def test_a_failure_is_of_its_own_type_in_a_result_backend(shop, ran):
    charge = ran.task(
        shop, raises=OSError("declined"), idempotent={"policy": Policy(failure="final")}
    )
    delivered(charge, 7)
    delivered(charge, 7)
    result = shop.AsyncResult("message-1").result  # which the backend has as JSON
    assert isinstance(result, PreviousFailure)
    assert (result.type_name, result.message) == ("OSError", "declined")


# --- what is not a message ---------------------------------------------------------------------


def test_a_direct_call_calls_the_function(shop, ran):
    charge = ran.task(shop, result="paid", idempotent=True)
    assert [charge(7), charge(7)] == ["paid", "paid"]
    assert ran == [7, 7]


def test_a_call_inside_of_the_task_is_a_direct_one(shop, ran):
    @shop.task(bind=True, idempotent=True)
    def charge(self, order):
        ran.append(order)
        return order if order == 0 else (charge(order - 1), self.run(0))

    assert delivered(charge, 2) == ((0, 0), 0)
    assert ran == [2, 1, 0, 0, 0]


def test_an_eager_message_that_runs_elsewhere_is_an_error(idem, shop, ran):
    begun, go = Event(), Event()

    @shop.task(idempotent=True, autoretry_for=(Exception,), retry_kwargs=NOW)
    def charge():
        ran.append(1)
        begun.set()
        assert go.wait(30)

    first = Thread(target=charge.apply, kwargs={"task_id": "a"})
    first.start()
    assert begun.wait(30)
    second = charge.apply(task_id="a")
    go.set()
    first.join()
    assert isinstance(second.result, ConcurrentRequest)
    assert second.result.retry_after >= 1
    assert ran == [1]


def test_an_eager_message_that_cannot_be_handled_raises_the_error_and_is_not_retried(ran):
    store = FaultyStore(open_store("memory://"))
    store.inject("claim", Refuse(), times=1000)
    with Idempotency(store, policy=Policy(store_timeout=0.2)) as idem:
        charge = ran.task(
            application(idem), idempotent=True, autoretry_for=(Exception,), retry_kwargs=NOW
        )
        assert isinstance(charge.apply((7,)).result, StoreUnavailable)
        store.heal()
    assert ran == []


def test_an_application_that_is_always_eager_handles_a_message_once(shop, ran):
    shop.conf.task_always_eager = True
    charge = ran.task(shop, result="paid", idempotent=True)
    assert [charge.apply_async((7,), task_id="a").get() for _ in range(2)] == ["paid", "paid"]
    assert ran == [7]


def test_a_nested_call_is_an_error_of_the_program(shop, ran):
    @shop.task(idempotent=True, autoretry_for=(Exception,), retry_kwargs=NOW)
    def charge():
        ran.append(1)
        return shop.Task.idempotency.execute("a", lambda: 1, scope=charge.name)

    assert isinstance(charge.apply(task_id="a").result, NestedCall)
    assert ran == [1]


# --- task classes ------------------------------------------------------------------------------


class Counting(Task):
    abstract = True
    calls: ClassVar[list[str]] = []

    def __init__(self):  # as Celery's documentation has it
        self.started = True

    def __call__(self, *args, **kwargs):
        self.calls.append("call")
        return super().__call__(*args, **kwargs)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        self.calls.append(type(exc).__name__)


def test_a_base_of_the_applications_own_keeps_what_it_does(idem, ran):
    shop = application(idem, base=Counting)
    charge = ran.task(shop, result="paid", idempotent=True)
    Counting.calls.clear()
    assert [delivered(charge, 7), delivered(charge, 7)] == ["paid", "paid"]
    delivered(charge, 8)
    assert charge.started
    assert Counting.calls == ["call", "call", "call", "PayloadMismatch"]
    assert ran == [7]


def test_a_class_between_says_it_for_all_of_its_tasks(shop, ran):
    class Base(shop.Task):
        idempotent: ClassVar = {"key": "{order}"}
        delivery = "an attribute of the application's own"

        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    assert Base.app is shop  # which binds the class
    charge = ran.task(shop, base=Base)

    @shop.task(base=Base, idempotent=False)
    def off(order):
        ran.append(-order)

    for _ in range(2):
        delivered(charge, 7, key="a")
        delivered(off, 8, key="a")
    assert ran == [7, -8, -8]
    assert (charge.acks_late, off.acks_late) == (True, False)


@pytest.mark.parametrize("name", [None, "shop.charge"])
def test_a_task_that_is_a_class_works(shop, ran, name):
    class Charge(shop.Task):
        idempotent: ClassVar = {"policy": Policy(failure="final")}

        def run(self, order):
            ran.append((self.request.retries, order))
            raise OSError

    Charge.name = name
    charge = shop.register_task(Charge(), autoretry_for=(OSError,), retry_kwargs=NOW)
    assert charge.semel_delivery.consumer.rules.consumer == charge.name
    charge.apply((7,), task_id="a")
    assert charge.apply((7,), task_id="a").state == "FAILURE"
    assert ran == [(0, 7)]


def test_wrong_options_of_a_class_without_a_name_are_an_error_when_it_is_made(shop):
    class Charge(shop.Task):
        idempotent: ClassVar = {"dead_letters": "yes"}

    with pytest.raises(ConfigError, match="dead_letters"):
        Charge()


def test_the_retries_that_register_task_adds_are_around_ours(shop, ran):
    class Charge(shop.Task):
        idempotent = True

        def run(self):
            ran.append(self.request.retries)
            raise OSError

    shop.register_task(Charge(), autoretry_for=(OSError,), retry_kwargs=NOW).apply()
    assert ran == [0, 1, 2]


# --- a message that cannot be handled now ------------------------------------------------------


@contextlib.contextmanager
def held_elsewhere(idem, task, key):
    """Another worker has begun to handle the message."""
    begun, go = Event(), Event()

    def handle():
        begun.set()
        assert go.wait(30)

    other = Thread(target=idem.execute, args=(key, handle), kwargs={"scope": task.name})
    other.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        go.set()
        other.join()


def test_a_message_that_runs_elsewhere_is_sent_again_as_it_was(idem, shop, ran):
    charge = ran.task(shop, idempotent={"payload": lambda order: None})
    sent = {
        "root_id": "root", "parent_id": "parent", "group": "group-1", "group_index": 3,
        "retries": 2, "expires": "2099-01-01T00:00:00+00:00", "timelimit": [30, 20],
        "ignore_result": True, "origin": "here", "shadow": "charge!", "tenant": "t-1",
        "delivery_info": {"exchange": "", "routing_key": "orders", "priority": 4, "redelivered": True},
        "callbacks": [charge.s()], "errbacks": [charge.s(1)], "chain": [charge.s(2)],
    }  # fmt: skip
    with held_elsewhere(idem, charge, "message-1"):
        info = delivered(charge, 7, **sent)
    assert info.state == "IGNORED"
    assert "redelivered in" in str(info.retval)
    (again,) = messages(shop, "orders")
    headers = again.headers
    assert headers["id"] == "message-1"
    assert headers["eta"] is not None
    assert headers["tenant"] == "t-1"
    assert again.properties["priority"] == 4
    assert again.payload[:2] == [[7], {}]
    embed = again.payload[2]
    assert [each["task"] for each in embed["callbacks"] + embed["errbacks"] + embed["chain"]] == [
        "charge"
    ] * 3
    for name in ("root_id", "parent_id", "group", "group_index", "retries", "expires", "timelimit",
                 "ignore_result", "origin", "shadow"):  # fmt: skip
        assert headers[name] == sent[name], name
    assert ran == []


def test_the_setting_of_the_task_counts_where_the_message_says_nothing_of_its_result(
    idem, shop, ran
):
    charge = ran.task(shop, idempotent={"payload": lambda order: None}, ignore_result=True)
    with held_elsewhere(idem, charge, "message-1"):
        delivered(charge, 7)
    (again,) = messages(shop)
    assert again.headers["ignore_result"] is True


def test_a_message_is_sent_again_with_its_own_serializer(idem, shop, ran):
    shop.conf.accept_content = ["json", "pickle"]
    charge = ran.task(shop, idempotent={"payload": lambda order: None})
    charge.apply_async(({1, 2},), serializer="pickle")
    (sent,) = messages(shop)
    assert "content_type" not in sent.properties  # as it is with RabbitMQ
    sent.accept = {sent.content_type}
    request = charge.Request(sent, app=shop, task=charge).request_dict
    with held_elsewhere(idem, charge, "message-1"):
        assert delivered(charge, {1, 2}, properties=request["properties"]).state == "IGNORED"
    (again,) = messages(shop)
    again.accept = {sent.content_type}
    assert list(again.payload[0]) == [{1, 2}]


def test_a_message_that_is_sent_again_shows_no_more_of_its_arguments(idem, shop, ran):
    charge = ran.task(shop, idempotent={"payload": lambda order: None})
    with held_elsewhere(idem, charge, "message-1"):
        delivered(charge, 7, argsrepr="(<secret>,)", kwargsrepr="{}")
    (again,) = messages(shop)
    assert (again.headers["argsrepr"], again.headers["kwargsrepr"]) == ("(<secret>,)", "{}")


def test_a_message_is_sent_again_to_its_own_queue_alone(idem, ran, rabbitmq, pauses):
    fan, topic, direct = (Exchange(kind, kind) for kind in ("fanout", "topic", "direct"))
    own = [
        Queue("own", fan, auto_delete=True),
        Queue("some", topic, "order.*"),
        Queue("all", topic, "#"),
        Queue("a", direct, "a"),
        Queue("b", direct, "b"),
    ]
    with rabbitmq.virtual_host() as host:
        shop = application(idem, broker=host.url)
        shop.conf.task_queues = own
        with shop.connection_for_write() as connection:
            for queue in (*own, Queue("of another worker", fan)):
                queue(connection).declare()
        charge = ran.task(shop, idempotent={"payload": lambda order: None})
        with held_elsewhere(idem, charge, "message-1"):
            fanned = delivered(charge, 7, delivery_info={"exchange": "fanout", "routing_key": "x"})
            either = {"exchange": "topic", "routing_key": "order.paid"}
            ambiguous = delivered(charge, 7, delivery_info=either)
            keyed = delivered(charge, 7, delivery_info={"exchange": "direct", "routing_key": "b"})
            named = delivered(charge, 7, delivery_info={"exchange": "", "routing_key": "some"})
        assert {fanned.state, keyed.state, named.state} == {"IGNORED"}
        assert ambiguous.state == "REJECTED"
        assert ambiguous.retval.requeue
        for queue in ("own", "some", "b"):
            host.wait_for_depth(queue, ready=1)
        ready = {name: depth.ready for name, depth in host.depths().items()}
        assert ready == {"own": 1, "of another worker": 0, "some": 1, "all": 0, "a": 0, "b": 1}


def test_a_message_that_cannot_be_encoded_does_not_come_at_once(idem, shop, ran, pauses):
    charge = ran.task(shop, idempotent={"payload": lambda order: None})
    with held_elsewhere(idem, charge, "message-1"):
        info = delivered(charge, {1, 2})
    assert info.state == "REJECTED"
    assert info.retval.requeue
    assert pauses == [SOONEST]


def test_a_message_that_cannot_be_sent_again_stays(idem, ran, pauses):
    shop = application(idem, broker="amqp://127.0.0.1:1")
    charge = ran.task(shop, idempotent={"payload": lambda order: None}, autoretry_for=(Exception,))
    with held_elsewhere(idem, charge, "message-1"):
        info = delivered(charge, 7)
    assert info.state == "REJECTED"
    assert info.retval.requeue


def test_a_full_queue_uses_up_no_retries(idem, shop, ran, pauses, monkeypatch):
    charge = ran.task(shop, idempotent={"payload": lambda order: None}, autoretry_for=(Exception,))
    connect = shop.connection_for_write

    def refused(**options):
        if options.get("transport_options") == {"confirm_publish": True}:
            raise OSError("basic.nack")
        return connect(**options)

    monkeypatch.setattr(shop, "connection_for_write", refused)
    with held_elsewhere(idem, charge, "message-1"):
        info = delivered(charge, 7)
    assert info.state == "REJECTED"
    assert info.retval.requeue
    assert not list(messages(shop))


def test_the_message_of_a_worker_that_stops_is_not_retried(shop, ran, monkeypatch):
    stopped = []
    monkeypatch.setattr(celery_worker.Program, "pid", 1)
    monkeypatch.setattr(celery_worker.os, "kill", lambda *args: stopped.append(args))
    charge = ran.task(
        shop, raises=ConfigError("no tariff"), idempotent=True, autoretry_for=(Exception,)
    )
    info = delivered(charge, 7)
    assert info.state == "REJECTED"
    assert info.retval.requeue
    assert stopped == [(1, signal.SIGTERM)]
    assert not list(messages(shop))


def test_a_message_whose_result_was_never_stored_stays(monkeypatch):
    monkeypatch.setattr(outcomes, "SAVE_FOR", 0.02)
    monkeypatch.setattr(runs, "CLOSING_LOOK", 0.05)

    def shut_down(event):
        if isinstance(event, ResultNotStored):
            idem.internals.closed = True

    store = FaultyStore(open_store("memory://"))
    idem = Idempotency(store, policy=Policy(lease=1), hooks=[shut_down])
    shop = application(idem)

    @shop.task(idempotent=True, autoretry_for=(Exception,))
    def charge(): ...

    store.inject("complete", Refuse(), times=1000)
    info = delivered(charge)
    store.heal()
    assert info.state == "REJECTED"
    assert info.retval.requeue


def test_a_soft_time_limit_while_a_result_waits_for_the_store_is_no_failure(monkeypatch, ran):
    monkeypatch.setattr(outcomes, "SAVE_FOR", 0.02)
    monkeypatch.setattr(runs, "CLOSING_LOOK", 0.05)
    store = FaultyStore(open_store("memory://"))
    idem = Idempotency(store)
    shop = application(idem)
    charge = ran.task(shop, result="paid", idempotent=True, autoretry_for=(Exception,))
    store.inject("complete", Refuse(), times=1000)

    def exceeded(*args):
        raise SoftTimeLimitExceeded

    def is_waiting(record):
        if "acknowledged when its record is stored" in record.getMessage():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        return True

    before = signal.signal(signal.SIGALRM, exceeded)
    logger = logging.getLogger("semel")
    logger.addFilter(is_waiting)
    try:
        info = delivered(charge, 7)
    finally:
        logger.removeFilter(is_waiting)
        signal.signal(signal.SIGALRM, before)
        store.heal()
        idem.close()
    assert info.state == "IGNORED"
    (again,) = messages(shop)
    assert (again.headers["id"], again.headers["retries"]) == ("message-1", 0)


# --- results, chords and what is linked --------------------------------------------------------


def test_a_result_that_is_not_kept_leaves_the_first_one_alone(shop, ran):
    charge = ran.task(shop, result="paid", idempotent={"policy": Policy(duplicate="reject")})
    assert delivered(charge, 7) == "paid"
    assert delivered(charge, 7).state == "IGNORED"
    assert shop.AsyncResult("message-1").result == "paid"
    assert ran == [7]


REDELIVERED = {"delivery_info": {"redelivered": True}}


@pytest.fixture
def pauses(monkeypatch):
    """How long the task has waited in its place, for nothing."""
    waited: list[float] = []
    monkeypatch.setattr(adapter, "sleep", waited.append)
    return waited


@pytest.fixture
def guarded(shop, ran, pauses):
    return ran.task(shop, result="paid", idempotent={"policy": Policy(duplicate="reject")})


def done(task):
    """Handle a message in a process that ends before Celery has its value."""
    message = Message(id="message-1", body={"args": [7], "kwargs": {}})
    task.semel_delivery.consumer.handle(message, ((7,), {}))


@pytest.mark.parametrize("request_", [{"chain": True}, {"callbacks": True}, REDELIVERED])
def test_a_value_that_only_celery_has_goes_to_what_waits_for_it(shop, guarded, ran, request_):
    @shop.task(name="mail")
    def mail(result): ...

    assert delivered(guarded, 7) == "paid"
    linked = {name: [dict(mail.s())] if each is True else each for name, each in request_.items()}
    assert delivered(guarded, 7, **linked) == "paid"
    sent = [message.payload[0] for message in messages(shop)]
    assert sent == [] if request_ is REDELIVERED else [["paid"]]
    assert ran == [7]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_value_that_was_lost_with_its_worker_is_a_failure(guarded, ran, ignored, caplog):
    done(guarded)
    following = dict(guarded.s().set(task_id="message-2"))
    linked = {"chain": [following], "ignore_result": True} if ignored else {}
    info = delivered(guarded, 7, **REDELIVERED, **linked)
    assert info.state == "FAILURE"
    assert isinstance(info.retval, ResultUnavailable)
    assert "its result is lost" in caplog.text
    assert ran == [7]


def test_a_result_that_is_about_to_be_stored_is_waited_for(shop, guarded, ran, monkeypatch):
    done(guarded)
    store = partial(shop.backend.store_result, "message-1", "paid", "SUCCESS")
    monkeypatch.setattr(adapter, "sleep", lambda seconds: store() if seconds else None)
    assert delivered(guarded, 7, **REDELIVERED) == "paid"


def test_a_chord_does_not_wait_for_a_value_that_is_not_kept(idem, ran, pauses, tmp_path):
    shop = application(idem, backend=f"db+sqlite:///{tmp_path}/results.db")
    charge = ran.task(shop, result="paid", idempotent={"policy": Policy(duplicate="reject")})
    done(charge)
    info = delivered(charge, 7, chord=dict(charge.s()))
    assert isinstance(info.retval, ResultUnavailable)


@pytest.mark.parametrize("sent", [{"ignore_result": True}, {"is_eager": True}])
def test_a_duplicate_whose_value_nobody_waits_for_is_ignored(guarded, sent):
    done(guarded)
    assert delivered(guarded, 7, **REDELIVERED, **sent).state == "IGNORED"


def test_a_duplicate_is_ignored_where_no_backend_has_results(idem, ran, pauses):
    shop = application(idem, backend=None)
    charge = ran.task(shop, result="paid", idempotent={"policy": Policy(duplicate="reject")})
    done(charge)
    assert delivered(charge, 7, **REDELIVERED).state == "IGNORED"


def test_a_duplicate_with_another_id_ends_no_chain(shop, guarded, caplog):
    done(guarded)  # which goes on with its own chain
    headers = {"idempotency-key": "message-1"}
    info = delivered(guarded, 7, key="message-2", headers=headers, chain=[dict(guarded.s())])
    assert info.state == "IGNORED"
    assert "are not sent again" in caplog.text


def test_a_message_stays_while_the_result_backend_is_away(shop, guarded, monkeypatch, pauses):
    done(guarded)

    def away(*args, **options):
        raise OSError("no connection")

    monkeypatch.setattr(shop.backend, "get_task_meta", away)
    info = delivered(guarded, 7, **REDELIVERED)
    assert info.state == "REJECTED"
    assert info.retval.requeue
    assert pauses == [0, SOONEST]


def test_what_is_linked_has_the_same_id_after_each_delivery(shop, ran):
    charge = ran.task(shop, result=5, idempotent=True)

    @shop.task(name="mail")
    def mail(result): ...

    pair = [mail.s(), mail.s(), mail.s().set(task_id="given"), mail.s() | mail.s()]
    for _ in range(2):
        delivered(charge, 7, callbacks=[dict(each) for each in pair])
    first, second = (
        {message.headers["id"] for message in sent}
        for sent in zip(*[messages(shop)] * 4, strict=True)
    )
    assert len(first & second) == 3  # a chain has other ids each time
    assert "given" in first


def test_signatures_of_an_eager_program_stay_as_they_are(shop, ran):
    shop.conf.task_always_eager = True
    mail = ran.task(shop, idempotent=True)

    @shop.task(idempotent=True)
    def charge(order):
        return order

    linked = mail.s()
    for order in (1, 2):
        charge.apply_async((order,), link=linked)
    assert ran == [1, 2]
    assert "task_id" not in linked.options


def test_what_a_replacement_links_is_not_what_the_task_linked(shop):
    @shop.task(name="mail")
    def mail(result): ...

    @shop.task(bind=True, idempotent=True)
    def charge(self, number):
        if number:
            self.replace(self.s(0).set(link=[mail.s()]))

    delivered(charge, 1, callbacks=[dict(mail.s())])
    (sent,) = messages(shop)
    callbacks = sent.payload[2]["callbacks"]
    assert len(callbacks) == 2
    replaced = {"replaced_task_nesting": 1, "parent_id": "message-1"}
    delivered(charge, 0, callbacks=callbacks, **replaced)
    assert len({message.headers["id"] for message in messages(shop)}) == 2


def test_a_chord_is_rejected_where_its_parts_would_count_twice(shop, ran):
    charge = ran.task(shop, idempotent=True, autoretry_for=(Exception,), retry_kwargs=NOW)

    @shop.task(name="mail")
    def mail(results): ...

    with pytest.raises(ConfigError, match="CacheBackend"):
        chord([charge.s(7)], mail.s()).apply_async()
    info = delivered(charge, 7, group="group-1", chord=dict(mail.s().set(task_id="body")))
    assert isinstance(info.retval, ConfigError)  # sent by something else
    assert ran == []


@pytest.mark.parametrize("ordered", [True, False])
def test_redis_counts_parts_twice_where_it_does_not_look_at_their_ids(ordered):
    shop = Celery(set_as_current=False)
    shop.conf.result_backend_transport_options = {"result_chord_ordered": ordered}
    backend = RedisBackend(url="redis://127.0.0.1:1", app=shop)
    by_id = hasattr(RedisBackend, "_chord_part_return_script")  # since Celery 5.7
    assert counts_chord_parts_twice(backend) is not (ordered or by_id)
    assert hasattr(RedisBackend, "_chord_zset")


def test_redis_counts_parts_twice_only_as_a_list_without_ids():
    class Backend:
        _chord_zset = True

        def __init__(self, **options):
            self.app = Celery(set_as_current=False)
            self.app.conf.result_backend_transport_options = options

    class Newer(Backend):
        _chord_part_return_script = None

    unordered = {"result_chord_ordered": False}
    assert counts_chord_parts_twice(Backend(**unordered))
    assert not counts_chord_parts_twice(Backend())
    assert not counts_chord_parts_twice(Newer(**unordered))


# --- in a transaction --------------------------------------------------------------------------


def test_the_record_is_committed_with_the_rows_of_the_task(tmp_path, ran):
    database = tmp_path / "shop.db"

    @contextlib.contextmanager
    def begin():
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    with Idempotency(f"sqlite:///{database}") as idem:
        idem.peek("-")  # makes the table
        shop = application(idem)

        @shop.task(idempotent={"transaction": begin, "key": "{order}"})
        def charge(session, order):
            session.execute("CREATE TABLE IF NOT EXISTS paid (number)")
            session.execute("INSERT INTO paid VALUES (?)", (order,))
            return order

        assert [delivered(charge, 7), delivered(charge, 7)] == [7, 7]
        assert list(inspect.signature(charge.run).parameters) == ["order"]  # for self.retry
        charge.delay(8)
        with pytest.raises(TypeError):
            charge.delay()
        with begin() as session:
            assert session.execute("SELECT number FROM paid").fetchall() == [(7,)]
            assert charge(session, 9) == 9

        class Charge(shop.Task):
            idempotent: ClassVar = {"transaction": begin}

            def run(self, session, order):
                session.execute("INSERT INTO paid VALUES (?)", (order,))

        delivered(shop.register_task(Charge()), 10)
        with begin() as session:
            assert session.execute("SELECT number FROM paid").fetchall() == [(7,), (9,), (10,)]


# --- settings of a worker ----------------------------------------------------------------------


def told(task, broker="amqp", visibility=None, time_limit=None):
    return [problem.partition(":")[0] for problem in problems(task, broker, visibility, time_limit)]


def test_good_settings_have_no_problems(shop, ran):
    assert told(ran.task(shop, idempotent=True)) == []


@pytest.mark.parametrize(
    ("options", "worker", "problem"),
    [
        ({"acks_late": False}, {}, "acks_late is off"),
        ({"reject_on_worker_lost": False}, {}, "reject_on_worker_lost is off"),
        ({"acks_on_timeout": True, "time_limit": 5}, {}, "acks_on_timeout is on"),
        ({"time_limit": 5}, {}, "it has a time limit of 5 s and no max_attempts"),
        ({}, {"time_limit": 60}, "it has a time limit of 60 s and no max_attempts"),
        ({}, {"broker": "redis", "visibility": 299.0}, "the visibility timeout of the broker is 299 s"),
        ({"default_retry_delay": 900}, {"broker": "sqs", "visibility": 600.0}, "the visibility timeout of the broker is 600 s"),
        ({"autoretry_for": (OSError,), "retry_backoff": True, "retry_backoff_max": 700}, {"broker": "redis", "visibility": 600.0}, "the visibility timeout of the broker is 600 s"),
        ({"idempotent": {"policy": Policy(lease=700)}}, {"broker": "redis", "visibility": 600.0}, "the visibility timeout of the broker is 600 s"),
        ({"idempotent": {"dead_letters": True}}, {"broker": "redis"}, "dead_letters is on, and the broker (redis) has no dead-letter exchange"),
    ],
)  # fmt: skip
def test_a_problem_is_told(shop, ran, options, worker, problem):
    assert told(ran.task(shop, **{"idempotent": True, **options}), **worker) == [problem]


def test_a_time_limit_longer_than_the_visibility_timeout_is_told(shop, ran):
    bounded = {"policy": Policy(max_attempts=3)}
    charge = ran.task(shop, idempotent=bounded, time_limit=4000, max_retries=0)
    (problem,) = problems(charge, "redis", 3600.0, None)
    assert "3600 s" in problem
    assert "a time limit of up to 4000 s" in problem
    assert told(charge, "redis", 4000.0) == []


def test_a_task_whose_class_knows_nothing_of_idempotent_is_named(shop, ran, monkeypatch, caplog):
    monkeypatch.setattr(celery_worker.Program, "pid", None)
    ran.task(shop, base=Task, idempotent=True)

    @shop.task(name="off", base=Task, idempotent=False)
    def off(): ...

    @shop.task(name="ours", idempotent=True)
    def ours(): ...

    worker = SimpleNamespace(app=shop, time_limit=None)
    signals.celeryd_after_setup.send(sender="worker", instance=worker, conf=shop.conf)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "charge sets idempotent= but is not protected" in record.getMessage()


# --- acknowledging -----------------------------------------------------------------------------


def test_a_request_of_the_applications_own_stays_one(shop, ran):
    class Own(Request):
        pass

    charge = ran.task(shop, idempotent=True, Request=Own)
    assert issubclass(charge.Request, Own)
    assert request_class(charge.Request) is charge.Request
