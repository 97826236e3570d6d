"""Every logger of semel is one whose handlers may raise, and every hook is called in one place."""

from __future__ import annotations

import ast
import inspect
import logging
import signal
import weakref
from functools import partial, wraps
from pathlib import Path

import pytest

import semel
from semel.core import observers
from semel.core.observers import Log, unheard

SOURCE = Path(semel.__file__).parent
WRITING = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
OF_A_LOGGER = {"getLogger", "getChild", "makeRecord", "handle", "callHandlers", "_log"} | WRITING


def logs_past_it(source: str) -> list[str]:
    """What a module does with loggers of `logging` itself, instead of by a `Log`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "logging":
            found.append(ast.unparse(node))
        if isinstance(node, ast.Attribute) and node.attr in OF_A_LOGGER:
            owner = ast.unparse(node.value)
            # `logging` itself, or the logger inside a `Log` (or of a framework): `app.logger.info`.
            if owner == "logging" or owner.endswith((".logger", "getLogger()")):
                found.append(ast.unparse(node))
    return found


def test_no_module_writes_to_a_logger_of_its_own():
    modules = [path for path in SOURCE.rglob("*.py") if path != Path(observers.__file__)]
    assert len(modules) > 100
    past = {str(path): found for path in modules if (found := logs_past_it(path.read_text()))}
    allowed = {str(SOURCE / "engine/setup.py"): ["events.logger.warning"]}  # which is a `Log`
    assert past == allowed
    assert isinstance(semel.events.logger, Log)


@pytest.mark.parametrize(
    "source",
    [
        "import logging\nlog = logging.getLogger(__name__)",
        "from logging import getLogger",
        "import logging\nlogging.warning('x')",
        "app.logger.info('x')",
        "from semel.events import logger\nlogger.logger.error('x')",
    ],
)
def test_one_that_did_would_be_found(source):
    assert logs_past_it(source)


def test_hooks_and_audit_logs_are_called_in_one_place():
    calls = [
        ast.unparse(node)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"hook", "self._audit"}
    ]
    assert calls == []


def test_a_record_names_the_line_that_logs(caplog):
    log = Log("semel.somewhere")
    log.warning("as a method")
    log.log(logging.WARNING, "by its level")
    try:
        int("no number")
    except ValueError:
        log.exception("with a traceback")
    assert {(record.pathname, record.funcName) for record in caplog.records} == {
        (__file__, "test_a_record_names_the_line_that_logs")
    }
    assert caplog.records[-1].exc_info[0] is ValueError


class Unwritable:
    def __str__(self):
        raise ConnectionError("unwritable")


class UnwritableError(Unwritable, Exception):
    """An error of an application whose text can't be made."""


@pytest.mark.parametrize("given", [Unwritable, UnwritableError])
@pytest.mark.parametrize("raises", [True, False])
def test_what_a_handler_raises_goes_to_stderr_without_what_it_was_told(
    monkeypatch, capfd, raises, given
):
    monkeypatch.setattr(logging, "raiseExceptions", raises)
    log = Log("semel.unwritable")
    monkeypatch.setattr(log.logger, "handle", lambda record: record.getMessage())
    try:
        int("the password is hunter2")
    except ValueError:
        log.warning("%s", given())
    told = capfd.readouterr().err
    assert ("ConnectionError: unwritable" in told) is raises
    assert "hunter2" not in told


def test_what_an_observer_raises_is_returned():
    error = unheard(int, "no number")
    assert isinstance(error, ValueError)
    assert unheard(int, "1") is None


# --- signals ---------------------------------------------------------------------------------


class TimeIsUp(BaseException):
    """What a time limit raises."""


def ends(signum, frame):
    raise TimeIsUp


class Limit:
    def method(self, signum, frame):
        raise TimeIsUp

    def __call__(self, signum, frame, *rest):
        raise TimeIsUp

    @classmethod
    def with_name(cls, name, signum, frame):
        raise TimeIsUp


class EndsWhenMade:
    def __init__(self, *given):
        raise TimeIsUp


def chained(*given):
    ends(*given)


def without_arguments(signum, frame):
    del signum, frame
    raise TimeIsUp


def with_others_in_their_place(*given):
    given = len(given)
    raise TimeIsUp(given)


HANDLERS = {
    "function": ends,
    "lambda": lambda *_: ends(0, None),
    "method": Limit().method,
    "object": Limit(),
    "partial": partial(Limit.with_name, "a name"),
    "class": EndsWhenMade,
    "wrapper": chained,
}


@pytest.fixture
def handler_before():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler_before")
@pytest.mark.parametrize("kind", HANDLERS)
def test_what_a_handler_raises_that_is_installed_no_more_reaches_the_caller(kind):
    def once(*given):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        HANDLERS[kind](*given)

    def uninstalled_by_another(*_):
        # The handler is installed only while the signal is received.
        before = signal.signal(signal.SIGUSR1, HANDLERS[kind])
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)

    signal.signal(signal.SIGUSR1, once)
    with pytest.raises(TimeIsUp):
        unheard(signal.raise_signal, signal.SIGUSR1)
    with pytest.raises(TimeIsUp):
        unheard(uninstalled_by_another)


@pytest.mark.usefixtures("handler_before")
@pytest.mark.parametrize("handler", [without_arguments, with_others_in_their_place])
def test_what_a_handler_raises_that_keeps_no_argument_reaches_the_caller(handler):
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TimeIsUp):
        unheard(signal.raise_signal, signal.SIGUSR1)


def shows(number, where):
    raise ValueError


def test_an_observer_that_is_given_frames_is_no_signal_handler():
    assert isinstance(unheard(shows, 5, inspect.currentframe()), ValueError)
    assert isinstance(unheard(lambda frame: shows("5", frame), 5), ValueError)
    assert isinstance(unheard(lambda: shows("5", inspect.currentframe())), ValueError)
    assert isinstance(unheard(lambda: shows(inspect.currentframe(), 5)), ValueError)


class Target:
    """Something that a weak reference can point to."""


class WithoutTraceback(Exception):
    """Raised as if from nowhere."""

    __traceback__ = None


def test_what_an_observer_was_given_is_not_asked_what_it_is():
    def hook(gone):
        raise ValueError

    assert isinstance(unheard(hook, weakref.proxy(Target())), ValueError)
    assert isinstance(unheard(_raise, WithoutTraceback()), WithoutTraceback)


def _raise(error):
    raise error


def measured(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@measured
def ends(_, __):
    raise TimeIsUp


@pytest.mark.usefixtures("handler_before")
def test_a_decorator_that_a_handler_and_a_hook_share_says_nothing_of_the_hook():
    signal.signal(signal.SIGUSR1, ends)
    assert isinstance(unheard(measured(_raise), ValueError()), ValueError)
    with pytest.raises(TimeIsUp):
        unheard(signal.raise_signal, signal.SIGUSR1)
