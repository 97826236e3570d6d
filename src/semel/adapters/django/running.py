"""One protected request on a thread.

Twin of `semel.adapters.django.aio_running`: the same names in the same order, without the awaiting.
Only `_recorded` goes a way of its own: here the server reads what is too large to be kept as it
sends it, and there the request's own task does, for a client who leaves would cancel the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from semel.adapters.check_decorators import PROTECTED
from semel.adapters.django.bodies import Body
from semel.adapters.django.doors import open_transactions
from semel.adapters.django.responses import (
    lines_of,
    mark_unprotected,
    read,
    rendered,
    response_of,
    send_for_error,
    send_instead,
    told_by,
)
from semel.adapters.django.uncancelled import uncancelled
from semel.adapters.integration import Exchange, Integration
from semel.adapters.streaming import StreamedAnswer
from semel.http.messages import Answer
from semel.http.rules import RouteRules
from semel.http.storing import is_event_stream


class Claim:
    """What is known of a request's key: it runs, it is answered with this, or (neither) it passes.

    For a decorator that is known before the view, for the middleware only during its run.
    """

    def __init__(self, exchange: Any = None) -> None:
        self.exchange: Any = exchange
        self.answer: Answer | None = None

    def decided(self, outcome: Any, request: Any) -> Any:
        """Take what is known of the key; gives the response in the view's place, if any."""
        if isinstance(outcome, Answer):
            self.answer = outcome
            return response_of(outcome)
        self.exchange = outcome
        self.enter(request)
        return None

    def enter(self, request: Any) -> None:
        """Let the view run as the attempt that has the key."""
        if self.exchange is not None:
            request.META[PROTECTED] = True
            self.exchange.enter()


def protected(
    integration: Integration, rules: RouteRules, request: Any, view: Callable[[], Any]
) -> Any:
    """Answer one request: by the view, or by what is known of its key."""
    body = Body(request, rules.max_body)
    begun = integration.begin(rules, body.request, body.read)
    if begun is None:
        return view()
    if isinstance(begun, Answer):
        return response_of(begun)
    return uncancelled(request, partial(_run, Claim(begun), request, view))


def passed(claim: Claim, request: Any, get_response: Callable[[], Any]) -> Any:
    """Let a request pass whose key `process_view` claims on the way, and save its answer."""
    return uncancelled(request, partial(_run, claim, request, get_response))


def _run(claim: Claim, request: Any, view: Callable[[], Any]) -> Any:
    claim.enter(request)
    try:
        try:
            response = rendered(view(), request)
        except Exception as error:
            if claim.exchange is not None:
                _refused(claim.exchange, request, error)
            raise
        if claim.exchange is not None:
            return _recorded(claim.exchange, response)
    except BaseException as error:
        if claim.exchange is not None and not claim.exchange.ended:
            claim.exchange.raised(error)
        raise
    # A replay is what was stored, whatever the layers inside have made of it since.
    return response if claim.answer is None else response_of(claim.answer)


def _refused(exchange: Exchange, request: Any, error: Exception) -> None:
    """Record an answer that was raised; it goes on its way as an error."""
    told = told_by(error, request, exchange.rules)
    if told is not None:
        exchange.raises = True
        instead = exchange.answered(*told)
        if instead is not None:
            send_for_error(error, request, response_of(instead))


def _recorded(exchange: Exchange, response: Any) -> Any:
    """Save a response; a stream is read up to the limit before, and followed beyond it."""
    rules = exchange.rules
    response.headers.pop(rules.choices.replayed_header, None)
    if is_event_stream(lines_of(response)):
        exchange.unprotected()
        mark_unprotected(response)
        return response
    try:
        told = read(response, rules.max_response)
        if (
            told.body is None
            and response.streaming
            and not response.is_async
            # Inside a transaction the answer counts when the view returns, like its rows.
            and not open_transactions()
        ):
            content = response.streaming_content
            send_instead(response, StreamedAnswer(exchange, told.status, told.lines, content, None))
            return response
    except BaseException:
        response.close()
        raise
    instead = exchange.answered(*told)
    return response if instead is None else response_of(instead)
