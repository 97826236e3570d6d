"""Decisions about abandoned attempts, as events; each one also goes into the audit trail.

Event
└── Decision            who decided, when, on which record
    ├── Resolved        the outcome is stored
    ├── Overtaken       it was decided, but somebody else wrote the outcome first
    ├── Unresolved      nobody knows yet, or no resolver is registered for the scope
    │   └── ResolverFailed   ... because the resolver itself failed
    └── GaveUp          asked as often as allowed; a person has to decide
"""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

from semel.events import Event

Verdict: TypeAlias = Literal["succeeded", "failed", "retryable"]


class Decision(Event, frozen=True, kw_only=True):
    """Somebody decided about an abandoned attempt."""

    fence: int
    by: str
    """Who: a name, the host and the process."""
    at: float
    """When, on the store's clock."""


class Resolved(Decision, frozen=True, kw_only=True):
    """The outcome of an abandoned attempt was found out, and is stored."""

    level = logging.INFO
    verdict: Verdict
    kept_until: float
    """How long at least, on the store's clock; a call after that runs again."""


class Overtaken(Decision, frozen=True, kw_only=True):
    """Somebody else wrote the outcome first; this decision was refused."""

    level = logging.WARNING
    verdict: Verdict


class Unresolved(Decision, frozen=True, kw_only=True):
    """Nobody knows yet what happened; the attempt stays abandoned, and held if it was."""

    level = logging.WARNING
    reason: str
    tries: int
    """How often its resolver was asked; 0 when there is none."""


class ResolverFailed(Unresolved, frozen=True, kw_only=True):
    """The resolver itself failed; `reason` is the type of its error."""

    level = logging.ERROR


class GaveUp(Decision, frozen=True, kw_only=True):
    """The resolver was asked as often as allowed; a person has to decide."""

    level = logging.ERROR
    tries: int
