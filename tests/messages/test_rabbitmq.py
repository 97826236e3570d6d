"""How a verdict is carried out on RabbitMQ: delays, names, headers, ids."""

from __future__ import annotations

import functools
from unittest.mock import AsyncMock

import pytest

from semel import ConfigError, InvalidKey
from semel.adapters.rabbitmq import (
    ACKNOWLEDGE,
    DEAD_LETTER,
    EXCHANGE,
    KEPT,
    NO_ID,
    STEPS,
    Publish,
    RabbitRules,
    Unwritable,
    check_async,
    check_handler,
    check_not_async,
    check_size,
    delay_queue,
    stable_id,
)
from semel.messages import Ack, Fail, Later, Reject

REJECT = Reject("no", InvalidKey("no"))


def rules(**options):
    given = {"consumer": "mailer", "queue": "orders", "dead_letters": False}
    given |= {"delay_queues": "quorum"}
    return RabbitRules(**{**given, **options})


def received(of=None, exchange="", routing_key="orders", **properties):
    given = {"message_id": "m-1", "headers": None, "expiration": None}
    return (of or rules()).received(exchange, routing_key, **{**given, **properties})


DEATH = {"queue": "semel.later.quorum.1.orders", "exchange": EXCHANGE}


def returned(headers, *deaths, **properties):
    """What the broker delivers when a message with these headers has been delayed."""
    died = {**headers, "x-death": [DEATH, *deaths], "x-first-death-queue": DEATH["queue"]}
    return received(exchange=EXCHANGE, headers=died, **properties)


@pytest.mark.parametrize(
    ("seconds", "step"),
    [(0, 1), (1, 1), (1.01, 2), (2, 2), (3, 4), (255, 256), (257, 300), (300, 300), (9999, 300)],
)
def test_seconds_are_rounded_up_to_the_next_step(seconds, step):
    delay = delay_queue("orders", seconds)
    assert delay.name == f"semel.later.quorum.{step}.orders"
    assert delay.arguments["x-message-ttl"] == step * 1000


def test_a_delay_queue_moves_its_messages_back_to_the_queue_it_belongs_to():
    quorum, classic = delay_queue("orders", 4), delay_queue("orders", 4, "classic")
    assert classic.arguments == {
        "x-message-ttl": 4000,
        "x-dead-letter-exchange": EXCHANGE,
        "x-dead-letter-routing-key": "orders",
    }
    assert classic.name == "semel.later.classic.4.orders"
    assert quorum.target == "orders"
    assert quorum.arguments["x-dead-letter-strategy"] == "at-least-once"
    assert len({delay_queue("orders", step).name for step in STEPS}) == len(STEPS)


def test_the_name_of_a_delay_queue_is_never_too_long():
    names = {delay_queue("é" * 126 + end, 300).name for end in "ab"}
    assert len(names) == 2
    assert all(len(name.encode()) < 255 for name in names)
    assert len(delay_queue("x" * 232, 300).name) == 255


def test_each_verdict_has_its_step():
    delivery = received()
    assert rules().step(Ack(), delivery) is ACKNOWLEDGE
    assert rules(dead_letters=True).step(REJECT, delivery) is DEAD_LETTER
    later = rules().step(Later(3, "busy"), delivery)
    assert isinstance(later, Publish)
    assert (later.exchange, later.routing_key) == (EXCHANGE, "semel.later.quorum.4.orders")
    dead = rules(dead_letters="dead").step(REJECT, delivery)
    assert isinstance(dead, Publish)
    assert (dead.exchange, dead.routing_key, dead.delay) == ("", "dead", None)
    assert dead.if_rejected is not None
    assert dead.if_rejected.routing_key == "semel.later.quorum.300.orders"
    with pytest.raises(InvalidKey):
        rules().step(Fail(InvalidKey("no")), delivery)


def test_a_long_reason_is_cut():
    dead = rules(dead_letters="dead").step(Reject("x" * 5000, InvalidKey("no")), received())
    assert isinstance(dead, Publish)
    assert len(dead.headers["semel-reason"]) == 1000


def test_what_cannot_be_written_with_our_headers_is_rejected_without_them():
    delivery = received(headers={"a": 1, "CC": ["copies"]}, exchange="shop")
    later = Later(3, "busy")
    assert rules().step(later, delivery).if_unwritable is None
    assert rules(dead_letters=True).step(later, delivery).if_unwritable is DEAD_LETTER
    for verdict in (later, REJECT):
        bare = rules(dead_letters="dead").step(verdict, delivery).if_unwritable
        assert (bare.exchange, bare.routing_key, bare.headers) == ("", "dead", {"a": 1})
        assert bare.if_rejected is None
        assert bare.if_unwritable.headers == {"semel-queue": "orders"}
        assert bare.if_unwritable.if_unwritable is None


def test_properties_have_to_fit_into_a_frame():
    check_size(lambda: b"1234", 4)
    check_size(lambda: b"1234", 0)  # without a limit
    with pytest.raises(Unwritable, match="take 5 bytes, and a frame has 4"):
        check_size(lambda: b"12345", 4)
    with pytest.raises(Unwritable, match="UnicodeEncodeError"):
        check_size("\udcff".encode, 4)


def test_a_message_comes_back_as_it_was():
    headers = {"a": 1, "CC": ["copies"], "x-death": [{"queue": "first"}], "x-delivery-count": 3}
    before = received(exchange="shop", routing_key="new", headers=headers, expiration="500")
    sent = rules().step(Later(1, "busy"), before).headers
    assert sent.keys() == {"a", KEPT}
    after = returned(sent, {"queue": "then"}, "odd")
    assert after.headers == {
        "a": 1, "CC": ["copies"], "x-death": [{"queue": "then"}, "odd", {"queue": "first"}],
    }  # fmt: skip
    assert (after.expiration, after.queue) == ("500", "orders")
    assert (after.exchange, after.routing_key) == ("shop", "new")
    assert after.delayed
    assert not before.delayed
    counted = returned({**sent, "x-delivery-count": 1})
    assert counted.headers["x-delivery-count"] == 1
    assert counted.headers["x-death"] == [{"queue": "first"}]


@pytest.mark.parametrize(
    "came_by", [("", "orders"), ("", "copies"), ("shop", "orders"), ("shop", ""), ("shop", b"\xff")]
)
def test_a_message_comes_back_with_the_exchange_and_routing_key_it_came_by(came_by):
    exchange, routing_key = came_by
    delivery = received(exchange=exchange, routing_key=routing_key)
    for _ in range(2):
        delivery = returned(rules().step(Later(1, "busy"), delivery).headers)
        assert (delivery.exchange, delivery.routing_key) == came_by


def test_nothing_is_added_to_a_message_of_which_nothing_has_to_be_kept():
    sent = rules().step(Later(1, "busy"), received()).headers
    assert sent == {}
    assert returned(sent).headers == {}


FORGED = {"exchange": "shop", "routing_key": "tenant-2", "headers": {"x-death": 7}}


@pytest.mark.parametrize(
    ("exchange", "death"),
    [
        ("", DEATH),
        ("shop", DEATH),
        (EXCHANGE, None),
        (EXCHANGE, {**DEATH, "exchange": ""}),  # sent to the delay queue itself
        (EXCHANGE, "semel.later"),
    ],
)
def test_what_a_producer_wrote_in_our_name_is_neither_believed_nor_sent_on(exchange, death):
    headers = {KEPT: FORGED, "tenant": "own"}
    deaths = {} if death is None else {"x-death": [death]}
    got = received(exchange=exchange, headers={**headers, **deaths})
    assert (got.exchange, got.routing_key, got.delayed) == (exchange, "orders", False)
    assert got.headers == {"tenant": "own", **deaths}
    again = returned(rules().step(Later(1, "busy"), got).headers)
    assert (again.exchange, again.routing_key) == (exchange, "orders")


def test_a_damaged_header_of_ours_is_left_out():
    wrong_times = ({"expiration": each} for each in (5, "", "soon", "9" * 99))
    for damaged in (
        "text",
        {"headers": None},
        {"headers": [1]},
        {"told": "yes"},
        [1],
        *wrong_times,
    ):
        got = returned({KEPT: damaged, "a": 1})
        assert (got.headers, got.exchange, got.routing_key) == ({"a": 1}, "", "orders")
    odd = {"headers": {"tenant": "other", "CC": ["copies"]}, "user": "root"}
    assert returned({KEPT: odd, "tenant": "own"}).headers == {"tenant": "own", "CC": ["copies"]}


def test_the_id_of_a_message_without_one_is_none():
    assert received(message_id=NO_ID).id is None
    assert received(message_id=None).id is None
    assert received(message_id="m-1").id == "m-1"


def test_the_log_says_once_that_a_message_stays(caplog):
    delivery = received()
    sent = rules().step(REJECT, delivery).headers
    rules().step(REJECT, returned(sent))
    assert caplog.text.count("there are no dead letters") == 1
    assert "[consumer=mailer queue=orders key_digest=-]" in caplog.text


def test_no_message_tells_which_queue_it_was_in():
    assert received(rules(queue="other"), exchange="shop").queue == "other"
    with pytest.raises(ConfigError, match=r"pass once\(\.\.\., queue="):
        received(rules(queue=None))


def test_the_consumer_is_the_queue_unless_given():
    assert rules(consumer=None, queue="orders").consumer == "orders"
    assert rules(queue="orders").consumer == "mailer"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"queue": ""}, "queue must be"),
        ({"queue": 5}, "queue must be"),
        ({"dead_letters": ""}, "dead_letters must be"),
        ({"dead_letters": None}, "dead_letters must be"),
        ({"queue": "orders", "dead_letters": "orders"}, "another queue"),
        ({"delay_queues": "stream"}, "delay_queues must be"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(ConfigError, match=text):
        rules(**options)


@pytest.mark.parametrize(
    ("part", "message_id", "text"),
    [
        (None, None, "needs either"),
        ("receipt", "order-42", "needs either"),
        (None, "", "must be a string"),
        (None, 5, "must be a string"),
        ("receipt", None, "none runs here"),
    ],
)
def test_an_id_is_given_or_made_of_the_operation_that_runs(part, message_id, text):
    with pytest.raises(ConfigError, match=text):
        stable_id(part, message_id)


def test_a_consumer_or_a_queue_is_needed():
    with pytest.raises(ConfigError, match="consumer= or queue= is needed"):
        rules(consumer=None, queue=None)


def test_the_log_says_what_becomes_of_a_rejected_message(caplog):
    rules(dead_letters=True).step(REJECT, received())
    assert "to the dead-letter exchange of its queue, and drops it if there is none" in caplog.text
    rules(dead_letters="dead").step(REJECT, received())
    assert "it goes to the queue dead: no" in caplog.text


@pytest.mark.parametrize("dead_letters", ["dead", True, False])
def test_a_line_about_dead_letters_has_the_digest_of_the_key(caplog, dead_letters):
    of = rules(dead_letters=dead_letters)
    verdict = Reject("no", InvalidKey("no"), "808ab18c")
    step = of.step(verdict, received(of))
    if dead_letters == "dead":
        for error, returned_ in (
            (Unwritable("no"), False),
            (ValueError(), True),
            (OSError(), False),
        ):
            of.instead(step, error, returned=returned_)
    assert caplog.messages
    assert all("key_digest=808ab18c]" in line for line in caplog.messages)


def test_the_log_tells_a_missing_queue_from_one_that_refuses(caplog):
    chosen = rules(dead_letters="dead")
    dead = chosen.step(REJECT, received())
    assert isinstance(dead, Publish)
    assert chosen.instead(dead, OSError("no"), returned=False) is dead.if_rejected
    assert "check that this user may configure and write it" in caplog.text
    caplog.clear()
    chosen.instead(dead, OSError("no"), returned=True)
    assert "there is no queue dead, so" in caplog.text
    assert "it will be delivered again after 300 s" in caplog.text
    assert "May this user" not in caplog.text
    caplog.clear()
    assert chosen.instead(dead.if_rejected, OSError("no"), returned=True) is None  # we declare it
    assert "declare it" not in caplog.text
    assert "goes back to its queue after 300 s" in caplog.text
    caplog.clear()
    assert chosen.instead(dead, Unwritable("too long"), returned=False) is dead.if_unwritable
    assert "with fewer headers: too long" in caplog.text


class Handlers:
    """Handlers of every form; their names say whether they are async."""

    async def method(self, message): ...

    def plain_method(self, message): ...

    @staticmethod
    async def static(message): ...

    async def __call__(self, message): ...


class PlainHandler:
    def __call__(self, message): ...


async def handle(message, more=None): ...


def plain_handle(message, more=None): ...


@functools.wraps(handle)
def wrapped(message):
    return handle(message)


@functools.wraps(plain_handle)
def plain_wrapped(message):
    return plain_handle(message)


class WrappedCall:
    __call__ = wrapped


ASYNC = [
    handle,
    functools.partial(handle, more=1),
    Handlers(),
    Handlers().method,
    Handlers.static,
    AsyncMock(),
]
WRAPPED = [
    wrapped,
    functools.partial(functools.partial(wrapped, more=1), more=2),
    WrappedCall(),
]
PLAIN = [
    plain_handle,
    plain_wrapped,
    functools.partial(plain_handle, more=1),
    PlainHandler(),
    Handlers().plain_method,
]
UNKNOWN = [lambda message: handle(message, 1), print, dict, [].append, "handle"]


@pytest.mark.parametrize("handler", PLAIN)
def test_a_handler_that_is_not_async_would_block_the_event_loop(handler):
    with pytest.raises(ConfigError, match=r"not async .* make it `async def`, or use semel\.adap"):
        check_async(handler)


@pytest.mark.parametrize("handler", [*ASYNC, *WRAPPED, *UNKNOWN])
def test_a_handler_that_is_async_or_may_be_is_taken_for_the_event_loop(handler):
    check_async(handler)


@pytest.mark.parametrize("handler", ASYNC)
def test_an_async_handler_would_not_be_awaited_by_a_thread(handler):
    with pytest.raises(ConfigError, match=r"is async.* or use semel\.adapters\.aio_pika"):
        check_not_async(handler)


@pytest.mark.parametrize("handler", [*PLAIN, *WRAPPED, *UNKNOWN])
def test_a_plain_handler_is_taken_for_threads_also_one_that_runs_an_event_loop(handler):
    check_not_async(handler)


def test_a_handler_has_to_take_what_it_is_called_with():
    check_handler(lambda message: None, in_transaction=False)
    check_handler(lambda session, message: None, in_transaction=True)
    check_handler(print, in_transaction=True)
    check_handler(type, in_transaction=False)  # tells nothing of its parameters
    with pytest.raises(ConfigError, match=r"handle\(session, message\)"):
        check_handler(lambda message: None, in_transaction=True)
    with pytest.raises(ConfigError, match=r"handle\(message\)"):
        check_handler(lambda session, message: None, in_transaction=False)


def test_a_handler_that_is_a_generator_is_rejected_because_its_body_would_never_run():
    def handle(message):
        yield message

    async def aio_handle(message):
        yield message

    for generator in (handle, aio_handle):
        with pytest.raises(ConfigError, match="must not yield"):
            check_handler(generator, in_transaction=False)
