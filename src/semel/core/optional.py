"""Packages that semel does not depend on: what is said without them, and how to know their classes.

Every module that stands on an optional package imports it under `Needed`, so that all of them say
the same: who needs it, and the command that installs it. What a package does not promise to keep
is looked up by `inside`, so that its loss is one clear error and not an AttributeError some day.
"""

from __future__ import annotations

import pkgutil
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from semel.errors import ConfigError

if TYPE_CHECKING:
    from dataclasses import Field
    from datetime import tzinfo

    from pydantic import BaseModel


class Needed:
    """Names the extra if an import inside fails: `with Needed("semel[flask]", by=__name__): ...`.

    A package that an import misses still raises `ModuleNotFoundError`; where it is a setting that
    asks for it, the caller says `ConfigError`.
    """

    def __init__(
        self, install: str | None, *, by: str, error: type[Exception] = ModuleNotFoundError
    ) -> None:
        self._install = install
        self._by = by
        self._error = error

    def __enter__(self) -> None:
        """Begin to import."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # None: nothing optional is imported. And one of our own modules is never an extra.
        if self._install is None or not isinstance(error, ModuleNotFoundError):
            return
        missing = error.name or ""
        if missing.partition(".")[0] == "semel":
            return
        package = _PACKAGES.get(missing, missing)
        missing_extra = self._error(
            f"{self._by} needs the package {package}: pip install '{self._install}'"
        )
        if isinstance(missing_extra, ImportError):
            missing_extra.name = missing  # as Python's own error has it
        raise missing_extra from error


_PACKAGES: Final = {"google": "protobuf", "google.protobuf": "protobuf", "grpc": "grpcio"}
"""What a module is installed by, where another package, or none, has its name."""


def inside(package: str, name: str) -> Any:
    """Look up what a package keeps for itself: `inside("starlette", "starlette._utils:name")`."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as missing:
        raise gone(package, name.replace(":", ".")) from missing


def have(package: str, thing: object, *names: str) -> None:
    """Raise a `ConfigError` if an object of a package does not have these attributes."""
    kind = type(thing)
    for name in names:
        if not hasattr(thing, name):
            raise gone(package, f"{kind.__module__}.{kind.__qualname__}.{name}")


def gone(package: str, name: str) -> ConfigError:
    """Say that this version of a package does not have what semel needs."""
    # Imported here: it takes longer than most of semel, which loads this module at once.
    from importlib.metadata import version  # noqa: PLC0415

    return ConfigError(
        f"{package} {version(package)} has no {name}, which semel needs: install a version of "
        f"{package} that semel is tested with (see the page Versions of its documentation), or a "
        "newer semel"
    )


# --- classes of packages that semel does not import ---------------------------------------
#
# If an object of such a class exists, its package is loaded; if it is not, no object can be one.


def is_pydantic_model(cls: type) -> TypeGuard[type[BaseModel]]:
    """Whether the class is a pydantic (version 2) model."""
    # The module that defines it, not `pydantic` itself: that one loads its parts when asked.
    module = sys.modules.get("pydantic.main")
    base = None if module is None else vars(module).get("BaseModel")
    return base is not None and issubclass(cls, base)


def is_dataclass(cls: type) -> bool:
    """Whether the class is a data class or inherits from one."""
    return hasattr(cls, "__dataclass_fields__")


def dataclass_fields(cls: type) -> tuple[Field[Any], ...]:
    """List the fields of a data class; what only its constructor takes is no field."""
    from dataclasses import fields  # noqa: PLC0415 - `import semel` must not pay for it

    return fields(cls)


def zone_key(zone: tzinfo | None) -> str | None:
    """Return the name of a `zoneinfo` zone (`Europe/Vienna`); None for every other kind."""
    module = sys.modules.get("zoneinfo")
    if module is None or type(zone) is not module.ZoneInfo:
        return None
    key: str | None = getattr(zone, "key")  # noqa: B009 - tzinfo has none, ZoneInfo has
    return key
