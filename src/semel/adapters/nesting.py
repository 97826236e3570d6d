"""Doors within doors: the outermost one protects a request, those further inside let it pass.

A second one would find the key taken by the first, and refuse what it was to protect.
"""

from __future__ import annotations

from typing import Final

from semel.attempts import current_attempt
from semel.core.records import Identity
from semel.errors import ConfigError

PROTECTED: Final = "semel.protected"
"""Is in the environ, or in the scope, of a request that a door protects."""


def owners_around(identity: Identity) -> set[bytes]:
    """Give the owners of the attempts around this call that claimed the same record."""
    owners, around = set(), current_attempt()
    while around is not None:
        if around.identity == identity:
            owners.add(around.owner)
        around = around.outer
    return owners


def claimed_outside(option: str) -> ConfigError:
    """Say that an integration further outside has the record which this one was to write."""
    return ConfigError(
        "this request is protected by another integration further outside, with the same store and "
        f"the same key as @idempotent({option}=...): give one of them another scope=, or let the "
        "outer one leave this path alone (exclude=)"
    )
