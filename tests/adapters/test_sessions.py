"""Record and rows in one transaction: `@idempotent(session=...)` in FastAPI and Starlette."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from contextvars import Context

import pytest
from anyio import to_thread
from fastapi import HTTPException
from sqlalchemy import delete, event, insert, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import AsyncAdaptedQueuePool, QueuePool
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from adapters.asgi_serving import begun, eventually, keyed, left, replayed, served
from adapters.session_shop import KINDS, Kind, Shop, order
from adapters.test_asgi_lives import Hasty, Scoped
from semel import AsyncIdempotency, ConfigError, Idempotency, LeaseLost, Policy, current_attempt
from semel.adapters.asgi import IdempotencyMiddleware
from semel.core.records import Identity, State
from semel.testing import bypass


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)


class Paid(Base):
    __tablename__ = "paid"
    number: Mapped[int] = mapped_column(primary_key=True)


DATABASES = {"sqlite": "sqlite_url", "postgresql": "postgres_url", "mysql": "mysql_url"}
ONE_OF_EACH = [Kind("fastapi", False), Kind("starlette", True)]
"""Where what is asked does not depend on the framework, only on the kind of session."""


@pytest.fixture(params=KINDS[1:3] + KINDS[4:], ids=str)
async def shop(request, sqlite_url):
    shop = Shop(sqlite_url, request.param)
    yield shop
    await shop.close()


@pytest.fixture
async def make_shop():
    shops = []

    def made(url, kind, **engine):
        shops.append(Shop(url, kind, **engine))
        return shops[-1]

    yield made
    for shop in shops:
        await shop.close()


@pytest.fixture
def any_url(request):
    return request.getfixturevalue(DATABASES[request.param])


def paid(session):
    order(session)
    return JSONResponse({"paid": 5}, 201, {"X-A": "1"})


async def post(client, key="k", **more):
    headers = {} if key is None else keyed(key)
    return await client.post("/pay", headers=headers, **more)


def locked():
    cause = sqlite3.OperationalError("database is locked")
    cause.sqlite_errorname = "SQLITE_BUSY"
    return OperationalError("COMMIT", {}, cause)


# --- one commit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("any_url", DATABASES, indirect=True)
@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_rows_and_record_are_committed_together(make_shop, any_url, kind):
    shop, seen = make_shop(any_url, kind), []

    def action(session):
        seen.append((current_attempt().key, session.in_transaction(), shop.orders()))
        return paid(session)

    async with shop.serving(action) as client:
        first, second = await post(client), await post(client)
    assert first.status_code == second.status_code == 201
    assert first.json() == second.json() == {"paid": 5}
    assert first.headers["X-A"] == second.headers["X-A"] == "1"
    assert [replayed(first), replayed(second)] == [False, True]
    assert seen == [("k", True, 0)]
    assert shop.orders() == 1
    assert shop.records() == [State.SUCCEEDED]


async def test_an_exception_rolls_back_both(shop):
    def action(session):
        order(session)
        raise OSError("broken")

    async with shop.serving(action) as client:
        answers = [await post(client), await post(client)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert shop.orders() == 0
    assert shop.records() == []


async def test_an_answer_that_is_raised_rolls_back_both_and_reaches_its_caller(shop):
    def action(session):
        order(session)
        raise HTTPException(409, "out of stock")

    async with shop.serving(action) as client:
        answers = [await post(client), await post(client)]
    assert [answer.status_code for answer in answers] == [409, 409]
    assert "out of stock" in answers[0].text
    assert shop.orders() == 0
    assert shop.records() == []


@pytest.mark.parametrize("status", [303, 409, 500])
async def test_an_answer_that_is_not_stored_rolls_back_both_and_reaches_its_caller(shop, status):
    def action(session):
        order(session)
        return Response("no", status, {"Location": "/again", "Idempotent-Replayed": "true"})

    async with shop.serving(action) as client:
        answers = [await post(client), await post(client)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(status, "no")] * 2
    assert not any(replayed(answer) for answer in answers)
    assert shop.orders() == 0
    assert shop.records() == []


async def test_an_answer_that_is_stored_when_asked_for_commits(shop):
    def action(session):
        order(session)
        return Response("gone", 410)

    async with shop.serving(action, stored=lambda status: status == 410) as client:
        await post(client)
        assert replayed(await post(client))
    assert shop.orders() == 1


@pytest.mark.parametrize(("status", "orders"), [(200, 2), (409, 0), (500, 0)])
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_without_a_key_the_endpoint_runs_in_a_transaction_all_the_same(
    shop, method, status, orders
):
    def action(session):
        order(session)
        if status == 500:
            raise OSError("broken")
        return Response(status_code=status)

    key = keyed() if method == "GET" else {}  # a GET is never protected
    async with shop.serving(action) as client:
        answers = [await client.request(method, "/pay", headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert shop.orders() == orders
    assert shop.records() == []


async def test_what_the_rules_refuse_runs_nothing(shop):
    async with shop.serving(paid, required=True) as client:
        assert (await post(client, None)).json()["code"] == "key_missing"
        assert (await post(client, 'a"b')).status_code == 400
        assert (await post(client)).status_code == 201
        assert (await post(client, content=b"other")).status_code == 422
    assert shop.orders() == 1


async def test_guard_mode_refuses_duplicates(shop):
    policy = Policy(duplicate="reject", message="This coupon was used.")
    async with shop.serving(paid, policy=policy) as client:
        await post(client)
        assert (await post(client)).json()["detail"] == "This coupon was used."


async def test_switched_off_it_runs_in_a_transaction_without_a_record(shop):
    app = shop.app(paid)

    async def switched_off(scope, receive, send):
        with bypass():
            await app(scope, receive, send)

    async with served(switched_off) as client:
        answers = [await post(client), await post(client)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert shop.orders() == 2
    assert shop.records() == []


async def test_a_stored_answer_that_cannot_be_read_is_not_given_and_nothing_runs(shop):
    async with shop.serving(paid) as client:
        with Idempotency(shop.url) as idem:
            idem.execute("k", lambda: "not an answer", scope="http")
        answer = await post(client, "k")
    assert answer.status_code in {409, 422, 503}
    assert shop.orders() == 0


# --- streams and large answers --------------------------------------------------------------------


def large(kind, path, seen=lambda: None):
    async def chunks():
        yield b"x" * 6
        yield b"x" * 6
        seen()
        yield b"x"

    if kind == "file":
        path.write_bytes(b"x" * 13)
        return FileResponse(path)
    return StreamingResponse(chunks()) if kind == "stream" else Response(b"x" * 13)


@pytest.mark.parametrize("answer", ["stream", "file", "plain"])
async def test_an_answer_beyond_the_cap_is_told_as_omitted(shop, tmp_path, answer):
    def action(session):
        order(session)
        return large(answer, tmp_path / "file")

    async with shop.serving(action, max_response=10) as client:
        first, second = await post(client), await post(client)
    assert first.content == b"x" * 13
    assert second.json()["code"] == "result_omitted"
    assert shop.orders() == 1


async def test_the_rows_are_committed_before_a_large_stream_goes_out(shop):
    seen = []

    def action(session):
        order(session)
        return large("stream", None, lambda: seen.append((shop.orders(), shop.records())))

    async with shop.serving(action, max_response=10) as client:
        assert (await post(client)).content == b"x" * 13
    assert seen == [(1, [State.SUCCEEDED])]


async def test_a_large_stream_whose_commit_fails_is_not_sent(shop):
    async def removed():
        yield b"x" * 6
        yield b"x" * 6

    def action(session):
        order(session)
        session.execute(text("DELETE FROM idempotent_record"))
        return StreamingResponse(removed())

    async with shop.serving(action, max_response=10) as client:
        answer = await post(client)
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")
    assert shop.orders() == 0


async def test_a_large_stream_whose_client_leaves_is_committed(shop):
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def chunks():
        reached.set()
        await go_on.wait()
        for _ in range(3):
            yield b"x" * 6

    def action(session):
        order(session)
        return StreamingResponse(chunks())

    async with shop.serving(action, max_response=10) as client:
        writer = await begun(
            client, "POST /pay HTTP/1.1", "Idempotency-Key: k", "Content-Length: 0"
        )
        await reached.wait()
        await left(writer)
        go_on.set()
        await eventually(lambda: shop.orders() == 1)
        assert (await post(client)).json()["code"] == "result_omitted"


@pytest.mark.fault(57)
async def test_readers_that_do_not_read_keep_no_other_request_out(make_shop, sqlite_url):
    """Their rows are committed: nothing is held for the rest of their answers."""
    shop = make_shop(sqlite_url, Kind("fastapi", False))
    waiting, go_on = [], asyncio.Event()

    async def chunks():
        for _ in range(2):
            yield b"x" * 6
        waiting.append(1)
        await go_on.wait()  # as for a client that does not read
        yield b"x"

    def action(session):
        order(session)
        return StreamingResponse(chunks())

    to_thread.current_default_thread_limiter().total_tokens = 2  # of this test's loop alone
    async with shop.serving(action, max_response=10) as client:
        slow = [asyncio.create_task(post(client, f"k{number}")) for number in range(5)]
        await eventually(lambda: len(waiting) == len(slow))
        assert shop.orders() == len(slow)
        go_on.set()
        answers = await asyncio.gather(*slow)
    assert [answer.content for answer in answers] == [b"x" * 13] * len(slow)


@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize(
    "answer",
    [("k", None, 10), (None, None, 10), ("k", "text/event-stream", 100)],
    ids=["large", "without a key", "events"],
)
async def test_a_stream_cannot_use_its_session_after_the_commit(
    make_shop, sqlite_url, kind, answer
):
    """Nothing would end that transaction."""
    key, media_type, max_response = answer
    pool = AsyncAdaptedQueuePool if kind.is_async else QueuePool
    shop, used = make_shop(sqlite_url, kind, poolclass=pool), []

    def action(session):
        order(session)

        async def chunks():
            for _ in range(2):
                yield b"x" * 6
            for _ in range(2):  # twice: a stream may catch the error, and try again
                with pytest.raises(ConfigError, match="after the commit"):
                    order(session)
                used.append(session.in_transaction())
            yield b"x"

        return StreamingResponse(chunks(), media_type=media_type)

    async with shop.serving(action, max_response=max_response) as client:
        assert (await post(client, key)).content == b"x" * 13
    assert used == [False, False]
    assert shop.engine.pool.checkedout() == 0
    assert shop.orders() == 1


async def test_a_small_stream_uses_its_session_with_and_without_a_key(make_shop, sqlite_url):
    shop = make_shop(sqlite_url, Kind("fastapi", False))

    def action(session):
        def chunks():
            order(session)
            yield b"ordered"

        return StreamingResponse(chunks())

    async with shop.serving(action) as client:
        answers = [await post(client), await post(client, None)]
    assert [answer.content for answer in answers] == [b"ordered"] * 2
    assert shop.orders() == 2


async def test_a_request_cancelled_during_the_commit_of_a_large_stream_is_done(
    make_shop, sqlite_url
):
    shop = make_shop(sqlite_url, Kind("starlette", False))
    committing, go_on = threading.Event(), threading.Event()

    async def chunks():
        for _ in range(3):
            yield b"x" * 6

    def action(session):
        @event.listens_for(session, "after_commit")
        def wait(session):
            committing.set()
            go_on.wait(20)

        order(session)
        return StreamingResponse(chunks())

    around = Hasty(shop.app(action, max_response=10))
    async with served(around) as client:
        first = asyncio.create_task(post(client))
        await eventually(committing.is_set)
        around.enough.set()
        for _ in range(10):
            await asyncio.sleep(0)  # the cancellation arrives
        go_on.set()
        assert (await first).text == "too slow"
        assert (await post(client)).json()["code"] == "result_omitted"
    assert shop.orders() == 1


async def test_events_pass_live_and_are_not_made_again(shop):
    async def events():
        yield "data: 1\n\n"

    def action(session):
        order(session)
        return StreamingResponse(events(), media_type="text/event-stream")

    async with shop.serving(action) as client:
        assert (await post(client)).content == b"data: 1\n\n"
        assert (await post(client)).json()["code"] == "result_omitted"
    assert shop.orders() == 1


async def test_background_tasks_run_after_the_commit(shop):
    seen = []

    def action(session):
        order(session)
        background = BackgroundTask(lambda: seen.append((shop.orders(), shop.records())))
        return Response("paid", background=background)

    async with shop.serving(action) as client:
        await post(client)
        await post(client)
        await eventually(lambda: seen)
    assert seen == [(1, [State.SUCCEEDED])]


# --- errors ---------------------------------------------------------------------------------------


async def test_an_error_of_ours_that_the_endpoint_raises_stays_its_own(shop):
    def action(session):
        order(session)
        raise LeaseLost("of another operation")

    async with shop.serving(action) as client:
        assert (await post(client)).status_code == 500
    assert shop.orders() == 0


async def test_a_record_that_was_removed_meanwhile_is_no_success(shop):
    def action(session):
        session.execute(text("DELETE FROM idempotent_record"))
        return paid(session)

    async with shop.serving(action) as client:
        answer = await post(client)
    assert (answer.status_code, answer.json()["code"]) == (409, "lease_lost")
    assert shop.orders() == 0


@pytest.mark.parametrize("place", ["endpoint", "made of it", "commit"])
async def test_a_database_that_asks_for_a_repetition_is_told_as_unavailable_for_now(shop, place):
    def fail(session):
        raise locked()

    def action(session):
        if place != "commit":
            order(session)
            try:
                fail(session)
            except OperationalError as error:
                if place == "endpoint":
                    raise
                raise HTTPException(402, "declined") from error
        event.listen(session.connection().engine, "commit", fail)
        return paid(session)

    async with shop.serving(action) as client:
        answer = await post(client)
    assert (answer.status_code, answer.json()["code"]) == (503, "retry_transaction")
    assert int(answer.headers["Retry-After"]) >= 1
    assert shop.orders() == 0
    assert shop.records() == []


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
async def test_a_commit_that_the_database_refuses_is_the_application_s_error(
    make_shop, postgres_url, kind, key
):
    shop = make_shop(postgres_url, kind)
    shop.query("CREATE TABLE item (id INTEGER PRIMARY KEY)")
    shop.query("CREATE TABLE line (item INTEGER REFERENCES item DEFERRABLE INITIALLY DEFERRED)")

    def action(session):
        session.execute(text("INSERT INTO line VALUES (7)"))
        return paid(session)

    app = shop.app(action)

    @app.exception_handler(IntegrityError)
    async def told(request, error):
        return Response("no such item", 422)

    async with served(app) as client:
        answers = [await post(client, key), await post(client, key)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(422, "no such item")] * 2
    assert shop.orders() == 0
    assert shop.records() == []


async def test_a_commit_by_the_endpoint_is_refused_before_anything_is_committed(shop, caplog):
    def action(session):
        order(session)
        session.commit()

    async with shop.serving(action) as client:
        answers = [await post(client), await post(client, None)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert "must not commit" in caplog.text
    assert shop.orders() == 0
    assert shop.records() == []


async def test_savepoints_of_the_endpoint_are_its_own(shop):
    def action(session):
        with contextlib.suppress(ValueError), session.begin_nested():
            order(session)
            raise ValueError
        with session.begin_nested():
            order(session)
        return paid(session)

    async with shop.serving(action) as client:
        assert (await post(client)).status_code == 201
        assert replayed(await post(client))
    assert shop.orders() == 2


async def test_a_commit_inside_a_savepoint_is_refused_too(shop):
    def action(session):
        session.begin_nested()
        order(session)
        session.commit()

    async with shop.serving(action) as client:
        assert (await post(client)).status_code == 500
    assert shop.orders() == 0


@pytest.mark.parametrize("status", [409, 201])
async def test_an_endpoint_that_rolls_back_cannot_answer_with_a_success(shop, status, caplog):
    def action(session):
        order(session)
        session.rollback()
        order(session)
        return Response("rolled back", status)

    async with shop.serving(action) as client:
        answer = await post(client)
    assert answer.status_code == (500 if status == 201 else 409)
    assert ("ended the transaction of its session" in caplog.text) is (status == 201)
    assert shop.orders() == 0
    assert shop.records() == []


@pytest.mark.parametrize("any_url", DATABASES, indirect=True)
@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("status", [409, 201])
async def test_an_endpoint_that_caught_a_failed_flush_cannot_answer_with_a_success(
    make_shop, any_url, kind, status, caplog
):
    shop = make_shop(any_url, kind)
    shop.query("CREATE TABLE paid (number INTEGER PRIMARY KEY)")
    caught = []

    def action(session):
        order(session)
        session.add_all([Paid(number=1), Paid(number=2)])
        session.flush()
        session.expunge_all()
        session.add(Paid(number=1))
        try:
            session.flush()
        except IntegrityError as error:
            caught.append(error)
        return Response("paid before", status)

    async with shop.serving(action) as client:
        answer = await post(client)
    assert len(caught) == 1
    assert answer.status_code == (500 if status == 201 else 409)
    assert ("caught an error of its session" in caplog.text) is (status == 201)
    assert answer.text == ("Internal Server Error" if status == 201 else "paid before")
    assert shop.orders() == 0
    assert shop.records() == []


@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=str)
async def test_an_error_that_has_aborted_the_transaction_is_named_in_the_log(
    make_shop, postgres_url, kind, caplog
):
    def action(session):
        order(session)
        with contextlib.suppress(DBAPIError):
            session.execute(text("SELECT 1 / 0"))
        return Response("paid", 201)

    shop = make_shop(postgres_url, kind)
    async with shop.serving(action) as client:
        answer = await post(client)
    assert answer.status_code == 503
    assert "use a savepoint (begin_nested())" in caplog.text
    assert shop.orders() == 0
    assert shop.records() == []


async def test_a_commit_past_the_session_is_held_as_unknown_and_logged(shop, caplog):
    def action(session):
        order(session)
        session.execute(text("COMMIT"))
        return Response("paid", 201)

    async with shop.serving(action) as client:
        answer = await post(client)
        assert answer.status_code == 409
        assert "an endpoint ended the transaction of its record" in caplog.text
        assert (await post(client)).status_code == 409
    assert shop.orders() == 1
    assert shop.records() == [State.PROCESSING]


async def test_a_client_who_leaves_ends_neither_the_endpoint_nor_the_commit(shop):
    entered, go_on = threading.Event(), threading.Event()
    runs = []

    def action(session):
        order(session)
        runs.append(1)
        entered.set()
        if not shop.kind.is_async:
            go_on.wait(20)
        return Response("paid", 201)

    app = shop.app(action)
    async with served(app) as client:
        writer = await begun(
            client, "POST /pay HTTP/1.1", "Idempotency-Key: k", "Content-Length: 0"
        )
        await eventually(entered.is_set)
        await left(writer)
        go_on.set()
        await eventually(lambda: shop.orders() == 1)
        again = await post(client)
    assert (again.status_code, replayed(again)) == (201, True)
    assert runs == [1]


# --- several at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("any_url", ["postgresql", "mysql"], indirect=True)
@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=str)
async def test_a_duplicate_of_a_running_request_is_told_so_or_waits(make_shop, any_url, kind):
    shop = make_shop(any_url, kind)
    entered, go_on = threading.Event(), threading.Event()

    def action(session):
        order(session)
        entered.set()
        return StreamingResponse(later())

    async def later():
        while not go_on.is_set():  # noqa: ASYNC110 - both kinds of endpoint tell it
            await asyncio.sleep(0.005)
        yield b"paid"

    async with shop.serving(action) as client, shop.serving(action, wait=30) as patient:
        first = asyncio.create_task(post(client))
        await eventually(entered.is_set)
        refused = await post(client)
        assert (refused.status_code, refused.json()["code"]) == (409, "concurrent_request")
        waiting = asyncio.create_task(post(patient))
        await asyncio.wait((waiting,), timeout=0.5)
        assert not waiting.done()
        go_on.set()
        answers = await asyncio.gather(first, waiting)
    assert [answer.content for answer in answers] == [b"paid"] * 2
    assert replayed(answers[1])
    assert shop.orders() == 1


@pytest.mark.parametrize("any_url", ["postgresql", "mysql"], indirect=True)
@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=str)
async def test_another_key_is_answered_beside_thirty_duplicates_that_would_wait(
    make_shop, any_url, kind
):
    pool = AsyncAdaptedQueuePool if kind.is_async else QueuePool
    engine = {"poolclass": pool, "pool_size": 4, "max_overflow": 0, "pool_timeout": 60}
    shop = make_shop(any_url, kind, **engine)
    entered, go_on = threading.Event(), threading.Event()

    def action(session):
        order(session)
        if current_attempt().key == "other":
            return JSONResponse("paid", 201)
        entered.set()
        return StreamingResponse(later(), 201)

    async def later():
        while not go_on.is_set():  # noqa: ASYNC110 - both kinds of endpoint tell it
            await asyncio.sleep(0.005)
        yield b"paid"

    async with shop.serving(action, wait=60) as client:
        first = asyncio.create_task(post(client, "slow"))
        await eventually(entered.is_set)
        duplicates = [asyncio.create_task(post(client, "slow")) for _ in range(30)]
        assert (await post(client, "other")).status_code == 201
        await eventually(lambda: sum(each.done() for each in duplicates) == 28)
        assert not first.done()
        go_on.set()
        assert (await first).status_code == 201
        answers = await asyncio.gather(*duplicates)
    rejected = [answer for answer in answers if answer.status_code == 409]
    assert len(rejected) == 28
    assert {(each.json()["code"], each.headers["Retry-After"]) for each in rejected} == {
        ("concurrent_request", "1")
    }
    assert [replayed(answer) for answer in answers if answer.status_code == 201] == [True] * 2
    assert shop.orders() == 2


async def test_many_requests_for_few_connections_and_threads_are_all_answered(
    make_shop, postgres_url
):
    # With the framework's threads, a commit would wait for those that wait for its connection.
    engine = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0, "pool_timeout": 60}
    shop = make_shop(postgres_url, Kind("fastapi", False), **engine)
    async with shop.serving(paid) as client:
        to_thread.current_default_thread_limiter().total_tokens = 2
        answers = await asyncio.gather(*(post(client, f"k{number}") for number in range(12)))
    assert [answer.status_code for answer in answers] == [201] * 12
    assert shop.orders() == 12


# --- behind another integration -------------------------------------------------------------------


@contextlib.asynccontextmanager
async def behind(shop, outer, action=paid, **options):
    async with served(IdempotencyMiddleware(shop.app(action, **options), outer)) as client:
        yield client


async def test_behind_another_integration_rows_and_record_are_committed_together(shop, tmp_path):
    fails = [1]

    def action(session):
        order(session)
        if fails:
            raise OSError("broken")
        return Response("paid", 201)

    elsewhere = f"sqlite:///{tmp_path / 'outer.db'}"
    async with behind(shop, elsewhere, action) as client:
        assert (await post(client)).status_code == 500
        assert (shop.orders(), shop.records()) == (0, [])
        fails.clear()
        assert (await post(client)).status_code == 201
        assert shop.records() == [State.SUCCEEDED]
        with Idempotency(elsewhere) as other:
            assert other.peek("k", scope="http").state is State.SUCCEEDED
            other.forget("k", scope="http")  # as if the save of the outer one had been lost
        again = await post(client)
    assert (again.status_code, again.content) == (201, b"paid")
    assert shop.orders() == 1


async def test_the_same_record_in_both_integrations_is_a_mistake(shop, caplog):
    async with behind(shop, shop.url) as client:
        answer = await post(client)
    assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_error")
    digest = Identity("http", "k").key_digest
    assert answer.json()["instance"] == f"urn:semel:key:{digest}"
    assert "give one of them another scope=" in caplog.text
    assert shop.orders() == 0


async def test_one_store_is_enough_for_both_integrations_with_a_scope_for_each(shop):
    async with behind(shop, shop.url, scope="endpoints") as client:
        answers = [await post(client), await post(client)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert shop.orders() == 1


@pytest.mark.parametrize("scope", ["http", "endpoints"])
async def test_a_key_that_another_request_has_is_no_mistake_behind_an_integration(
    shop, tmp_path, scope
):
    with Idempotency(shop.url) as elsewhere:
        async with behind(shop, f"sqlite:///{tmp_path / 'outer.db'}", scope=scope) as client:
            running = elsewhere.attempt("k", scope=scope)
            Context().run(running.__enter__)  # as another request does: it is not around this one
            assert (await post(client)).json()["code"] == "concurrent_request"
            Context().run(running.__exit__, None, None, None)
    assert shop.orders() == 0


# --- mistakes that only a request shows -----------------------------------------------------------


@pytest.mark.parametrize("case", ["another file", "no SQL", "another dialect"])
async def test_records_in_another_place_are_refused_before_anything_runs(
    tmp_path, request, caplog, case
):
    if case == "another file":
        url = f"sqlite:///{tmp_path / 'records.db'}"
    else:
        url = "memory://" if case == "no SQL" else request.getfixturevalue("postgres_url")
    for kind in KINDS:
        shop = Shop(f"sqlite:///{tmp_path / str(kind)}.db", kind)
        async with shop.serving(paid, url) as client:
            answer = await post(client)
        assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_error")
        assert shop.orders() == 0
        await shop.close()
    assert "ConfigError" in caplog.text


async def test_a_session_without_a_database_is_refused(shop, caplog):
    shop.maker.configure(bind=None)
    async with shop.serving(paid) as client:
        assert (await post(client)).status_code == 500
    assert "bound to one database" in caplog.text


async def test_a_session_of_another_kind_is_refused(shop, caplog):
    shop.maker = object
    if shop.kind.depends:
        shop.opened = shop.opened_async = object
    async with shop.serving(paid) as client:
        assert (await post(client)).json()["code"] == "idempotency_error"
    wanted = "an AsyncSession" if shop.kind.is_async else "a Session"
    assert f"an object, not {wanted}" in caplog.text


async def test_a_database_that_is_away_is_told_as_unavailable(
    make_shop, sqlite_url, caplog, tmp_path
):
    for kind in KINDS:
        shop = Shop(f"sqlite:///{tmp_path / str(kind)}.db", kind)
        async with shop.serving(paid) as client:
            assert (await post(client, "first")).status_code == 201
            plain = getattr(shop.engine, "sync_engine", shop.engine)

            @event.listens_for(plain, "do_connect")
            def away(*_):
                raise sqlite3.OperationalError("unable to open database file")

            answer = await post(client)
        assert (answer.status_code, answer.json()["code"]) == (503, "store_error")
        assert shop.orders() == 1
        await shop.close()


# --- sessions of dependencies ---------------------------------------------------------------------

DEPENDING = [kind for kind in KINDS if kind.depends]


@pytest.mark.parametrize("kind", DEPENDING, ids=str)
async def test_a_dependency_may_read_before_the_endpoint(make_shop, sqlite_url, kind):
    shop = make_shop(sqlite_url, kind)
    shop.before = lambda session: session.execute(text("SELECT number FROM orders")).all()
    async with shop.serving(paid) as client:
        first, second = await post(client), await post(client)
    assert first.json() == second.json()
    assert shop.orders() == 1
    assert shop.records() == [State.SUCCEEDED]


def flushed(session):
    session.add(Order(number=1))
    session.flush()


CHANGES = {
    "added": lambda session: session.add(Order(number=1)),
    "flushed": flushed,
    "inserted": lambda session: session.execute(insert(Order).values(number=1)),
    "updated": lambda session: session.execute(update(Order).values(number=1)),
    "deleted": lambda session: session.execute(delete(Order)),
    "in words": lambda session: session.execute(text("\n  Insert INTO orders VALUES (1)")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", DEPENDING, ids=str)
async def test_changes_of_a_dependency_are_refused(make_shop, sqlite_url, kind, change, caplog):
    shop = make_shop(sqlite_url, kind)
    shop.before = CHANGES[change]
    async with shop.serving(paid) as client:
        assert (await post(client)).status_code == 500
    assert "changes that were made before the endpoint" in caplog.text
    assert shop.orders() == 0


@pytest.mark.parametrize("kind", DEPENDING, ids=str)
async def test_a_dependency_may_commit_changes_of_its_own_before_the_endpoint(
    make_shop, sqlite_url, kind
):
    shop = make_shop(sqlite_url, kind)

    def before(session):
        with session.begin_nested():
            order(session)
        session.commit()

    shop.before = before
    async with shop.serving(paid) as client:
        answers = [await post(client), await post(client)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert shop.orders() == 3  # two of the dependency's, one of the endpoint's


@pytest.mark.parametrize("kind", DEPENDING, ids=str)
@pytest.mark.parametrize("status", [201, 409])
async def test_a_dependency_may_have_a_transaction_of_its_own_around_the_endpoint(
    make_shop, sqlite_url, kind, status
):
    shop = make_shop(sqlite_url, kind)

    def opened():
        with shop.maker.begin() as session:
            yield session

    async def opened_async():
        async with shop.maker.begin() as session:
            yield session

    shop.opened, shop.opened_async = opened, opened_async

    def action(session):
        order(session)
        return Response("answered", status)

    async with shop.serving(action) as client:
        answers = [await post(client), await post(client)]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert shop.orders() == (1 if status == 201 else 0)
    assert len(shop.records()) == shop.orders()


async def test_the_session_of_a_dependency_is_not_closed_under_a_cancelled_endpoint(
    make_shop, sqlite_url
):
    shop = make_shop(sqlite_url, Kind("fastapi", False, depends=True))
    told, entered, go_on = [], threading.Event(), threading.Event()

    async def opened():
        with shop.maker() as session:
            try:
                yield session
            finally:
                told.append("closed")

    def action(session):
        entered.set()
        go_on.wait(20)
        order(session)
        told.append("paid")
        return Response("paid", 201)

    shop.opened = opened
    around = Scoped(shop.app(action))
    async with served(around) as client:
        first = asyncio.create_task(post(client))
        await eventually(entered.is_set)
        around.enough.set()
        for _ in range(200):  # turns of the loop: cancelled by now, again and again
            await asyncio.sleep(0)
        go_on.set()
        assert (await first).text == "too slow"
        assert told == ["paid", "closed"]
        assert replayed(await post(client))
    assert shop.orders() == 1


# --- engines --------------------------------------------------------------------------------------


async def test_an_engine_of_the_session_s_kind_is_taken(shop):
    if shop.kind.is_async:
        async with AsyncIdempotency(shop.url) as idem, shop.serving(paid, idem) as client:
            assert [(await post(client)).status_code for _ in range(2)] == [201, 201]
    else:
        with Idempotency(shop.url) as idem:
            async with shop.serving(paid, idem) as client:
                assert [(await post(client)).status_code for _ in range(2)] == [201, 201]
            assert idem.peek("k", scope="http").state is State.SUCCEEDED  # still open
    assert shop.orders() == 1


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
