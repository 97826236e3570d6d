"""aio-pika: every message is handled once, and none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import aio_pika as client
import aiosqlite
import pytest

from adapters.rabbit import PATIENCE, Broker, circle, full
from semel import AsyncIdempotency, ConfigError, NestedCall, Policy, StoreUnavailable
from semel.adapters import aio_pika, rabbitmq
from servers.proxy import proxy_to
from versions import has

if not has("aio-pika", "10"):  # which leaves the socket of a lost connection to the collector
    pytestmark = [
        pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
        pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    ]


@pytest.fixture
def broker(virtual_host):
    broker = Broker(virtual_host)
    yield broker
    broker.close()


@pytest.fixture
async def idem():
    async with AsyncIdempotency("memory://") as idem:
        yield idem


@pytest.fixture(params=["robust", "plain"])
async def connection(request, broker):
    async with await connected(broker, request.param) as connection:
        yield connection


@pytest.fixture
async def queue(broker):
    async with await connected(broker) as connection:
        yield await queue_of(connection)


async def connected(broker, kind="robust"):
    if kind == "plain":
        return await client.connect(broker.host.url)
    return await client.connect_robust(broker.host.url, reconnect_interval=0.1)


async def queue_of(connection, prefetch=10):
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=prefetch)
    return await channel.get_queue("orders")


async def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def serve(queue, consumer, condition):
    """Consume until a condition holds, and drain."""
    tag = await queue.consume(consumer)
    await until(condition)
    await queue.cancel(tag)
    return await consumer.drain(grace=PATIENCE)


def ready(broker, name, number=1):
    return lambda: broker.host.depth(name).ready == number


class Handler:
    """Notes what it is called with; fails as often as it is told to."""

    def __init__(self, failures=0, wait=None):
        self.seen = []
        self.began = asyncio.Event()
        self._failures = failures
        self._wait = wait

    async def __call__(self, message):
        self.seen.append(message)
        self.began.set()
        if self._wait is not None:
            await self._wait.wait()
        if len(self.seen) <= self._failures:
            raise OSError("not yet")

    def times(self, number):
        return lambda: len(self.seen) >= number


async def test_a_duplicate_is_acknowledged_and_not_handled(broker, connection, idem):
    handle = Handler()
    broker.publish(body=b"1")
    broker.publish(body=b"1")
    broker.publish("m-2", b"2")
    consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
    assert await serve(await queue_of(connection), consumer, handle.times(2))
    assert sorted((each.id, each.body) for each in handle.seen) == [("m-1", b"1"), ("m-2", b"2")]
    assert isinstance(handle.seen[0].raw, client.IncomingMessage)
    await until(lambda: broker.host.depth("orders") == (0, 0))
    with pytest.raises(ConfigError, match="consumer= or queue= is needed"):
        aio_pika.once(idem, handle)


async def test_a_message_is_delivered_later_with_all_that_it_had(broker, queue, idem):
    broker.declare("copies")
    headers = {"tenant": "t", "CC": ["copies"], "x-death": circle(), "x-first-death-queue": "first"}
    handle = Handler(failures=2)
    broker.publish(**full(headers=headers, user_id="guest"))
    consumer = aio_pika.once(idem, handle, queue="orders")
    assert await serve(queue, consumer, handle.times(3))
    first, again, last = handle.seen
    assert first.headers == again.headers == last.headers == headers
    told = [each.raw.info() for each in handle.seen]
    for each in told:
        for changes in ("delivery_tag", "routing_key", "exchange", "redelivered", "user_id"):
            del each[changes]
    assert told[0] == told[1] == told[2]
    assert told[0]["expiration"] == 60.0
    await until(ready(broker, "copies"))
    await until(lambda: broker.host.depth("orders") == (0, 0))


async def test_a_message_that_cannot_be_written_again_waits_in_the_worker(
    broker, queue, idem, caplog
):
    handled = []

    async def handle(message):
        handled.append(message)
        if len(handled) == 1:
            message.headers["odd"] = "\udcff"  # as a client may read bytes
            raise OSError("not yet")

    broker.publish(headers={"odd": ""})
    consumer = aio_pika.once(idem, handle, queue="orders")
    assert await serve(queue, consumer, lambda: len(handled) == 2)
    assert "message not published again" in caplog.text
    await until(lambda: broker.host.depth("orders") == (0, 0))


def came_by(message):
    return message.raw.exchange, message.raw.routing_key


async def test_a_delayed_message_has_the_exchange_and_routing_key_it_came_with(broker, queue, idem):
    broker.bind_shop()
    handle = Handler(failures=2)
    broker.publish(exchange="shop", to="order.made")
    consumer = aio_pika.once(idem, handle, queue="orders", key=lambda m: f"{came_by(m)[1]}:{m.id}")
    await serve(queue, consumer, handle.times(3))
    broker.publish(exchange="shop", to="order.made")  # a duplicate
    assert await serve(queue, consumer, lambda: broker.host.depth("orders") == (0, 0))
    assert [came_by(each) for each in handle.seen] == [("shop", "order.made")] * 3


async def test_headers_that_leave_no_room_for_ours_close_no_connection(broker, queue, idem, caplog):
    broker.declare("dead")
    broker.bind_shop()
    handle = Handler(failures=1)
    broker.publish_full(exchange="shop", room=1)  # aio-pika adds a priority
    consumer = aio_pika.once(idem, handle, queue="orders", dead_letters="dead")
    await serve(queue, consumer, ready(broker, "dead"))
    broker.publish_full("at-the-default-exchange", room=1)  # nothing is kept of it
    broker.publish_full(None, room=20)  # without an id it is rejected
    handle.seen.clear()
    await serve(queue, consumer, handle.times(2))
    await until(ready(broker, "dead", 2))
    await until(lambda: broker.host.depth("orders") == (0, 0))
    assert caplog.text.count("it goes to the dead letters with fewer headers") == 2


@pytest.mark.parametrize("body", [b'{"number": "\xff"}', b"[" * 100_000])
async def test_a_message_that_cannot_be_read_is_rejected_and_the_next_is_handled(
    broker, queue, idem, body
):
    handle = Handler()
    broker.declare("dead")
    broker.publish(body=body)
    broker.publish(body=b'{"number": 8}')
    consumer = aio_pika.once(
        idem, handle, queue="orders", key="order:{body.number}", dead_letters="dead"
    )
    assert await serve(queue, consumer, handle.times(1))
    assert broker.get("dead")[1] == body


async def test_headers_that_are_no_text_come_back_as_they_were(broker, queue, idem):
    handle = Handler(failures=1)
    headers = {"odd": b"\xff", "more": {"odd": [b"\xff", 1]}}
    broker.publish_raw(headers)
    assert await serve(queue, aio_pika.once(idem, handle, queue="orders"), handle.times(2))
    assert handle.seen[0].headers == handle.seen[1].headers == headers
    assert not handle.seen[1].raw.redelivered  # it was delayed, and did not wait in the worker


async def test_no_message_gets_an_id_that_nobody_gave_it(broker, queue, idem):
    handle = Handler(failures=1)
    broker.publish(None, b"body")
    consumer = aio_pika.once(idem, handle, queue="orders", missing="digest")
    assert await serve(queue, consumer, handle.times(2))
    assert [each.id for each in handle.seen] == [None, None]
    assert handle.seen[1].raw.message_id is None


async def test_messages_of_the_same_id_are_delayed_at_the_same_time(broker, queue, idem):
    handle = Handler()
    for _ in range(5):
        broker.publish()
    consumer = aio_pika.once(
        idem, handle, queue="orders", consumer="orders", policy=Policy(lease=50)
    )
    delay = "semel.later.quorum.64.orders"
    async with idem.attempt("m-1", scope="orders", policy=Policy(lease=50)) as attempt:
        assert await serve(queue, consumer, ready(broker, delay, 5))
        attempt.result = None
    assert broker.host.depth("orders") == (0, 0)
    assert handle.seen == []


async def test_what_cannot_be_handled_goes_to_a_queue_with_the_reason(broker, queue, idem):
    broker.declare("dead")
    broker.publish(None, b"body", headers={"a": 1}, expiration="60000")
    consumer = aio_pika.once(idem, Handler(), queue="orders", dead_letters="dead")
    assert await serve(queue, consumer, ready(broker, "dead"))
    properties, body = broker.get("dead")
    assert body == b"body"
    assert properties.headers["a"] == 1
    assert "no id" in properties.headers[rabbitmq.REASON]
    assert properties.message_id == rabbitmq.NO_ID
    await until(lambda: broker.host.depth("orders") == (0, 0))


async def test_what_cannot_be_handled_goes_to_the_dead_letter_exchange(broker, queue, idem):
    broker.declare("dead")
    broker.host.set_policy(
        "^orders$", {"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}
    )
    broker.publish(None)
    consumer = aio_pika.once(idem, Handler(), queue="orders", consumer="mailer", dead_letters=True)
    assert await serve(queue, consumer, ready(broker, "dead"))


async def test_a_message_for_a_queue_that_is_not_there_stays(broker, queue, idem, caplog):
    broker.publish(None)
    broker.publish(None)
    consumer = aio_pika.once(
        idem, Handler(), queue="orders", consumer="mailer", dead_letters="nowhere"
    )
    assert await serve(queue, consumer, ready(broker, "semel.later.quorum.300.orders", 2))
    assert "there is no queue nowhere, so" in caplog.text


@pytest.mark.parametrize("gone", ["queue_delete", "exchange_delete"])
async def test_a_delay_queue_that_was_deleted_is_declared_again(broker, queue, idem, gone):
    handle = Handler(failures=2)
    delay = "semel.later.quorum.1.orders"
    consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
    broker.publish("m-1")
    assert await serve(queue, consumer, ready(broker, delay))
    getattr(broker.channel, gone)(delay)
    broker.publish("m-2")
    assert await serve(queue, consumer, lambda: [m.id for m in handle.seen].count("m-2") == 2)
    await until(lambda: broker.host.depth("orders") == (0, 0))


async def test_a_message_that_no_delay_queue_takes_waits_in_the_worker(broker, queue, idem, caplog):
    broker.declare("semel.later.quorum.1.orders")  # with other arguments: it cannot be declared
    broker.publish()
    handle = Handler(failures=1)
    consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
    began = time.monotonic()
    assert await serve(queue, consumer, handle.times(2))
    assert time.monotonic() - began > 0.9
    assert [each.raw.redelivered for each in handle.seen] == [False, True]
    assert "goes back to its queue after 1 s" in caplog.text


async def test_a_lost_connection_gives_one_effect(broker, connection, idem):
    go = asyncio.Event()
    handle = Handler(wait=go)
    broker.publish()
    consumer = aio_pika.once(
        idem, handle, queue="orders", consumer="mailer", policy=Policy(lease=1)
    )
    await (await queue_of(connection)).consume(consumer)
    await handle.began.wait()
    broker.host.server.close_connections()
    await until(lambda: broker.host.depth("orders") == (1, 0) or broker.host.consumers("orders"))
    go.set()
    if not isinstance(connection, client.RobustConnection):
        again = await connected(broker, "plain")
        await (await queue_of(again)).consume(consumer)
    await until(lambda: sum(map(sum, broker.host.depths().values())) == 0)
    assert await consumer.drain()
    assert len(handle.seen) == 1
    if not isinstance(connection, client.RobustConnection):
        await again.close()


async def test_a_connection_that_ends_before_a_delay_leaves_the_message(broker, idem, caplog):
    go = asyncio.Event()
    handle = Handler(failures=1, wait=go)
    broker.publish()
    connection = await connected(broker, "plain")
    consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
    await (await queue_of(connection)).consume(consumer)
    await handle.began.wait()
    await connection.close()
    go.set()
    caplog.set_level("INFO")
    assert await consumer.drain()
    assert "lost; RabbitMQ will redeliver" in caplog.text
    await until(ready(broker, "orders"))


async def test_a_delay_whose_confirmation_is_lost_gives_one_effect(broker, idem):
    handle = Handler(failures=1)
    with proxy_to(broker.host.server.port) as proxy:
        url = broker.host.url_at(proxy.port)
        async with await client.connect_robust(url, reconnect_interval=0.1) as connection:
            consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
            await (await queue_of(connection)).consume(consumer)
            proxy.lose_reply(lambda sent: b"semel.later" in sent and b"the body" in sent)
            broker.publish(body=b"the body")
            await until(handle.times(2))
            await until(lambda: sum(map(sum, broker.host.depths().values())) == 0)
        assert await consumer.drain()
        assert proxy.lost == 1
    assert len(handle.seen) == 2


async def test_an_error_of_the_program_stops_the_consumer_and_acknowledges_nothing(
    broker, queue, idem, caplog
):
    async def handle(message):
        await idem.execute("m-1", asyncio.Event().wait, scope="mailer")

    broker.publish()
    consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
    with pytest.raises(NestedCall):
        await consumer.run(queue, signals=())
    assert broker.host.consumers("orders") == 0
    assert "consumer stopped by an error" in caplog.text
    with pytest.raises(NestedCall):
        await consumer.drain()
    with pytest.raises(NestedCall):
        await consumer.run(queue)
    await queue.consume(consumer)
    broker.publish("m-2")
    await until(lambda: broker.host.depth("orders") == (0, 2))
    await queue.channel.close()
    await until(ready(broker, "orders", 2))


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_what_runs_and_takes_no_more(broker, queue, idem, number):
    ended = []

    async def handle(message):
        os.kill(os.getpid(), number)
        await until(lambda: broker.host.consumers("orders") == 0)
        broker.publish("m-2")
        ended.append(message.id)

    broker.publish()
    assert await aio_pika.once(idem, handle, queue="orders").run(queue)
    assert ended == ["m-1"]
    await until(lambda: broker.host.depth("orders") == (1, 0))


async def test_what_runs_after_the_time_of_grace_is_cancelled_and_given_back(
    broker, queue, idem, caplog
):
    handle = Handler(wait=asyncio.Event())
    broker.publish()
    consumer = aio_pika.once(
        idem, handle, queue="orders", consumer="mailer", policy=Policy(lease=50)
    )
    running = asyncio.create_task(consumer.run(queue, signals=(), grace=0.01))
    await handle.began.wait()
    consumer.stop()
    assert await running is False
    assert "1 messages were still running after 0.01 s" in caplog.text
    await until(ready(broker, "orders"))
    again = Handler()
    consumer = aio_pika.once(
        idem, again, queue="orders", consumer="mailer", policy=Policy(lease=50)
    )
    assert await serve(queue, consumer, again.times(1))  # its record was released


async def test_a_consumer_ends_while_the_broker_is_away(broker, idem, monkeypatch, caplog):
    monkeypatch.setattr(aio_pika, "_CANCELLING", 0.1)
    caplog.set_level("INFO")
    go = asyncio.Event()
    handle = Handler(wait=go)
    with proxy_to(broker.host.server.port) as proxy:
        url = broker.host.url_at(proxy.port)
        async with await client.connect_robust(url, reconnect_interval=0.1) as connection:
            consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
            queue = await queue_of(connection)
            running = asyncio.create_task(consumer.run(queue, signals=()))
            broker.publish()
            await handle.began.wait()
            proxy.refusing = True
            proxy.cut_all()
            await until(lambda: proxy.refused)
            consumer.stop()
            go.set()
            assert await running
            assert "lost; RabbitMQ will redeliver" in caplog.text
    assert len(handle.seen) == 1
    await until(ready(broker, "orders"))


async def test_messages_that_come_while_the_consumer_is_canceled_go_back_once(
    broker, connection, idem, monkeypatch
):
    steps = []

    async def cancel(queue, tag, cancel=aio_pika._cancel):
        for number in range(3):
            broker.publish(f"m-{number}")
        await until(lambda: broker.host.depth("orders") == (0, 3))  # they are delivered
        await cancel(queue, tag)
        steps.append("canceled")

    async def give_back(message, give_back=aio_pika._give_back):
        steps.append("given back")
        await give_back(message)

    monkeypatch.setattr(aio_pika, "_cancel", cancel)
    monkeypatch.setattr(aio_pika, "_give_back", give_back)
    handle = Handler()
    consumer = aio_pika.once(idem, handle, consumer="mailer")
    consumer.stop()
    assert await consumer.run(await queue_of(connection), signals=())
    await until(ready(broker, "orders", 3))  # and the connection lives
    assert handle.seen == []
    assert steps == ["canceled", *["given back"] * 3]


async def test_a_second_run_at_the_same_time_is_rejected_and_harms_none(broker, idem):
    handle = Handler()
    consumer = aio_pika.once(idem, handle, consumer="mailer")
    async with await connected(broker, "plain") as first, await connected(broker) as other:
        running = asyncio.create_task(consumer.run(await queue_of(first), signals=()))
        await until(lambda: broker.host.consumers("orders"))
        with pytest.raises(ConfigError, match="while this consumer is running: make another"):
            await consumer.run(await queue_of(other), signals=())
        broker.publish()
        await until(handle.times(1))
        await first.close()
        with pytest.raises(ConnectionError):
            await running
        again = asyncio.create_task(consumer.run(await queue_of(other), signals=()))
        broker.publish("m-2")
        await until(handle.times(2))
        consumer.stop()
        assert await again


async def test_a_channel_that_is_closed_ends_the_consumer(broker, idem):
    connection = await connected(broker, "plain")
    queue = await queue_of(connection)
    handle = Handler()
    broker.channel.exchange_declare("shop", "topic")
    broker.channel.queue_bind("orders", "shop", "#")
    consumer = aio_pika.once(idem, handle, queue="orders", consumer="mailer")
    running = asyncio.create_task(consumer.run(queue, signals=()))
    broker.publish(exchange="shop", to="order.made")  # the name of the queue is known to `run`
    await handle.began.wait()
    await connection.close()
    with pytest.raises(ConnectionError, match="the channel of the queue orders was closed"):
        await running


async def test_a_request_that_a_close_ends_is_no_mistake_of_the_program(broker, idem, monkeypatch):
    connection = await connected(broker, "plain")
    queue = await queue_of(connection)

    async def bind_again(*_):
        await connection.close()
        raise Exception  # noqa: TRY002 - as aiormq does, to requests that are under way

    monkeypatch.setattr("semel.adapters.aio_pika._Publisher.bind_again", bind_again)
    consumer = aio_pika.once(idem, Handler(), queue="orders", consumer="mailer")
    with pytest.raises(ConnectionError, match="the channel of the queue orders was closed"):
        await consumer.run(queue, signals=())


async def test_a_consumer_that_was_stopped_does_not_begin_again(broker, queue, idem):
    consumer = aio_pika.once(idem, Handler(), queue="orders", consumer="mailer")
    consumer.stop()
    assert await consumer.run(queue)
    assert broker.host.consumers("orders") == 0


async def test_a_cancelled_run_takes_no_more_and_leaves_its_messages_to_drain(broker, queue, idem):
    go = asyncio.Event()
    handle = Handler(wait=go)
    broker.publish()
    consumer = aio_pika.once(idem, handle, consumer="mailer")
    running = asyncio.create_task(consumer.run(queue))
    await handle.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert broker.host.consumers("orders") == 0
    broker.publish("m-2")
    go.set()
    assert await consumer.drain()
    await until(lambda: broker.host.depth("orders") == (1, 0))
    assert [each.id for each in handle.seen] == ["m-1"]


class Panic(BaseException):
    """As an extension in Rust raises it."""


@pytest.mark.parametrize("error", [Panic, KeyboardInterrupt, SystemExit])
async def test_what_is_no_exception_stops_the_consumer_and_acknowledges_nothing(
    broker, queue, idem, error
):
    async def handle(message):
        raise error("no")

    broker.publish()
    consumer = aio_pika.once(idem, handle, consumer="mailer")
    with pytest.raises(error):
        await consumer.run(queue, signals=())
    assert broker.host.consumers("orders") == 0
    await queue.channel.close()
    await until(ready(broker, "orders"))


async def cancelled_inside(message):
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


async def canceling_itself(message):
    asyncio.current_task().cancel()
    await asyncio.Event().wait()


async def canceling_itself_last(message):
    asyncio.current_task().cancel()


async def canceled_by_its_own_helper(message):
    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
    await asyncio.Event().wait()


async def ending_as_a_generator(message):
    raise GeneratorExit


INSIDE = [
    cancelled_inside,
    canceling_itself,
    canceling_itself_last,
    canceled_by_its_own_helper,
    ending_as_a_generator,
]


@pytest.mark.parametrize("handle", INSIDE)
async def test_a_cancellation_from_inside_the_handler_is_its_failure(
    broker, queue, idem, caplog, handle
):
    broker.declare("dead")
    broker.publish()
    consumer = aio_pika.once(
        idem, handle, queue="orders", dead_letters="dead", policy=Policy(max_attempts=2)
    )
    assert await serve(queue, consumer, ready(broker, "dead"))
    assert "its handler failed 2 times" in broker.get("dead")[0].headers[rabbitmq.REASON]
    assert "it will be redelivered in 1 s" in caplog.text


@pytest.mark.parametrize("handle", INSIDE)
async def test_a_cancellation_from_inside_the_handler_is_held(broker, queue, idem, handle):
    broker.declare("dead")
    broker.publish()
    consumer = aio_pika.once(
        idem, handle, queue="orders", dead_letters="dead", policy=Policy(abandoned="hold")
    )
    assert await serve(queue, consumer, ready(broker, "dead"))
    assert "unknown outcome" in broker.get("dead")[0].headers[rabbitmq.REASON]
    record = await idem.peek("m-1", scope="orders")
    assert record.abandoned
    assert record.hold


@pytest.mark.parametrize("everything", [False, True], ids=["its task", "all tasks"])
async def test_a_cancellation_from_outside_gives_the_message_back(broker, queue, idem, everything):
    handle = Handler(wait=asyncio.Event())
    broker.publish()
    before = asyncio.all_tasks()
    consumer = aio_pika.once(idem, handle, queue="orders", policy=Policy(lease=50))
    tag = await queue.consume(consumer)
    await handle.began.wait()
    await queue.cancel(tag)
    ours = set(consumer._running._tasks)
    # As `asyncio.run` does at its end, also with the task of the handler.
    inside = {each for each in asyncio.all_tasks() - before if "_ended" in repr(each.get_coro())}
    assert inside
    for each in ours | (inside if everything else set()):
        each.cancel()
    await asyncio.wait(ours)
    assert all(each.cancelled() for each in ours)
    assert all(each.done() for each in inside)
    await until(ready(broker, "orders"))
    await until(lambda: not idem.internals.in_background)
    assert b"CancelledError" in (await idem.peek("m-1", scope="orders")).outcome.data


async def test_a_consumer_that_stops_does_not_wait_for_a_store_that_is_down(
    broker, queue, tmp_path, monkeypatch
):
    path = tmp_path / "shop.db"
    failing = asyncio.Event()

    @asynccontextmanager
    async def begin():
        async with aiosqlite.connect(path, isolation_level=None) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            yield connection

    async def handle(session, message):
        async def fails(*_):
            failing.set()
            raise StoreUnavailable("down")

        monkeypatch.setattr(idem.internals.store, "get", fails)
        raise StoreUnavailable("lost")

    broker.publish()
    async with AsyncIdempotency(f"sqlite:///{path}") as idem:
        await idem.marks.set("first")  # makes the table
        consumer = aio_pika.once(
            idem, handle, queue="orders", transaction=begin, policy=Policy(max_attempts=2)
        )
        running = asyncio.create_task(consumer.run(queue, signals=(), grace=PATIENCE * 60))
        await asyncio.wait_for(failing.wait(), PATIENCE)
        consumer.stop()
        assert await asyncio.wait_for(running, PATIENCE)
    await until(ready(broker, "semel.later.quorum.8.orders"))


async def test_a_cancellation_of_what_the_store_waits_for_delays_the_message(
    broker, queue, idem, monkeypatch
):
    async def run(*args):
        await cancelled_inside(None)

    monkeypatch.setattr(idem.internals, "run", run)
    broker.publish()
    consumer = aio_pika.once(idem, Handler(), queue="orders")
    assert await serve(queue, consumer, ready(broker, "semel.later.quorum.8.orders"))


@pytest.fixture
def looks(monkeypatch):
    monkeypatch.setattr(aio_pika, "_LOOK", 0.05)
    monkeypatch.setattr(aio_pika, "_CONSUME_AGAIN", (0.05, 0.1))


@pytest.mark.usefixtures("looks")
async def test_a_consumer_whose_queue_was_deleted_consumes_again(broker, connection, idem, caplog):
    handle = Handler()
    consumer = aio_pika.once(idem, handle, consumer="mailer")
    queue = await queue_of(connection)
    running = asyncio.create_task(consumer.run(queue, signals=()))
    await until(lambda: broker.host.consumers("orders") == 1)
    broker.channel.queue_delete("orders")
    await until(lambda: "RabbitMQ canceled a consumer" in caplog.text)
    broker.declare("orders")
    await until(lambda: broker.host.consumers("orders") == 1)
    broker.publish()
    await until(handle.times(1))
    consumer.stop()
    assert await running
    await until(lambda: broker.host.consumers("orders") == 0)
    await until(lambda: broker.host.depth("orders") == (0, 0))


async def test_a_queue_is_asked_for_by_its_name(connection):
    queue = await queue_of(connection)
    beneath = (await queue.channel.get_underlay_channel()).connection
    assert await aio_pika._is_there(beneath, "orders")
    assert not await aio_pika._is_there(beneath, "nothing")


def test_only_the_end_of_a_connection_is_dropped():
    with pytest.raises(KeyError), aio_pika._even_if_lost():
        raise KeyError


@pytest.mark.usefixtures("looks")
async def test_a_queue_that_a_robust_connection_does_not_restore_is_consumed_again(broker, idem):
    handle = Handler()
    async with await connected(broker) as connection:
        queue = await (await connection.channel()).get_queue("orders", ensure=False)
        consumer = aio_pika.once(idem, handle, consumer="mailer")
        running = asyncio.create_task(consumer.run(queue, signals=()))
        await until(lambda: broker.host.consumers("orders") == 1)
        broker.host.server.close_connections()
        again = Broker(broker.host)
        again.publish()
        await until(handle.times(1))
        consumer.stop()
        assert await running
        again.close()


# --- what is refused ----------------------------------------------------------------------------


async def test_without_run_the_name_of_the_queue_is_needed(broker, queue, idem):
    broker.publish()
    consumer = aio_pika.once(idem, Handler(), consumer="mailer")
    await queue.consume(consumer)
    await until(lambda: broker.host.consumers("orders") == 0)
    with pytest.raises(ConfigError, match=r"pass once\(..., queue=...\), or use run\(\)"):
        await consumer.drain()


async def test_a_handler_has_to_be_async(idem):
    def handle(message): ...

    with pytest.raises(ConfigError, match=r"make it `async def`, or use semel\.adapters\.pika"):
        aio_pika.once(idem, handle, queue="orders", consumer="mailer")
    with pytest.raises(ConfigError, match="a function that takes the message is needed, not str"):
        aio_pika.once(idem, "handle", queue="orders", consumer="mailer")
    with pytest.raises(ConfigError, match=r"such as AsyncIdempotency.* not str"):
        aio_pika.once("memory://", Handler(), queue="orders", consumer="mailer")


async def test_messages_must_not_be_acknowledged_by_aio_pika(broker, queue, idem):
    broker.publish()
    consumer = aio_pika.once(idem, Handler(), queue="orders", consumer="mailer")
    await queue.consume(consumer, no_ack=True)
    await until(lambda: broker.host.consumers("orders") == 0)
    with pytest.raises(ConfigError, match="no_ack=True"):
        await consumer.drain()


async def test_messages_have_the_id_of_the_operation_or_a_given_one(broker, queue, idem):
    given = aio_pika.message(b"body", message_id="order-42", headers={"a": 1}, app_id="shop")
    assert given.headers == {"a": 1, "idempotency-key": "order-42"}
    await queue.channel.default_exchange.publish(given, "orders")
    properties, body = broker.get("orders")
    assert (properties.message_id, properties.app_id, body) == ("order-42", "shop", b"body")
    async with idem.attempt("order:42") as attempt:
        made = aio_pika.message(b"body", "receipt")
        assert made.message_id == attempt.derive("receipt")
        attempt.result = None
