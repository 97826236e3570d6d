"""Record and rows in one transaction: `@idempotent(atomic="default")`.

The view runs inside `transaction.atomic()` of that database. An answer that is stored commits with
the view's rows, or neither does; an exception, or an answer that is not stored, rolls back both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.db import transaction

from semel.adapters.aio_door import refused
from semel.adapters.django.bodies import Body
from semel.adapters.django.responses import lines_of, read, rendered, response_of
from semel.adapters.door import Door
from semel.errors import IdempotencyError
from semel.http.rulebook import Refusal, Rulebook
from semel.http.storing import is_event_stream, is_success
from semel.sync.transactions import TransactionContext

_REDIRECTION: Final = 3
"""The first digit of a redirect's status."""


class _NotStored(Exception):
    """Rolls back what was done for an answer that is not stored; it never leaves this module."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


def protected(door: Door, book: Rulebook, request: Any, view: Callable[[], Any], alias: str) -> Any:
    """Answer one request: by the view, in a transaction, or by what is known of its key."""
    body = Body(request, book.max_body)
    try:
        call = door.called(book, body.request, body.read)
    except (IdempotencyError, Refusal) as error:
        return response_of(refused(book, error))
    together: Any = transaction.atomic(using=alias)
    if call is None:
        with together:
            return view()
    failure: Exception | None = None
    try:
        with together, TransactionContext(door.engine, call, alias, None) as attempt:
            if attempt.replayed:
                return response_of(book.replay(attempt.result))
            try:
                response = rendered(view(), request)
                attempt.result = _stored(book, response)
            except Exception as error:
                failure = error
                raise
            return response
    except _NotStored as undone:
        return undone.response
    except IdempotencyError as error:
        if error is failure:
            raise
        return response_of(refused(book, error))


def _is_done(book: Rulebook, status: int) -> bool:
    """Tell whether an answer is stored and its rows are committed.

    A redirect is, unless the application says otherwise: after a form it is how a view says "done".
    """
    redirects = book.choices.stored is is_success and status // 100 == _REDIRECTION
    return redirects or book.keeping(status) == "store"


def _stored(book: Rulebook, response: Any) -> bytes:
    """Give what is stored of a response, or roll back."""
    response.headers.pop(book.choices.replayed_header, None)
    if not _is_done(book, response.status_code):
        raise _NotStored(response)
    if is_event_stream(lines_of(response)):
        # Its rows are committed, so it must not run again; it is only not kept.
        return book.stored(response.status_code, lines_of(response), None)
    return book.stored(*read(response, book.max_response))
