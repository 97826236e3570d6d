"""How semel calls code that only watches: log handlers and filters, hooks, and audit logs.

Observing never changes what happens: whatever such code raises is dropped here. Only what is meant
for the code around it gets out. Every logger of semel is a `Log`, and every hook is called by
`unheard`.
"""

from __future__ import annotations

import inspect
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter


def unheard(observer: Callable[..., object], *args: Any, **kwargs: Any) -> BaseException | None:
    """Call an observer; return what it raised, unless that is meant for the caller.

    What watches a call does not end it, nor a thread that renews for all, nor an event loop.
    """
    try:
        observer(*args, **kwargs)
    except BaseException as error:
        if is_for_the_caller(error):
            raise
        return error
    return None


def printable(text: str, *, but: str = "") -> str:
    """Escape what a terminal would obey instead of show: a stored text may come from anywhere.

    `but` are such characters that stay, as in a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in but else repr(each)[1:-1] for each in text)


def _shown(value: object) -> object:
    """Escape what a log line has in it: a text may come from the store."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, BaseException):
        return printable(str(value))
    return value


class Log(Adapter):
    """A logger whose handlers, filters and formatters may raise: no caller of it notices.

    Texts in a line are escaped: scopes and errors of records come from the store, which others may
    write to.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a record. What a handler raises goes to stderr, as with those of `logging`."""
        if self.logger.isEnabledFor(level):
            # The record names the line that logs: four functions of this module lie between.
            dropped = self.tell(level, msg, *args, stacklevel=5, **kwargs)
            if dropped is not None and logging.raiseExceptions:
                unheard(traceback.print_exception, dropped, file=sys.__stderr__, chain=False)

    def tell(self, level: int, msg: object, *args: object, **kwargs: Any) -> BaseException | None:
        """Write a record; return what a handler raised, or the text of an error in it."""
        return unheard(lambda: self.logger.log(level, msg, *map(_shown, args), **kwargs))


def is_for_the_caller(error: BaseException) -> bool:
    """Whether it only met the code that raised it: it ends the program, or a call out of time."""
    switched = (getattr(sys.modules.get(module), name, None) for module, name in _OF_GEVENT)
    kinds = (KeyboardInterrupt, *filter(None, switched))
    return isinstance(error, kinds) or _by_a_signal(error)


_OF_GEVENT = (("gevent.timeout", "Timeout"), ("greenlet", "GreenletExit"))
"""What gevent raises wherever a greenlet happens to wait."""


def _by_a_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised it: a server's that ends on SIGTERM, or a time limit's."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    inner = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    return any(frame.f_code in codes or _was_given_a_signal(frame) for frame in inner)


def _was_given_a_signal(frame: FrameType) -> bool:
    """Whether Python called this as a signal's handler, which may be installed no more.

    Only then the arguments are a number and the frame that was interrupted, which looks as if it
    had made the call.
    """
    names, rest, _, given = inspect.getargvalues(frame)
    further = given.get(rest) if rest else ()
    values = [*map(given.get, names), *(further if isinstance(further, tuple) else ())]
    return any(
        issubclass(type(number), int) and interrupted is frame.f_back
        for number, interrupted in pairwise(values)
    )


def _code_of(handler: object) -> object:
    """Return the code that runs when a handler is called; None if it is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    # Not the code of a decorator, which may be a hook's as well.
    handler = inspect.unwrap(handler) if callable(handler) else handler
    code = getattr(handler, "__code__", None)
    return code or getattr(getattr(handler, "__call__", None), "__code__", None)  # noqa: B004 - it is asked what it runs
