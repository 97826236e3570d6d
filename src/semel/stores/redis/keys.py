"""Where records live: `prefix{bucket}len(scope):scope:key`.

This module names keys. It touches no server.

The bucket is the identity's CRC-32 mod 1024: it spreads, and nothing more is asked of it. Between
braces it is what Redis Cluster hashes, so a record and the index of its bucket share a slot
whatever braces the user's key holds; that is also why the prefix may have none. The index is
`prefix{bucket}~leases`: a record goes on with a digit after the brace, so the two can never meet.
"""

from __future__ import annotations

import re
from zlib import crc32

from semel.core.records import Identity
from semel.errors import ConfigError
from semel.stores.redis.scripts import size

BUCKETS = 1024
_INDEX_NAME = "~leases"
_GLOB_CHARACTERS = re.compile(r"([\\*?\[\]^-])")


class KeyLayout:
    """The keys of one store."""

    def __init__(self, prefix: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ConfigError(
                f"the prefix {prefix!r} has a brace; Redis Cluster hashes what stands between "
                "braces, and semel needs that place for its own bucket number"
            )
        self.prefix = prefix
        self._indexes = [f"{prefix}{{{bucket}}}{_INDEX_NAME}".encode() for bucket in range(BUCKETS)]
        self._records = [f"{prefix}{{{bucket}}}".encode() for bucket in range(BUCKETS)]
        self.written_indexes = {index: size(len(index)) + index for index in self._indexes}
        """The keys of all indexes, each as an argument of a command."""

    def record(self, identity: Identity) -> bytes:
        """The key of the record."""
        encoded = identity.encoded
        return self._records[crc32(encoded) % BUCKETS] + encoded

    def record_and_index(self, identity: Identity) -> tuple[bytes, bytes]:
        """The key of the record, and the key of the index of running leases beside it."""
        encoded = identity.encoded
        bucket = crc32(encoded) % BUCKETS
        return self._records[bucket] + encoded, self._indexes[bucket]

    def indexes(self) -> list[bytes]:
        """The keys of all indexes."""
        return self._indexes

    def pattern(self, scope: str | None, key_prefix: str) -> bytes:
        """A glob for SCAN that finds the records asked for, and perhaps a few more."""
        glob = _escaped(self.prefix) + "{*}"
        if scope is None:
            glob += "[0-9]*:" if not key_prefix else f"[0-9]*:*:{_escaped(key_prefix)}"
        else:
            glob += _escaped(f"{len(scope)}:{scope}:{key_prefix}")
        return (glob + "*").encode()

    def identity(self, key: bytes) -> Identity | None:
        """The identity that a key stands for; None when the key is not one of ours."""
        _, brace, encoded = key.partition(b"}")
        found = member_identity(encoded) if brace else None
        return found if found is not None and self.record(found) == key else None


def member_identity(encoded: bytes) -> Identity | None:
    """Read `len(scope):scope:key`, which is also how the index names a record."""
    try:
        length, _, rest = encoded.decode().partition(":")
        scope_length = int(length)
    except ValueError:
        return None
    scope, colon, key = rest[:scope_length], rest[scope_length : scope_length + 1], rest
    if colon != ":":
        return None
    return Identity(scope, key[scope_length + 1 :])


def _escaped(text: str) -> str:
    return _GLOB_CHARACTERS.sub(r"\\\1", text)
