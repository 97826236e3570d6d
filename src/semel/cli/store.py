"""The engine and the store that the options and the settings name, and reading its records.

A command looks at what others have written: a store that can only be empty is rejected. In Redis
a wrong database or prefix looks like a new store, so `hint_if_empty` asks.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Final

from msgspec import UNSET

from semel.cli.terminal import Progress
from semel.core.keys import KeyRules
from semel.core.records import Record
from semel.core.settings import Settings, load_settings
from semel.errors import ConfigError, InvalidKey
from semel.http.problems import INSTANCE
from semel.repair.maintenance import reject_empty_stores, reject_memory, store_of
from semel.stores.base import Creating, Store
from semel.stores.urls import (
    BACKENDS,
    DEFAULT_PREFIX,
    DEFAULT_TIMEOUT,
    open_store,
    split_url,
)
from semel.sync import Idempotency

LIMIT = 100
"""Records that are shown, unless more are asked for."""
PAGE = 500
"""Records that are read at a time."""

CONFIG = "SEMEL_CONFIG"
URL = "SEMEL_URL"

SEARCH_SECONDS = 2.0
"""How long the first record is looked for among the keys that others have in a Redis."""

_DIGEST = re.compile("[0-9a-f]{32}", re.IGNORECASE)
_NAMED_DIGEST = re.compile(
    rf"""(?:{INSTANCE}|key_digest["']?\s*(?:[=:]\s*)?["']?)([0-9a-f]{{32}})(?![0-9a-f])""",
    re.IGNORECASE,
)
"""A key digest in a problem, a log line or the output of a command."""

_DEFAULT_URL: Final = "preset: url"
"""The source of a URL that was not given."""

NO_RECORD = (
    "there is no such record (the key of an HTTP request with a tenant is stored as TENANT/KEY: "
    "semel find KEY shows it)"
)


class NothingThere(ConfigError):
    """The store can only be empty."""


@contextmanager
def open_engine(options: Namespace) -> Iterator[Idempotency]:
    """Open the engine, and close it afterwards."""
    settings = read_settings(options)
    with configured(options), _naming_the_file(options):
        _reject_empty_stores(settings)
        prefix = UNSET if options.store_prefix is None else options.store_prefix
        engine = Idempotency(options.url, prefix=prefix, **options.engine)
        create_nothing(engine.internals.store)
    with engine:
        yield engine


def _reject_empty_stores(settings: Settings) -> None:
    try:
        reject_empty_stores(settings)
    except ConfigError as error:
        if settings.sources["url"] != _DEFAULT_URL:
            raise NothingThere(str(error)) from error
        raise NothingThere(
            "no URL was given: there is no --url, no SEMEL_URL and no url in semel.toml, and "
            f"nothing is at the default {settings.url}. Set SEMEL_URL to the store of the program"
        ) from error


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
        raise type(error)(f"{options.config}: {error}") from error


# --- where the records are -----------------------------------------------------------------------


def address_of(settings: Settings) -> str:
    """Name the servers and databases of a store that could be opened, without their logins."""
    urls = (settings.url, settings.behind)
    return " in front of ".join(_place(url) for url in urls if url is not None)


def place_of(settings: Settings) -> str:
    """Name where the records are, with the prefix; that of a service is its own affair."""
    backend = BACKENDS.get(str(settings.url).partition("://")[0])
    address = address_of(settings)
    own = backend is not None and backend.module == _SERVICE
    return address if own else f"{address}, prefix {settings.prefix}"


def _place(url: str) -> str:
    scheme = url.partition("://")[0]
    backend = BACKENDS.get(scheme)
    name = None if backend is None else _ADDRESSES.get(backend.module)
    return scheme if name is None else name(url)


def _redis_place(url: str) -> str:
    from semel.stores.redis.clients import parse_url  # noqa: PLC0415  needs its driver

    return parse_url(url).place


def _postgres_place(url: str) -> str:
    from semel.stores.sql.postgres.settings import part, settings  # noqa: PLC0415  needs its driver

    return settings(part(url)[0], {}, timeout=1.0).place


def _mysql_place(url: str) -> str:
    from semel.stores.sql.mysql.addresses import parse  # noqa: PLC0415  needs its driver

    return parse(url, {})[0].place


def _service_place(url: str) -> str:
    from semel.stores.remote.addresses import parse  # noqa: PLC0415  the other commands need none

    return parse(url, prefix=DEFAULT_PREFIX, timeout=DEFAULT_TIMEOUT, options={}).where


def _sqlite_place(url: str) -> str:
    return f"the SQLite database {Path(split_url(url)[0][1:]).absolute()}"


_REDIS: Final = "semel.stores.redis"
_SERVICE: Final = "semel.stores.remote"
_ADDRESSES: Final[dict[str, Callable[[str], str]]] = {
    _REDIS: _redis_place,
    "semel.stores.sql.postgres": _postgres_place,
    "semel.stores.sql.mysql": _mysql_place,
    "semel.stores.sql.sqlite": _sqlite_place,
    _SERVICE: _service_place,
}
"""By the module of a backend: what names the place behind a URL."""


def hint_if_empty(engine: Idempotency, options: Namespace) -> str | None:
    """Ask whether it is the right store, if it is a Redis without a record; else None.

    SQL needs no question: a database without the table is rejected. Among very many keys of others
    the search ends early.
    """
    settings = read_settings(options)
    backend = BACKENDS.get(str(settings.url).partition("://")[0])
    if settings.behind is not None or backend is None or backend.module != _REDIS:
        return None
    end = monotonic() + SEARCH_SECONDS
    for page in read_pages(engine, 1):
        if page or monotonic() > end:
            return None
    return (
        f"there is no record at all under {settings.prefix} in {address_of(settings)}: are the URL "
        "and the prefix right?"
    )


# --- which record --------------------------------------------------------------------------------


def key_of(engine: Idempotency, options: Namespace) -> str | None:
    """Return the key that a command names; None = no record of the scope has this digest."""
    if not options.digest:
        try:
            KeyRules().check(options.key)
        except InvalidKey as error:
            raise InvalidKey(
                f"{error}; of an HTTP request, tenant and key are stored percent-encoded: semel "
                "find KEY shows it"
            ) from error
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
    """Return the key digest that a text is, or names: a problem, its `instance`, a log line."""
    if _DIGEST.fullmatch(text):
        return text.lower()
    named = sorted({digest.lower() for digest in _NAMED_DIGEST.findall(text)})
    if len(named) > 1:
        raise ConfigError(f"the text has {len(named)} key digests ({', '.join(named)}): give one")
    return named[0] if named else None


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
