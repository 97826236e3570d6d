"""The middleware: protects every view of a project that is not exempt.

Place it last, or at least after every middleware that authorizes. Some of those (CSRF, Django's
LoginRequiredMiddleware) decide in `process_view`, which Django calls after the last `__call__` and
before the view. So there are two steps:

- `__call__` keeps the body, which a check of forms may consume, runs the rest of the request where
  no cancellation ends it, and saves the response;
- `process_view` claims the key, or answers with the replay. It never calls the view: Django does,
  in the transaction of ATOMIC_REQUESTS and after the `process_view` of later middlewares.

What the views inside it raise has become a response when it arrives here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.urls import Resolver404, resolve

from semel.adapters.django import running
from semel.adapters.django.bodies import Body, is_protected, response_of
from semel.adapters.django.running import AsyncDjangoIntegration, Claim, DjangoIntegration
from semel.adapters.django.settings import ENGINES
from semel.adapters.django.views import is_exempt
from semel.adapters.wsgi import check_header_names
from semel.aio import AsyncIdempotency
from semel.errors import ConfigError
from semel.events import logger
from semel.http.options import MiddlewareOptions
from semel.http.rules import Rejected, RouteRules
from semel.sync import Idempotency


class _Request:
    """A request between `__call__` and `process_view`."""

    def __init__(self, integration: Any, rules: RouteRules, body: Body) -> None:
        self.integration, self.rules, self.body = integration, rules, body
        self.content = b""
        self.claim = Claim()
        self.seen = False
        """Django has called `process_view` with it."""

    def read(self) -> bytes:
        return self.content

    async def aread(self) -> bytes:
        return self.content


class IdempotencyMiddleware:
    """Protects the requests that have a key; `settings.SEMEL` has its options.

    To use your own engine, name a function in `MIDDLEWARE` that returns
    `IdempotencyMiddleware(get_response, idem, required=True)`. There `idempotency` is an
    `Idempotency` or an `AsyncIdempotency`.
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
        self._integration = self._integration_of(idempotency, {**options})
        self._warned = False

    def _integration_of(self, idempotency: Any, options: dict[str, Any]) -> Callable[[], Any]:
        """Return the function that finds the integration: the settings may change in a test."""
        check_header_names(options)
        if idempotency is not None:
            kind = AsyncDjangoIntegration if self._asynchronous else DjangoIntegration
            integration = kind(idempotency, options)
            return lambda: integration
        if options:
            raise ConfigError(
                "without an engine, settings.SEMEL has all of the options: leave them out here"
            )
        ENGINES.integration()  # made now, so that wrong settings are an error at the start
        return ENGINES.async_integration if self._asynchronous else ENGINES.integration

    def __call__(self, request: Any) -> Any:
        """Answer one request; on asyncio this returns a coroutine."""
        if self._asynchronous:
            return self._acall(request)
        begun = self._begin(request)
        if begun is None:
            return self.get_response(request)
        if not isinstance(begun, _Request):
            return begun
        run = partial(self.get_response, request)
        return self._passed(begun, request, running.run_inside(begun.claim, request, run))

    async def _acall(self, request: Any) -> Any:
        begun = self._begin(request)
        if begun is None:
            return await self.get_response(request)
        if not isinstance(begun, _Request):
            return begun
        run = partial(self.get_response, request)
        limit = begun.rules.max_response
        response = await running.arun_inside(begun.claim, limit, request, run)
        return self._passed(begun, request, response)

    def _begin(self, request: Any) -> Any:
        """Keep what `process_view` needs, or answer; None = the request is not protected here."""
        integration = self._integration()
        root = request.path.removesuffix(request.path_info)
        rules = integration.routing.find(request.method, request.path, root)
        if rules is None or is_protected(request) or _is_exempt(request):
            return None
        begun = _Request(integration, rules, Body(request, rules.max_body))
        if rules.may_have_key(begun.body.request):
            try:
                begun.content = begun.body.read()
            except (ConfigError, Rejected) as error:
                return response_of(rules.rejection(error))
        elif not rules.choices.required:
            return None
        vars(request).setdefault("_semel", {})[self] = begun
        return begun

    # --- before the view ---------------------------------------------------------------------

    @property
    def process_view(self) -> Callable[..., Any]:
        """Claim the key of a request, now that the checks before have passed.

        Django asks whether this is a coroutine function, and calls it accordingly.
        """
        return self._aclaim if self._asynchronous else self._claim

    def _claim(self, request: Any, callback: Any, _args: Any, _kwargs: Any) -> Any:
        begun = self._due(request, callback)
        if begun is None:
            return None
        outcome = begun.integration.begin(begun.rules, begun.body.request, begun.read)
        return begun.claim.decided(outcome, request)

    async def _aclaim(self, request: Any, callback: Any, _args: Any, _kwargs: Any) -> Any:
        begun = self._due(request, callback)
        if begun is None:
            return None
        outcome = await begun.integration.begin(begun.rules, begun.body.request, begun.aread)
        return begun.claim.decided(outcome, request)

    def _due(self, request: Any, callback: Any) -> _Request | None:
        """Return the request whose key is to be claimed now."""
        begun: _Request | None = vars(request).get("_semel", {}).pop(self, None)
        if begun is None:
            return None
        begun.seen = True
        # A layer inside may have other views, and an outer one of ours may have claimed the key.
        exempt = is_protected(request) or is_exempt(callback, request.method)
        return None if exempt else begun

    # --- after the view ----------------------------------------------------------------------

    def _passed(self, begun: _Request, request: Any, response: Any) -> Any:
        """Log once if Django never calls this middleware's `process_view`."""
        was_called = request.resolver_match and response.status_code < 300  # noqa: PLR2004 - done
        if was_called and not begun.seen and not self._warned:
            self._warned = True
            logger.error(
                "a view ran unprotected, because Django did not call process_view of "
                "IdempotencyMiddleware: a function that MIDDLEWARE names must return the "
                "middleware itself"
            )
        return response


def _is_exempt(request: Any) -> bool:
    try:
        callback = resolve(request.path_info, getattr(request, "urlconf", None)).func
    except Resolver404:
        return False
    return is_exempt(callback, request.method)
