"""The command find: the records of a key, a client's key, a key digest or a problem.

Support knows a key as the client sent it. What is stored may have the tenant and the route before
it, and what would be too long is stored as a digest. So `find` reads every record that the options
let through, and compares each.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from semel.cli.reading import print_records
from semel.cli.store import PAGE, digest_of, hint_if_empty, open_engine, read_pages
from semel.cli.terminal import Progress, say
from semel.core.observers import printable
from semel.core.records import Identity, Record
from semel.errors import ConfigError, InvalidKey
from semel.http.problems import INSTANCE
from semel.http.requests import KEY_DIGEST, StoredKeys, key_of_lines, stored_key

_SHOWN_PARTS: Final = 3
"""Keys that are named because they contain the text."""


class Wanted:
    """What a text can mean: a key digest, a stored key, or the key of a client."""

    def __init__(self, text: str, tenant: str | None = None, route: str | None = None) -> None:
        self.digest = digest_of(text)
        if self.digest is None and INSTANCE in text.lower():
            raise ConfigError(
                f"an instance is {INSTANCE} and 32 hexadecimal digits; give all of it"
            )
        self.may_be_key = self.digest in {None, text.lower()}
        """Not the whole problem, or log line, that names a digest."""
        if self.may_be_key and not (text and text.isprintable()):
            raise ConfigError(
                "TEXT is a key, a key digest, or a problem or log line that has one "
                f"({INSTANCE}..., key_digest=...)"
            )
        anywhere = tenant is None and route is None
        self._stored = text if anywhere and self.may_be_key else None
        clients = _client_keys(text) if self.may_be_key else []
        self._of_clients = [StoredKeys(key, tenant, route) for key in clients]
        self._parts = {text, stored_key(text)} if self.may_be_key else set()

    def match(self, record: Record) -> bool:
        """Return whether a record is meant."""
        key = record.key
        return (
            self._stored in {key, unquote(key)}
            or any(keys.match(key) for keys in self._of_clients)
            or (self.digest is not None and record.identity.key_digest == self.digest)
        )

    def contains(self, record: Record) -> bool:
        """Return whether the text is a part of a record's key."""
        return any(part in record.key for part in self._parts)


def _client_keys(text: str) -> list[str]:
    """Return the key as a client has it: this text, or what is quoted by it as in the header."""
    try:
        sent = key_of_lines([text])
    except InvalidKey:
        sent = None
    return [text] if sent is None or sent == text else [text, sent]


def find(options: Namespace) -> int:
    """Find the records that a text can mean; the exit code says whether there are any."""
    wanted = Wanted(options.text, options.tenant, options.route)
    found: dict[Identity, Record] = {}  # Redis may list a record twice while it rebuilds its table
    read = digests = 0
    partly: list[str] = []  # keys that contain the text
    with open_engine(options) as engine:
        try:
            with Progress() as progress:
                for page in read_pages(engine, PAGE, scope=options.scope):
                    found |= {each.identity: each for each in page if wanted.match(each)}
                    if len(found) > options.limit or wanted.digest in _digests(found):
                        break
                    read += len(page)
                    digests += sum(each.key.startswith(KEY_DIGEST) for each in page)
                    partly += [each.key for each in page if wanted.contains(each)]
                    progress.show(f"{read:,} records read, {len(found)} found")
        finally:  # also of a search that Ctrl-C ends
            if found or options.json:
                print_records([*found.values()][: options.limit], options)
        hint = None if found or read else hint_if_empty(engine, options)
    if len(found) > options.limit:
        say(f"there are more than {options.limit}: see --limit")
    if not found:
        hidden = digests if wanted.may_be_key else 0  # a digest finds those, too
        say(f"none of {read} records has it{_hint(options, hidden)}")
        if wanted.may_be_key:
            say(f"find compares whole keys{_parts(partly)}")
    if hint is not None:
        say(hint)
    return 0 if found else 1


def _digests(found: Iterable[Identity]) -> set[str]:
    return {identity.key_digest for identity in found}


def _hint(options: Namespace, digests: int) -> str:
    """Say what may help."""
    missing = [f"--{name}" for name in ("tenant", "route") if getattr(options, name) is None]
    if digests and missing:
        return (
            f"; {digests} of them have keys that were too long and are stored as digests: "
            f"such a key is found with its {' and '.join(missing)}"
        )
    return "; a record that has expired is gone"


def _parts(keys: list[str]) -> str:
    """Name some of the keys that contain a text."""
    if not keys:
        return ""
    shown = ", ".join(printable(key) for key in keys[:_SHOWN_PARTS])
    more = ", ..." if len(keys) > _SHOWN_PARTS else ""
    number = "1 key contains it" if len(keys) == 1 else f"{len(keys)} keys contain it"
    return f"; {number}: {shown}{more}"
