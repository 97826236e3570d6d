"""Recognises the classes of libraries that semel does not import.

If an object of such a class exists, its library is loaded; if it is not, no object can be one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from dataclasses import Field
    from datetime import tzinfo

    from pydantic import BaseModel


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
    """Give the name of a `zoneinfo` zone (`Europe/Vienna`); None for every other kind."""
    module = sys.modules.get("zoneinfo")
    if module is None or type(zone) is not module.ZoneInfo:
        return None
    key: str | None = getattr(zone, "key")  # noqa: B009 - tzinfo has none, ZoneInfo has
    return key
