"""The engine and the store that the options and the settings name, and reading its records.

A command looks at what others have written: a store that can only be empty is rejected.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import UNSET

from semel.cli.terminal import Progress
from semel.core.records import Record
from semel.core.settings import Settings, load_settings
from semel.errors import ConfigError
from semel.http.problems import INSTANCE
from semel.repair.maintenance import reject_empty_stores, reject_memory, store_of
from semel.stores.base import Creating, Store
from semel.stores.urls import open_store
from semel.sync import Idempotency

LIMIT = 100
"""Records that are shown, unless more are asked for."""
PAGE = 500
"""Records that are read at a time."""

CONFIG = "SEMEL_CONFIG"
URL = "SEMEL_URL"

_DIGEST = re.compile("[0-9a-f]{32}")

NO_RECORD = (
    "there is no such record (the key of an HTTP request with a tenant is stored as TENANT/KEY: "
    "semel find KEY shows it)"
)


@contextmanager
def open_engine(options: Namespace) -> Iterator[Idempotency]:
    """Open the engine, and close it afterwards."""
    settings = read_settings(options)
    with configured(options), _naming_the_file(options):
        reject_empty_stores(settings)
        engine = Idempotency(
            options.url, prefix=UNSET if options.store_prefix is None else options.store_prefix
        )
        create_nothing(engine.internals.store)
    with engine:
        yield engine


def open_deciding_store(options: Namespace, *, create: bool) -> Store:
    """Open the store that decides, which of two tiers is the one behind.

    With `create` it may be new, and a call makes what it needs.
    """
    settings = read_settings(options)
    url = settings.url if settings.behind is None else settings.behind
    with configured(options), _naming_the_file(options):
        reject_memory(str(url))
        store = open_store(str(url), prefix=settings.prefix)
    if not create:
        create_nothing(store)
    return store


def create_nothing(store: object) -> None:
    """Let no call of a command create a table."""
    # A table that a command makes is empty: in the wrong database all would look well.
    deciding = getattr(store, "behind", store)
    if isinstance(deciding, Creating):
        deciding.create_nothing()


def read_settings(options: Namespace) -> Settings:
    """Read what an engine of these options is made from."""
    written = {"url": options.url, "prefix": options.store_prefix}
    with configured(options):
        return load_settings(**{name: text for name, text in written.items() if text is not None})


@contextmanager
def configured(options: Namespace) -> Iterator[None]:
    """Let the settings be read from the file that was named."""
    before = os.environ.get(CONFIG)
    if options.config is not None:
        if not Path(options.config).is_file():
            raise ConfigError(f"--config: there is no file {options.config}")
        os.environ[CONFIG] = options.config
    try:
        yield
    finally:
        if before is not None:
            os.environ[CONFIG] = before
        else:
            os.environ.pop(CONFIG, None)


@contextmanager
def _naming_the_file(options: Namespace) -> Iterator[None]:
    """Name the file that an unusable URL came from."""
    try:
        yield
    except ConfigError as error:
        if options.config is None or options.url is not None or URL in os.environ:
            raise
        raise ConfigError(f"{options.config}: {error}") from error


def key_of(engine: Idempotency, options: Namespace) -> str | None:
    """Return the key that a command names; None = no record of the scope has this digest."""
    if not options.digest:
        return str(options.key)
    wanted = checked_digest(options.key, "--digest", "leave out --digest")
    read = 0
    with Progress() as progress:
        for page in read_pages(engine, PAGE, scope=options.scope):
            for record in page:
                if record.identity.key_digest == wanted:
                    return str(record.key)
            read += len(page)
            progress.show(f"{read:,} records read")
    return None


def checked_digest(text: str, option: str, instead: str) -> str:
    """Return the key_digest that an `option` was given; `instead` says how to give the key."""
    digest = digest_of(text)
    if digest is None:
        raise ConfigError(
            f"{option} takes a whole key_digest, which is 32 hexadecimal digits; {instead} to give "
            "the key itself"
        )
    return digest


def digest_of(text: str) -> str | None:
    """Return the key digest that a text is, or that is in the `instance` of a problem."""
    digest = text.lower().removeprefix(INSTANCE)
    return None if _DIGEST.fullmatch(digest) is None else digest


def read_pages(engine: Idempotency, limit: int, **filters: Any) -> Iterator[tuple[Record, ...]]:
    """Read the records that these filters let through, at most `limit` at a time.

    A page may be empty: a store that has to look far for the next record shows a sign of life.
    """
    store, cursor = store_of(engine), None
    while True:
        page = store.scan(limit=limit, cursor=cursor, **filters)
        yield page.records
        cursor = page.cursor
        if cursor is None:
            return
