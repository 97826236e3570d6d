"""Clients that go away, deadlines, long handlers, and the ends of servers."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from adapters.rpc.shop import PAY, Server, Shop, finished
from engines.facade import World, wait_until
from semel import Policy
from semel.core.records import State
from semel.events import Ran

OK = grpc.StatusCode.OK


def is_stored(engine, key="k"):
    record = engine.peek(key, scope="grpc")
    return record is not None and record.state is State.SUCCEEDED


def cancel(call, server, shop):
    """Cancel a call whose handler runs, and wait until its server has let go of it."""
    shop.wait_held()
    assert shop.kind == "threads" or not is_over(server)
    call.cancel()
    if shop.kind != "threads":  # where nothing but `is_active` would tell
        wait_until(lambda: is_over(server))


def is_over(server):
    """The call's own task has ended; if anything is left, it is the handler's."""

    async def tasks():
        return [task.get_name() for task in asyncio.all_tasks()]

    return not any(PAY in name for name in server.world.kind.finish(tasks))


def test_a_client_that_cancels_takes_neither_the_handler_nor_the_save_with_it(serve):
    server, shop, engine = serve()
    cancel(server.client.start(PAY, "hold", "k"), server, shop)
    busy = server.client.pay("hold", "k")
    assert busy.status == "concurrent-request"
    shop.release()
    wait_until(lambda: is_stored(engine))
    again = server.client.pay("hold", "k")
    assert again.value == "run 1"
    assert again.replayed
    assert shop.runs == ["hold"]


def test_a_deadline_that_passes_takes_neither_the_handler_nor_the_save_with_it(serve):
    server, shop, engine = serve()
    late = finished(server.client.start(PAY, "hold", "k", timeout=0.2))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    shop.wait_held()
    shop.release()
    wait_until(lambda: is_stored(engine))
    assert server.client.pay("hold", "k").replayed
    assert shop.runs == ["hold"]


def test_a_handler_whose_client_has_gone_may_still_ask_who_it_was(serve):
    server, shop, engine = serve()
    cancel(server.client.start(PAY, "hold peer", "k"), server, shop)
    shop.release()
    wait_until(lambda: is_stored(engine))
    ((peer, auth, identities),) = shop.seen
    assert peer.startswith("ipv4:127.0.0.1")
    assert isinstance(auth, dict)
    assert identities is None


def test_a_handler_whose_deadline_has_passed_may_still_ask_who_its_client_was(serve, kind):
    if kind == "threads":
        pytest.skip("its context is gRPC's own, which does not know that either")
    server, shop, engine = serve()
    late = finished(server.client.start(PAY, "hold peer", "k", timeout=0.5))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    shop.wait_held()
    wait_until(lambda: is_over(server))
    shop.release()
    wait_until(lambda: is_stored(engine))
    ((peer, *_),) = shop.seen
    assert peer.startswith("ipv4:127.0.0.1")


def test_a_handler_that_fails_after_its_client_has_gone_frees_the_key(serve, kind, caplog):
    server, shop, engine = serve()
    cancel(server.client.start(PAY, "hold raise oh", "k"), server, shop)
    shop.release()
    shop.wait_ended()
    wait_until(lambda: not engine.engine.internals.leases)
    assert server.client.pay("ok", "k").value == "run 2"
    if kind != "threads":
        assert "after its client had disconnected" in caplog.text


def test_a_handler_that_aborts_after_its_client_has_gone_harms_nobody(serve):
    server, shop, engine = serve()
    cancel(server.client.start(PAY, "hold abort NOT_FOUND", "k"), server, shop)
    shop.release()
    shop.wait_ended()
    wait_until(lambda: not engine.engine.internals.leases)
    assert server.client.pay("ok", "k").value == "run 2"


def test_an_unprotected_call_is_cancelled_as_without_us(serve, kind):
    server, shop, _ = serve(key=lambda _: None)
    cancel(server.client.start(PAY, "hold"), server, shop)
    if kind == "asyncio":
        shop.wait_ended()  # its handler was cancelled
    shop.release()
    assert server.client.pay("ok").value == "run 2"


def test_a_handler_longer_than_its_lease_runs_once(serve):
    server, shop, engine = serve(policy=Policy(lease=0.3))
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    renewals = engine.commands("renew", "renew_many")
    wait_until(lambda: engine.commands("renew", "renew_many") >= renewals + 6)  # two leases
    assert server.client.pay("hold", "k").status == "concurrent-request"
    shop.release()
    assert finished(held).value == "run 1"
    assert server.client.pay("hold", "k").replayed
    assert shop.runs == ["hold"]


def test_an_interceptor_opened_by_url_closes_what_it_opened(kind, sqlite_url):
    with World("threads" if kind == "threads" else "asyncio", "memory://") as world:
        shop = Shop(kind)
        server = Server(world, shop, sqlite_url)
        assert server.client.pay("ok", "k").value == "run 1"
        assert server.client.pay("ok", "k").replayed
        engine = server.interceptor._engine
        server.close()
        assert engine.internals.closed


def test_closing_waits_for_handlers_whose_clients_have_gone(sqlite_url):
    with World("asyncio", sqlite_url) as world:
        shop, engine = Shop("asyncio"), world.engine()
        server = Server(world, shop, engine.engine)
        cancel(server.client.start(PAY, "hold", "k"), server, shop)
        threading.Timer(0.1, shop.release).start()
        world.kind.finish(server.interceptor.close)
        assert is_stored(engine)
        assert engine.told(Ran)
        server.close()


@pytest.mark.parametrize("kind", ["threads", "plain"])
def test_a_plain_handler_that_finds_nothing_fails_as_any_other(serve, monkeypatch):
    """A StopIteration cannot leave a thread for a loop: its task would wait for ever."""
    monkeypatch.setattr(Shop, "_made", lambda *_: lambda *_: next(iter(())))
    server, _, engine = serve()
    assert server.client.pay("ok", "k").code is grpc.StatusCode.UNKNOWN
    assert engine.peek("k", scope="grpc").state is State.FAILED


@pytest.mark.parametrize(
    ("options", "warnings"),
    [({}, 1), ({"tenant": None}, 0), ({"tenant": lambda _: "ann"}, 0)],
    ids=["unset", "none", "set"],
)
def test_an_interceptor_warns_once_that_keys_are_shared(serve, caplog, options, warnings):
    server, _, _ = serve(**options)
    said = "tenant= is not set, so all clients share their keys"
    assert said not in caplog.text
    for key in ("a", "b"):
        assert server.client.pay("ok", key).code is OK
    assert caplog.text.count(said) == warnings
