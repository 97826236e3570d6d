"""Turns what redis-py raises into our errors: the one place where that happens.

This module names failures. Each message says which server it was and what to do about it; none
repeats a command, because commands carry users' keys, payloads and passwords.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions as driver
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.sentinel import MasterNotFoundError

from semel.errors import (
    RecordUnreadable,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from semel.stores.urls import NO_TLS, tls_error

DRIVER_ERRORS = (driver.RedisError, driver.RedisClusterException, OSError)
"""Everything redis-py raises; RedisClusterException is not a RedisError."""

_COMMAND = re.compile(r",? with args beginning with:.*", re.DOTALL)
_OUR_SCRIPTS = re.compile(r"SEMEL<([^<>]*)>")
_NOT_PERMITTED = re.compile(r"NOPERM|no permissions|can't run this command|can't access at least")
_MISSING = re.compile(r"'([^']*)' command|\b(key|command|channel)")

_LOGIN = "authentication failed for {where}; check user name and password"
_LOADING = "{where} is still loading its data; try again when it is up"
_POOL = "no free connection to {where}; give the client a higher max_connections"
_FULL = "{where} is full; raise maxmemory, or keep records for a shorter time"
_REPLICA = "{where} is a replica and takes no writes; name the primary, or use redis+sentinel://"
_DOWN = "{where} is down: no server has some of its slots; see CLUSTER INFO"
_REDIRECTED = "{where} is in a cluster (use redis+cluster://) whose slots did not settle in time"
_UNSETTLED = "the slots of {where} did not settle in time; see CLUSTER INFO"
_MOVING = "{where} is moving this slot; try again"
_SLOW = "{where} did not answer in time; it may be overloaded, or the timeout too short"
_UNCONNECTED = (
    "{where} accepted no connection in time; it may be overloaded, the timeout too short, or its "
    "port one without TLS that rediss:// cannot open"
)
_NO_CLUSTER = "{where} cannot be reached, or is not a cluster: {text}"
_DISK = "{where} cannot write to its disk and rejects changes (MISCONF); make room there"
_NO_REPLICAS = "{where} has too few good replicas to accept writes"
_NO_PRIMARY = "{where} has lost its primary; wait for the failover"
_BUSY = "{where} is busy running a Lua script; try again later"
_NO_SENTINEL = "no sentinel of {where} answers and knows a primary of that name"
_CLIENTS = "{where} has reached its maxclients"
_DATABASE = "{where} has no database of that number"
_OTHER_TYPE = "its key at {where} holds another type, so another program uses this prefix"

# The first class that fits gives the answer, so subclasses stand before their bases.
_BY_CLASS: tuple[tuple[type[Exception], type[StoreError], str], ...] = (
    (driver.AuthenticationError, StoreRefused, _LOGIN),
    (driver.AuthorizationError, StoreRefused, _LOGIN),
    (driver.BusyLoadingError, StoreUnavailable, _LOADING),
    (driver.MaxConnectionsError, StoreUnavailable, _POOL),
    (driver.OutOfMemoryError, StoreFull, _FULL),
    (driver.ReadOnlyError, StoreUnavailable, _REPLICA),
    (driver.ClusterDownError, StoreUnavailable, _DOWN),
    (driver.SlotNotCoveredError, StoreUnavailable, _DOWN),
    (driver.AskError, StoreUnavailable, _REDIRECTED),  # a MovedError is one too
    (driver.TryAgainError, StoreUnavailable, _MOVING),
    (MasterNotFoundError, StoreUnavailable, _NO_SENTINEL),  # its words are whole connections
    (AsyncMasterNotFoundError, StoreUnavailable, _NO_SENTINEL),
    (driver.TimeoutError, StoreUnavailable, _SLOW),
    (TimeoutError, StoreUnavailable, _SLOW),
    (driver.RedisClusterException, StoreUnavailable, _NO_CLUSTER),
)

# Replies that redis-py has no class for, by the word that names them. Errors raised inside a
# script arrive with more text around that word, which is why it is searched for.
_BY_WORD: tuple[tuple[str, type[StoreError], str], ...] = (
    ("OOM ", StoreFull, _FULL),
    ("MISCONF", StoreUnavailable, _DISK),
    ("READONLY", StoreUnavailable, _REPLICA),
    ("NOREPLICAS", StoreUnavailable, _NO_REPLICAS),
    ("MASTERDOWN", StoreUnavailable, _NO_PRIMARY),
    ("BUSY ", StoreUnavailable, _BUSY),
    ("WRONGTYPE", RecordUnreadable, _OTHER_TYPE),
    ("NOAUTH", StoreRefused, _LOGIN),
    ("WRONGPASS", StoreRefused, _LOGIN),
    ("unauthenticated", StoreRefused, _LOGIN),
    ("max number of clients", StoreUnavailable, _CLIENTS),
    ("Too many connections", StoreUnavailable, _POOL),  # redis-py before 7
    ("DB index", StoreRefused, _DATABASE),
)


CLUSTER = "redis cluster "
"""How the names of clusters begin."""

_CERTIFICATES = {
    9: "it is not valid yet",
    10: "it has expired",
    62: "it is not for this host name; use the name that it is for, or ssl_check_hostname=false",
    64: "it is not for this address; use the name that it is for, or ssl_check_hostname=false",
}
"""What OpenSSL found of a certificate (X509_V_ERR_...)."""
_AUTHORITY = "{words}; name the file of its authority in ssl_ca_certs"

_HOPELESS = (driver.AuthenticationError, driver.AuthorizationError)


def is_hopeless(error: object) -> bool:
    """Whether the next connection would fail in the same way: a wrong login, or TLS refused."""
    return isinstance(error, _HOPELESS) or (
        isinstance(error, DRIVER_ERRORS) and _tls_refused(error) is not None
    )


def _tls_refused(error: BaseException) -> str | None:
    """Say why TLS does not come about; None when that is not the reason."""
    found = tls_error(error, connecting="connecting" in str(error))
    if isinstance(found, ssl.SSLCertVerificationError):
        words = found.verify_message.rstrip(".")
        why = _CERTIFICATES.get(found.verify_code, _AUTHORITY.format(words=words))
        return f"the certificate of {{where}} is rejected: {why}"
    reason = getattr(found, "reason", None)  # not every SSLError of Python's has one
    if reason in NO_TLS:
        return "{where} does not speak TLS; use redis://, or the port that does"
    if found is not None:
        return (
            f"TLS with {{where}} fails ({reason or found}); check ssl_ca_certs, "
            "ssl_certfile, ssl_keyfile and ssl_min_version"
        )
    return None


def failure(error: BaseException, where: str) -> StoreError:
    """Our error for what redis-py raised, which stays its cause unless it repeats a command."""
    text = str(error)
    said = _COMMAND.sub("", text)
    ours = _ours(error, said, where)
    ours.__cause__ = error if said == text else None
    return ours


def _ours(error: BaseException, text: str, where: str) -> StoreError:
    by_script = _OUR_SCRIPTS.search(text)
    if by_script is not None:
        return RecordUnreadable(by_script[1])
    if isinstance(error, driver.NoPermissionError) or _NOT_PERMITTED.search(text):
        return StoreRefused(
            f"{where} does not permit this user what semel needs: {_permission(text)}; "
            "what to grant is on the page docs/stores/redis.md"
        )
    refused = _tls_refused(error)
    if refused is not None:
        return StoreRefused(refused.format(where=where))
    for kind, ours, message in _BY_CLASS:
        if isinstance(error, kind):
            return ours(_fitting(message, text, where).format(where=where, text=text))
    for word, ours, message in _BY_WORD:
        if word in text:
            return ours(message.format(where=where))
    if isinstance(error, (driver.ConnectionError, OSError)):
        return StoreUnavailable(f"{where} cannot be reached: {text or type(error).__name__}")
    return StoreError(f"{where} answered: {text}")


def _fitting(message: str, text: str, where: str) -> str:
    """The message, or one that knows more."""
    if message is _REDIRECTED and where.startswith(CLUSTER):
        return _UNSETTLED
    if message is _SLOW and "connecting" in text:
        return _UNCONNECTED
    return message


def _permission(text: str) -> str:
    found = _MISSING.search(text)
    if found is None:
        return "something"
    return f"the command {found[1]}" if found[1] else f"a {found[2]}"


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Let only our errors out."""
    try:
        yield
    except DRIVER_ERRORS as error:
        ours = failure(error, where)
        raise ours from ours.__cause__
