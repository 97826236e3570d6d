"""One protected request on asyncio.

Twin of `semel.adapters.django.running`: the same names in the same order, with the waiting awaited;
`_recorded` differs, as is told there.
Under WSGI an async view has a loop for its request alone: the integration there is for threads.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

from asgiref.sync import sync_to_async

from semel.adapters.aio_integration import AsyncExchange, AsyncIntegration
from semel.adapters.django.bodies import Body
from semel.adapters.django.responses import (
    aread,
    lines_of,
    mark_unprotected,
    rendered,
    response_of,
    send_for_error,
    told_by,
)
from semel.adapters.django.running import Claim
from semel.adapters.integration import Exchange, Integration
from semel.adapters.streaming import Background, Flow
from semel.http.messages import Answer
from semel.http.rules import RouteRules
from semel.http.storing import is_event_stream

_BACKGROUND: Final = Background()


async def protected(
    integration: AsyncIntegration | Integration,
    rules: RouteRules,
    request: Any,
    view: Callable[[], Awaitable[Any]],
) -> Any:
    """Answer one request: by the view, or by what is known of its key."""
    body = Body(request, rules.max_body)
    begun: AsyncExchange | Exchange | Answer | None
    if isinstance(integration, Integration):
        # On the request's own thread, where functions of the application may ask the database.
        begun = await sync_to_async(integration.begin)(rules, body.request, body.read)
    else:
        begun = await integration.begin(rules, body.request, _awaited(body.read))
    if begun is None:
        return await view()
    if isinstance(begun, Answer):
        return response_of(begun)
    # Django cancels a request whose client goes away; the view and its save run on.
    flow = Flow(rules.max_response)
    return await flow.answer(_BACKGROUND, _run(Claim(begun), request, view, flow))


async def passed(
    claim: Claim, limit: int, request: Any, get_response: Callable[[], Awaitable[Any]]
) -> Any:
    """Let a request pass whose key `process_view` claims on the way, and save its answer."""
    flow = Flow(limit)
    return await flow.answer(_BACKGROUND, _run(claim, request, get_response, flow))


async def _run(claim: Claim, request: Any, view: Callable[[], Awaitable[Any]], flow: Flow) -> Any:
    claim.enter(request)
    try:
        try:
            response = await _rendered(await view(), request)
        except Exception as error:
            if claim.exchange is not None:
                await _refused(claim.exchange, request, error)
            raise
        if claim.exchange is not None:
            return await _recorded(claim.exchange, response, flow)
    except BaseException as error:
        if claim.exchange is not None and not claim.exchange.ended:
            await _ended(claim.exchange.raised(error))
        raise
    # A replay is what was stored, whatever the layers inside have made of it since.
    return response if claim.answer is None else response_of(claim.answer)


async def _refused(exchange: AsyncExchange | Exchange, request: Any, error: Exception) -> None:
    """Record an answer that was raised; it goes on its way as an error."""
    told = await sync_to_async(told_by)(error, request, exchange.rules)
    if told is not None:
        exchange.raises = True
        instead = await _ended(exchange.answered(*told))
        if instead is not None:
            send_for_error(error, request, response_of(instead))


async def _recorded(exchange: AsyncExchange | Exchange, response: Any, flow: Flow) -> Any:
    """Save a response; a stream is read before, to its end."""
    rules = exchange.rules
    response.headers.pop(rules.choices.replayed_header, None)
    if is_event_stream(lines_of(response)):
        await _ended(exchange.unprotected())
        mark_unprotected(response)
        return response
    # A loop for one request alone ends before its answer is sent.
    lasting = isinstance(exchange, AsyncExchange)
    try:
        told = await aread(response, rules.max_response, flow if lasting else None)
    except BaseException:
        if not flow.is_open:
            await sync_to_async(response.close)()
        raise
    instead = await _ended(exchange.answered(*told))
    return response if instead is None else response_of(instead)


async def _rendered(response: Any, request: Any) -> Any:
    """Render on a thread, where templates may ask the database; most responses are whole."""
    if getattr(response, "is_rendered", True):
        return rendered(response, request)
    return await sync_to_async(rendered)(response, request)


async def _ended(given: Any) -> Any:
    """Await what has to be awaited; an integration for threads has done its work already."""
    return await given if inspect.isawaitable(given) else given


def _awaited(read: Callable[[], bytes]) -> Callable[[], Awaitable[bytes]]:
    async def reading() -> bytes:
        return read()

    return reading
