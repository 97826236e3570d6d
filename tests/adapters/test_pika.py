"""pika: every message is handled once, and none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
import time
from contextlib import contextmanager

import pytest
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

from adapters.rabbit import PATIENCE, Broker, circle, full
from semel import ConfigError, Idempotency, NestedCall, Policy, StoreUnavailable
from semel.adapters import pika, rabbitmq
from servers.rabbitmq import wait_until


@pytest.fixture
def broker(virtual_host):
    broker = Broker(virtual_host)
    yield broker
    broker.close()


@pytest.fixture
def idem():
    with Idempotency("memory://") as idem:
        yield idem


@pytest.fixture
def worker(broker):
    worker = Worker(broker)
    yield worker
    worker.close()


class Worker:
    """A connection that consumes."""

    def __init__(self, broker, prefetch=10, heartbeat=None):
        self.connection = broker.connect(heartbeat)
        self.channel = self.connection.channel()
        self.channel.basic_qos(prefetch_count=prefetch)

    def serve(self, consumer, until, queue="orders"):
        """Consume until a condition holds, and drain."""
        self.channel.basic_consume(queue, consumer)
        self.events(until)
        return consumer.drain(self.channel, grace=PATIENCE)

    def events(self, until):
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline
            self.connection.process_data_events(0.02)

    def close(self):
        if self.connection.is_open:
            self.connection.close()


def times(handled, number):
    return lambda: len(handled) >= number


def test_a_duplicate_is_acknowledged_and_not_handled(broker, worker, idem):
    handled = []
    broker.publish(body=b"1")
    broker.publish(body=b"1")
    broker.publish("m-2", b"2")
    consumer = pika.once(idem, handled.append, queue="orders", consumer="mailer")
    assert worker.serve(consumer, times(handled, 2))
    assert [(each.id, each.body) for each in handled] == [("m-1", b"1"), ("m-2", b"2")]
    assert handled[0].raw.properties.message_id == "m-1"
    broker.host.wait_for_depth("orders")


def test_a_message_is_delivered_later_with_all_that_it_had(broker, worker, idem):
    seen = []
    broker.declare("copies")
    headers = {"tenant": "t", "CC": ["copies"], "x-death": circle(), "x-first-death-queue": "first"}

    def handle(message):
        seen.append((message, {**vars(message.raw.properties)}))
        if len(seen) < 3:
            raise OSError("not yet")

    broker.publish(**full(headers=headers, user_id="guest"))
    consumer = pika.once(idem, handle, queue="orders")
    assert worker.serve(consumer, times(seen, 3))
    first, again, last = seen
    assert [fields.pop("user_id") for _, fields in seen] == ["guest", None, None]
    assert first[0].headers == again[0].headers == last[0].headers
    assert first[1] == again[1] == last[1]
    assert first[1].items() >= full(headers=headers).items()
    broker.host.wait_for_depth("copies", ready=1)
    broker.host.wait_for_depth("orders")
    assert {
        "semel.later.quorum.1.orders",
        "semel.later.quorum.2.orders",
    } <= broker.host.depths().keys()


def came_by(message):
    return message.raw.method.exchange, message.raw.method.routing_key


@pytest.mark.parametrize("routing_key", ["order.made", "orders", ""])
def test_a_delayed_message_has_the_exchange_and_routing_key_it_came_with(
    broker, worker, idem, routing_key
):
    seen = []
    broker.bind_shop()

    def handle(message):
        seen.append(came_by(message))
        if len(seen) < 3:
            raise OSError("not yet")

    broker.publish(exchange="shop", to=routing_key)
    consumer = pika.once(idem, handle, queue="orders", key=lambda m: f"{came_by(m)[1]}:{m.id}")
    worker.serve(consumer, times(seen, 3))
    broker.publish(exchange="shop", to=routing_key)  # a duplicate
    assert worker.serve(consumer, lambda: broker.host.depth("orders") == (0, 0))
    assert seen == [("shop", routing_key)] * 3


def test_only_what_comes_from_our_own_delay_queue_says_how_it_was_published(broker, worker, idem):
    """A producer may write any header, but not to our exchange."""
    seen = []
    kept = {rabbitmq.KEPT: {"exchange": "shop", "routing_key": "tenant-2.order"}}
    delay = rabbitmq.delay_queue("orders", 1).name

    def handle(message):
        seen.append((message.id, *came_by(message), rabbitmq.KEPT in message.headers))
        if sum(each == message.id for each, *_ in seen) == 1:
            raise OSError("not yet")

    consumer = pika.once(idem, handle, queue="orders")
    broker.publish("delayed")  # so that the delay queue is there
    worker.serve(consumer, lambda: broker.host.depth(delay).ready == 1)
    broker.host.add_user("producer", write=r"^(amq\.default|shop)$")
    producer = Broker(broker.host, "producer")
    producer.publish("to-the-queue", headers=kept)
    producer.publish("to-the-delay-queue", to=delay, headers=kept)
    refused = producer.connection.channel()
    refused.basic_publish(rabbitmq.EXCHANGE, "orders", b"")
    with pytest.raises(ChannelClosedByBroker, match="ACCESS_REFUSED"):
        refused.basic_qos()
    worker.serve(consumer, times(seen, 6))
    assert sorted(seen) == [
        *[("delayed", "", "orders", False)] * 2,
        *[("to-the-delay-queue", rabbitmq.EXCHANGE, "orders", False)] * 2,
        *[("to-the-queue", "", "orders", False)] * 2,
    ]
    producer.close()


def test_a_user_with_no_more_than_the_documented_permissions_delays_messages(broker, idem, caplog):
    handled = []

    def handle(message):
        handled.append(message.id)
        if len(handled) == 1:
            raise OSError("not yet")

    pattern = r"^(semel\.later\.|orders$)"
    broker.host.add_user("worker", r"^semel\.later\.", pattern, pattern)
    broker.publish()
    own = Broker(broker.host, "worker")
    worker = Worker(own)
    assert worker.serve(pika.once(idem, handle, queue="orders"), times(handled, 2))
    assert "RabbitMQ rejected a message" not in caplog.text
    worker.close()
    own.close()


def test_a_hidden_copy_of_a_message_goes_back_to_the_queue_it_was_in(broker, worker, idem):
    handled = []
    broker.declare("copies")

    def handle(message):
        handled.append(message.id)
        if len(handled) == 1:
            raise OSError("not yet")

    broker.publish(to="copies", headers={"BCC": ["orders"]})
    broker.publish("m-2", headers={"CC": ["copies"]})
    consumer = pika.once(idem, handle, queue="orders")
    assert worker.serve(consumer, times(handled, 3))
    broker.host.wait_for_depth("orders")
    broker.host.wait_for_depth("copies", ready=2)


def test_messages_of_a_queue_that_was_deleted_hold_up_no_others(broker, worker, idem):
    handled = []
    broker.declare("gone")
    delay = rabbitmq.delay_queue("gone", 1).name

    def handle(message):
        handled.append(message.id)
        if handled.count(message.id) == 1:
            raise OSError("not yet")

    broker.publish("first", to="gone")  # which makes the delay queue
    assert worker.serve(
        pika.once(idem, handle, queue="gone"), lambda: handled.count("first") == 2, "gone"
    )
    broker.channel.queue_delete("gone")
    for number in range(40):  # more than the 32 that a quorum queue moves at a time
        broker.publish(f"g-{number}", to=delay)
    wait_until(lambda: broker.host.depth(delay).ready >= 40, "all to be late")
    broker.publish()
    assert worker.serve(pika.once(idem, handle, queue="orders"), lambda: handled.count("m-1") == 2)


def test_a_queue_that_was_deleted_and_declared_again_gets_its_delayed_messages(
    broker, worker, idem
):
    handled = []

    def handle(message):
        handled.append(message.id)
        if len(handled) < 3:  # the second delay is 2 s
            raise OSError("not yet")
        consumer.stop()

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders")
    delay = rabbitmq.delay_queue("orders", 2).name
    worker.serve(consumer, lambda: broker.host.depth(delay).ready == 1)
    broker.channel.queue_delete("orders")
    broker.declare("orders")
    worker.channel.basic_consume("orders", consumer)
    assert consumer.run(worker.channel)
    assert handled == ["m-1"] * 3


# --- headers that fill their frame --------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["", "shop"])
def test_headers_that_leave_no_room_for_ours_close_no_connection(
    broker, worker, idem, exchange, caplog
):
    handled = []
    broker.declare("dead")
    broker.bind_shop()

    def handle(message):
        handled.append(message.id)
        if message.id == "full" and handled.count("full") == 1:
            raise OSError("not yet")

    broker.publish_full(None, exchange=exchange)  # without an id it is rejected
    broker.publish_full(exchange=exchange)
    broker.publish("m-2")
    consumer = pika.once(idem, handle, queue="orders", dead_letters="dead")
    # What is kept of a message from the default exchange is nothing, so it can be delayed.
    done = ["full", "m-2", "full"] if exchange == "" else ["full", "m-2"]
    assert worker.serve(consumer, lambda: sorted(handled) == sorted(done))
    broker.host.wait_for_depth("orders")
    broker.host.wait_for_depth("dead", ready=1 if exchange == "" else 2)
    assert "it goes to the dead letters with fewer headers" in caplog.text
    assert set(broker.get("dead")[0].headers) == {"tenant"}


def test_headers_that_leave_no_room_for_ours_are_rejected_by_the_broker(broker, worker, idem):
    broker.declare("dead")
    broker.bind_shop()
    broker.host.set_policy(
        "^orders$", {"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}
    )

    def handle(message):
        raise OSError("not yet")

    broker.publish_full(exchange="shop")
    consumer = pika.once(idem, handle, queue="orders", dead_letters=True)
    assert worker.serve(consumer, lambda: broker.host.depth("dead").ready == 1)


def test_headers_that_leave_no_room_for_ours_stay_without_dead_letters(
    broker, worker, idem, caplog
):
    handled = []
    broker.bind_shop()

    def handle(message):
        handled.append(message.id)
        if message.id == "full" and handled.count("full") == 1:
            raise OSError("not yet")

    broker.publish_full(exchange="shop")
    broker.publish("m-2")
    assert worker.serve(pika.once(idem, handle, queue="orders"), times(handled, 3))
    assert handled == ["full", "m-2", "full"]
    assert "it stays with this consumer, and goes back to its queue after 1 s" in caplog.text
    broker.host.wait_for_depth("orders")


def test_a_busy_message_waits_in_a_delay_queue_and_not_in_the_worker(broker, worker, idem):
    handled = []
    broker.publish()
    consumer = pika.once(
        idem, handled.append, queue="orders", consumer="orders", policy=Policy(lease=50)
    )
    delay = "semel.later.quorum.64.orders"
    with idem.attempt("m-1", scope="orders", policy=Policy(lease=50)) as attempt:
        assert worker.serve(consumer, lambda: broker.host.depth(delay).ready == 1)
        attempt.result = None
    assert broker.host.depth("orders") == (0, 0)
    properties, _ = broker.get(delay)
    assert properties.message_id == "m-1"
    assert handled == []


def test_what_cannot_be_handled_goes_to_a_queue_with_the_reason(broker, worker, idem, caplog):
    broker.declare("dead")
    broker.publish(None, b"body", headers={"a": 1}, expiration="60000")
    consumer = pika.once(idem, print, queue="orders", dead_letters="dead")
    assert worker.serve(consumer, lambda: broker.host.depth("dead").ready == 1)
    properties, body = broker.get("dead")
    assert body == b"body"
    assert properties.headers["a"] == 1
    assert "no id" in properties.headers[rabbitmq.REASON]
    assert properties.headers[rabbitmq.ERROR] == "InvalidKey"
    assert properties.headers[rabbitmq.QUEUE] == "orders"
    assert properties.headers[rabbitmq.CONSUMER] == "orders"
    assert properties.expiration is None  # else it would vanish there
    assert "goes to the queue dead: the message has no id" in caplog.text
    broker.host.wait_for_depth("orders")


def test_what_cannot_be_handled_goes_to_the_dead_letter_exchange(broker, worker, idem):
    broker.declare("dead")
    broker.host.set_policy(
        "^orders$", {"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}
    )
    broker.publish(None)
    consumer = pika.once(idem, print, queue="orders", consumer="mailer", dead_letters=True)
    assert worker.serve(consumer, lambda: broker.host.depth("dead").ready == 1)
    assert broker.get("dead")[0].headers["x-death"][0]["reason"] == "rejected"


def test_without_dead_letters_a_message_stays_and_the_log_says_so_once(
    broker, worker, idem, caplog, monkeypatch
):
    monkeypatch.setattr(rabbitmq, "LONGEST", 1.0)
    asked = []
    broker.publish()

    def key(message):
        asked.append(message)

    consumer = pika.once(idem, print, queue="orders", consumer="mailer", key=key)
    assert worker.serve(consumer, times(asked, 2))
    assert asked[0].headers == asked[1].headers == {}
    assert caplog.text.count("there are no dead letters") == 1
    broker.host.wait_for_depth("orders", ready=1)


def test_a_message_for_a_queue_that_is_not_there_stays(broker, worker, idem, caplog):
    broker.publish(None)
    consumer = pika.once(idem, print, queue="orders", consumer="mailer", dead_letters="nowhere")
    delay = "semel.later.quorum.300.orders"
    assert worker.serve(consumer, lambda: broker.host.depth(delay).ready == 1)
    assert "there is no queue nowhere, so" in caplog.text


def test_a_delay_queue_that_was_deleted_is_declared_again(broker, worker, idem):
    handled = []
    delay = "semel.later.quorum.1.orders"

    def handle(message):
        handled.append(message.id)
        if handled.count(message.id) == 1:
            raise OSError("not yet")

    def delete(*ids):
        return lambda: set(ids) <= set(handled) and broker.host.depth(delay).ready == len(ids)

    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    broker.publish("m-1")
    worker.serve(consumer, delete("m-1"))
    for gone in (broker.channel.queue_delete, broker.channel.exchange_delete):
        gone(delay)
        broker.publish(f"m-{gone.__name__}")
        worker.serve(consumer, lambda name=gone.__name__: handled.count(f"m-{name}") == 2)
    broker.host.wait_for_depth("orders")


def test_a_message_that_no_delay_queue_takes_waits_in_the_worker(broker, worker, idem, caplog):
    handled = []
    broker.declare("semel.later.quorum.1.orders")  # with other arguments: it cannot be declared
    broker.publish()

    def handle(message):
        handled.append(message.raw.method.redelivered)
        if len(handled) == 1:
            raise OSError("not yet")

    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    began = time.monotonic()
    assert worker.serve(consumer, times(handled, 2))
    assert time.monotonic() - began > 0.9
    assert handled == [False, True]
    assert "goes back to its queue after 1 s" in caplog.text


def test_a_message_that_cannot_be_written_again_waits_in_the_worker(broker, worker, idem, caplog):
    handled = []

    def handle(message):
        handled.append(message)
        if len(handled) == 1:
            message.headers["odd"] = "\udcff"  # as a client may read bytes
            raise OSError("not yet")

    broker.publish(headers={"odd": ""})
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    assert worker.serve(consumer, times(handled, 2))
    assert "message not published again" in caplog.text
    broker.host.wait_for_depth("orders")


def test_classic_delay_queues_are_an_option(broker, worker, idem):
    handled = []

    def handle(message):
        handled.append(message)
        raise OSError("not yet")

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer", delay_queues="classic")
    assert worker.serve(
        consumer, lambda: broker.host.depth("semel.later.classic.1.orders").ready == 1
    )


def test_a_handler_may_take_longer_than_the_heartbeats(broker, idem):
    served, handled = threading.Event(), []

    def handle(message):
        handled.append(served.wait(PATIENCE))

    broker.publish()
    worker = Worker(broker, heartbeat=1)
    worker.connection.call_later(3, served.set)  # pika's own thread ends the handler
    assert worker.serve(
        pika.once(idem, handle, queue="orders", consumer="mailer"), times(handled, 1)
    )
    assert handled == [True]
    broker.host.wait_for_depth("orders")
    worker.close()


def test_as_many_messages_are_handled_at_once_as_there_are_threads(broker, worker, idem):
    both, handled = threading.Barrier(2, timeout=PATIENCE), []

    def handle(message):
        both.wait()
        handled.append(message.id)

    for number in range(4):
        broker.publish(f"m-{number}")
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer", threads=2)
    assert worker.serve(consumer, times(handled, 4))


def test_an_error_of_the_program_stops_the_consumer_and_acknowledges_nothing(broker, worker, idem):
    handled = []

    def handle(message):
        handled.append(message)
        idem.execute("m-1", dict, scope="mailer")

    broker.publish()
    broker.publish("m-2")
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    with pytest.raises(NestedCall):
        consumer.run(worker.channel)
    broker.publish("m-3")
    with pytest.raises(NestedCall):
        consumer.run(worker.channel)
    assert len(handled) == 1
    worker.close()
    broker.host.wait_for_depth("orders", ready=3)


def test_a_lost_connection_gives_one_effect(broker, idem):
    effects, go = [], threading.Event()
    began = threading.Event()

    def handle(message):
        began.set()
        go.wait(PATIENCE)
        effects.append(message.id)

    broker.publish()
    short = Policy(lease=1)
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer", threads=2, policy=short)
    first = Worker(broker)
    first.channel.basic_consume("orders", consumer)
    first.events(began.is_set)
    broker.host.server.close_connections()
    with pytest.raises(AMQPConnectionError):
        first.events(lambda: False)
    again = Broker(broker.host)
    worker = Worker(again)
    worker.channel.basic_consume("orders", consumer)
    worker.events(lambda: sum(each.ready for each in again.host.depths().values()) == 1)
    go.set()
    worker.events(lambda: sum(map(sum, again.host.depths().values())) == 0)
    assert consumer.drain(worker.channel)
    assert effects == ["m-1"]
    worker.close()
    again.close()


def test_a_closed_channel_gives_one_effect(broker, worker, idem):
    effects, began, go = [], threading.Event(), threading.Event()

    def handle(message):
        began.set()
        go.wait(PATIENCE)
        effects.append(message.id)

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    worker.events(began.is_set)
    worker.channel.close()
    go.set()
    worker.events(lambda: not consumer._works)
    worker.channel = worker.connection.channel()
    assert worker.serve(consumer, lambda: broker.host.depth("orders") == (0, 0))
    assert effects == ["m-1"]


@contextmanager
def _begin(path):
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()


def test_the_handler_and_its_record_are_one_commit(broker, worker, tmp_path):
    path = tmp_path / "shop.db"
    handled = []
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE orders (id TEXT)")
    connection.close()

    def handle(session, message):
        session.execute("INSERT INTO orders VALUES (?)", (message.id,))
        handled.append(message.id)

    broker.publish()
    broker.publish()
    with Idempotency(f"sqlite:///{path}") as idem:
        idem.marks.set("first")  # makes the table
        consumer = pika.once(
            idem, handle, queue="orders", consumer="mailer", transaction=lambda: _begin(path)
        )
        assert worker.serve(consumer, lambda: broker.host.depth("orders") == (0, 0) and handled)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT * FROM orders").fetchall() == [("m-1",)]
    connection.close()


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_a_cancellation_inside_the_handler_is_its_failure(broker, worker, idem, error):
    def handle(message):
        raise error

    broker.declare("dead")
    broker.publish()
    consumer = pika.once(
        idem, handle, queue="orders", dead_letters="dead", policy=Policy(max_attempts=2)
    )
    assert worker.serve(consumer, lambda: broker.host.depth("dead").ready == 1)
    assert "its handler failed 2 times" in broker.get("dead")[0].headers[rabbitmq.REASON]


def test_a_consumer_that_stops_does_not_wait_for_a_store_that_is_down(
    broker, worker, tmp_path, monkeypatch
):
    path = tmp_path / "shop.db"

    def fails(*_):
        consumer.stop()
        raise StoreUnavailable("down")

    def handle(session, message):
        monkeypatch.setattr(idem.internals.store, "get", fails)
        raise StoreUnavailable("lost")

    broker.publish()
    with Idempotency(f"sqlite:///{path}") as idem:
        idem.marks.set("first")  # makes the table
        consumer = pika.once(
            idem,
            handle,
            queue="orders",
            transaction=lambda: _begin(path),
            policy=Policy(max_attempts=2),
        )
        worker.channel.basic_consume("orders", consumer)
        assert consumer.run(worker.channel, grace=PATIENCE)
    broker.host.wait_for_depth("semel.later.quorum.8.orders", ready=1)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_runs_and_gives_the_rest_back(broker, worker, idem, number):
    ended = []

    def handle(message):
        os.kill(os.getpid(), number)
        broker.host.wait_for_depth("orders", ready=2, unacknowledged=1)  # the rest is back
        ended.append(message.id)

    before = signal.getsignal(number)
    for each in ("m-1", "m-2", "m-3"):
        broker.publish(each)
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    assert consumer.run(worker.channel)
    assert ended == ["m-1"]
    assert signal.getsignal(number) is before
    broker.host.wait_for_depth("orders", ready=2)
    assert broker.host.consumers("orders") == 0


def test_a_second_signal_does_what_it_did_before(broker, worker, idem):
    go = threading.Event()

    def handle(message):
        os.kill(os.getpid(), signal.SIGINT)
        broker.host.wait_for_depth("orders", ready=0, unacknowledged=1)
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        go.wait(PATIENCE)

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    with pytest.raises(KeyboardInterrupt):
        consumer.run(worker.channel)
    go.set()
    assert consumer.drain(worker.channel)


def test_what_runs_after_the_time_of_grace_is_not_acknowledged(broker, worker, idem, caplog):
    began, go = threading.Event(), threading.Event()

    def handle(message):
        began.set()
        go.wait(PATIENCE)

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    worker.events(began.is_set)
    assert consumer.drain(worker.channel, grace=0.01) is False
    assert "1 messages were still running after 0.01 s" in caplog.text
    worker.close()
    broker.host.wait_for_depth("orders", ready=1)
    go.set()


@pytest.fixture
def soon(monkeypatch):
    """Connections are made again at once."""
    monkeypatch.setattr(pika, "_RECONNECT", (0.05,))


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("lost", ["connection", "channel", "consumer"])
def test_a_consumer_connects_again_and_a_handler_goes_on_meanwhile(broker, idem, lost, caplog):
    effects, channels = [], []

    def connect():
        channels.append(broker.connect().channel())
        channels[-1].basic_consume("orders", consumer)
        return channels[-1]

    def handle(message):
        channel = channels[-1]
        if lost == "connection":
            broker.host.server.close_connections()
        elif lost == "channel":  # what RabbitMQ closes a channel for, as consumer_timeout is
            channel.connection.add_callback_threadsafe(lambda: channel.basic_ack(99))
        else:
            channel.connection.add_callback_threadsafe(channel.stop_consuming)
        while len(channels) < 2:
            time.sleep(0.01)
        effects.append(message.id)
        consumer.stop()

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer", policy=Policy(lease=1))
    assert consumer.run(connect)
    assert effects == ["m-1"]
    assert ("no connection to RabbitMQ" in caplog.text) is (lost != "consumer")
    assert consumer._works == set()
    channels[-1].connection.close()


@pytest.mark.usefixtures("soon")
def test_a_consumer_whose_queue_was_deleted_connects_again(broker, idem, caplog):
    handled, connections = [], []

    def connect():
        broker.declare("orders")
        broker.declare("others")
        connections.append(broker.connect())
        channel = connections[-1].channel()
        channel.basic_consume("others", print)  # its other consumer goes on
        channel.basic_consume("orders", consumer)
        if len(connections) == 1:
            broker.channel.queue_delete("orders")
        else:
            broker.publish()
        return channel

    def handle(message):
        handled.append(message.id)
        consumer.stop()

    consumer = pika.once(idem, handle, queue="orders")
    assert consumer.run(connect)
    assert handled == ["m-1"]
    assert "was its queue deleted?" in caplog.text
    connections[-1].close()


def test_a_channel_whose_consumer_ends_with_its_queue_raises(broker, worker, idem):
    consumer = pika.once(idem, print, queue="orders")
    worker.channel.basic_consume("orders", consumer)
    broker.channel.queue_delete("orders")
    with pytest.raises(ConnectionError, match="RabbitMQ ended the consumer"):
        consumer.run(worker.channel)


@pytest.mark.usefixtures("soon")
def test_a_signal_while_the_broker_is_away_lets_the_handler_end(broker, idem):
    effects, tried = [], []

    def connect():
        tried.append(1)
        if len(tried) != 2:
            raise AMQPConnectionError("the broker is away")
        channel = broker.connect().channel()
        channel.basic_consume("orders", consumer)
        return channel

    def handle(message):
        broker.host.server.close_connections()
        while len(tried) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        effects.append(message.id)

    broker.publish("m-1")
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    assert consumer.run(connect)
    assert effects == ["m-1"]


def test_messages_of_lost_connections_do_not_hold_up_the_end(broker, worker, idem):
    began, go = threading.Event(), threading.Event()

    def handle(message):
        began.set()
        go.wait(PATIENCE)

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    worker.events(began.is_set)
    (work,) = consumer._works
    go.set()
    while not work.handled:
        time.sleep(0.01)
    worker.close()  # before pika's thread could carry out what became of it
    again = Worker(broker)
    assert consumer.drain(again.channel, grace=PATIENCE)
    again.close()


def test_another_thread_stops_a_consumer(broker, idem):
    ended, ready, problems = [], threading.Event(), []
    consumer = pika.once(idem, print, queue="orders", consumer="mailer")

    def work():
        worker = Worker(broker)
        worker.channel.basic_consume("orders", consumer)
        try:
            consumer.run(worker.channel)
        except ConfigError as error:
            problems.append(str(error))
        ready.set()
        ended.append(consumer.run(worker.channel, signals=()))
        worker.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(PATIENCE)
    broker.publish()
    broker.host.wait_for_depth("orders")
    consumer.stop()
    thread.join(PATIENCE)
    assert ended == [True]
    assert "main thread" in problems[0]


def test_a_second_run_at_the_same_time_is_rejected_and_harms_none(broker, worker, idem):
    handled, problems = [], []
    consumer = pika.once(idem, lambda message: handled.append(message.id), queue="orders")

    def run_again():
        try:
            consumer.run(worker.channel, signals=())
        except ConfigError as error:
            problems.append(str(error))
        broker.publish()

    def look():
        if handled:
            consumer.stop()
        else:
            worker.connection.call_later(0.02, look)

    worker.channel.basic_consume("orders", consumer)
    worker.connection.call_later(0, run_again)
    worker.connection.call_later(0, look)
    assert consumer.run(worker.channel)
    assert handled == ["m-1"]
    assert "while this consumer is running: make another one" in problems[0]


def test_what_ended_with_its_connection_is_not_waited_for(broker, worker, idem):
    began, go = threading.Event(), threading.Event()

    def handle(message):
        began.set()
        go.wait(PATIENCE)

    broker.publish()
    consumer = pika.once(idem, handle, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    worker.events(began.is_set)
    go.set()
    (work,) = consumer._works
    while not work.handled:
        time.sleep(0.01)
    worker.close()
    again = Worker(broker)
    assert consumer.drain(again.channel)
    again.close()


def test_a_consumer_that_was_stopped_does_not_begin_again(broker, worker, idem):
    broker.publish()
    consumer = pika.once(idem, print, queue="orders", consumer="mailer")
    consumer.stop()  # as a signal may do while the connection is lost
    worker.channel.basic_consume("orders", consumer)
    assert consumer.run(worker.channel)
    assert broker.host.consumers("orders") == 0


# --- what is broken -----------------------------------------------------------------------------


def test_headers_that_cannot_be_written_again_are_left_out_of_the_dead_letters(
    broker, worker, idem
):
    broker.declare("dead")

    def key(message):
        message.headers["odd"] = "\udcff"  # as a client may read bytes

    broker.publish(body=b"body", headers={"a": 1})
    consumer = pika.once(idem, print, queue="orders", key=key, dead_letters="dead")
    assert worker.serve(consumer, lambda: broker.host.depth("dead").ready == 1)
    properties, body = broker.get("dead")
    assert (properties.message_id, properties.headers, body) == (
        "m-1",
        {"semel-queue": "orders"},
        b"body",
    )


@pytest.mark.parametrize("body", [b'{"number": "\xff"}', b"[" * 100_000, b'{"number": []}', b""])
def test_a_message_that_cannot_be_read_is_rejected_and_the_next_is_handled(
    broker, worker, idem, body
):
    handled = []
    broker.declare("dead")
    broker.publish(body=body)
    broker.publish(body=b'{"number": 8}')
    consumer = pika.once(
        idem, handled.append, queue="orders", key="order:{body.number}", dead_letters="dead"
    )
    assert worker.serve(consumer, times(handled, 1))
    assert broker.get("dead")[1] == body


# --- what is refused ----------------------------------------------------------------------------


def test_messages_must_not_be_acknowledged_by_pika(broker, worker, idem):
    broker.publish()
    consumer = pika.once(idem, print, queue="orders", consumer="mailer")
    worker.channel.basic_consume("orders", consumer, auto_ack=True)
    with pytest.raises(ChannelClosedByBroker, match="unknown delivery tag"):
        consumer.run(worker.channel, signals=())


def test_other_channels_are_refused(idem):
    consumer = pika.once(idem, print, queue="orders", consumer="mailer")
    with pytest.raises(ConfigError, match=r"needs a channel of a BlockingConnection.*Got object"):
        consumer(object(), None, None, b"")


def test_a_handler_has_to_be_a_plain_function(idem):
    async def handle(message): ...

    with pytest.raises(ConfigError, match=r"or use semel\.adapters\.aio_pika"):
        pika.once(idem, handle, queue="orders", consumer="mailer")
    with pytest.raises(ConfigError, match="a function that takes the message is needed, not str"):
        pika.once(idem, "handle", queue="orders", consumer="mailer")
    with pytest.raises(ConfigError, match=r"such as Idempotency.* not str"):
        pika.once("memory://", print, queue="orders", consumer="mailer")


@pytest.mark.parametrize("threads", [0, 1.5, None])
def test_a_number_of_threads_is_checked(idem, threads):
    with pytest.raises(ConfigError, match="threads must be"):
        pika.once(idem, print, queue="orders", consumer="mailer", threads=threads)


def test_properties_have_the_id_of_the_operation_or_a_given_one(idem):
    given = pika.properties(message_id="order-42", headers={"a": 1}, app_id="shop")
    assert given.message_id == "order-42"
    assert given.headers == {"a": 1, "idempotency-key": "order-42"}
    assert given.app_id == "shop"
    with idem.attempt("order:42") as attempt:
        made = pika.properties("receipt")
        assert made.message_id == attempt.derive("receipt")
        attempt.result = None
