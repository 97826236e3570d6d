"""Finds the store behind what a caller has at hand."""

from __future__ import annotations

from typing import Any

from semel.engine.setup import Setup
from semel.errors import ConfigError
from semel.stores.base import Scannable


def store_of(place: Any) -> Any:
    """Give the store of an engine, or the store itself."""
    store = place._store if isinstance(place, Setup) else place
    if not isinstance(store, Scannable):
        raise ConfigError(f"{type(store).__name__} cannot list its records")
    return store
