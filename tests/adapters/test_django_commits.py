"""Views inside a transaction that ends after them: the record waits for the commit."""

from __future__ import annotations

from adapters.django_project import MIDDLEWARE, apost, post, project, state

# That one told Django its settings, which other parts of it ask for.
# isort: split
import gc
import logging
import os
import signal
import threading
import time
import unittest

import pytest
from asgiref.sync import async_to_sync
from django.core.checks import run_checks
from django.db import DatabaseError, connections, transaction
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.test import RequestFactory, TestCase, override_settings

from semel import AsyncIdempotency, Idempotency, Policy, current_attempt
from semel.adapters.django import Idempotent, idempotent
from semel.core.records import State
from semel.stores.sql.sqlite import SQLiteStore
from semel.stores.tiered import AsyncTieredStore, TieredStore
from transactions.kinds import django_alias

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Shop:
    """A database whose requests are atomic; the records are elsewhere."""

    def __init__(self, dialect, url, records):
        self.alias, self.records = django_alias(dialect, url), records
        self.connection = connections[self.alias]
        # One dictionary: of a URL that was used before, there are two.
        connections.databases[self.alias] = self.connection.settings_dict
        self.connection.settings_dict["ATOMIC_REQUESTS"] = True
        self.runs = 0
        self.run("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        reference = "INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED"
        self.run(f"CREATE TABLE orders (parent {reference})")

    def run(self, sql):
        with self.connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def order(self, parent="NULL"):
        self.runs += 1
        self.run(f"INSERT INTO orders VALUES ({parent})")  # noqa: S608 - numbers of this test

    def orders(self):
        return len(self.run("SELECT * FROM orders"))

    def serving(self, view, **options):
        return project(self.records, {"pay": view}, **options)

    def state(self):
        return state(self.records)


@pytest.fixture
def shop(tmp_path, sqlite_url):
    shop = Shop("sqlite", f"sqlite:///{tmp_path / 'shop.db'}", sqlite_url)
    yield shop
    shop.connection.settings_dict["ATOMIC_REQUESTS"] = False
    shop.connection.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_shop(request, tmp_path, sqlite_url):
    if request.param == "sqlite":
        yield request.getfixturevalue("shop")
        return
    shop = Shop("postgresql", request.getfixturevalue("postgres_url"), sqlite_url)
    yield shop
    shop.connection.settings_dict["ATOMIC_REQUESTS"] = False
    shop.connection.close()


def test_a_record_is_saved_after_the_commit_and_not_before(any_shop):
    seen = []

    @idempotent
    def pay(request):
        any_shop.order()
        return HttpResponse("paid", status=201)

    def around(request):
        response = pay(request)
        inside = any_shop.connection.in_atomic_block
        seen.append((inside, any_shop.state(), current_attempt()))
        return response

    with any_shop.serving(around):
        assert post().status_code == 201
        assert post()["Idempotent-Replayed"] == "true"
    assert seen[0] == (True, State.PROCESSING, None)
    assert any_shop.orders() == any_shop.runs == 1
    assert any_shop.state() is State.SUCCEEDED


@pytest.mark.parametrize("integration", ["decorator", "middleware"])
@pytest.mark.fault(52)
def test_a_commit_that_fails_leaves_no_record_of_a_success(any_shop, integration):
    def pay(request):
        any_shop.order(999 if any_shop.runs == 0 else "NULL")  # no such parent: told at the commit
        return HttpResponse("paid", status=201)

    layers = [MIDDLEWARE] if integration == "middleware" else []
    view = pay if integration == "middleware" else idempotent(pay)
    with any_shop.serving(view, MIDDLEWARE=layers):
        assert post().status_code == 500
        assert any_shop.state() is State.FAILED
        again = post()
        assert again.status_code == 201
        assert "Idempotent-Replayed" not in again
        assert post()["Idempotent-Replayed"] == "true"
    assert any_shop.orders() == 1
    assert any_shop.runs == 2


@pytest.mark.fault(52)
def test_a_process_that_dies_before_the_commit_leaves_no_record_of_a_success(shop):
    @idempotent(policy=Policy(lease=1))
    def pay(request):
        shop.order()
        return HttpResponse("paid", status=201)

    with shop.serving(pay):
        shop.connection.close()
        child = os.fork()
        if child == 0:
            shop.connection.commit = lambda: os.kill(os.getpid(), signal.SIGKILL)
            post()
            os._exit(0)  # not reached: the fault has to fire
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert shop.state() is State.PROCESSING
        assert shop.orders() == 0
        end = time.monotonic() + PATIENCE
        while (answer := post()).status_code == 409 and time.monotonic() < end:
            time.sleep(0.05)
        assert answer.status_code == 201
        assert "Idempotent-Replayed" not in answer
    assert shop.orders() == 1


def test_a_view_that_rolls_back_its_transaction_is_not_done(shop):
    @idempotent
    def pay(request):
        shop.order()
        if shop.runs == 1:
            transaction.set_rollback(True, using=shop.alias)
        return HttpResponse("paid", status=201)

    with shop.serving(pay):
        assert [post().status_code for _ in range(3)] == [201, 201, 201]
    assert (shop.orders(), shop.runs) == (1, 2)


def test_what_a_view_raises_frees_the_key_when_it_is_rolled_back(shop):
    @idempotent
    def pay(request):
        shop.order()
        raise OSError("broken")

    with shop.serving(pay):
        assert post().status_code == 500
    assert shop.state() is State.FAILED
    assert shop.orders() == 0


def test_an_answer_that_is_raised_and_stored_counts_although_it_rolls_back(shop):
    @idempotent
    def pay(request):
        shop.order()
        raise Http404("no such order")

    with shop.serving(pay, STORED="web.profiles.deterministic"):
        assert post().status_code == 404
        assert post()["Idempotent-Replayed"] == "true"
    assert (shop.orders(), shop.runs) == (0, 1)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_an_answer_that_is_not_stored_frees_the_key_after_the_transaction(shop, rolled_back):
    @idempotent
    def pay(request):
        shop.order()
        transaction.set_rollback(rolled_back, using=shop.alias)
        return HttpResponse("out of stock", status=409)

    with shop.serving(pay):
        assert [post().content for _ in range(2)] == [b"out of stock"] * 2
    assert shop.state() is State.FAILED
    assert (shop.orders(), shop.runs) == (0 if rolled_back else 2, 2)


def test_events_free_the_key_after_the_commit(shop):
    @idempotent
    def pay(request):
        shop.order()
        return StreamingHttpResponse(iter(["data: 1\n\n"]), content_type="text/event-stream")

    with shop.serving(pay):
        answer = post()
        assert answer["Idempotent-Unprotected"] == "stream"
        assert answer.getvalue() == b"data: 1\n\n"
    assert shop.state() is State.FAILED


def test_a_large_stream_that_breaks_off_after_its_rows_are_committed_does_not_run_again(shop):
    """Else a retry would repeat the rows; the page says so."""

    def breaking():
        yield from [b"x" * 6] * 3
        raise OSError("broken")

    @idempotent
    def pay(request):
        shop.order()
        return StreamingHttpResponse(breaking())

    with shop.serving(pay, MAX_RESPONSE=10):
        with pytest.raises(OSError, match="broken"):
            post().getvalue()
        assert post().json()["code"] == "result_omitted"
    assert (shop.orders(), shop.runs) == (1, 1)


@pytest.mark.parametrize("parent", ["NULL", 999])
def test_a_large_stream_is_done_with_the_rows_of_its_view(shop, parent):
    @idempotent
    def pay(request):
        shop.order(parent)
        return StreamingHttpResponse(iter([b"x" * 6] * 3))

    with shop.serving(pay, MAX_RESPONSE=10):
        first = post()
        if parent == "NULL":
            assert first.getvalue() == b"x" * 18
            assert post().json()["code"] == "result_omitted"
        else:
            assert first.status_code == 500
            assert shop.state() is State.FAILED
    assert shop.runs == 1


def test_a_hook_of_the_application_that_raises_keeps_no_record_from_being_saved(shop):
    def failing():
        raise OSError("broken hook")

    @idempotent
    def pay(request):
        shop.order()
        transaction.on_commit(failing, using=shop.alias)
        return HttpResponse("paid", status=201)

    with shop.serving(pay):
        assert post().status_code == 500
        assert post()["Idempotent-Replayed"] == "true"
    assert (shop.orders(), shop.runs) == (1, 1)


def test_a_record_waits_for_the_commits_of_all_databases(shop, tmp_path):
    other = Shop("sqlite", f"sqlite:///{tmp_path / 'other.db'}", shop.records)
    other.connection.settings_dict["ATOMIC_REQUESTS"] = False
    seen = []

    @idempotent
    def pay(request):
        shop.order()
        other.order(999 if shop.runs == 1 else "NULL")
        return HttpResponse("paid", status=201)

    def around(request):
        # The shop's own transaction is inside, and is committed; the other one then fails.
        with transaction.atomic(using=other.alias):
            with transaction.atomic(using=shop.alias):
                response = pay(request)
            seen.append(shop.state())
            return response

    shop.connection.settings_dict["ATOMIC_REQUESTS"] = False
    with shop.serving(around):
        assert post().status_code == 500
        assert shop.state() is State.FAILED
        assert post().status_code == 201
        assert post()["Idempotent-Replayed"] == "true"
    assert seen == [State.PROCESSING, State.PROCESSING, State.SUCCEEDED]
    assert shop.runs == 2
    other.connection.close()


def test_a_savepoint_that_is_rolled_back_undoes_the_success(shop):
    seen = []

    @idempotent
    def pay(request):
        shop.order()
        return HttpResponse("paid", status=201)

    def around(request):
        with transaction.atomic(using=shop.alias):
            pay(request)
            transaction.set_rollback(True, using=shop.alias)
        seen.append(shop.state())
        return HttpResponse("not paid", status=202)

    with shop.serving(around):
        assert post().status_code == 202
    assert seen == [State.FAILED]
    assert shop.state() is State.FAILED
    assert shop.orders() == 0


@pytest.mark.parametrize("closed_by", ["the view", "what is around it"])
def test_a_connection_that_is_closed_in_its_transaction_has_rolled_it_back(shop, closed_by):
    @idempotent
    def pay(request):
        shop.order()
        if closed_by == "the view":
            shop.connection.close()
        return HttpResponse("paid", status=201)

    def around(request):
        response = pay(request)
        shop.connection.close()
        return response

    with shop.serving(around):
        assert post().status_code == 201
        assert shop.state() is State.FAILED
    assert shop.orders() == 0


HOLD = Policy(abandoned="hold", not_done=[DatabaseError])


@pytest.fixture
def remote(postgres_url, sqlite_url):
    shop = Shop("postgresql", postgres_url, sqlite_url)
    yield shop
    shop.connection.settings_dict["ATOMIC_REQUESTS"] = False
    shop.connection.close()


@pytest.mark.parametrize("policy", [HOLD, Policy()])
def test_a_commit_whose_answer_is_lost_is_unknown_where_the_policy_holds(
    remote, monkeypatch, policy
):
    really, cut = remote.connection._commit, []

    def committed_and_cut():
        really()
        if not cut:
            cut.append(True)
            remote.run("SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(60)")

    @idempotent(policy=policy)
    def pay(request):
        remote.order()
        return HttpResponse("paid", status=201)

    with remote.serving(pay):
        monkeypatch.setattr(remote.connection, "_commit", committed_and_cut)
        assert post().status_code == 500
        assert cut
        again = post()
    if policy is HOLD:
        assert again.json()["code"] == "outcome_unknown"
        assert (remote.orders(), remote.runs) == (1, 1)
    else:  # as documented: atomic= decides it in the database
        assert again.status_code == 201
        assert (remote.orders(), remote.runs) == (2, 2)


def test_a_rollback_after_the_commit_of_another_database_is_unknown_where_the_policy_holds(
    shop, tmp_path
):
    other = Shop("sqlite", f"sqlite:///{tmp_path / 'other.db'}", shop.records)
    other.connection.settings_dict["ATOMIC_REQUESTS"] = False
    shop.connection.settings_dict["ATOMIC_REQUESTS"] = False

    @idempotent(policy=HOLD)
    def pay(request):
        shop.order()
        other.order(999)  # no such parent: the database says so at the commit
        return HttpResponse("paid", status=201)

    def around(request):
        with transaction.atomic(using=other.alias), transaction.atomic(using=shop.alias):
            return pay(request)

    with shop.serving(around):
        assert post().status_code == 500
        assert post().json()["code"] == "outcome_unknown"
    assert (shop.orders(), other.orders(), shop.runs) == (1, 0, 1)
    other.connection.close()


def test_a_rollback_that_is_certain_frees_the_key_as_the_policy_says(shop):
    @idempotent(policy=HOLD)
    def pay(request):
        shop.order(999 if shop.runs == 0 else "NULL")
        return HttpResponse("paid", status=201)

    with shop.serving(pay):
        assert [post().status_code for _ in range(2)] == [500, 201]
    assert (shop.orders(), shop.runs) == (1, 2)


def test_the_garbage_collector_ends_no_attempt_by_itself(shop):
    told = []

    def hook(event):
        told.append(threading.get_ident())

    def answer_only(request):
        return HttpResponse("paid", status=201)

    with Idempotency(shop.records, hooks=[hook]) as idem:
        view = Idempotent(idem, policy=Policy(lease=1))(answer_only)

        def leave_open():
            # As a thread that ends inside its transaction, with all that is in it.
            transaction.atomic(using=shop.alias).__enter__()
            headers = {"Idempotency-Key": "k"}
            request = RequestFactory().post("/pay/", b"", "text/plain", headers=headers)
            assert view(request).status_code == 201
            connections[shop.alias].connection.close()

        gc.collect()
        gc.disable()
        try:
            thread = threading.Thread(target=leave_open)
            thread.start()
            thread.join()
            assert shop.state() is State.PROCESSING
            told.clear()
            gc.collect()  # at any line of any thread, also where the engine holds a lock
            assert threading.get_ident() not in told
        finally:
            gc.enable()
        with project(shop.records, {"pay": idempotent(paying(shop))}):
            end = time.monotonic() + PATIENCE
            while (answer := post()).status_code == 409 and time.monotonic() < end:
                time.sleep(0.05)
        assert answer.status_code == 201
        assert "Idempotent-Replayed" not in answer
    assert shop.orders() == 1


@pytest.mark.parametrize("by", ["the settings", "a middleware"])
@pytest.mark.parametrize("connected", [True, False])
def test_a_transaction_without_a_block_is_refused(shop, caplog, by, connected):
    logging.disable(logging.NOTSET)
    shop.connection.settings_dict["ATOMIC_REQUESTS"] = False
    if by == "the settings":
        shop.connection.settings_dict["AUTOCOMMIT"] = False
        shop.connection.close()
        if connected:
            shop.connection.connect()
    else:
        shop.connection.set_autocommit(False)
    try:
        with shop.serving(idempotent(paying(shop))):
            answer = post()
    finally:
        shop.connection.settings_dict["AUTOCOMMIT"] = True
        shop.connection.close()
    assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_error")
    assert "autocommit switched off" in caplog.text
    assert shop.runs == 0


def test_a_plain_view_under_asgi_is_recorded_after_the_commit_too(shop):
    @idempotent
    def pay(request):
        shop.order(999 if shop.runs == 0 else "NULL")
        return HttpResponse("paid", status=201)

    send = async_to_sync(apost)  # so the view runs on this thread, with this connection
    with shop.serving(pay):
        assert send().status_code == 500
        assert shop.state() is State.FAILED
        assert send().status_code == 201
        assert send()["Idempotent-Replayed"] == "true"
    assert (shop.orders(), shop.runs) == (1, 2)


# --- records in the same SQLite file --------------------------------------------------------------


@pytest.fixture
def one_file(sqlite_url):
    with Idempotency(sqlite_url) as idem:
        idem.peek("any")
    shop = Shop("sqlite", sqlite_url, sqlite_url)
    yield shop
    shop.connection.settings_dict["ATOMIC_REQUESTS"] = False
    shop.connection.close()


def paying(shop):
    def pay(request):
        shop.order()
        return HttpResponse("paid", status=201)

    return pay


def test_a_view_that_would_wait_for_itself_is_refused_before_it_runs(one_file, caplog):
    logging.disable(logging.NOTSET)
    view = idempotent(paying(one_file))
    with one_file.serving(view):
        answer = post()
    assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_error")
    assert "the same SQLite file" in caplog.text
    assert "ATOMIC_REQUESTS" in caplog.text
    assert one_file.runs == 0
    assert one_file.state() is None


def test_a_request_without_a_key_has_nothing_to_wait_for(one_file):
    with one_file.serving(idempotent(paying(one_file))):
        assert post(key=None).status_code == 201


def test_in_one_file_the_record_is_committed_with_the_rows_by_atomic(one_file):
    view = idempotent(atomic=one_file.alias)(paying(one_file))
    with one_file.serving(view):
        assert post().status_code == 201
        assert post()["Idempotent-Replayed"] == "true"
    assert (one_file.orders(), one_file.runs) == (1, 1)


def test_the_middleware_stands_outside_of_the_transaction_in_one_file(one_file):
    with one_file.serving(paying(one_file), MIDDLEWARE=[MIDDLEWARE]):
        assert post().status_code == 201
        assert post()["Idempotent-Replayed"] == "true"
    assert (one_file.orders(), one_file.runs) == (1, 1)


# --- the transaction of a TestCase ----------------------------------------------------------------


@pytest.fixture
def in_testcase():
    """Run something as a test of a TestCase does: in a transaction that is never committed."""

    def run(alias, test):
        class Case(TestCase):
            databases = frozenset({alias})

            def runTest(self):  # noqa: N802 - so unittest calls it
                test()

        result = unittest.TestResult()
        unittest.TestSuite([Case()]).run(result)
        assert result.wasSuccessful(), (result.errors, result.failures)

    return run


@pytest.mark.parametrize("atomic_requests", [True, False])
def test_in_a_testcase_a_view_is_replayed_as_ever(shop, in_testcase, atomic_requests):
    shop.connection.settings_dict["ATOMIC_REQUESTS"] = atomic_requests

    def test():
        shop.order()  # as what a test prepares
        with shop.serving(idempotent(paying(shop))):
            assert post().status_code == 201
            assert post()["Idempotent-Replayed"] == "true"
        assert shop.orders() == 2

    in_testcase(shop.alias, test)
    assert shop.orders() == 0


@pytest.mark.parametrize("integration", ["decorator", "middleware"])
def test_in_a_testcase_on_one_file_a_view_is_refused_at_once(
    one_file, in_testcase, integration, caplog
):
    logging.disable(logging.NOTSET)
    one_file.connection.settings_dict["ATOMIC_REQUESTS"] = False
    layers = [MIDDLEWARE] if integration == "middleware" else []
    view = paying(one_file) if integration == "middleware" else idempotent(paying(one_file))

    def test():
        one_file.order()
        with one_file.serving(view, MIDDLEWARE=layers):
            assert post().json()["code"] == "idempotency_error"
        atomic = idempotent(atomic=one_file.alias)(paying(one_file))
        with one_file.serving(atomic):
            assert [post().status_code for _ in range(2)] == [201, 201]
        assert one_file.runs == 2

    in_testcase(one_file.alias, test)
    assert "a TransactionTestCase or another URL" in caplog.text


async def test_an_async_view_in_a_testcase_on_one_file_is_refused_at_once(one_file):
    async def pay(request):
        """Never run."""

    one_file.connection.settings_dict["ATOMIC_REQUESTS"] = False
    with transaction.atomic(using=one_file.alias):
        async with AsyncIdempotency(one_file.records) as idem:
            with project("memory://", {"pay": Idempotent(idem)(pay)}):
                assert (await apost()).json()["code"] == "idempotency_error"
    connections[one_file.alias].close()  # each task has connections of its own


def test_records_behind_a_tier_in_the_same_file_are_found(one_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    behind = SQLiteStore(os.path.relpath(one_file.connection.settings_dict["NAME"]))
    monkeypatch.chdir("/")
    store = TieredStore("redis://127.0.0.1:1/", behind)  # it is not asked
    with (
        Idempotency(store) as idem,
        project("memory://", {"pay": Idempotent(idem)(paying(one_file))}),
    ):
        assert post().json()["code"] == "idempotency_error"
    assert one_file.runs == 0
    store.close()
    behind.close()


async def test_records_on_a_server_are_in_no_file():
    url = "postgresql://127.0.0.1:1/none"
    store = TieredStore("redis://127.0.0.1:1/", url)
    astore = AsyncTieredStore("redis://127.0.0.1:1/", url)
    assert (store.path, astore.path) == (None, None)
    store.close()
    await astore.close()


def test_records_in_memory_are_in_no_file(one_file):
    view = idempotent(paying(one_file))
    with project("memory://", {"pay": view}):
        assert post().status_code == 201
        assert post()["Idempotent-Replayed"] == "true"


# --- the check of the settings --------------------------------------------------------------------


def test_the_check_names_atomic_requests(shop):
    url = f"sqlite:///{shop.connection.settings_dict['NAME']}"
    for records, told in ((url, "semel.W003"), (shop.records, "semel.I001")):
        with override_settings(SEMEL={"URL": records}):
            (message,) = run_checks(tags=["semel"])
        assert message.id == told
        assert f"ATOMIC_REQUESTS of {shop.alias!r}" in message.msg


def test_the_check_names_atomic_requests_before_the_file_is_there(shop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setitem(shop.connection.settings_dict, "NAME", str(tmp_path / "later.db"))
    for records, told in (
        ("sqlite:///later.db", "semel.W003"),
        (f"sqlite:///{tmp_path}/link/later.db", "semel.W003"),
        ("sqlite:///records.db", "semel.I001"),
    ):
        with override_settings(SEMEL={"URL": records}):
            (message,) = run_checks(tags=["semel"])
        assert message.id == told
    assert not (tmp_path / "later.db").exists(), "a check makes no file"


def test_the_check_says_nothing_of_atomic_requests_where_the_settings_are_wrong(shop):
    with override_settings(SEMEL={"URL": "nonsense://"}):
        (message,) = run_checks(tags=["semel"])
    assert message.id == "semel.E001"
