"""The decorator of views: plain functions, methods, coroutines, and those of REST framework.

It runs where the view would: after the middlewares, and after REST framework's authentication and
permissions when it decorates a method such as `post`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Final, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.http import HttpRequest

from semel.adapters._sync.integration import Integration
from semel.adapters.django import atomic, running
from semel.adapters.django.bodies import in_thread, inner, is_asgi, is_protected
from semel.adapters.django.running import AsyncDjangoIntegration, DjangoIntegration
from semel.adapters.django.settings import ENGINES, configured
from semel.adapters.integration import AsyncIntegration, aio_awaited
from semel.adapters.wsgi import check_header_names
from semel.aio import AsyncIdempotency
from semel.core.optional import have
from semel.errors import ConfigError
from semel.http.options import IntegrationOptions, chosen
from semel.http.rules import RouteRules
from semel.sync import Idempotency

F = TypeVar("F", bound=Callable[..., Any])

EXEMPT: Final = "semel_exempt"
"""The attribute by which the middleware knows a view that it has nothing to do with."""


class ViewOptions(IntegrationOptions, total=False):
    """Options of every integration, and of transactional mode."""

    atomic: str | bool
    """The database in whose transaction the record is written with the view's own rows."""


class Idempotent:
    """Protects views: `@idempotent`, or `@idempotent(required=True, ...)` with other options.

    `idempotency` is an `Idempotency` or an `AsyncIdempotency`; without one, `settings.SEMEL`
    decides. Options that you pass win over the settings.
    """

    def __init__(
        self,
        idempotency: Idempotency | AsyncIdempotency | None = None,
        **options: Unpack[ViewOptions],
    ) -> None:
        self._idempotency = idempotency
        self._given = options
        self._options: dict[str, Any] = {**options}
        self._atomic = _alias(self._options.pop("atomic", None))
        chosen(self._options)
        check_header_names(self._options)
        self._integration = None if idempotency is None else _integration(idempotency)
        self._known_rules: WeakKeyDictionary[Any, RouteRules] = WeakKeyDictionary()
        if self._integration is not None:
            self._rules(self._integration)

    @overload
    def __call__(self, view: F, /) -> F: ...
    @overload
    def __call__(self, **options: Unpack[ViewOptions]) -> Idempotent: ...
    def __call__(self, view: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # Any takes all of them
        """Decorate a view, or (with options) return the decorator that has them too."""
        if view is None:
            given: Any = {**self._given, **options}
            return Idempotent(self._idempotency, **given)
        if not callable(view) or isinstance(view, type):
            raise ConfigError("decorate a function; a class-based view needs method_decorator")
        protected = self._awaiting(view) if iscoroutinefunction(view) else self._plain(view)
        setattr(protected, EXEMPT, True)
        return protected

    def _plain(self, view: F) -> F:
        if isinstance(self._integration, AsyncIntegration):
            raise ConfigError("a plain view needs an Idempotency, not an AsyncIdempotency")
        name = _name_of(view)

        @wraps(view)
        def protected(*args: Any, **kwargs: Any) -> Any:
            request, run = _request_in(args), partial(view, *args, **kwargs)
            integration = (
                ENGINES.integration()
                if self._integration is None
                else cast("Integration", self._integration)
            )
            rules = self._rules(integration)
            # Behind another integration, too: that one saves in a transaction of its own.
            if self._atomic is not None and request.method in rules.choices.methods:
                return atomic.run_view(integration, rules, request, run, self._atomic)
            if not _concerns(rules, request, name):
                return run()
            return running.run_view(integration, rules, request, run)

        return cast("F", protected)

    def _awaiting(self, view: F) -> F:
        if self._atomic is not None:
            raise ConfigError("atomic= is for plain views: Django's transactions are not async")
        name = _name_of(view)

        @wraps(view)
        async def protected(*args: Any, **kwargs: Any) -> Any:
            request, run = _request_in(args), partial(view, *args, **kwargs)
            integration, on_loop = self._integration, is_asgi(inner(request))
            if integration is None:
                integration = ENGINES.async_integration() if on_loop else ENGINES.integration()
            elif on_loop and isinstance(integration, Integration):
                raise ConfigError("an async view under ASGI needs an AsyncIdempotency")
            rules = self._rules(integration)
            if not _concerns(rules, request, name):
                return await run()
            if isinstance(integration, AsyncIntegration):
                return await running.arun_view(integration, rules, request, run)
            # Under WSGI a loop is there for one request alone: the thread of the request runs it.
            protect = in_thread(running.run_view)
            return await protect(
                integration, rules, request, lambda: async_to_sync(aio_awaited)(run())
            )

        return cast("F", protected)

    def _rules(self, integration: Integration | AsyncIntegration) -> RouteRules:
        rules = self._known_rules.get(integration)
        if rules is None:
            settings = {} if integration is self._integration else configured().view_options
            rules = self._known_rules[integration] = integration.rules_for(
                {**settings, **self._options}
            )
        return rules


def exempt(view: F) -> F:
    """Exclude a view from the middleware: a function, or a class-based view."""
    setattr(view, EXEMPT, True)
    return view


def is_exempt(callback: Any, method: str) -> bool:
    """Return whether a view, or its method for this request, is exempt from the middleware."""
    return any(getattr(part, EXEMPT, False) for part in _parts(callback, method.lower()))


def _parts(callback: Any, method: str) -> Iterator[Any]:
    yield callback
    view_class = _class_of(callback)
    if view_class is not None:
        yield view_class
        # A viewset of REST framework has names of its own for what a method does.
        yield getattr(
            view_class, (getattr(callback, "actions", None) or {}).get(method, method), None
        )


def _class_of(callback: Any) -> Any:
    """Return the class of what `as_view` made, of either framework; None = a function."""
    return getattr(callback, "view_class", getattr(callback, "cls", None))


def _alias(given: Any) -> str | None:
    if given is None or given is False:
        return None
    if given is True:
        return "default"
    if not isinstance(given, str):
        raise ConfigError(f"atomic must be the alias of a database; got {given!r}")
    return given


def _integration(idempotency: Any) -> Integration | AsyncIntegration:
    if isinstance(idempotency, AsyncIdempotency):
        return AsyncDjangoIntegration(idempotency, {})
    if isinstance(idempotency, Idempotency):
        return DjangoIntegration(idempotency, {})
    raise ConfigError(
        f"an Idempotency or an AsyncIdempotency is needed, not {type(idempotency).__name__}"
    )


def _concerns(rules: RouteRules, request: Any, name: str) -> bool:
    return not is_protected(request) and rules.concerns(request.method, name)


def _name_of(view: Any) -> str:
    """Name a view for its author: a method with its class, and what `as_view` gave by its class."""
    named = _class_of(view) or view
    name: str = getattr(named, "__qualname__", repr(named))
    return name


def _request_in(args: tuple[Any, ...]) -> Any:
    """Find the request: the first argument of a view, or the one after `self` in a method."""
    for given in args[:2]:
        if isinstance(given, HttpRequest) or isinstance(
            getattr(given, "_request", None), HttpRequest
        ):
            return given
    for given in args[:2]:
        if any(kind.__module__ == "rest_framework.request" for kind in type(given).__mro__):
            have("djangorestframework", given, "_request")
    raise ConfigError("the decorated function is not a view: it was called without a request")


idempotent: Final = Idempotent()
"""The decorator that goes by the settings."""
