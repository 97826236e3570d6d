"""One suite for every framework, on real brokers with two workers each: what happens to a message.

| # | fault | expected |
|---|---|---|
| 7 | crash after complete, before the message is acknowledged | replay and acknowledge |
| 20 | message redelivered during execution | not acknowledged as done; comes back after the remaining lease |
| 21 | framework retries a failed task under the same id | it runs |
| 25 | SIGTERM while running | finishes and acknowledges, and takes nothing new |
| 59 | the database connection is lost while a message is handled | comes again; never a failure, never lost |

Effects are counted outside the library, in a file or a database. After each test the broker has no
message left: none waits, none is unacknowledged, and what was rejected is among the dead letters.
"""

from __future__ import annotations

import contextlib

import psycopg
import pytest

from queues.deployments import (
    ENDS,
    KINDS,
    ON_RABBITMQ,
    WORKERS,
    Deployment,
    deployment,
    with_tables,
)
from queues.ledger import eventually
from semel import State

pytestmark = pytest.mark.timeout(300)

every_kind = pytest.mark.parametrize("deployed", KINDS, indirect=True)


def ends(deployed: Deployment, order: str) -> list[str]:
    """The verdicts after which the messages of an order did not come again."""
    return [kind for kind in deployed.ledger.verdicts(order) if kind in ENDS]


# --- duplicates ----------------------------------------------------------------------------------


@pytest.mark.fault(7)
@every_kind
def test_a_duplicate_of_a_message_that_is_done_is_acknowledged_and_does_nothing(deployed):
    order = deployed.send(deployed.order())
    deployed.settled()
    deployed.send(order)
    deployed.settled()
    assert deployed.effects(order) == 1
    assert deployed.ledger.verdicts(order) == ["Ack", "Ack"]


@pytest.mark.fault(20)
@every_kind
def test_a_duplicate_of_a_message_that_runs_comes_again_at_most_once_a_second(deployed):
    order = deployed.send(deployed.order(), "wait")
    (began,) = deployed.ledger.wait_for("began", order)
    deployed.send(order, "wait")
    eventually(lambda: deployed.ledger.verdicts(order).count("Later") >= 2, "two deliveries")
    deployed.ledger.let_go(order)
    deployed.settled()

    assert deployed.effects(order) == 1
    assert ends(deployed, order) == ["Ack", "Ack"]
    running, *busy = deployed.ledger.notes("delivered", order)
    assert running.worker == began.worker
    assert {note.worker for note in busy} - {running.worker}, "no other worker has met it"
    assert len(busy) - 1 <= busy[-1].at - busy[0].at


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.fault(21)
@every_kind
def test_a_failed_message_runs_again_and_being_busy_does_not_count_as_a_failure(deployed):
    """Two attempts are allowed: were being busy counted, the message would be rejected."""
    order = deployed.order()
    with deployed.claimed_elsewhere(order):
        deployed.send(order, "fail once")
        eventually(lambda: "Later" in deployed.ledger.verdicts(order), "a verdict")
        assert deployed.ledger.count("began", order) == 0
    deployed.settled()

    runs = deployed.ledger.notes("began", order)
    assert [run.more["number"] for run in runs] == [1, 2]
    if deployed.is_celery:
        assert [run.more["retries"] for run in runs] == [0, 1]
    assert deployed.effects(order) == 1


@every_kind
def test_a_message_that_always_fails_is_rejected_after_the_attempts_that_are_allowed(deployed):
    order = deployed.send(deployed.order(), "poison")
    deployed.settled(dead=order)
    assert deployed.ledger.count("began", order) == 2
    assert deployed.effects(order) == 0


@every_kind
def test_a_message_that_kills_its_worker_is_rejected_after_the_attempts_that_are_allowed(deployed):
    order = deployed.send(deployed.order(), "kill")
    for runs in (1, 2):
        deployed.ledger.wait_for("began", order, runs)
        deployed.start_again()
    deployed.settled(dead=order)
    assert deployed.ledger.count("began", order) == 2
    assert deployed.effects(order) == 0


@every_kind
def test_a_message_without_an_id_is_rejected(deployed):
    order = deployed.send(deployed.order(), message_id=None)
    deployed.settled(dead=order)
    assert deployed.ledger.verdicts(order) == ["Reject"]
    assert deployed.ledger.count("began", order) == 0


@every_kind
def test_a_message_with_the_id_of_another_one_is_rejected(deployed):
    order = deployed.send(deployed.order())
    deployed.settled()
    before = len(deployed.log())
    other = deployed.send(deployed.order(), message_id=order)
    # Celery keeps the result of a success, and Redis has no dead letters: only the log is left.
    deployed.settled(dead=None if deployed.kind == "celery_redis" else other)
    assert "used with another payload" in deployed.log()[before:]
    assert deployed.ledger.verdicts(other) == ["Reject"]
    assert (deployed.effects(order), deployed.effects(other)) == (1, 0)


# --- workers that end ----------------------------------------------------------------------------


@every_kind
def test_a_message_of_a_killed_worker_is_handled_by_another_after_its_lease(deployed):
    order = deployed.send(deployed.order(), "wait")
    (began,) = deployed.ledger.wait_for("began", order)
    deployed.worker_of(began).kill()
    deployed.queue.miss_the_workers()
    again = deployed.ledger.wait_for("began", order, 2)[-1]
    deployed.ledger.let_go(order)
    deployed.settled()

    assert again.worker != began.worker
    assert again.more["number"] == 2
    assert deployed.effects(order) == 1


@pytest.mark.fault(25)
@every_kind
def test_a_worker_that_is_told_to_stop_finishes_what_it_handles_and_takes_nothing_new(deployed):
    order = deployed.send(deployed.order(), "wait")
    (began,) = deployed.ledger.wait_for("began", order)
    stopping = deployed.worker_of(began)
    stopping.terminate()
    others = [deployed.send(deployed.order()) for _ in range(3)]
    for other in others:
        (run,) = deployed.ledger.wait_for("effect", other)
        assert run.worker != began.worker
    assert stopping.code is None
    deployed.ledger.let_go(order)
    assert stopping.ended() == 0, deployed.log()[-4000:]
    deployed.settled()

    assert ends(deployed, order) == ["Ack"]
    assert deployed.effects(order) == 1


# --- the broker ----------------------------------------------------------------------------------


def await_redelivery(deployed: Deployment, order: str, before: set[str]) -> None:
    """Wait until the broker has delivered an order again, which is still being handled.

    RabbitMQ may give it to the worker that handles it, which then looks at it afterwards.
    """
    if deployed.kind == "celery_redis":
        deployed.queue.miss_the_workers()
        deployed.ledger.wait_for("delivered", order, 2)
    else:
        eventually(
            lambda: len(deployed.queue.consumers() - before) == WORKERS, "the workers to be back"
        )


@every_kind
def test_a_message_whose_connection_is_cut_while_it_is_handled_has_one_effect(deployed):
    order = deployed.send(deployed.order(), "wait")
    deployed.ledger.wait_for("began", order)
    before = deployed.queue.consumers()
    deployed.to_broker.cut_all()
    await_redelivery(deployed, order, before)
    deployed.ledger.let_go(order)
    deployed.settled()

    assert deployed.ledger.count("delivered", order) >= 2
    assert deployed.ledger.count("began", order) == 1, "the handler was cut off, too"
    assert deployed.effects(order) == 1
    assert deployed.record(order).state is State.SUCCEEDED


@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
def test_messages_outlive_a_restart_of_the_broker_with_one_effect(servers, deployments, broker):
    kinds = ON_RABBITMQ if broker == "rabbitmq" else ("celery_redis",)
    running: list[tuple[Deployment, str, set[str]]] = []
    for kind in kinds:
        deployed = deployments[kind]
        deployed.begin()
        order = deployed.send(deployed.order(), "wait")
        deployed.ledger.wait_for("began", order)
        running.append((deployed, order, deployed.queue.consumers()))
    getattr(servers, broker).restart()
    for deployed, order, before in running:
        await_redelivery(deployed, order, before)
        deployed.ledger.let_go(order)
    for deployed, order, _ in running:
        deployed.settled()
        assert deployed.ledger.count("delivered", order) >= 2
        assert deployed.ledger.count("began", order) == 1
        assert deployed.effects(order) == 1


# --- the store -----------------------------------------------------------------------------------


@every_kind
def test_a_message_that_the_store_cannot_be_asked_about_comes_again_and_is_not_rejected(deployed):
    with deployed.store_away():
        order = deployed.send(deployed.order())
        eventually(lambda: "Later" in deployed.ledger.verdicts(order), "a verdict")
        assert deployed.ledger.count("began", order) == 0
    deployed.settled()
    assert deployed.effects(order) == 1


@every_kind
def test_a_message_is_acknowledged_when_the_store_is_back_and_knows_that_it_is_done(deployed):
    order = deployed.send(deployed.order(), "wait")
    deployed.ledger.wait_for("began", order)
    before = len(deployed.log())
    with deployed.store_away():
        deployed.ledger.let_go(order)
        deployed.ledger.wait_for("effect", order)
        # An engine returns to its caller after two seconds; the message has to wait.
        waiting = "acknowledged when its record is stored"
        eventually(lambda: waiting in deployed.log()[before:], "the log to say that it waits")
        assert ends(deployed, order) == []
        assert deployed.queue.left() > 0
    deployed.settled()
    assert deployed.effects(order) == 1
    assert ends(deployed, order)[0] == "Ack"
    assert deployed.record(order).state is State.SUCCEEDED


# --- in a transaction ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_transactions(servers, postgres_of_this_worker, tmp_path_factory):
    """A queue of each kind whose orders are rows; effects are counted in their database."""
    with contextlib.ExitStack() as stack:

        class Started(dict[str, tuple[Deployment, str]]):
            def __missing__(self, kind: str) -> tuple[Deployment, str]:
                database = with_tables(postgres_of_this_worker)
                folder = tmp_path_factory.mktemp(kind)
                started = stack.enter_context(deployment(kind, servers, folder, database))
                self[kind] = started, database
                return self[kind]

        yield Started()


@pytest.fixture(params=ON_RABBITMQ)
def transactional(request, in_transactions):
    deployed, database = in_transactions[request.param]
    deployed.begin()
    with psycopg.connect(database, autocommit=True) as connection:
        yield deployed, connection


def rows(connection: psycopg.Connection, order: str) -> int:
    """How many effects an order has."""
    asked = connection.execute("SELECT count(*) FROM effects WHERE order_id = %s", (order,))
    (count,) = asked.fetchone()
    return count


def test_in_a_transaction_a_killed_worker_leaves_one_effect(transactional):
    """The worker is killed after its effect, before the commit: with a lease it would be two."""
    deployed, connection = transactional
    order = deployed.send(deployed.order(), "wait")
    (began,) = deployed.ledger.wait_for("began", order)
    deployed.worker_of(began).kill()
    deployed.ledger.wait_for("began", order, 2)
    deployed.ledger.let_go(order)
    deployed.send(order, "wait")
    deployed.settled()
    assert rows(connection, order) == 1


def test_in_a_transaction_a_message_that_kills_its_worker_is_rejected_too(transactional):
    deployed, connection = transactional
    order = deployed.send(deployed.order(), "kill")
    for runs in (1, 2):
        deployed.ledger.wait_for("began", order, runs)
        deployed.start_again()
    deployed.settled(dead=order)
    assert deployed.ledger.count("began", order) == 2
    assert rows(connection, order) == 0


@pytest.mark.fault(59)
def test_a_message_whose_database_connections_are_cut_comes_again_and_is_not_rejected(
    transactional,
):
    """As often as there are attempts, which with `max_attempts=2` would be all of them."""
    deployed, connection = transactional
    order = deployed.send(deployed.order(), "wait")
    for runs in (1, 2):
        deployed.ledger.wait_for("began", order, runs)
        cut = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )
        assert cut.fetchall()
        deployed.ledger.let_go(order)  # it meets the cut at the end of the handler
        deployed.ledger.wait_for("verdict", order, runs)
        (deployed.ledger.folder / f"go-{order}").unlink()
    deployed.ledger.wait_for("began", order, 3)
    deployed.ledger.let_go(order)
    deployed.settled()
    assert deployed.ledger.verdicts(order) == ["Later", "Later", "Ack"]
    assert rows(connection, order) == 1
