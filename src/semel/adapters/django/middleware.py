"""The middleware: protects every view of a project, but for those that it is told to leave alone.

Place it after the middlewares that authorize, in the list of `MIDDLEWARE`. What the views inside it
raise has become a response when it arrives here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.urls import Resolver404, resolve

from semel.adapters.aio_door import AsyncDoor
from semel.adapters.django import aio_running, running
from semel.adapters.django.bodies import is_protected
from semel.adapters.django.engines import ENGINES
from semel.adapters.django.views import is_left_alone
from semel.adapters.door import Door
from semel.adapters.options import MiddlewareOptions
from semel.adapters.wsgi_requests import refuse_underscores
from semel.aio import AsyncIdempotency
from semel.errors import ConfigError
from semel.sync import Idempotency


class IdempotencyMiddleware:
    """Protects the requests that have a key; `settings.SEMEL` has its options.

    A project with engines of its own makes it in a function that `MIDDLEWARE` names:
    `IdempotencyMiddleware(get_response, idem, required=True)`.
    """

    sync_capable = True
    async_capable = True

    def __init__(
        self,
        get_response: Callable[[Any], Any],
        idempotency: Idempotency | AsyncIdempotency | None = None,
        **options: Unpack[MiddlewareOptions],
    ) -> None:
        self.get_response = get_response
        self._asynchronous = iscoroutinefunction(get_response)
        if self._asynchronous:
            markcoroutinefunction(self)
        self._door = self._made_door(idempotency, {**options})

    def _made_door(self, idempotency: Any, options: dict[str, Any]) -> Any:
        refuse_underscores(options)
        if idempotency is not None:
            return (AsyncDoor if self._asynchronous else Door)(idempotency, options)
        if options:
            raise ConfigError("without an engine, settings.SEMEL says all of the options")
        ENGINES.door()  # made now, so that wrong settings are told of at the start
        return None

    def __call__(self, request: Any) -> Any:
        """Answer one request; on asyncio this gives a coroutine."""
        if self._asynchronous:
            return self._answered(request)
        door = ENGINES.door() if self._door is None else self._door
        book = door.routing.find(request.method, request.path)
        if book is None or is_protected(request) or _is_left_alone(request):
            return self.get_response(request)
        return running.protected(door, book, request, partial(self.get_response, request))

    async def _answered(self, request: Any) -> Any:
        door = ENGINES.async_door() if self._door is None else self._door
        book = door.routing.find(request.method, request.path)
        if book is None or is_protected(request) or _is_left_alone(request):
            return await self.get_response(request)
        return await aio_running.protected(door, book, request, partial(self.get_response, request))


def _is_left_alone(request: Any) -> bool:
    try:
        callback = resolve(request.path_info, getattr(request, "urlconf", None)).func
    except Resolver404:
        return False
    return is_left_alone(callback, request.method)
