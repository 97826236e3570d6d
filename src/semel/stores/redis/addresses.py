"""Reads store URLs of the redis family.

This module parses. It connects to nothing and resolves no names. No message and no repr here
shows a password, not even one in a URL that could not be read.

    redis://[user:password@]host[:port][/db]        rediss:// is the same over TLS
    redis+unix:///path/to/socket[?db=0]
    redis+cluster://[user:password@]h:p,h:p         also h:p;h:p; rediss+cluster:// over TLS
    redis+sentinel://[user:password@]h:p,h:p/service[/db]
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from semel.errors import ConfigError
from semel.stores.urls import check_login, refuse_in_url

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
_HIGHEST_PORT = 65535
_NO_PORT = re.compile("[^:[]*:[0-9]*[^0-9,;]")


class Kind(enum.Enum):
    """How the servers are found."""

    SINGLE = "single"
    UNIX = "unix"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": (Kind.SINGLE, False),
    "rediss": (Kind.SINGLE, True),
    "redis+unix": (Kind.UNIX, False),
    "redis+cluster": (Kind.CLUSTER, False),
    "rediss+cluster": (Kind.CLUSTER, True),
    "redis+sentinel": (Kind.SENTINEL, False),
    "rediss+sentinel": (Kind.SENTINEL, True),
}


def _truth(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return values[text.lower()]


OPTIONS: dict[str, Callable[[str], Any]] = {
    "db": int,
    "username": str,
    "password": str,
    "client_name": str,
    "max_connections": int,
    "socket_timeout": float,
    "socket_connect_timeout": float,
    "socket_keepalive": _truth,
    "health_check_interval": float,
    "protocol": int,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_ca_data": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_cert_reqs": str,
    "ssl_check_hostname": _truth,
    "ssl_ciphers": str,
    "ssl_min_version": int,
    "require_full_coverage": _truth,
    "sentinel_username": str,
    "sentinel_password": str,
    "min_other_sentinels": int,
}
"""What may stand in the query of a URL: redis-py's options that text can express."""


class ServerAddress(Struct, frozen=True):
    """Where the servers are and how to log in; what a URL says."""

    kind: Kind
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    path: str | None
    """The socket file of `redis+unix`."""
    service: str | None
    """The name under which Sentinel knows the primary."""
    options: dict[str, Any]
    """For redis-py; holds db, user name and password too."""

    @property
    def where(self) -> str:
        """A name for messages, without secrets."""
        places = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        match self.kind:
            case Kind.UNIX:
                return f"redis {self.path}"
            case Kind.CLUSTER:
                return f"redis cluster {places}"
            case Kind.SENTINEL:
                return f"redis {self.service!r} (sentinels {places})"
            case _:
                return f"redis {places}"

    def __repr__(self) -> str:
        return f"<ServerAddress {self.where}>"


def parse_addresses(text: str, *, default_port: int = DEFAULT_PORT) -> list[tuple[str, int]]:
    """Read `host:port,host:port` (or with semicolons); a bad one is named in the error."""
    addresses = [part.strip() for part in text.replace(";", ",").split(",")]
    return [_address(part, text, default_port) for part in addresses]


def _address(part: str, text: str, default_port: int) -> tuple[str, int]:
    def bad(why: str) -> ConfigError:
        return ConfigError(f"bad address {part!r} in {text!r}: {why}; write host:port")

    if part.startswith("["):  # IPv6
        host, bracket, rest = part[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise bad("an IPv6 address looks like [::1]:6379")
        port = rest[1:]
        colon = rest[:1]
    else:
        host, colon, port = part.partition(":")
        if ":" in port:
            raise bad("more than one colon (an IPv6 address goes in brackets)")
    if not host or any(character.isspace() or character in "/@?#" for character in host):
        raise bad("no host name" if not host else "not a host name")
    if not colon:
        return host, default_port
    if not port.isascii() or not port.isdigit() or not 0 < int(port) <= _HIGHEST_PORT:
        raise bad(f"{port!r} is not a port")
    return host, int(port)


def parse_url(url: str) -> ServerAddress:
    """Read a store URL."""
    scheme, _, rest = url.partition("://")
    kind, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    login, at, places = authority.rpartition("@")
    check_login(f"{scheme}://{authority}?{query}" if kind is Kind.UNIX else url)
    if kind is Kind.SINGLE and not at and _NO_PORT.match(places):
        # Unnamed: it may be a login whose @ and host are missing.
        raise ConfigError(
            f"the port of {scheme}:// is not a number; write {scheme}://user:password@host:6379/0"
        )
    options = _query_options(query)
    if at:
        user, _, password = login.partition(":")
        options |= {"username": unquote(user)} if user else {}
        options |= {"password": unquote(password)} if password else {}
    if kind is Kind.UNIX:
        if places or not path:
            raise ConfigError(f"{scheme}:// needs a socket file: {scheme}:///path/to/socket?db=0")
        return ServerAddress(kind, tls, (), slash + unquote(path), None, options)
    service = None
    if kind is Kind.SENTINEL:
        service, _, path = path.partition("/")
        if not service:
            raise ConfigError(
                f"{scheme}:// needs the name of the service: {scheme}://host:port,host:port/service"
            )
        service = unquote(service)
    if path:
        options["db"] = _database(path)
    if kind is Kind.CLUSTER and options.get("db"):
        raise ConfigError(f"a Redis Cluster has one database only; leave out db {options['db']}")
    port = SENTINEL_PORT if kind is Kind.SENTINEL else DEFAULT_PORT
    places = places or ("localhost" if kind is Kind.SINGLE else "")
    hosts = parse_addresses(places, default_port=port)
    if kind is Kind.SINGLE and len(hosts) > 1:
        raise ConfigError(
            f"{scheme}:// takes one server, got {places!r}; several are {scheme}+cluster:// "
            f"or {scheme}+sentinel://"
        )
    return ServerAddress(kind, tls, tuple(hosts), None, service, options)


def _database(path: str) -> int:
    if not path.isascii() or not path.isdigit():
        raise ConfigError(f"the database must be a number, got {path!r}: redis://localhost:6379/0")
    return int(path)


def _query_options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        refuse_in_url([name], timeout="an option of open_store, and the setting store_timeout")
        parse = OPTIONS.get(name)
        if parse is None:
            raise ConfigError(
                f"unknown option {name!r} in the URL; known: {', '.join(OPTIONS)}. redis-py's "
                "others are given by name"
            )
        try:
            options[name] = parse(text)
        except (ValueError, KeyError):
            raise ConfigError(f"option {name!r} in the URL has a bad value {text!r}") from None
    return options
