"""Entries of the audit trail as records: `semel.repair.audit` writes and reads them.

They are here because engines write one, too, before they clear a scope.
"""

from __future__ import annotations

import os
from copy import copy
from typing import Final

import msgspec

from semel.core.keys import KeyGenerator
from semel.core.policy import DAY
from semel.core.records import AUDIT_SCOPE, OWNER_BYTES, Encoded, Identity, PutRequest
from semel.errors import ConfigError, StoreError

KEPT: Final = 400 * DAY
"""Seconds that an entry is kept: more than a year, so that audits of a year find all of it."""

LONGEST_TEXT: Final = 500
"""Characters of a name or of a reason."""

KEYS: Final = KeyGenerator("audit")
"""Makes the keys of entries, which sort by time and end in a random part."""

CODEC: Final = "audit/1"


def checked_text(what: str, text: str) -> str:
    """Return a text that fits on one line of a listing."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{what} must be a string that is not empty; got {text!r}")
    if len(text) > LONGEST_TEXT:
        raise ConfigError(f"{what} has {len(text)} characters, at most {LONGEST_TEXT} are allowed")
    if not text.isprintable():
        raise ConfigError(f"{what} must be one line of printable characters; got {text!r}")
    return text


def request_for(said: dict[str, str]) -> PutRequest:
    """Make the request that writes an entry."""
    identity = Identity(AUDIT_SCOPE, KEYS.new())
    outcome = Encoded(CODEC, msgspec.json.encode(said))
    return PutRequest(identity, os.urandom(OWNER_BYTES), outcome, KEPT)


def not_written(answer: bool | StoreError) -> StoreError:
    """Make the error of an action that is refused because its entry is missing."""
    cause = answer if isinstance(answer, StoreError) else StoreError("its key is taken")
    refused = copy(cause)  # of the same class: it says whether to try again
    refused.args = (
        f"the entry in the audit trail could not be written, so nothing was done: {cause.text}",
    )
    refused.__cause__ = cause
    return refused
