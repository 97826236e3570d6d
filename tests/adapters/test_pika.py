"""pika: every message is handled once, and none is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from contextlib import contextmanager

import pytest
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

from adapters.rabbit import PATIENCE, Broker, circle, full
from semel import ConfigError, Idempotency, NestedCall, Policy
from semel.adapters import pika, rabbitmq


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
    consumer = pika.once(idem, handled.append, consumer="mailer")
    assert worker.serve(consumer, times(handled, 2))
    assert [(each.id, each.body) for each in handled] == [("m-1", b"1"), ("m-2", b"2")]
    assert handled[0].raw.properties.message_id == "m-1"
    broker.host.wait_for_depth("orders")
    with pytest.raises(ConfigError, match="say who handles the messages"):
        pika.once(idem, handled.append)


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
    assert {"semel.later.quorum.1", "semel.later.quorum.2"} <= broker.host.depths().keys()


def test_a_busy_message_waits_in_a_delay_queue_and_not_in_the_worker(broker, worker, idem):
    handled = []
    broker.publish()
    consumer = pika.once(idem, handled.append, consumer="orders", policy=Policy(lease=50))
    delay = "semel.later.quorum.64"
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
    consumer = pika.once(idem, print, consumer="mailer", dead_letters=True)
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

    consumer = pika.once(idem, print, consumer="mailer", key=key)
    assert worker.serve(consumer, times(asked, 2))
    assert asked[0].headers == asked[1].headers == {}
    assert caplog.text.count("there are no dead letters") == 1
    broker.host.wait_for_depth("orders", ready=1)


def test_a_message_for_a_queue_that_is_not_there_stays(broker, worker, idem, caplog):
    broker.publish(None)
    consumer = pika.once(idem, print, consumer="mailer", dead_letters="nowhere")
    delay = "semel.later.quorum.300"
    assert worker.serve(consumer, lambda: broker.host.depth(delay).ready == 1)
    assert "there is no queue nowhere: declare it" in caplog.text


def test_a_delay_queue_that_was_deleted_is_declared_again(broker, worker, idem):
    handled = []
    delay = "semel.later.quorum.1"

    def handle(message):
        handled.append(message.id)
        if handled.count(message.id) == 1:
            raise OSError("not yet")

    def delete(*ids):
        return lambda: set(ids) <= set(handled) and broker.host.depth(delay).ready == len(ids)

    consumer = pika.once(idem, handle, consumer="mailer")
    broker.publish("m-1")
    worker.serve(consumer, delete("m-1"))
    for gone in (broker.channel.queue_delete, broker.channel.exchange_delete):
        gone(delay)
        broker.publish(f"m-{gone.__name__}")
        worker.serve(consumer, lambda name=gone.__name__: handled.count(f"m-{name}") == 2)
    broker.host.wait_for_depth("orders")


def test_a_message_that_no_delay_queue_takes_waits_in_the_worker(broker, worker, idem, caplog):
    handled = []
    broker.declare("semel.later.quorum.1")  # with other arguments: it cannot be declared
    broker.publish()

    def handle(message):
        handled.append(message.raw.method.redelivered)
        if len(handled) == 1:
            raise OSError("not yet")

    consumer = pika.once(idem, handle, consumer="mailer")
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
            message.raw.properties.headers["odd"] = "\udcff"  # as a client may read bytes
            raise OSError("not yet")

    broker.publish(headers={"odd": ""})
    consumer = pika.once(idem, handle, consumer="mailer")
    assert worker.serve(consumer, times(handled, 2))
    assert "RabbitMQ did not take a message" in caplog.text
    broker.host.wait_for_depth("orders")


def test_classic_delay_queues_are_an_option(broker, worker, idem):
    handled = []

    def handle(message):
        handled.append(message)
        raise OSError("not yet")

    broker.publish()
    consumer = pika.once(idem, handle, consumer="mailer", delay_queues="classic")
    assert worker.serve(consumer, lambda: broker.host.depth("semel.later.classic.1").ready == 1)


def test_a_handler_may_take_longer_than_the_heartbeats(broker, idem):
    served, handled = threading.Event(), []

    def handle(message):
        handled.append(served.wait(PATIENCE))

    broker.publish()
    worker = Worker(broker, heartbeat=1)
    worker.connection.call_later(3, served.set)  # pika's own thread ends the handler
    assert worker.serve(pika.once(idem, handle, consumer="mailer"), times(handled, 1))
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
    consumer = pika.once(idem, handle, consumer="mailer", threads=2)
    assert worker.serve(consumer, times(handled, 4))


def test_an_error_of_the_program_stops_the_consumer_and_acknowledges_nothing(broker, worker, idem):
    handled = []

    def handle(message):
        handled.append(message)
        idem.execute("m-1", dict, scope="mailer")

    broker.publish()
    broker.publish("m-2")
    consumer = pika.once(idem, handle, consumer="mailer")
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
    consumer = pika.once(idem, handle, consumer="mailer", threads=2, policy=short)
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
    consumer = pika.once(idem, handle, consumer="mailer")
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
        consumer = pika.once(idem, handle, consumer="mailer", transaction=lambda: _begin(path))
        assert worker.serve(consumer, lambda: broker.host.depth("orders") == (0, 0) and handled)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT * FROM orders").fetchall() == [("m-1",)]
    connection.close()


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
    consumer = pika.once(idem, handle, consumer="mailer")
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
    consumer = pika.once(idem, handle, consumer="mailer")
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
    consumer = pika.once(idem, handle, consumer="mailer")
    worker.channel.basic_consume("orders", consumer)
    worker.events(began.is_set)
    assert consumer.drain(worker.channel, grace=0.01) is False
    assert "1 messages are still handled after 0.01 s" in caplog.text
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
    consumer = pika.once(idem, handle, consumer="mailer", policy=Policy(lease=1))
    assert consumer.run(connect)
    assert effects == ["m-1"]
    assert ("connection to RabbitMQ is lost" in caplog.text) is (lost != "consumer")
    assert consumer._works == set()
    channels[-1].connection.close()


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
    consumer = pika.once(idem, handle, consumer="mailer")
    assert consumer.run(connect)
    assert effects == ["m-1"]


def test_messages_of_lost_connections_do_not_hold_up_the_end(broker, worker, idem):
    began, go = threading.Event(), threading.Event()

    def handle(message):
        began.set()
        go.wait(PATIENCE)

    broker.publish()
    consumer = pika.once(idem, handle, consumer="mailer")
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
    consumer = pika.once(idem, print, consumer="mailer")

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


def test_what_ended_with_its_connection_is_not_waited_for(broker, worker, idem):
    began, go = threading.Event(), threading.Event()

    def handle(message):
        began.set()
        go.wait(PATIENCE)

    broker.publish()
    consumer = pika.once(idem, handle, consumer="mailer")
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
    consumer = pika.once(idem, print, consumer="mailer")
    consumer.stop()  # as a signal may do while the connection is lost
    worker.channel.basic_consume("orders", consumer)
    assert consumer.run(worker.channel)
    assert broker.host.consumers("orders") == 0


# --- what is refused ----------------------------------------------------------------------------


def test_a_message_of_an_exchange_needs_the_name_of_its_queue(broker, worker, idem):
    handled = []
    broker.channel.exchange_declare("shop", "topic")
    broker.channel.queue_bind("orders", "shop", "#")
    broker.publish(exchange="shop", to="order.made")
    with pytest.raises(ConfigError, match=r"through the exchange 'shop'.*say once\(..., queue="):
        worker.serve(pika.once(idem, handled.append, consumer="mailer"), lambda: False)
    worker.close()
    again = Worker(broker)
    assert again.serve(pika.once(idem, handled.append, queue="orders"), times(handled, 1))
    again.close()


def test_messages_must_not_be_acknowledged_by_pika(broker, worker, idem):
    broker.publish()
    consumer = pika.once(idem, print, consumer="mailer")
    worker.channel.basic_consume("orders", consumer, auto_ack=True)
    with pytest.raises(ChannelClosedByBroker, match="unknown delivery tag"):
        consumer.run(worker.channel, signals=())


def test_other_channels_are_refused(idem):
    consumer = pika.once(idem, print, consumer="mailer")
    with pytest.raises(ConfigError, match=r"needs a channel of a BlockingConnection.*Got object"):
        consumer(object(), None, None, b"")


def test_a_handler_has_to_be_a_plain_function(idem):
    async def handle(message): ...

    with pytest.raises(ConfigError, match=r"or use semel\.adapters\.aio_pika"):
        pika.once(idem, handle, consumer="mailer")
    with pytest.raises(ConfigError, match="a function that takes the message is needed, not str"):
        pika.once(idem, "handle", consumer="mailer")
    with pytest.raises(ConfigError, match=r"such as Idempotency.* not str"):
        pika.once("memory://", print, consumer="mailer")


@pytest.mark.parametrize("threads", [0, 1.5, None])
def test_a_number_of_threads_is_checked(idem, threads):
    with pytest.raises(ConfigError, match="threads must be"):
        pika.once(idem, print, consumer="mailer", threads=threads)


def test_properties_have_the_id_of_the_operation_or_a_given_one(idem):
    given = pika.properties(message_id="order-42", headers={"a": 1}, app_id="shop")
    assert given.message_id == "order-42"
    assert given.headers == {"a": 1, "idempotency-key": "order-42"}
    assert given.app_id == "shop"
    with idem.attempt("order:42") as attempt:
        made = pika.properties("receipt")
        assert made.message_id == attempt.derive("receipt")
        attempt.result = None
