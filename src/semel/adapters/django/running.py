"""One protected request: claimed, run, and its response recorded; on threads and on asyncio.

`run_view` is for the decorator, `run_inside` for the middleware; `arun_view` and `arun_inside` do
the same on asyncio. They differ in what is too large to be stored: on threads the server reads it
as it sends it; on asyncio the request's own task does, because a client that disconnects cancels
the server's.

A client that disconnects ends neither a view nor its save.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.db import transaction

from semel.adapters._sync.integration import Exchange, Integration
from semel.adapters.check_decorators import PROTECTED
from semel.adapters.django.atomic import open_transactions, reject_transactions, when_ended
from semel.adapters.django.bodies import (
    Body,
    aread,
    close_with,
    in_thread,
    inner,
    is_asgi,
    lines_of,
    mark_unprotected,
    parts_of_error,
    read,
    rendered,
    response_of,
    send_for_error,
    send_instead,
)
from semel.adapters.integration import (
    AsyncExchange,
    AsyncIntegration,
    Background,
    Flow,
    aio_awaited,
)
from semel.adapters.wsgi import StreamedAnswer
from semel.core.decide import UnstoredResponse
from semel.engine.setup import Call
from semel.http.requests import HeaderLine, Request
from semel.http.rules import BODY, RouteRules, Waiting
from semel.http.storing import Answer, is_event_stream

_BACKGROUND: Final = Background()


class DjangoExchange(Exchange):
    """One request that runs, whose end is recorded when the transactions around it have ended."""

    def answered(
        self, status: int, lines: Iterable[HeaderLine], body: bytes | None
    ) -> Answer | None:
        """Record an answer; one that was to be stored has failed if it is rolled back."""
        lines = [*lines]
        answered = partial(super().answered, status, lines, body)
        instead: Answer | None = self._settle(
            answered, partial(self._rolled_back, status, lines, answered)
        )
        return instead

    def unprotected(self) -> None:
        """Free the key."""
        unprotected = super().unprotected
        self._settle(unprotected, lambda _: unprotected())

    def raised(self, error: BaseException) -> None:
        """Record that the view raised."""
        raised = partial(super().raised, error)
        self._settle(raised, lambda _: raised())

    def _rolled_back(
        self, status: int, lines: list[HeaderLine], answered: Callable[[], Any], in_doubt: bool
    ) -> None:
        # What a view raises rolls back its rows by itself, and is its answer all the same.
        if self.raises or self.rules.decide(status, lines) != "store":
            answered()
            return
        error: Exception = transaction.TransactionManagementError(
            "the transaction around the view was rolled back"
        )
        if in_doubt and self.rules.policy.hold:
            # Nothing that the policy says of database errors: these rows may be committed.
            error = UnstoredResponse("the transaction may have been committed", "unknown")
        super().raised(error)

    def _settle(self, committed: Callable[[], Any], rolled_back: Callable[[bool], Any]) -> Any:
        instead = when_ended(committed, rolled_back)
        self._leave()  # Also where the end comes later: what runs until then is not the view.
        return instead


class DjangoIntegration(Integration):
    """The integration of views on threads; the application's functions may be async."""

    exchange = DjangoExchange

    def before_claim(self) -> None:
        """Reject what would wait for itself."""
        reject_transactions(self.engine)

    def awaited(self, given: Any) -> Any:
        """Await what an async function returned, too: one setting serves both servers."""
        return async_to_sync(aio_awaited)(given) if inspect.iscoroutine(given) else given


class AsyncDjangoIntegration(AsyncIntegration):
    """The integration of async views; the application's plain functions may ask the database."""

    def before_claim(self) -> None:
        """Reject what would wait for itself."""
        reject_transactions(self.engine)

    async def prepare(
        self, rules: RouteRules, request: Request, read: Callable[[], Awaitable[bytes]]
    ) -> Call | None:
        """Prepare the call of a request, on a thread where the application has a part in it."""
        chosen = rules.choices
        if chosen.tenant is None and chosen.key is None and not callable(chosen.payload):
            return await super().prepare(rules, request, read)
        step, waiting, given = in_thread(_step), rules.identify(request), None
        while True:
            ended, need = await step(waiting, given)
            if ended:
                return self.call_of(rules, need)
            given = await read() if need is BODY else await self.awaited(need)


def _step(waiting: Waiting, given: Any) -> tuple[bool, Any]:
    """Continue a request; the StopIteration that ends it cannot leave a thread."""
    try:
        return False, waiting.send(given)
    except StopIteration as end:
        return True, end.value


# --- on threads ----------------------------------------------------------------------------------


class Claim:
    """What is known of a request's key: it runs, it is answered with this, or (neither) it passes.

    For a decorator that is known before the view, for the middleware only during its run.
    """

    def __init__(self, exchange: Any = None) -> None:
        self.exchange: Any = exchange
        self.answer: Answer | None = None

    def decided(self, outcome: Any, request: Any) -> Any:
        """Take what is known of the key; returns the response in the view's place, if any."""
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


def run_view(
    integration: Integration, rules: RouteRules, request: Any, view: Callable[[], Any]
) -> Any:
    """Answer one request: by the view, or by what is known of its key."""
    body = Body(request, rules.max_body)
    begun = integration.begin(rules, body.request, body.read)
    if begun is None:
        return view()
    if isinstance(begun, Answer):
        return response_of(begun)
    return _run_to_end(request, partial(_run, Claim(begun), request, view))


def run_inside(claim: Claim, request: Any, get_response: Callable[[], Any]) -> Any:
    """Let a request pass whose key `process_view` claims on the way, and save its answer."""
    return _run_to_end(request, partial(_run, claim, request, get_response))


def _run(claim: Claim, request: Any, view: Callable[[], Any]) -> Any:
    claim.enter(request)
    try:
        try:
            response = rendered(view(), request)
        except Exception as error:
            if claim.exchange is not None:
                _record_raised(claim.exchange, request, error)
            raise
        if claim.exchange is not None:
            return _record(claim.exchange, response)
    except BaseException as error:
        if claim.exchange is not None and not claim.exchange.ended:
            claim.exchange.raised(error)
        raise
    # A replay is what was stored, whatever the layers inside have made of it since.
    return response if claim.answer is None else response_of(claim.answer)


def _record_raised(exchange: Exchange, request: Any, error: Exception) -> None:
    """Record an answer that was raised; the error is raised further."""
    parts = parts_of_error(error, request, exchange.rules)
    if parts is not None:
        exchange.raises = True
        instead = exchange.answered(*parts)
        if instead is not None:
            send_for_error(error, request, response_of(instead))


def _record(exchange: Exchange, response: Any) -> Any:
    """Save a response; a stream is read up to the limit before, and followed beyond it."""
    rules = exchange.rules
    response.headers.pop(rules.choices.replayed_header, None)
    if is_event_stream(lines_of(response)):
        exchange.unprotected()
        mark_unprotected(response)
        return response
    try:
        parts = read(response, rules.max_response)
        if (
            parts.body is None
            and response.streaming
            and not response.is_async
            # Inside a transaction the answer counts when the view returns, like its rows.
            and not open_transactions()
        ):
            content = response.streaming_content
            streamed = StreamedAnswer(exchange, parts.status, parts.lines, content, None)
            send_instead(response, streamed)
            close_with(exchange.raw, streamed)
            return response
    except BaseException:
        response.close()
        raise
    instead = exchange.answered(*parts)
    return response if instead is None else response_of(instead)


def _run_to_end(request: Any, run: Callable[[], Any]) -> Any:
    """Run a request on this thread; on a server for asyncio its cancellation does not end it.

    Django cancels a request whose client disconnects. A thread cannot be canceled, but what it
    waits for on the loop is: below a middleware without asyncio that is the view itself, which
    would go on while its record has ended.
    """
    if not is_asgi(inner(request)) or _runs_a_loop():
        return run()
    return async_to_sync(_in_background)(run)


def _runs_a_loop() -> bool:
    """Return whether this thread runs a loop: nothing can cancel a call that blocks the loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _in_background(run: Callable[[], Any]) -> Any:
    # What waits here is canceled; the task that runs on the thread, which waits for it, is not.
    task = _BACKGROUND.begin(in_thread(run)())
    task.add_done_callback(_BACKGROUND.end)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        _BACKGROUND.leave(task)
        await asyncio.wait((task,))
        with suppress(Exception):  # it is recorded, and no caller is left to notify
            # It is not sent: read the rest of a large one now, not when it is collected.
            await in_thread(task.result().close)()
        raise


# --- on asyncio ----------------------------------------------------------------------------------


async def arun_view(
    integration: AsyncIntegration,
    rules: RouteRules,
    request: Any,
    view: Callable[[], Awaitable[Any]],
) -> Any:
    """Answer one request: by the view, or by what is known of its key."""
    body = Body(request, rules.max_body)
    begun = await integration.begin(rules, body.request, body.aread)
    if begun is None:
        return await view()
    if isinstance(begun, Answer):
        return response_of(begun)
    # Django cancels a request whose client goes away; the view and its save run on.
    flow = Flow(rules.max_response)
    return await flow.answer(_BACKGROUND, _arun(Claim(begun), request, view, flow))


async def arun_inside(
    claim: Claim, limit: int, request: Any, get_response: Callable[[], Awaitable[Any]]
) -> Any:
    """Let a request pass whose key `process_view` claims on the way, and save its answer."""
    flow = Flow(limit)
    return await flow.answer(_BACKGROUND, _arun(claim, request, get_response, flow))


async def _arun(claim: Claim, request: Any, view: Callable[[], Awaitable[Any]], flow: Flow) -> Any:
    claim.enter(request)
    try:
        try:
            response = await _arender(await view(), request)
        except Exception as error:
            if claim.exchange is not None:
                await _arecord_raised(claim.exchange, request, error)
            raise
        if claim.exchange is not None:
            return await _arecord(claim.exchange, response, flow)
    except BaseException as error:
        if claim.exchange is not None and not claim.exchange.ended:
            await claim.exchange.raised(error)
        raise
    # A replay is what was stored, whatever the layers inside have made of it since.
    return response if claim.answer is None else response_of(claim.answer)


async def _arecord_raised(exchange: AsyncExchange, request: Any, error: Exception) -> None:
    """Record an answer that was raised; the error is raised further."""
    parts = await in_thread(parts_of_error)(error, request, exchange.rules)
    if parts is not None:
        exchange.raises = True
        instead = await exchange.answered(*parts)
        if instead is not None:
            send_for_error(error, request, response_of(instead))


async def _arecord(exchange: AsyncExchange, response: Any, flow: Flow) -> Any:
    """Save a response; a stream is read before, to its end."""
    rules = exchange.rules
    response.headers.pop(rules.choices.replayed_header, None)
    if is_event_stream(lines_of(response)):
        await exchange.unprotected()
        mark_unprotected(response)
        return response
    try:
        parts = await aread(response, flow)
    except BaseException:
        if not flow.is_open:
            await in_thread(response.close)()
        raise
    instead = await exchange.answered(*parts)
    return response if instead is None else response_of(instead)


async def _arender(response: Any, request: Any) -> Any:
    """Render on a thread, where templates may ask the database; most responses are whole."""
    if getattr(response, "is_rendered", True):
        return rendered(response, request)
    return await in_thread(rendered)(response, request)
