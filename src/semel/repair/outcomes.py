"""What a resolver may find out about an abandoned attempt.

A resolver takes the record and looks where the effect would be: at the payment provider, in the
business tables. It says "failed" only with proof that the effect did not happen and no longer can.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from msgspec import Struct

from semel.core.records import Record


class Succeeded(Struct, frozen=True):
    """It happened; duplicates get this value from now on."""

    value: object = None


class Failed(Struct, frozen=True):
    """It did not happen, and no longer can."""

    error: str
    """What later callers are told."""
    retryable: bool
    """True: the same payload may run again. False: later callers get `PreviousFailure`."""


class Unknown(Struct, frozen=True):
    """It cannot be told, or not yet: the attempt stays abandoned, and held if it was."""

    reason: str = ""


Resolution: TypeAlias = Succeeded | Failed | Unknown
Resolver: TypeAlias = Callable[[Record], Resolution]
AsyncResolver: TypeAlias = Callable[[Record], Resolution | Awaitable[Resolution]]


class ResolvedFailure(Exception):
    """Stands in the record for a failure that a resolver or a person established."""
