"""What a project's settings say: `SEMEL = {"URL": ..., "REQUIRED": True, ...}`.

Names are those of the options, in capitals. A text in the place of a function or a policy is the
dotted path to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.conf import settings
from django.utils.module_loading import import_string
from msgspec import Struct

from semel.adapters.options import MiddlewareOptions, PathOptions
from semel.adapters.wsgi_requests import refuse_underscores
from semel.errors import ConfigError

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

    @property
    def view_options(self) -> dict[str, Any]:
        """The options without those that say which paths are taken."""
        paths = PathOptions.__annotations__
        return {name: value for name, value in self.options.items() if name not in paths}


def configured() -> Configured:
    """Read the project's settings; what is wrong there is a ConfigError."""
    written = getattr(settings, SETTING, {})
    if not isinstance(written, Mapping):
        raise ConfigError(f"settings.{SETTING} must be a dict, not {type(written).__name__}")
    known = {name.upper(): name for name in MiddlewareOptions.__annotations__}
    unknown = written.keys() - known.keys() - {"URL", "ENGINE"}
    if unknown:
        told = ", ".join(["URL", "ENGINE", *known])
        raise ConfigError(f"settings.{SETTING} has no {min(unknown, key=str)!r}; known: {told}")
    options = {
        known[name]: _value(known[name], value) for name, value in written.items() if name in known
    }
    refuse_underscores(options)
    engine = written.get("ENGINE", {})
    if not isinstance(engine, Mapping):
        raise ConfigError(f"settings.{SETTING}: ENGINE must be a dict of an engine's arguments")
    return Configured(written.get("URL"), {**engine}, options)


def _value(name: str, value: Any) -> Any:
    if name not in _BY_PATH or not isinstance(value, str):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ConfigError(
            f"settings.{SETTING}: {name.upper()} cannot be imported: {error}"
        ) from error
