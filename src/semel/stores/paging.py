"""Cursors of listings: where the last page ended. Records are listed by key, then by scope."""

from __future__ import annotations

import msgspec

from semel.core.records import Identity
from semel.errors import ConfigError


def cursor_after(identity: Identity) -> str:
    """Name the place where a page that ends with `identity` goes on."""
    return msgspec.json.encode((identity.key, identity.scope)).decode()


def position(cursor: str) -> tuple[str, str]:
    """Read the (key, scope) that a cursor stands for."""
    try:
        return msgspec.json.decode(cursor, type=tuple[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{cursor!r} is not the cursor of a page") from error
