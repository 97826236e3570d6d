"""Opens the engine that the options and the settings describe."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import UNSET

from semel.core.settings import Settings, load_settings
from semel.errors import ConfigError
from semel.stores.base import Scannable
from semel.sync import Idempotency

CONFIG = "SEMEL_CONFIG"


@contextmanager
def opened(options: Namespace) -> Iterator[Idempotency]:
    """Give the engine, and close it afterwards."""
    with configured(options):
        engine = Idempotency(
            options.url, prefix=UNSET if options.store_prefix is None else options.store_prefix
        )
    with engine:
        yield engine


def found_settings(options: Namespace) -> Settings:
    """Read what an engine of these options is made from."""
    written = {"url": options.url, "prefix": options.store_prefix}
    with configured(options):
        return load_settings(**{name: text for name, text in written.items() if text is not None})


@contextmanager
def configured(options: Namespace) -> Iterator[None]:
    """Let the settings be read from the file that was named."""
    before = os.environ.get(CONFIG)
    if options.config is not None:
        os.environ[CONFIG] = options.config
    try:
        yield
    finally:
        if before is not None:
            os.environ[CONFIG] = before
        else:
            os.environ.pop(CONFIG, None)


def listing_of(engine: Idempotency) -> Any:
    """Give the engine's store, if it can list its records."""
    if not isinstance(engine._store, Scannable):
        raise ConfigError(f"{type(engine._store).__name__} cannot list its records")
    return engine._store
