"""Handlers, filters and formatters of a log, and hooks, that raise: what they watch goes on.

| # | fault | what must hold |
|---|---|---|
| 54 | a log handler, a filter or a hook raises, whatever it raises | call, renewal and result are as without it; only KeyboardInterrupt, what a signal handler raised and gevent's own get out |
"""

from __future__ import annotations

import asyncio
import io
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import gevent
import pytest

from engines.facade import Effect, World, never, wait_until
from semel import AsyncIdempotency, Idempotency, events
from semel.adapters import asgi, wsgi
from semel.adapters._sync.consuming import Consumer
from semel.adapters.consuming import AsyncConsumer
from semel.core.records import ClaimRequest, Identity, State
from semel.engine.colours import threads
from semel.events import logger
from semel.messages import Ack, Later, Message
from semel.repair import AsyncReconciler, Reconciler, Succeeded
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import AsyncFaultyStore, FaultyStore, Refuse

fault = pytest.mark.fault


class Panic(BaseException):
    """As a library in Rust raises when it panics."""


RAISED = [ConnectionError, asyncio.CancelledError, SystemExit, Panic]


class Broken:
    """Whatever watches: it raises each time it is called."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.fired = 0

    def __call__(self, *_: object, **__: object) -> None:
        self.fired += 1
        raise self.kind("the log server is unreachable")

    format = __call__


LOGGERS = [logging.getLogger(f"semel{name}") for name in ("", ".repair", ".audit")]


@contextmanager
def as_filter(broken: Callable[..., object]) -> Iterator[None]:
    for one in LOGGERS:
        one.addFilter(broken)
    try:
        yield
    finally:
        for one in LOGGERS:
            one.removeFilter(broken)


@contextmanager
def attached(handler: logging.Handler) -> Iterator[None]:
    for one in LOGGERS:
        one.addHandler(handler)
    try:
        yield
    finally:
        for one in LOGGERS:
            one.removeHandler(handler)


def as_handler(broken: Callable[..., object]) -> AbstractContextManager[None]:
    handler = logging.Handler()
    handler.emit = broken
    return attached(handler)


def as_formatter(broken: Broken) -> AbstractContextManager[None]:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(broken)
    return attached(handler)


@contextmanager
def as_record_factory(broken: Broken) -> Iterator[None]:
    usual = logging.getLogRecordFactory()

    def made(*args: object, **kwargs: object) -> logging.LogRecord:
        record = usual(*args, **kwargs)
        return broken() if record.name.startswith("semel") else record

    logging.setLogRecordFactory(made)
    try:
        yield
    finally:
        logging.setLogRecordFactory(usual)


ATTACH = {
    "handler": as_handler,
    "filter": as_filter,
    "formatter": as_formatter,
    "record": as_record_factory,
    "hook": None,
}


@pytest.fixture(autouse=True)
def _every_record(caplog):
    for one in LOGGERS:
        caplog.set_level(logging.DEBUG, logger=one.name)


@pytest.fixture(params=RAISED)
def broken(request) -> Broken:
    return Broken(request.param)


@pytest.fixture(params=ATTACH)
def hooks(request, broken) -> Iterator[list[Callable[[events.Event], object]]]:
    """What watches is broken, in each way; these are the hooks of an engine then."""
    attach = ATTACH[request.param]
    if attach is None:
        yield [broken]
    else:
        with attach(broken):
            yield []
    assert broken.fired, "the fault never came"


@pytest.fixture(params=["threads", "asyncio"])
def world(request) -> Iterator[World]:
    with World(request.param, "memory://") as opened:
        yield opened


def watched(world: World, hooks, **options):
    engine = world.engine(**options)
    engine.engine.internals.announce._hooks += (*hooks,)
    return engine


def renew_now(engine) -> None:
    """Let the leases of an engine be due, long before they end."""
    for lease in engine.engine.internals.leases.running():
        lease.due = 0.0
    timer = engine.engine.internals.renewer.timer
    loop = engine.engine.internals.loop_guard.loop if hasattr(timer, "_handle") else None
    if loop is None:
        timer.due(0.0)
    else:
        loop.call_soon_threadsafe(timer.due, 0.0)


@fault(54)
def test_call_renewal_save_and_failure_are_as_without_it(world, hooks):
    engine, other = watched(world, hooks), world.engine()
    effect = Effect("paid").held()
    engine.store.inject("renew_many", Refuse())
    first = engine.start("k", effect)
    effect.wait_started()
    for number in (1, 2, 3):  # the first one fails, and the timer goes on
        renew_now(engine)
        wait_until(lambda number=number: engine.commands("renew_many") >= number)
    assert engine.store.fired("renew_many") == 1
    engine.store.inject("complete", Refuse())
    effect.release()
    assert first.result() == "paid"
    assert other.execute("k", never) == engine.execute("k", never) == "paid"
    assert effect.runs == 1
    assert not engine.told(events.LostLease)
    engine.store.inject("fail", Refuse(), times=2)
    with pytest.raises(KeyError, match="declined"):
        engine.execute("f", Effect(raising=KeyError("declined")))


@fault(54)
def test_a_timer_survives_what_is_raised_in_it_and_in_its_log(broken):
    ticks = []

    def tick() -> float:
        ticks.append(threading.current_thread())
        raise broken.kind

    timer = threads.Timer(tick)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "AFTER_FAILURE", 0.01)
        patch.setattr(logger, "log", broken)  # even what gets out of a log
        timer.due(0.0)
        wait_until(lambda: len(ticks) >= 3)
        timer.stop()
    assert broken.fired >= 2
    assert len(set(ticks)) == 1


@fault(54)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_timer_whose_thread_was_ended_starts_another(monkeypatch):
    monkeypatch.setattr(threads, "AFTER_FAILURE", 0.01)
    ticks = []
    timer = threads.Timer(lambda: ticks.append(threading.current_thread()) or 0.0)
    wait, ended = timer._serve, []

    def struck(me: threading.Thread) -> None:
        if not ended:
            ended.append(me)
            raise Panic
        wait(me)

    monkeypatch.setattr(timer, "_serve", struck)
    timer.due(0.0)
    wait_until(lambda: ticks)
    timer.stop()
    assert ticks[0] is not ended[0]


# --- adapters and the reconciler ------------------------------------------------------------------


def engine_of(kind: str, hooks):
    if kind == "threads":
        store = FaultyStore(MemoryStore())
        return Idempotency(store, hooks=hooks), store
    store = AsyncFaultyStore(AsyncMemoryStore())
    return AsyncIdempotency(store, hooks=hooks), store


def posted(app) -> tuple[str, bytes]:
    sent = []
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/pay",
        "SERVER_NAME": "here",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(b""),
        "HTTP_IDEMPOTENCY_KEY": "abc",
    }
    body = app(environ, lambda status, _, *__: sent.append(status))
    try:
        return sent[0], b"".join(body)
    finally:
        getattr(body, "close", int)()


@fault(54)
def test_a_wsgi_response_is_as_without_it(hooks):
    engine, store = engine_of("threads", hooks)
    effect = Effect([b"paid"])

    def application(_, start):
        start("201 Created", [("Content-Type", "text/plain")])
        return effect()

    with engine:
        app = wsgi.IdempotencyMiddleware(application, engine)
        store.inject("complete", Refuse())
        assert posted(app) == posted(app) == ("201 Created", b"paid")
    assert effect.runs == 1


@fault(54)
async def test_an_asgi_response_is_as_without_it(hooks):
    engine, store = engine_of("asyncio", hooks)
    runs = []

    async def application(scope, receive, send):
        runs.append(scope["path"])
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})

    app = asgi.IdempotencyMiddleware(application, engine)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/pay",
        "query_string": b"",
        "headers": [(b"idempotency-key", b"abc")],
    }

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def posted_to() -> tuple[int, bytes]:
        sent = []

        async def send(message):
            sent.append(message)

        await app({**scope}, receive, send)
        return sent[0]["status"], b"".join(part.get("body", b"") for part in sent)

    async with engine:
        store.inject("complete", Refuse())
        assert await posted_to() == await posted_to() == (201, b"paid")
    assert len(runs) == 1


MESSAGE = Message(id="m-1", body=b"{}")


@fault(54)
def test_a_message_is_handled_as_without_it_by_threads(hooks):
    engine, store = engine_of("threads", hooks)
    effect = Effect()
    with engine:
        consumer = Consumer(engine, effect, {"consumer": "mailer"})
        store.inject("claim", Refuse())
        assert isinstance(consumer.handle(MESSAGE), Later)
        store.inject("complete", Refuse())
        assert isinstance(consumer.handle(MESSAGE), Ack)
        assert isinstance(consumer.handle(MESSAGE), Ack)
    assert effect.runs == 1


@fault(54)
async def test_a_message_is_handled_as_without_it_by_tasks(hooks):
    engine, store = engine_of("asyncio", hooks)
    effect = Effect()

    async def handler() -> None:
        effect()

    async with engine:
        consumer = AsyncConsumer(engine, handler, {"consumer": "mailer"})
        store.inject("claim", Refuse())
        assert isinstance(await consumer.handle(MESSAGE), Later)
        store.inject("complete", Refuse())
        assert isinstance(await consumer.handle(MESSAGE), Ack)
        assert isinstance(await consumer.handle(MESSAGE), Ack)
    assert effect.runs == 1


ABANDONED = ClaimRequest(Identity("orders", "k"), b"somebody....", None, 0.001, 60.0)
FOUND = {"orders": lambda _: Succeeded("found out")}


@fault(54)
def test_a_reconciler_decides_as_without_it(hooks, broken):
    engine, store = engine_of("threads", hooks)
    with engine:
        store.ask(ABANDONED)
        wait_until(lambda: store.get(ABANDONED.identity).abandoned)
        reconciler = Reconciler(engine, FOUND, older_than=0, audit=broken)
        assert reconciler.run_once().resolved == 1
        assert engine.execute("k", never, scope="orders") == "found out"


@fault(54)
async def test_so_does_one_for_tasks(hooks, broken):
    engine, store = engine_of("asyncio", hooks)
    async with engine:
        await store.ask(ABANDONED)
        record = await store.get(ABANDONED.identity)
        while not record.abandoned:
            record = await store.get(ABANDONED.identity)
        reconciler = AsyncReconciler(engine, FOUND, older_than=0)
        assert (await reconciler.run_once()).resolved == 1
        assert (await store.get(ABANDONED.identity)).state is State.SUCCEEDED


# --- what gets out --------------------------------------------------------------------------------


class TimeIsUp(Exception):
    """What Celery's soft time limit raises from a signal's handler."""


def time_is_up(*_: object) -> None:
    raise TimeIsUp


def by_a_signal(*_: object) -> None:
    """Receive the signal, as while a handler writes to its log server."""
    signal.raise_signal(signal.SIGUSR1)


def by_ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


def by_gevent(*_: object) -> None:
    """Wait, as for a log server, until the time that its greenlet has is over."""
    gevent.sleep(60)


def by_the_end_of_a_greenlet(*_: object) -> None:
    raise gevent.GreenletExit


OUT = {
    by_a_signal: TimeIsUp,
    by_ctrl_c: KeyboardInterrupt,
    by_gevent: gevent.Timeout,
    by_the_end_of_a_greenlet: gevent.GreenletExit,
}


@fault(54)
@pytest.mark.parametrize("watches", ["hook", "handler"])
@pytest.mark.parametrize("meeting", OUT, ids=lambda meeting: meeting.__name__)
def test_what_only_met_an_observer_reaches_the_caller_and_the_result_is_kept(meeting, watches):
    armed = [meeting]

    def watching(*_: object) -> None:
        if armed:
            armed.pop()()

    before = signal.signal(signal.SIGUSR1, time_is_up)
    try:
        with (
            Idempotency("memory://", hooks=[watching] if watches == "hook" else []) as idem,
            as_handler(watching) if watches == "handler" else nullcontext(),
            gevent.Timeout(0.05 if meeting is by_gevent else None, False),
        ):
            with pytest.raises(OUT[meeting]):
                idem.execute("k", lambda: "paid")
            assert not armed
            assert idem.marks.check("k"), "the result is saved"
    finally:
        signal.signal(signal.SIGUSR1, before)
