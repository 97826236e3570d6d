"""The command find: the records of a key, a client's key, a key digest or a problem's `instance`.

Support knows a key as the client sent it. What is stored may have the tenant and the route before
it, and what would be too long is stored as a digest. So `find` reads every record that the options
let through, and compares each.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable

from semel.cli.reading import print_records
from semel.cli.store import PAGE, digest_of, open_engine, read_pages
from semel.cli.terminal import Progress
from semel.core.records import Identity, Record
from semel.errors import ConfigError, InvalidKey
from semel.http.problems import INSTANCE
from semel.http.requests import KEY_DIGEST, StoredKeys, key_of_lines


class Wanted:
    """What a text can mean: a key digest, a stored key, or the key of a client."""

    def __init__(self, text: str, tenant: str | None = None, route: str | None = None) -> None:
        if not text or not text.isprintable():
            raise ConfigError("TEXT is a key, a key digest or the instance of a problem")
        is_instance = text.lower().startswith(INSTANCE)
        self.digest = digest_of(text)
        if is_instance and self.digest is None:
            raise ConfigError(f"an instance is {INSTANCE} and 32 hexadecimal digits; take it whole")
        anywhere = tenant is None and route is None
        self._stored = text if anywhere and not is_instance else None
        self._of_clients = (
            [] if is_instance else [StoredKeys(key, tenant, route) for key in _client_keys(text)]
        )

    def match(self, record: Record) -> bool:
        """Tell whether a record is meant."""
        key = record.key
        return (
            key == self._stored
            or any(keys.match(key) for keys in self._of_clients)
            or (self.digest is not None and record.identity.key_digest == self.digest)
        )


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
    with open_engine(options) as engine:
        try:
            with Progress() as progress:
                for page in read_pages(engine, PAGE, scope=options.scope):
                    found |= {each.identity: each for each in page if wanted.match(each)}
                    if len(found) > options.limit or wanted.digest in _digests(found):
                        break
                    read += len(page)
                    digests += sum(each.key.startswith(KEY_DIGEST) for each in page)
                    progress.show(f"{read:,} records read, {len(found)} found")
        finally:  # also of a search that Ctrl-C ends
            if found or options.json:
                print_records([*found.values()][: options.limit], options)
    if len(found) > options.limit:
        print(f"there are more than {options.limit}: see --limit", file=sys.stderr)
    if not found:
        print(f"none of {read} records has it{_hint(options, digests)}", file=sys.stderr)
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
