"""Where a service is: the URL of a remote store and its options. Nothing is resolved or opened."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from semel.core.settings import TOKEN_VARIABLE
from semel.errors import ConfigError
from semel.stores.urls import (
    DEFAULT_PREFIX,
    check_login,
    merge_options,
    positive_seconds,
    reject_in_url,
    split_url,
)

PORT: Final = 8600
"""Where `semel serve` listens by default."""
TLS_PORT: Final = 443

FILES: Final = ("ca_file", "cert_file", "key_file")
OPTIONS: Final = frozenset({*FILES, "token"})

IDLE: Final = 3.0
"""Seconds after which an idle connection is not used again. Many servers and balancers close one
after 5, and a request that meets its end would have to be sent again."""


class Unreachable(Exception):
    """A request had no answer: nothing came in time, or the connection ended before it did."""


_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,512}")


class Address(Struct, frozen=True):
    """What a URL and the options beside it say."""

    host: str
    port: int
    path: str
    """What stands before `/v1`, where a gateway adds it."""
    token: str | None
    files: Mapping[str, str] | None
    """The files of TLS; None = the service is reached without TLS."""
    timeout: float

    @property
    def url(self) -> str:
        """The URL before `/v1`, as HTTP has it."""
        scheme = "http" if self.files is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.path}"

    @property
    def where(self) -> str:
        """A name for messages."""
        return f"the semel service at {self.url}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        login = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        return {"Content-Type": "application/msgpack", "Accept-Encoding": "identity", **login}

    def tls(self) -> ssl.SSLContext | None:
        """Return what TLS needs to know; None where there is none."""
        files = self.files
        if files is None:
            return None
        try:
            context = ssl.create_default_context(cafile=files.get("ca_file"))
            if "cert_file" in files:
                context.load_cert_chain(files["cert_file"], files.get("key_file"))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"a file of TLS for {self.where} can't be used: {error}") from error
        return context

    def __repr__(self) -> str:
        return f"<Address {self.url}>"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("url", self.url)]


def parse(url: str, *, prefix: str, timeout: float, options: Mapping[str, Any]) -> Address:
    """Read a store URL."""
    scheme = url.partition("://")[0]
    check_login(url)
    needed = ConfigError(f"{scheme}:// needs a host, and maybe a port: {scheme}://host:{PORT}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise needed from None
    if not host or port == 0:
        raise needed
    if "@" in parts.netloc:
        raise ConfigError(f"{scheme}:// has no login: set {TOKEN_VARIABLE} instead")
    in_url = split_url(url)[1]
    reject_in_url(in_url, token=f"a secret: set {TOKEN_VARIABLE}, or give it to open_store")
    chosen = merge_options(scheme, in_url, options, OPTIONS)
    if prefix != DEFAULT_PREFIX:
        raise ConfigError(
            f"the prefix of {scheme}:// is the service's: set it there, and leave it out here"
        )
    tls = scheme.endswith("https")
    return Address(
        host,
        port or (TLS_PORT if tls else PORT),
        parts.path.rstrip("/"),
        _token(chosen.get("token")),
        _files(scheme, chosen, tls=tls),
        positive_seconds("timeout", timeout),
    )


def _token(given: object) -> str | None:
    token = given if given is not None else os.environ.get(TOKEN_VARIABLE) or None
    if token is None or (isinstance(token, str) and _TOKEN.fullmatch(token)):
        return token
    name = TOKEN_VARIABLE if given is None else "token"
    raise ConfigError(f"{name} is not a token: `semel token new` makes one, without spaces")


def _files(scheme: str, chosen: Mapping[str, Any], *, tls: bool) -> dict[str, str] | None:
    files = {name: os.fspath(chosen[name]) for name in FILES if name in chosen}
    if not tls:
        if files:
            raise ConfigError(f"{min(files)} is for TLS: write semel+https://, not {scheme}://")
        return None
    for name, file in files.items():
        if not Path(file).is_file():
            raise ConfigError(f"{name}: there is no file {file}")
    if "key_file" in files and "cert_file" not in files:
        raise ConfigError("key_file goes with cert_file")
    return files
