# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Idioms that the docs print, as mypy and pyright must take them; nothing here is ever run."""

from __future__ import annotations

from typing import Any, assert_type

from semel import Attempt, Policy, Record, current_attempt, require_attempt
from semel.adapters.fastapi import Idempotent
from semel.adapters.grpc import IdempotencyInterceptor
from semel.adapters.wsgi import IdempotencyMiddleware
from semel.http import part_of_call


class CardDeclinedError(Exception):
    """Proves that nothing was charged."""


class CardExpiredError(CardDeclinedError):
    """The same."""


def exceptions_that_prove_nothing_happened(known: list[type[CardDeclinedError]]) -> None:
    Policy.payment(not_done=[CardDeclinedError])
    Policy.payment(not_done=CardDeclinedError)
    Policy(not_done=(CardDeclinedError, CardExpiredError))
    Policy(not_done=known)
    Policy(not_done=[5])  # type: ignore[list-item]


def the_attempt_that_runs() -> None:
    assert_type(require_attempt(), Attempt[Any])
    assert_type(require_attempt().derive("receipt"), str)
    current_attempt().derive("receipt")  # type: ignore[union-attr]


def keys_of_downstream_calls(record: Record) -> None:
    assert_type(record.derive("charge"), str)
    assert_type(record.derive(part_of_call("POST", "https://bank.example/charges"), nth=2), str)


def what_a_tenant_function_sees(app: Any) -> None:
    Idempotent("memory://", tenant=lambda request: request.raw.state.user)
    IdempotencyMiddleware(app, "memory://", tenant=lambda request: request.raw.get("REMOTE_USER"))
    IdempotencyInterceptor("memory://", tenant=lambda call: call.metadata.get("x-user"))
