"""How times are written: ISO 8601, and beside it what ISO cannot say (zone name, fold)."""

from __future__ import annotations

import datetime as dt
from typing import Any, TypeVar

from semel.core.foreign import zone_key
from semel.core.refusal import Refused, type_name

Clock = TypeVar("Clock", dt.datetime, dt.time)


def write_clock(value: dt.datetime | dt.time) -> str | list[Any]:
    """Write a datetime or time as its ISO text, or as [text, fold, zone name]."""
    key = zone_key(value.tzinfo)
    if key is not None:
        return [value.replace(tzinfo=None).isoformat(), value.fold, key]
    text = value.isoformat()
    if value.tzinfo is not None:
        _check_offset(value, text)
    return [text, value.fold, None] if value.fold else text


def _check_offset(value: dt.datetime | dt.time, text: str) -> None:
    """Let any zone pass as its offset, but only where that gives an equal value."""
    restored = type(value).fromisoformat(text)
    offset = value.utcoffset()
    if offset is None or restored.utcoffset() != offset or restored != value:
        raise Refused(
            f"a {type(value).__name__} in a {type_name(type(value.tzinfo))} zone cannot be stored"
            " exactly; use zoneinfo or datetime.timezone"
        )


def read_clock(cls: type[Clock], body: str | list[Any]) -> Clock:
    """Read what `write_clock` wrote."""
    if isinstance(body, str):
        return cls.fromisoformat(body)
    text, fold, key = body
    value = cls.fromisoformat(text).replace(fold=fold)
    if key is None:
        return value
    from zoneinfo import ZoneInfo  # noqa: PLC0415 - only who uses zones pays for their module

    return value.replace(tzinfo=ZoneInfo(key))
