"""From a URL to redis-py's clients, configured the way semel needs them.

This module parses and configures. It connects to nothing and resolves no names. No message and no
repr here shows a password, not even one in a URL that could not be read.

    redis://[user:password@]host[:port][/db]        rediss:// is the same over TLS
    redis+unix:///path/to/socket[?db=0]
    redis+cluster://[user:password@]h:p,h:p         also h:p;h:p; rediss+cluster:// over TLS
    redis+sentinel://[user:password@]h:p,h:p/service[/db]

What differs from redis-py's defaults, and why:

- Its commands are repeated ten times, each with its own timeout, which can add up to a minute.
  Here redis-py repeats nothing, except the first question of a client to its cluster. The transport
  does, and only while half of `timeout` has not passed (see `retry`); each wait for the socket
  takes at most the other half, so that a call ends within `timeout` (or half as much again, for
  threads, when its last repetition had to connect first).
- Pools do not refuse callers: a limit lets in as many as there are connections. redis-py's
  own count has no bound, because a signal handler that raises inside its pool takes a place for
  good.
"""

from __future__ import annotations

import enum
import inspect
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, unquote

import redis
from msgspec import Struct
from redis.backoff import NoBackoff

from semel.errors import ConfigError, did_you_mean
from semel.stores.redis.errors import CLUSTER
from semel.stores.redis.redis_py import RETRIES_BELONG_TO_NODES
from semel.stores.urls import OPEN_OPTIONS, check_login, reject_in_url

# --- URLs ------------------------------------------------------------------------------------

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
_HIGHEST_PORT = 65535


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

    @property
    def place(self) -> str:
        """The same with the database, of which a cluster has one only."""
        one = self.kind is Kind.CLUSTER
        return self.where if one else f"{self.where}, database {self.options.get('db', 0)}"

    def __repr__(self) -> str:
        return f"<ServerAddress {self.where}>"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("where", self.where)]


def parse_addresses(text: str, *, default_port: int = DEFAULT_PORT) -> list[tuple[str, int]]:
    """Read `host:port,host:port` (or with semicolons)."""
    addresses = [part.strip() for part in text.replace(";", ",").split(",")]
    return [_address(part, place, default_port) for place, part in enumerate(addresses, 1)]


def _address(part: str, place: int, default_port: int) -> tuple[str, int]:
    def bad(why: str) -> ConfigError:
        # By its place: without the @ behind it, a login is taken for an address.
        return ConfigError(
            f"address {place} of the URL is wrong: {why}; write host:port, and a login before it "
            "as user:password@"
        )

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
        raise bad("what follows the colon is not a port")
    return host, int(port)


def parse_url(url: str) -> ServerAddress:
    """Read a store URL."""
    scheme, _, rest = url.partition("://")
    kind, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    login, at, places = authority.rpartition("@")
    check_login(f"{scheme}://{authority}?{query}" if kind is Kind.UNIX else url)
    # First: what is half of a password is then not read as a database or an option, and shown.
    port = SENTINEL_PORT if kind is Kind.SENTINEL else DEFAULT_PORT
    assumed = "localhost" if kind is Kind.SINGLE else ""
    hosts = [] if kind is Kind.UNIX else parse_addresses(places or assumed, default_port=port)
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
    if kind is Kind.SINGLE and len(hosts) > 1:
        raise ConfigError(
            f"{scheme}:// takes one server, got {len(hosts)}; several are {scheme}+cluster:// "
            f"or {scheme}+sentinel://"
        )
    return ServerAddress(kind, tls, tuple(hosts), None, service, options)


def _database(path: str) -> int:
    if not path.isascii() or not path.isdigit():
        raise ConfigError("the database must be a number: redis://localhost:6379/0")
    return int(path)


def _query_options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        reject_in_url([name], timeout="an option of open_store, and the setting store_timeout")
        parse = OPTIONS.get(name)
        if parse is None:
            raise ConfigError(
                f"unknown option {name!r} in the URL; known: {', '.join(OPTIONS)}. redis-py's "
                "others are given by name"
            )
        try:
            options[name] = parse(text)
        except (ValueError, KeyError):
            raise ConfigError(f"option {name!r} in the URL has a bad value") from None
    return options


# --- clients ---------------------------------------------------------------------------------

DEFAULT_CONNECTIONS = 64
NO_LIMIT = 2**31
"""What redis-py's pools took for no limit until 7; later ones have a bound unless they get this."""

_SHARED = ("socket_", "ssl")
"""How the options begin that count for the Sentinels, too."""
_OURS = {"max_connections", "sentinel_username", "sentinel_password", "min_other_sentinels"}


def opener(
    address: ServerAddress, timeout: float, more: Mapping[str, Any], driver: ModuleType
) -> Callable[[], Any]:
    """Check the settings now; the function that is returned makes a client.

    `driver` is redis-py's module for threads (`redis`) or for asyncio (`redis.asyncio`).
    """
    settings = _Settings(address, timeout, more)
    once = driver.retry.Retry(NoBackoff(), 0)
    match address.kind:
        case Kind.CLUSTER:
            # A new client asks one of the nodes at random, which may be one that does not answer.
            retry = once if RETRIES_BELONG_TO_NODES else driver.retry.Retry(NoBackoff(), 1)
            if driver is redis:
                settings.check(driver.RedisCluster, driver.Redis)
            else:
                settings.check(driver.RedisCluster)
            node = driver.cluster.ClusterNode
            # Nodes are made for each client: they keep the connections of one that was not made.
            return lambda: driver.RedisCluster(
                startup_nodes=[node(*place) for place in address.hosts],
                retry=retry,
                **settings.both,
            )
        case Kind.SENTINEL:
            settings.check(driver.Redis)
            finders = settings.for_sentinels | {"retry": once}
            sentinel = driver.Sentinel(address.hosts, settings.min_other_sentinels, finders)
            return lambda: sentinel.master_for(address.service, retry=once, **settings.both)
        case _:
            settings.check(driver.Redis)
            return lambda: driver.Redis(retry=once, **settings.place, **settings.both)


def pools_of(client: Any) -> list[Any]:
    """The pool of a client, and those of the sentinels behind it: all that connect and are closed.

    Pools, because 5.0.0 leaves some of them open when it closes their client.
    """
    pool = client.connection_pool
    manager = getattr(pool, "sentinel_manager", None)
    sentinels = () if manager is None else manager.sentinels
    return [pool, *(sentinel.connection_pool for sentinel in sentinels)]


def server_name(client: Any) -> str:
    """Name the server of a client of the application, for messages."""
    settings = client.connection_pool.connection_kwargs
    service = getattr(client.connection_pool, "service_name", None)
    if service is not None:
        return f"redis {service!r} (by sentinel)"
    if "path" in settings:
        return f"redis {settings['path']}"
    return f"redis {settings.get('host', 'localhost')}:{settings.get('port', 6379)}"


def cluster_name(client: Any) -> str:
    """Name the cluster of a client of the application, for messages."""
    nodes = client.nodes_manager.startup_nodes.values()
    return CLUSTER + ",".join(f"{node.host}:{node.port}" for node in nodes)


def wrong_client(client: Any, store: str, wanted: str) -> ConfigError:
    """What to raise for a client that this store cannot use."""
    kind = type(client)
    return ConfigError(
        f"{store} takes a {wanted}, got a {kind.__module__}.{kind.__qualname__}; "
        "sync clients go with RedisStore, redis.asyncio ones with AsyncRedisStore"
    )


class _Settings:
    """The keyword arguments of redis-py's clients, from a URL and what was passed beside it."""

    def __init__(self, address: ServerAddress, timeout: float, more: Mapping[str, Any]) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, got {timeout!r}")
        half = {"socket_timeout": timeout / 2, "socket_connect_timeout": timeout / 2}
        given: dict[str, Any] = half | address.options | dict(more)
        if address.tls:
            _check_files(given)
        if given.get("protocol", 3) not in _PROTOCOLS:
            raise ConfigError(f"protocol is 2 or 3, got {given['protocol']!r}")
        self.min_other_sentinels = int(given.get("min_other_sentinels", 0))
        connection_limit(address, more)  # which raises for a wrong one; `Limit` keeps it
        self.both: dict[str, Any] = {
            name: value for name, value in given.items() if name not in _OURS
        }
        self.both["max_connections"] = NO_LIMIT
        if address.tls:
            self.both["ssl"] = True
            if given.get("ssl_cert_reqs", "required") not in _UNCHECKED:
                # redis-py checks the name from version 6 on; before that, only when it is told to.
                self.both.setdefault("ssl_check_hostname", True)
        login = {"username": "sentinel_username", "password": "sentinel_password"}
        # Sentinels are asked one after another: together they get the time of one server.
        share = timeout / 2 / max(len(address.hosts), 1)
        chosen = {**address.options, **more}
        self.for_sentinels = (
            {name: value for name, value in self.both.items() if name.startswith(_SHARED)}
            | {"max_connections": NO_LIMIT}
            | {name: share for name in half if name not in chosen}
            | {name: given[option] for name, option in login.items() if option in given}
        )
        if address.path is not None:
            self.place: dict[str, Any] = {"unix_socket_path": address.path}
        elif address.kind is Kind.SINGLE:
            self.place = dict(zip(("host", "port"), address.hosts[0], strict=True))

    def check(self, *classes: type) -> None:
        """Refuse what redis-py would take silently, or refuse only on the first connection."""
        known = {name for kind in classes for name in inspect.signature(kind).parameters}
        for name in self.both:
            if name not in known:
                raise ConfigError(
                    f"unknown option {name!r}: neither open_store nor redis-py knows it here"
                    + did_you_mean(name, known | OPEN_OPTIONS)
                )


_PROTOCOLS = (2, 3, "2", "3")
_UNCHECKED = (None, "none", ssl.CERT_NONE)
_FILES = {"ssl_ca_certs": Path.is_file, "ssl_ca_path": Path.is_dir}
_FILES |= dict.fromkeys(("ssl_certfile", "ssl_keyfile"), Path.is_file)


def _check_files(given: Mapping[str, Any]) -> None:
    """Refuse a file of TLS that is not there, which redis-py would not name."""
    for name, is_there in _FILES.items():
        path = given.get(name)
        if path is not None and not is_there(Path(path)):
            raise ConfigError(f"{name}: no such file or directory: {str(path)!r}")


def connection_limit(address: ServerAddress, more: Mapping[str, Any]) -> int:
    """How many calls may be on their way at once (`max_connections`)."""
    limit = dict(address.options | dict(more)).get("max_connections", DEFAULT_CONNECTIONS)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"max_connections must be a positive number, got {limit!r}")
    return limit
