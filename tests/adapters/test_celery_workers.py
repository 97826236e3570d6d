"""Celery tasks in real workers on real brokers: prefork on RabbitMQ, threads and gevent on Redis."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from decimal import Decimal
from itertools import count
from pathlib import Path

import pytest
from celery import chain, chord, group

from adapters.celery_workers import Shop
from semel.errors import AttemptsExhausted
from servers.rabbitmq import RabbitMQServer
from servers.redis import RedisServer, redis_server

# Celery 5.3 with a newer redis-py.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

orders = count(1)


@pytest.fixture(scope="module")
def servers() -> Iterator[RedisServer]:
    """For the store, the results, and as a broker: a server of this module's own."""
    with redis_server() as server:
        yield server


def database(server: RedisServer, number: int) -> str:
    return f"{server.url.removesuffix('/0')}/{number}"


@contextlib.contextmanager
def shop_of(folder: Path, **options) -> Iterator[Shop]:
    shop = Shop(folder, **options)
    try:
        yield shop
    finally:
        shop.close()


@pytest.fixture(scope="module")
def rabbit_shop(rabbitmq: RabbitMQServer, servers, tmp_path_factory) -> Iterator[Shop]:
    with (
        rabbitmq.virtual_host() as host,
        shop_of(
            tmp_path_factory.mktemp("rabbit"),
            broker=host.url,
            backend=database(servers, 1),
            store=servers.url,
            pool="prefork",
        ) as shop,
    ):
        host.set_policy("celery", {"dead-letter-exchange": "", "dead-letter-routing-key": "dead"})
        shop.host = host
        yield shop


@pytest.fixture
def prefork(rabbit_shop: Shop) -> Shop:
    """A worker with processes, on RabbitMQ; the results are in Redis."""
    rabbit_shop.start()
    return rabbit_shop


@pytest.fixture(scope="module")
def redis_shop(servers, tmp_path_factory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("redis")
    with shop_of(
        folder,
        broker=database(servers, 2),
        backend=f"db+sqlite:///{folder}/results.db",
        store=servers.url,
        pool="threads",
        SHOP_VISIBILITY="3",
    ) as shop:
        yield shop


@pytest.fixture
def threads(redis_shop: Shop) -> Shop:
    """A worker with threads, on Redis; the results are in a database."""
    redis_shop.start()
    return redis_shop


@pytest.fixture
def order() -> int:
    return next(orders)


def nothing_is_left(shop: Shop) -> None:
    """No message waits, and none is unacknowledged."""
    shop.host.wait_for_depth("celery")


# --- prefork on RabbitMQ -----------------------------------------------------------------------


def test_a_duplicate_of_a_task_that_is_done_gets_its_result(prefork, order):
    for number in (1, 2):
        prefork.send("charge", order, key=f"charge-{order}")
        prefork.wait_for_log("charge", f"charge-{order}]", "succeeded", times=number)
    assert prefork.client.AsyncResult(f"charge-{order}").get() == [order, "paid"]
    assert prefork.effects[f"charge {order}"] == 1


def test_a_duplicate_of_a_task_that_runs_waits_until_it_is_done(prefork, order):
    prefork.send("gated", order, key=f"first-{order}")
    prefork.wait_for_effect(f"gated {order}")
    prefork.send("gated", order, key=f"second-{order}", headers={"tenant": "t"})
    prefork.wait_for_log(f"second-{order}]", "ignored")
    prefork.open(order)
    assert prefork.client.AsyncResult(f"second-{order}").get(60) == "paid"
    assert prefork.effects[f"gated {order}"] == 1
    nothing_is_left(prefork)


def test_retries_of_celery_run_under_the_same_id(prefork, order):
    assert prefork.send("flaky", order, key=f"flaky-{order}").get(60) == "paid"
    assert prefork.effects_of("flaky", order) == [f"flaky {order} {number}" for number in range(3)]


def test_a_failure_that_is_final_is_not_retried_and_its_message_is_gone(prefork, order):
    for number in (1, 2):
        prefork.send("declined", order, key=f"declined-{order}")
        prefork.wait_for_log(f"declined-{order}] raised", times=number)
    assert prefork.effects_of("declined", order) == [f"declined {order}"]
    nothing_is_left(prefork)


def test_a_task_whose_process_is_killed_runs_again(prefork, order):
    assert prefork.send("killed", order, key=f"killed-{order}").get(60) == "paid"
    assert prefork.effects[f"killed {order}"] == 2
    nothing_is_left(prefork)


@pytest.mark.fault(24)
def test_a_soft_time_limit_releases_the_record(prefork, order):
    assert prefork.send("soft", order, key=f"soft-{order}").get(60) == "paid"
    assert prefork.effects_of("soft", order) == [f"soft {order} 0", f"soft {order} 1"]


@pytest.mark.fault(24)
def test_a_task_that_always_exceeds_its_hard_time_limit_ends(prefork, order):
    report = prefork.client.signature("report")
    result = prefork.send("hard", order, key=f"hard-{order}", link_error=report)
    with pytest.raises(AttemptsExhausted):
        result.get(60)
    assert prefork.effects[f"hard {order}"] == 2
    assert prefork.lines("hard time limit (0.5 s) exceeded", "will be redelivered") == 2
    # Celery itself would have called the task failed each time, and its `link_error` too.
    prefork.wait_for_log("report[", "succeeded")
    assert prefork.effects[f"report hard-{order}"] == 1
    nothing_is_left(prefork)


def test_a_task_that_fails_is_rejected_to_the_dead_letters(prefork, order):
    with prefork.client.connection_for_write() as connection:
        connection.SimpleQueue("dead").close()
        prefork.send("lettered", order, key=f"lettered-{order}")
        prefork.wait_for_log(f"lettered-{order}] raised")
        with contextlib.closing(connection.SimpleQueue("dead")) as dead:
            letter = dead.get(timeout=60)
            letter.ack()
    assert letter.headers["id"] == f"lettered-{order}"


def test_a_payload_names_what_is_compared_of_pickled_arguments(prefork, order):
    for number in (1, 2):
        prefork.send("pickled", order, Decimal(number), key=f"pickled-{order}", serializer="pickle")
        prefork.wait_for_log(f"pickled-{order}]", "succeeded", times=number)
    assert prefork.effects_of("pickled", order) == [f"pickled {order} Decimal('1')"]


def test_a_task_that_is_not_idempotent_runs_each_time(prefork, order):
    for number in (1, 2):
        prefork.send("plain", order, key=f"plain-{order}")
        prefork.wait_for_log(f"plain-{order}]", "succeeded", times=number)
    assert prefork.effects[f"plain {order}"] == 2


# --- chains, groups and chords -----------------------------------------------------------------


def sign(shop, task, *args, key, **options):
    return shop.client.signature(task, args, task_id=key, **options)


def test_a_chain_goes_on_once(prefork, order):
    steps = chain(
        sign(prefork, "charge", order, key=f"step-{order}"),
        sign(prefork, "mail", f"chain-{order}", key=f"then-{order}"),
        app=prefork.client,
    )
    with prefork.recorded() as sent:
        assert steps.apply_async().get(60) == f"then-{order}"
    prefork.duplicate(sent[0])
    prefork.wait_for_log(f"then-{order}]", "succeeded", times=2)
    assert prefork.effects_of("mail", f"chain-{order}") == [f"mail chain-{order} [{order}, 'paid']"]


def test_what_is_linked_runs_once(prefork, order):
    linked = prefork.client.signature("mail", (f"link-{order}",))
    before = prefork.lines("mail[", "succeeded")
    for number in (1, 2):
        prefork.send("charge", order, key=f"linked-{order}", link=linked)
        prefork.wait_for_log(f"linked-{order}]", "succeeded", times=number)
        prefork.wait_for_log("mail[", "succeeded", times=before + number)
    assert len(prefork.effects_of("mail", f"link-{order}")) == 1


def test_a_group_has_the_results_of_all_its_tasks(prefork, order):
    parts = group(
        [sign(prefork, "charge", order, key=f"part-{order}-{each}") for each in "ab"],
        app=prefork.client,
    )
    with prefork.recorded() as sent:
        assert parts.apply_async().get(timeout=60) == [[order, "paid"]] * 2
    prefork.duplicate(sent[0])
    prefork.wait_for_log(f"part-{order}-a]", "succeeded", times=2)
    assert prefork.effects[f"charge {order}"] == 2


@pytest.mark.parametrize("kind", ["prefork", "threads"])
def test_a_part_of_a_chord_that_is_delivered_again_counts_once(request, kind, order):
    shop = request.getfixturevalue(kind)
    parts = [
        sign(shop, "charge", order, key=f"header-{order}"),
        sign(shop, "gated", order, key=f"gated-{order}"),
    ]
    body = sign(shop, "mail", f"chord-{order}", key=f"body-{order}")
    with shop.recorded() as sent:
        result = chord(parts, body, app=shop.client).apply_async()
    header = next(each for each in sent if each["headers"]["id"] == f"header-{order}")
    for number in (1, 2, 3):
        shop.wait_for_log(f"header-{order}]", "succeeded", times=number)
        shop.duplicate(header)
    shop.wait_for_log(f"header-{order}]", "succeeded", times=4)
    assert not shop.effects_of("mail", f"chord-{order}")
    shop.open(order)
    assert result.get(60) == f"body-{order}"
    shop.duplicate(header)
    shop.wait_for_log(f"header-{order}]", "succeeded", times=5)
    (mailed,) = shop.effects_of("mail", f"chord-{order}")
    assert mailed == f"mail chord-{order} [[{order}, 'paid'], 'paid']"
    assert shop.effects[f"charge {order}"] == 1


# --- threads and gevent on Redis ---------------------------------------------------------------


def test_threads_handle_a_message_once(threads, order):
    threads.send("gated", order, key=f"first-{order}")
    threads.wait_for_effect(f"gated {order}")
    threads.send("gated", order, key=f"second-{order}")
    threads.wait_for_log(f"second-{order}]", "ignored")
    threads.open(order)
    threads.wait_for_log(f"second-{order}]", "succeeded")
    assert threads.effects[f"gated {order}"] == 1


def test_greenlets_handle_a_message_once(servers, order, tmp_path):
    with shop_of(
        tmp_path,
        broker=database(servers, 3),
        backend=database(servers, 1),
        store=servers.url,
        pool="gevent",
    ) as shop:
        shop.start()
        shop.send("gated", order, key=f"first-{order}")
        shop.wait_for_effect(f"gated {order}")
        shop.send("gated", order, key=f"second-{order}")
        shop.wait_for_log(f"second-{order}]", "ignored")
        shop.open(order)
        assert shop.client.AsyncResult(f"second-{order}").get(60) == "paid"
        assert shop.effects[f"gated {order}"] == 1
        assert shop.send("flaky", order, key=f"flaky-{order}").get(60) == "paid"
        shop.signal(signal.SIGKILL)  # greenlets take 4 s to end


def test_a_task_longer_than_the_visibility_timeout_is_delivered_again_and_runs_once(threads, order):
    # Redis has no acknowledgements. What is busy waits in the memory of the worker meanwhile.
    threads.send("gated", order, key=f"long-{order}")
    threads.wait_for_log(f"long-{order}]", "ignored")
    threads.open(order)
    threads.wait_for_log(f"long-{order}]", "succeeded", times=2)
    assert threads.effects[f"gated {order}"] == 1


# --- starting and stopping ---------------------------------------------------------------------


def test_a_worker_that_starts_tells_what_is_wrong_with_its_settings(prefork, threads):
    for shop in (prefork, threads):
        starts = shop.lines(" ready.")
        assert shop.lines("Celery task early: acks_late is off") == starts
        assert shop.lines("Celery task charge: ") == (0 if shop is prefork else starts)
    assert threads.lines("Celery task charge: the visibility timeout of the broker is 3 s")
    assert threads.lines("Celery task lettered: dead_letters is on, and the broker (redis)")
    assert not prefork.lines("Celery task lettered")


def test_a_worker_that_is_told_to_stop_finishes_what_runs(prefork, order):
    prefork.send("gated", order, key=f"gated-{order}")
    prefork.wait_for_effect(f"gated {order}")
    prefork.signal(signal.SIGTERM)
    prefork.wait_for_log("Warm shutdown")
    prefork.open(order)
    assert prefork.stopped() == 0
    assert prefork.client.AsyncResult(f"gated-{order}").get(60) == "paid"
    nothing_is_left(prefork)


def test_a_worker_whose_program_is_wrong_stops_and_its_message_stays(prefork, order):
    prefork.send("wrong", order, key=f"wrong-{order}")
    assert prefork.stopped() == 0
    assert prefork.lines("worker stopping", "the tariff is missing")
    prefork.host.wait_for_depth("celery", ready=1)
    assert prefork.client.AsyncResult(f"wrong-{order}").state == "PENDING"
    prefork.client.control.purge()
