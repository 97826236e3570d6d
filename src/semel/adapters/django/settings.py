"""What a project's settings say, `SEMEL = {"URL": ..., "REQUIRED": True, ...}`, and its engines.

Names are those of the options, in capitals. A text in the place of a function or a policy is the
dotted path to it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, Final

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string
from msgspec import Struct

from semel.adapters.django.running import AsyncDjangoIntegration, DjangoIntegration
from semel.adapters.wsgi import check_header_names
from semel.aio import AsyncIdempotency
from semel.core.policy import resolve
from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.errors import ConfigError
from semel.http.options import MiddlewareOptions, PathOptions
from semel.http.requests import Request
from semel.http.rules import Routing
from semel.sync import Idempotency

SETTING: Final = "SEMEL"
_BY_PATH: Final = ("key", "tenant", "payload", "policy", "stored")
"""Options whose value may be named by a dotted path."""


class Configured(Struct, frozen=True):
    """The project's settings, read."""

    url: str | None
    """Where records are kept; None = as semel's own settings say."""
    engine: dict[str, Any]
    """Further arguments of both engines, such as hooks."""
    options: dict[str, Any]
    """The options of the middleware."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # By their names: the URL, an engine's and the middleware's options may be secret.
        return [("engine", [*self.engine]), ("options", [*self.options])]

    def __repr__(self) -> str:
        return f"Configured({dict(self.__rich_repr__())})"

    @property
    def view_options(self) -> dict[str, Any]:
        """The options without those that say which paths are taken."""
        paths = PathOptions.__annotations__
        return {name: value for name, value in self.options.items() if name not in paths}


def configured() -> Configured:
    """Read the project's settings; all that is wrong there is one ConfigError."""
    chosen, mistakes = read()
    if mistakes:
        raise ConfigError("\n  - ".join([f"settings.{SETTING} is wrong:", *mistakes]))
    return chosen


def read() -> tuple[Configured, list[str]]:
    """Read the settings, and say all that is wrong there; if something is, no option counts."""
    written = getattr(settings, SETTING, {})
    if not isinstance(written, Mapping):
        raise ConfigError(f"settings.{SETTING} must be a dict, not {type(written).__name__}")
    known = {name.upper(): name for name in MiddlewareOptions.__annotations__}
    mistakes = []
    unknown = written.keys() - known.keys() - {"URL", "ENGINE"}
    if unknown:
        names = ", ".join(map(repr, sorted(unknown, key=str)))
        mistakes.append(f"there is no {names}; known: {', '.join(['URL', 'ENGINE', *known])}")
    options = {}
    for capitals, name in known.items():
        if capitals in written:
            try:
                options[name] = _checked(name, written[capitals])
            except (ConfigError, TypeError) as error:
                mistakes.append(_in_capitals(name, str(error)))
    engine = written.get("ENGINE", {})
    if not isinstance(engine, Mapping):
        mistakes.append("ENGINE must be a dict of an engine's arguments")
        engine = {}
    return Configured(written.get("URL"), {**engine}, {} if mistakes else options), mistakes


def _checked(name: str, value: Any) -> Any:
    """Return the value of one option; what is wrong with it alone is an error."""
    if name in _BY_PATH and isinstance(value, str):
        try:
            value = import_string(value)
        except ImportError as error:
            raise ConfigError(f"{name} cannot be imported: {error}") from error
    check_header_names({name: value})
    # With a source of keys beside it, for one that is switched off here may be replaced by another.
    Routing(resolved=lambda _, *policies: resolve(*policies), **{"key": _some_key, name: value})
    return value


def _some_key(_: Request, __: bytes) -> None: ...


def _in_capitals(name: str, said: str) -> str:
    """Name an option as the settings do."""
    capitals = name.upper()
    return capitals + said.removeprefix(name) if said.startswith(name) else f"{capitals}: {said}"


# --- the engines that the settings ask for -------------------------------------------------------


class Engines(ForkAware):
    """The integrations of this process: one for all threads, and one for each event loop.

    They are made when they are first needed, and made anew when a test changes the settings.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._integration: DjangoIntegration | None = None
        self._integrations: dict[asyncio.AbstractEventLoop, AsyncDjangoIntegration] = {}
        follow_forks(self)

    def integration(self) -> DjangoIntegration:
        """The integration for threads."""
        notice_fork()
        with self._lock:
            if self._integration is None:
                chosen = configured()
                self._integration = DjangoIntegration(
                    Idempotency(chosen.url, **chosen.engine), chosen.options
                )
            return self._integration

    def async_integration(self) -> AsyncDjangoIntegration:
        """The integration of the event loop that runs here."""
        notice_fork()
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._integrations:
                self._integrations = {
                    other: integration
                    for other, integration in self._integrations.items()
                    if not other.is_closed()
                }
                chosen = configured()
                engine = AsyncIdempotency(chosen.url, **chosen.engine)
                self._integrations[loop] = AsyncDjangoIntegration(engine, chosen.options)
            return self._integrations[loop]

    def close(self) -> None:
        """Close the engine for threads of `settings.SEMEL`."""
        notice_fork()
        with self._lock:
            integration, self._integration = self._integration, None
        if integration is not None:
            integration.engine.close()

    async def aclose(self) -> None:
        """Close the engine of the running event loop."""
        notice_fork()
        with self._lock:
            integration = self._integrations.pop(asyncio.get_running_loop(), None)
        if integration is not None:
            await integration.engine.close()

    def forget(self) -> None:
        """Make everything anew; an engine of an event loop can only be closed on it."""
        self.close()
        with self._lock:
            self._integrations.clear()

    def after_fork_in_child(self) -> None:
        """Free the lock, which a thread of the parent may hold; loops stay with the parent."""
        self._lock = threading.RLock()
        self._integrations.clear()


ENGINES: Final = Engines()
close = ENGINES.close
aclose = ENGINES.aclose


def _changed(*, setting: str, **_: Any) -> None:
    if setting == SETTING:
        ENGINES.forget()


setting_changed.connect(_changed)
