"""Record and rows in one transaction: `@idempotent(atomic="default")`.

The view runs inside `transaction.atomic()` of that database. An answer that is stored commits with
the view's rows, or neither does; an exception, or an answer that is not stored, rolls back both.

That holds behind other integrations, too. They have a record of their own, in a transaction of its
own, which could not keep this promise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import transaction

from semel.adapters.check_decorators import claimed_outside, owners_around
from semel.adapters.django.bodies import Body
from semel.adapters.django.responses import lines_of, read, rendered, response_of
from semel.adapters.integration import Integration
from semel.engine._sync.transactions import TransactionContext
from semel.engine.setup import Call
from semel.errors import IdempotencyError, StoreError, about
from semel.http.rules import Rejected, RouteRules
from semel.http.storing import is_event_stream
from semel.transactions import troubles


class _NotStored(Exception):
    """Rolls back what was done for an answer that is not stored; it never leaves this module."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


def protected(
    integration: Integration, rules: RouteRules, request: Any, view: Callable[[], Any], alias: str
) -> Any:
    """Answer one request: by the view, in a transaction, or by what is known of its key."""
    body = Body(request, rules.max_body)
    try:
        call = integration.called(rules, body.request, body.read)
    except (IdempotencyError, Rejected) as error:
        return response_of(rules.rejection(error))
    together: Any = transaction.atomic(using=alias)
    if call is None:
        with together:
            return view()
    failure: Exception | None = None
    try:
        with together, TransactionContext(integration.engine, call, alias, None) as attempt:
            if attempt.replayed:
                return response_of(rules.replay(attempt.result))
            try:
                response = rendered(view(), request)
                attempt.result = _stored(rules, request, response)
            except Exception as error:
                failure = error
                raise
            return response
    except _NotStored as undone:
        return undone.response
    except IdempotencyError as error:
        if error is failure:
            raise
        return response_of(rules.rejection(_explained(integration, call, error)))
    except Exception as error:
        # The COMMIT itself may fail in a way that asks for another try; nothing was done then.
        if error is failure or not troubles.must_repeat(error):
            raise
        return response_of(rules.rejection(about(troubles.repeat(), call.identity)))


def _explained(integration: Integration, call: Call, error: IdempotencyError) -> IdempotencyError:
    """Say that it is an integration around this one that has the record which refuses it."""
    owners = owners_around(call.identity)
    if owners:
        with suppress(StoreError):
            record = integration.engine._store.get(call.identity)
            if record is not None and record.owner in owners:
                return claimed_outside("atomic")
    return error


def _stored(rules: RouteRules, request: Any, response: Any) -> bytes:
    """Give what is stored of a response, or roll back."""
    response.headers.pop(rules.choices.replayed_header, None)
    status, lines = response.status_code, lines_of(response)
    if rules.decide(status, lines) != "store":
        rules.log_redirect(status, request, rolled_back=True)
        raise _NotStored(response)
    if is_event_stream(lines):
        # Its rows are committed, so it must not run again; it is only not kept.
        return rules.stored(status, lines, None)
    return rules.stored(*read(response, rules.max_response))
