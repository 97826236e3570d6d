"""Who may ask what: the tokens of a service, in a TOML file with their sha256 sums.

    [tokens.shop]
    sha256 = "9f86d0..."        # `semel token new shop` writes it
    rights = ["use"]            # use, store, view, operate
    scopes = ["shop.*"]         # names, or patterns that end in *
    rate = 200                  # optional: starts and claims a second

A token is never stored, logged, or shown after it was made.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from msgspec import UNSET, UnsetType

from semel.core.records import check_text
from semel.core.settings import WILDCARD, names_for
from semel.errors import ConfigError, InvalidKey, did_you_mean
from semel.server.problems import Problem

RIGHTS: Final = {
    "use": "the five verbs",
    "store": "claim, renew, complete, fail, and watch, for engines that use the service as a store",
    "view": "read records, and /metrics",
    "operate": "put, touch, forget, adopt, purge, and the audit trail",
}

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUM: Final = re.compile("[0-9a-f]{64}")
_MOST_RATE: Final = 1_000_000
_BEARER: Final = re.compile(r"bearer +([\x21-\x7e]{1,512})", re.IGNORECASE)


class Caller:
    """Who sends a request, and what it may ask."""

    def __init__(
        self,
        name: str | None = None,
        rights: frozenset[str] = frozenset(RIGHTS),
        scopes: frozenset[str] = frozenset({WILDCARD}),
        rate: float | None = None,
    ) -> None:
        self.name = name
        """The token's; None where the service has no tokens."""
        self.rights = rights
        self.scopes = scopes
        self.rate = rate
        self.waiting = 0
        """How many of its starts wait."""
        self.replaced = False
        """Whether the file that was read last has no such token, or says something else of it."""
        self._left = 1.0 if rate is None else max(1.0, rate)
        self._at = time.monotonic()

    @property
    def may_operate(self) -> bool:
        """Whether errors may show it the store's host and path."""
        return "operate" in self.rights

    def may(self, right: str, scope: str | UnsetType | None) -> bool:
        """Return whether it may ask this about a scope; None stands for all of them.

        UNSET: what it asks is about no record at all.
        """
        if right not in self.rights:
            return False
        if scope is UNSET:
            return True
        return WILDCARD in self.scopes if scope is None else bool(names_for(scope, self.scopes))

    def require(self, right: str, scope: str | UnsetType | None) -> None:
        """Raise a `forbidden` problem unless it `may`."""
        if not self.may(right, scope):
            raise Problem("forbidden")

    def count(self, n: int = 1) -> None:
        """Count starts and claims; raise a `rate_limited` problem while the rate is used up.

        A second's worth may come at once. A batch larger than that needs a full second's worth, and
        the next request waits for the rest.
        """
        if self.rate is None:
            return
        now, most = time.monotonic(), max(1.0, self.rate)
        self._left = min(most, self._left + (now - self._at) * self.rate)
        self._at = now
        missing = min(n, most) - self._left
        if missing > 0:
            raise Problem("rate_limited", retry_after=missing / self.rate)
        self._left -= n


ANYONE: Final = Caller()
"""The caller of a service without tokens, which listens on this machine only."""


class Tokens:
    """The tokens of a service."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self._callers = dict(callers)

    @classmethod
    def load(cls, path: str | Path, before: Tokens | None = None) -> Tokens:
        """Read the file; a `ConfigError` names all that is wrong with it.

        Callers that are unchanged since `before` keep what they have used of their rate.
        """
        try:
            table = tomllib.loads(Path(path).read_text("utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not valid TOML: {error}") from error
        problems: list[str] = []
        callers = dict(_callers(table, problems))
        if problems:
            listed = "\n  - ".join(["these tokens are wrong:", *problems])
            raise ConfigError(f"{path}: {listed}")
        known = {} if before is None else before._callers  # noqa: SLF001 - of the same class
        for digest, caller in callers.items():
            old = known.get(digest)
            if old is not None and vars_of(old) == vars_of(caller):
                callers[digest] = old
        return cls(callers)

    def replace(self, before: Tokens) -> None:
        """Let those of `before` know that are not here any more: what waits for them must end."""
        for digest, caller in before._callers.items():
            caller.replaced = self._callers.get(digest) is not caller

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller whose token the headers have; raise `unauthorized` for any other."""
        sent = _BEARER.fullmatch(headers.get("authorization", ""))
        found: Caller | None = None
        if sent is not None:
            digest = hashlib.sha256(sent[1].encode()).digest()
            for known, caller in self._callers.items():  # all of them: in constant time
                if hmac.compare_digest(known, digest):
                    found = caller
        if found is None:
            raise Problem("unauthorized", headers={"WWW-Authenticate": "Bearer"})
        return found


def vars_of(caller: Caller) -> tuple[object, ...]:
    """Return what a file says of a caller."""
    return caller.name, caller.rights, caller.scopes, caller.rate


def _callers(table: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[bytes, Caller]]:
    problems += [
        f"{name}: is not known; a token is a table [tokens.NAME]"
        for name in table
        if name != "tokens"
    ]
    tokens = table.get("tokens", {})
    if not isinstance(tokens, Mapping):
        problems.append("tokens: must be a table of tables, [tokens.NAME]")
        return
    seen: dict[str, str] = {}
    for name, fields in tokens.items():
        where = f"tokens.{name}"
        wrong = list(_problems(name, fields))
        problems += [f"{where}{each}" for each in wrong]
        if wrong:
            continue
        digest = fields["sha256"]
        if digest in seen:
            problems.append(f"{where}.sha256: is the one of tokens.{seen[digest]}")
        seen[digest] = name
        rights, scopes = frozenset(fields["rights"]), frozenset(fields["scopes"])
        yield bytes.fromhex(digest), Caller(name, rights, scopes, fields.get("rate"))


def _problems(name: str, fields: object) -> Iterator[str]:
    """Say what is wrong with one token; each text follows the place."""
    if _NAME.fullmatch(name) is None:
        yield ": a name has up to 64 letters, digits, dots, _ and -"
    if not isinstance(fields, Mapping):
        yield ": must be a table"
        return
    for field in fields.keys() - _FIELDS.keys():
        yield f".{field}: is not known{did_you_mean(field, _FIELDS)}"
    for field, (fits, expected) in _FIELDS.items():
        if not fits(fields.get(field)):
            yield f".{field}: must be {expected}"


def _is_sum(value: object) -> bool:
    return isinstance(value, str) and _SUM.fullmatch(value) is not None


def _is_rights(value: object) -> bool:
    # By type first: what cannot be hashed is in no set.
    return isinstance(value, list) and {*map(type, value)} == {str} and {*value} <= RIGHTS.keys()


def _is_scopes(value: object) -> bool:
    try:
        for each in value if isinstance(value, list) else ():
            check_text("scope", each)
    except InvalidKey:
        return False
    return isinstance(value, list) and value != []


def _is_rate(value: object) -> bool:
    if value is None:
        return True
    return type(value) in {int, float} and 0 < cast("float", value) <= _MOST_RATE


_FIELDS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "sha256": (_is_sum, "the 64 hex digits that `semel token new` prints, never the token"),
    "rights": (_is_rights, f"a list of some of {', '.join(RIGHTS)}"),
    "scopes": (_is_scopes, 'a list of scopes or patterns, such as ["orders.*"]'),
    "rate": (_is_rate, f"a number of requests a second, above 0 and at most {_MOST_RATE}"),
}
"""What a token's table may have: how to know a good value, and what to say of a bad one."""


def new_token() -> tuple[str, str]:
    """Make a token; return it with its sha256 sum."""
    token = f"semel_{secrets.token_urlsafe(32)}"
    return token, hashlib.sha256(token.encode()).hexdigest()


def checked_table(name: str, fields: Mapping[str, Any]) -> str:
    """Write the table of a token in TOML; raise `ConfigError` for what no file may have."""
    problems: list[str] = []
    list(_callers({"tokens": {name: fields}}, problems))
    if problems:
        raise ConfigError("; ".join(problems))
    lines = (f"{field} = {json.dumps(value)}" for field, value in fields.items())
    return "\n".join([f'[tokens."{name}"]', *lines, "", ""])
