"""Reads `postgresql://user:password@host:5432/database?option=value`, and options given by name.

Ours are taken out; the others are libpq's (`sslmode`, `target_session_attrs`, several hosts...) and
stay in. Nothing here, and no error message, shows the password again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any, Final
from urllib.parse import unquote

import psycopg
from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from semel.errors import ConfigError
from semel.stores.urls import boolean, check_login, merge_options, reject_in_url, whole_number

STORE_OPTIONS: Final = frozenset(
    {"table", "schema", "columns", "partitions", "autocreate", "timeout", "batching"}
)
POOL_OPTIONS: Final = frozenset({"prepare", "min_size", "max_size"})

_UNKNOWN_OPTION: Final = re.compile(r'invalid (?:URI query parameter:|connection option) "(\w+)"')
_AUTO_PREPARE: Final = 5
"""psycopg's own default: a statement is prepared when it is sent the fifth time."""


class Settings(Struct, frozen=True, kw_only=True):
    """How to reach a database, and with how many connections."""

    conninfo: str
    place: str
    min_size: int
    max_size: int
    prepare: bool
    timeout: float
    """Seconds that a call may take."""

    @property
    def prepare_threshold(self) -> int | None:
        """None for pgbouncer, where the next statement may meet another server."""
        return _AUTO_PREPARE if self.prepare else None

    @property
    def own_session(self) -> bool:
        """Whether a session's settings stay ours; pgbouncer hands the session to the next one."""
        return self.prepare

    def __repr__(self) -> str:
        return f"<Settings {self.place}>"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("place", self.place)]


def part(url: str) -> tuple[str, dict[str, str]]:
    """Split a URL into libpq's part and semel's own options."""
    address, _, query = _with_login(url).partition("?")
    ours: dict[str, str] = {}
    theirs: list[str] = []
    for option in filter(None, query.split("&")):
        name, _, value = option.partition("=")
        reject_in_url([name], columns="a mapping of functions")
        if name not in STORE_OPTIONS | POOL_OPTIONS:
            theirs.append(option)
        elif name in ours:
            raise ConfigError(f"postgresql:// has the option {name} twice")
        else:
            ours[name] = unquote(value)
    return (f"{address}?{'&'.join(theirs)}" if theirs else address), ours


def all_options(url: str, timeout: float, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Part a URL into what libpq reads and our options, with those that are given by name."""
    address, in_url = part(url)
    known = frozenset(in_url) | frozenset(options)  # libpq knows the others, and is asked
    merged = merge_options("postgresql", in_url, options, known)
    return address, {"timeout": timeout, **merged}


def settings(url: str, options: Mapping[str, Any], timeout: float) -> Settings:
    """Check everything that can be checked without the server."""
    libpq = {name: value for name, value in options.items() if name not in POOL_OPTIONS}
    try:
        parameters = conninfo_to_dict(make_conninfo(_with_login(url), **libpq))
    except psycopg.ProgrammingError as error:
        # Without its cause: libpq repeats what it could not read, password and all.
        raise ConfigError(_why_not(str(error))) from None
    port = str(parameters.get("port") or "5432")
    if not re.fullmatch(r"[0-9,]+", port):
        # Unnamed: with an unescaped password, it is a part of that.
        raise ConfigError(
            "the port of postgresql:// is not a number; in a password, write %40 for @, %3A for : "
            "and %2F for /"
        )
    parameters.setdefault("connect_timeout", max(2, ceil(timeout)))
    parameters.setdefault("fallback_application_name", "semel")
    most = whole_number("max_size", options.get("max_size", 10))
    least = options.get("min_size", 0)
    least = 0 if least in {0, "0"} else whole_number("min_size", least)
    if least > most:
        raise ConfigError(f"min_size ({least}) is above max_size ({most})")
    return Settings(
        conninfo=make_conninfo("", **parameters),
        place=_place(parameters),
        min_size=least,
        max_size=most,
        prepare=boolean("prepare", options.get("prepare", True)),
        timeout=timeout,
    )


def _with_login(url: str) -> str:
    """Let the last @ end the login, as in every other URL; libpq would take the first."""
    check_login(url)
    scheme, separator, rest = url.partition("://")
    address, slash, path = rest.partition("/")
    login, at, hosts = address.rpartition("@")
    return f"{scheme}{separator}{login.replace('@', '%40')}{at}{hosts}{slash}{path}"


def _place(parameters: Mapping[str, Any]) -> str:
    host = parameters.get("host") or parameters.get("hostaddr") or "localhost"
    port = parameters.get("port") or "5432"
    return f"the PostgreSQL database {parameters.get('dbname') or 'of this user'} at {host}:{port}"


def _why_not(said: str) -> str:
    found = _UNKNOWN_OPTION.match(said)
    if found is None:
        return (
            "postgresql:// cannot be read: write postgresql://user:password@host:5432/database, "
            "options behind a ?"
        )
    known = ", ".join(sorted(STORE_OPTIONS | POOL_OPTIONS))
    return f"postgresql:// has no option {found[1]}; known: {known}, and those of libpq"


def check_given(
    url: str | None, pool: object, connection: object, options: Mapping[str, Any]
) -> None:
    """Insist on one way to the database, and on options that have a meaning there."""
    given = [way for way in (url, pool, connection) if way is not None]
    if len(given) != 1:
        raise ConfigError("a PostgreSQL store takes a URL, a pool or a connection, one of them")
    if url is None and options:
        raise ConfigError(f"{min(options)} goes with a URL, not with what is open already")
