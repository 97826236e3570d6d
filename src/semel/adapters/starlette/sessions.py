"""Which session an endpoint gets: what `session=` may be, and what goes with what.

`def` endpoints have a `Session`, `async def` endpoints an `AsyncSession`. It is opened by the
decorator, from a sessionmaker, or by a dependency, for a parameter that is named.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from semel.adapters.starlette.endpoints import Endpoint, is_of_kind, plain_annotation
from semel.core.extras import Needed
from semel.errors import ConfigError

with Needed("semel[sqlalchemy]", by="@idempotent(session=...)"):
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session


class _Limits(NamedTuple):
    """What bounds the threads of one event loop."""

    requests: CapacityLimiter
    """How many requests with a sync session run at the same time: as many as plain endpoints."""
    steps: CapacityLimiter
    """Every step of those requests has a thread at once.

    In the framework's own pool, the commit of one request would wait for threads of others, which
    wait for the connection that it would give back.
    """


_limits: Final[RunVar[_Limits]] = RunVar("semel_session_limits")


def limits_here() -> _Limits:
    """Give the limits of the running event loop."""
    try:
        return _limits.get()
    except LookupError:
        at_once = to_thread.current_default_thread_limiter().total_tokens
        made = _Limits(CapacityLimiter(at_once), CapacityLimiter(math.inf))
        _limits.set(made)
        return made


async def in_step(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one step of a request with a sync session in a thread."""
    return await to_thread.run_sync(partial(function, *args, **kwargs), limiter=limits_here().steps)


class SessionChoice:
    """What `session=` says: who opens an endpoint's session, and the parameter that it goes to."""

    parameter: str
    is_async: bool
    in_thread = staticmethod(in_step)
    """Runs a plain function that has such a session."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.depends = isinstance(given, str)
        """A dependency opens the session, for the parameter that is named."""
        if self.depends:
            self.parameter = given
        else:
            self._check_factory(given)

    @staticmethod
    def _check_factory(given: Any) -> None:
        maker = "session= takes a sessionmaker or an async_sessionmaker"
        if isinstance(given, scoped_session | async_scoped_session):
            raise ConfigError(f"{maker}, not a scoped session: each request has a session anyway")
        if isinstance(given, Session | AsyncSession):
            raise ConfigError(f"{maker}, not a session: all requests would share that one")
        if isinstance(given, Engine | AsyncEngine):
            raise ConfigError(f"{maker}: give sessionmaker(engine) in place of the engine")
        if not callable(given):
            raise ConfigError(
                f"{maker}, or the name of the parameter whose session a dependency opens; got "
                f"{type(given).__name__}"
            )
        kinds = (
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
            inspect.iscoroutinefunction,
        )
        if any(is_of_kind(given, kind) for kind in kinds):
            name = getattr(given, "__name__", "this")
            raise ConfigError(
                f"{maker}, and {name} is a dependency. Give the sessionmaker that it uses; or "
                f"declare Depends({name}) on a parameter, and name that: session='session'"
            )

    def bind(self, endpoint: Endpoint, name: str) -> None:
        """Find the endpoint's parameter for the session, and check that all is of one kind."""
        self.is_async = endpoint.is_coroutine
        wanted, other = (AsyncSession, Session) if self.is_async else (Session, AsyncSession)
        kind = "async def" if self.is_async else "def"
        made = getattr(self.given, "class_", None)
        if isinstance(made, type) and not issubclass(made, wanted):
            maker = "an async_sessionmaker" if self.is_async else "a plain sessionmaker"
            raise ConfigError(
                f"{name} is {kind}, so its session is {_named(wanted)}: give session= {maker}, or "
                f"make the endpoint {'def' if self.is_async else 'async def'}"
            )
        parameters = endpoint.parameters
        if self.depends:
            found = [each for each in parameters if each == self.parameter]
        else:
            found = [each for each in parameters if _is_for(parameters[each], wanted, other)]
            found = found or [each for each in parameters if each == "session"]
        if len(found) != 1:
            such = f"{self.given if self.depends else 'session'}: {wanted.__name__}"
            raise ConfigError(
                f"{name} has {'more than one' if found else 'no'} parameter for its session: it "
                f"needs one such as `{such}`"
            )
        (self.parameter,) = found
        if self.depends and self.parameter not in endpoint.injected:
            raise ConfigError(
                f"no dependency opens the session of {name}: declare Depends(...) on its parameter "
                f"{self.parameter!r}, or give session= the sessionmaker"
            )
        if not self.depends and self.parameter in endpoint.injected:
            raise ConfigError(
                f"a dependency opens the session of {name}: name its parameter, "
                f"session={self.parameter!r}, in place of a sessionmaker"
            )
        annotation = plain_annotation(parameters[self.parameter])
        if isinstance(annotation, type) and issubclass(annotation, other):
            raise ConfigError(
                f"{name} is {kind}, so its session is {_named(wanted)}, not {_named(other)}"
            )

    def check_given(self, session: Any) -> None:
        """Refuse what a factory or a dependency has given, if it is no session of this kind."""
        wanted = AsyncSession if self.is_async else Session
        if not isinstance(session, wanted):
            whose = f"the parameter {self.parameter!r} has" if self.depends else "session= gave"
            raise ConfigError(f"{whose} {_named(type(session))}, not {_named(wanted)}")
        plain = plain_session(session)
        if plain.new or plain.dirty or plain.deleted:
            raise ConfigError(
                "the session has changes that were made before the endpoint ran, for example by a "
                "dependency: they would be rolled back for every duplicate. Make them in the "
                "endpoint, or in a session of their own"
            )


def _is_for(parameter: inspect.Parameter, *kinds: type) -> bool:
    annotation = plain_annotation(parameter)
    return isinstance(annotation, type) and issubclass(annotation, kinds)


def _named(kind: type) -> str:
    """Name a class in a sentence."""
    return f"{'an' if kind.__name__[:1] in 'AEIOaeio' else 'a'} {kind.__name__}"


def plain_session(session: Any) -> Session:
    """Give the session itself, which an `AsyncSession` stands in front of."""
    plain: Session = getattr(session, "sync_session", session)
    return plain
