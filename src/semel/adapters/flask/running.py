"""One protected request.

What the view gives becomes a response here, is saved, and goes on its way through `after_request`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final
from wsgiref.util import FileWrapper

from flask import Flask, Response, current_app, request
from werkzeug.exceptions import HTTPException
from werkzeug.urls import iri_to_uri

from semel.adapters.check_decorators import PROTECTED
from semel.adapters.flask.bodies import Body
from semel.adapters.integration import Exchange, Integration
from semel.adapters.streaming import StreamedAnswer, up_to
from semel.adapters.wsgi import texts
from semel.http.requests import Answer, HeaderLine
from semel.http.rules import RouteRules
from semel.http.storing import UNPROTECTED, is_event_stream

_ADDRESSES: Final = frozenset({"location", "content-location"})
_HANDLED: Final = "semel.handled"
"""Is in the environ of a request whose error has its answer: the error, and the answer."""


def answered(integration: Integration, rules: RouteRules, view: Callable[[], Any]) -> Any:
    """Answer one request: by the view, or by what is known of its key."""
    if PROTECTED in request.environ or not rules.concerns(request.method, str(request.endpoint)):
        return view()
    body = Body(rules.max_body)
    begun = integration.begin(rules, body.request, body.read)
    if begun is None:
        return view()
    if isinstance(begun, Answer):
        return _response(begun)
    request.environ[PROTECTED] = True
    request.environ["wsgi.file_wrapper"] = FileWrapper  # the server's own would send files past us
    begun.enter()
    try:
        try:
            response = current_app.make_response(view())
        except HTTPException as error:
            _refused(begun, error)
            raise
        return _recorded(begun, response)
    except BaseException as error:
        if not begun.ended:
            begun.raised(error)
        raise


def _refused(exchange: Exchange, error: HTTPException) -> None:
    """Record an answer that was raised, as by `abort(404)`; it goes on its way as an error."""
    raised = error.get_response()
    status, lines = raised.status_code, _lines(raised)
    decision = exchange.rules.decide(status, lines)
    if decision == "store":
        # As the application's error handler words it, which is not asked a second time: the first
        # caller gets the answer that is stored.
        app = current_app._get_current_object()  # type: ignore[attr-defined]  # it is a proxy
        _handle_once(app)
        response = app.make_response(app.handle_user_exception(error))
        if not is_event_stream(_lines(response)):
            response.make_sequence()  # read now: what is sent later must be recorded before
        request.environ[_HANDLED] = error, _recorded(exchange, response)
    elif decision != "failure":  # else the policy is asked, about the error itself
        exchange.answered(status, lines, b"")


def _handle_once(app: Flask) -> None:
    """Let an application answer an error that was handled here with what is recorded of it."""
    handle: Any = app.handle_http_exception
    if getattr(handle, "semel_handles_once", False):
        return

    def handled(error: HTTPException) -> Any:
        known, response = request.environ.get(_HANDLED, (None, None))
        return response if known is error else handle(error)

    handled.semel_handles_once = True  # type: ignore[attr-defined]  # functions have any
    app.handle_http_exception = handled  # type: ignore[method-assign, assignment]  # gives what Flask's own does


def _recorded(exchange: Exchange, response: Response) -> Response:
    """Save a response; a stream is read up to the limit before."""
    rules, status = exchange.rules, response.status_code
    response.headers.remove(rules.choices.replayed_header)
    lines = _lines(response)
    if is_event_stream(lines):
        exchange.unprotected()
        response.headers.extend(texts([UNPROTECTED]))
        return response
    chunks = response.iter_encoded()
    try:
        held, whole = up_to(rules.max_response, chunks)
    except BaseException:
        response.close()
        raise
    if not whole:
        return _streamed(exchange, response, lines, chain(held, chunks))
    instead = exchange.answered(status, lines, b"".join(held))
    if instead is not None:
        return _replaced(response, instead)
    if not response.is_sequence:
        _replace(response, held)
    return response


def _streamed(
    exchange: Exchange, response: Response, lines: list[HeaderLine], chunks: Iterator[bytes]
) -> Response:
    """Send an answer that is too large to be kept as it comes."""
    if response.is_sequence:
        exchange.answered(response.status_code, lines, None)
    else:
        source = response.response
        response.response = StreamedAnswer(exchange, response.status_code, lines, chunks, source)
        response.direct_passthrough = False
    return response


def _replace(response: Response, held: list[bytes]) -> None:
    """Send the chunks of a stream that was read; its source is closed when they are out."""
    closing = getattr(response.response, "close", None)
    if closing is not None:
        response.call_on_close(closing)
    response.response = held
    response.direct_passthrough = False


def _replaced(response: Response, answer: Answer) -> Response:
    """Give another answer; what belongs to this one is closed with it."""
    other = _response(answer)
    other.call_on_close(response.close)
    return other


def _response(answer: Answer) -> Response:
    response = current_app.response_class(answer.body, answer.status)
    response.headers.clear()
    response.headers.extend(texts(answer.headers))
    return response


def _lines(response: Any) -> list[HeaderLine]:
    return [
        (
            name.encode("latin-1"),
            # Werkzeug does that when it sends them: before, they may have any characters.
            (iri_to_uri(value) if name.lower() in _ADDRESSES else value).encode("latin-1"),
        )
        for name, value in response.headers
    ]
