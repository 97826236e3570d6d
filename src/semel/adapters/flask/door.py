"""The decorator of views, and what an application's configuration says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from flask import Flask, current_app

from semel.adapters.check_decorators import Decorated, Routed, check_protected
from semel.adapters.flask.running import answered
from semel.adapters.integration import Integration
from semel.adapters.wsgi import IdempotencyMiddleware, check_header_names
from semel.errors import ConfigError
from semel.http.options import DoorOptions, MiddlewareOptions, PathOptions, chosen
from semel.http.rules import RouteRules
from semel.sync import Idempotency

F = TypeVar("F", bound=Callable[..., Any])

_PREFIX: Final = "SEMEL_"


class Idempotent:
    """Protects views: `@idempotent`, or `@idempotent(required=True, ...)` with other options.

    `idempotency` is an Idempotency, or a URL. Without one, `init_app` takes `SEMEL_URL` from the
    application's configuration.

    Examples:
        >>> app = Flask("shop")
        >>> idempotent = Idempotent("memory://")
        >>> @app.post("/payments")
        ... @idempotent
        ... def pay() -> str:
        ...     return "paid"
    """

    def __init__(
        self, idempotency: Idempotency | str | None = None, **options: Unpack[DoorOptions]
    ) -> None:
        self._options: dict[str, Any] = {**options}
        _check(self._options)
        self._given = None if idempotency is None else Integration(idempotency, {})
        self._opened: list[Idempotency] = []
        self._views = None if self._given is None else _Views(self._given, self._options)
        self._decorated: list[tuple[Any, Any, dict[str, Any]]] = []
        self._views_of: WeakKeyDictionary[Flask, _Views] = WeakKeyDictionary()

    @overload
    def __call__(self, view: F, /) -> F: ...
    @overload
    def __call__(self, **options: Unpack[DoorOptions]) -> Callable[[F], F]: ...
    def __call__(self, view: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # Any takes all of them
        """Decorate a view; the route's own decorator goes above this one."""
        _check({**self._options, **options})
        return partial(self._protect, options) if view is None else self._protect(options, view)

    def init_app(
        self, app: Flask, *, middleware: bool = False, **paths: Unpack[PathOptions]
    ) -> None:
        """Take what the configuration of `app` says; there may be several applications.

        With `middleware=True` every view is protected, without a decorator, but outside of
        `before_request`; `include`, `exclude` and `routes` then say which.

        At the first request, a decorator that protects nothing is a ConfigError.
        """
        url, configured = _configured(app)
        options = {**configured, **self._options}
        integration = Integration(self._engine(url), {}) if self._given is None else self._given
        if middleware:
            everything: Any = {**options, **paths}
            wrapped = IdempotencyMiddleware(app.wsgi_app, integration.engine, **everything)
            app.wsgi_app = wrapped  # type: ignore[method-assign]  # Flask's own way to wrap it
            options = {
                name: value
                for name, value in options.items()
                if name in DoorOptions.__annotations__
            }
        elif paths:
            raise ConfigError(
                f"{', '.join(paths)}: only the middleware takes paths (middleware=True)"
            )
        views = self._views_of[app] = _Views(integration, options)
        app.before_request(_Check(views, self._decorated))
        app.extensions["semel"] = self

    def close(self) -> None:
        """Close the engines that were opened here."""
        for engine in self._opened:
            engine.close()
        if self._given is not None:
            self._given.close()

    def _engine(self, url: str | None) -> Idempotency:
        engine = Idempotency(url)
        self._opened.append(engine)
        return engine

    def _protect(self, options: dict[str, Any], view: F) -> F:
        if self._views is not None:
            self._views.rules_for(options)  # what the engine cannot do is told of now

        @wraps(view)
        def protected(*args: Any, **kwargs: Any) -> Any:
            views = self._of_this_app()
            run = partial(current_app.ensure_sync(view), *args, **kwargs)
            return answered(views.integration, views.rules_for(options), run)

        self._decorated.append((view, protected, options))
        return cast("F", protected)

    def _of_this_app(self) -> _Views:
        views = self._views_of.get(current_app._get_current_object(), self._views)  # type: ignore[attr-defined]
        if views is None:
            raise ConfigError("this application is not known yet: call idempotent.init_app(app)")
        return views


class _Views:
    """The integration of one application, and the rules of its views."""

    def __init__(self, integration: Integration, options: dict[str, Any]) -> None:
        self.integration = integration
        self._options = options
        self._known_rules: dict[int, tuple[dict[str, Any], RouteRules]] = {}
        self.rules_for({})

    def rules_for(self, options: dict[str, Any]) -> RouteRules:
        """Give the rules of a view that has these options of its own."""
        known = self._known_rules.get(id(options))
        if known is None:
            known = options, self.integration.rules_for({**self._options, **options})
            self._known_rules[id(options)] = (
                known  # with the options: another dict may get their id
            )
        return known[1]


class _Check:
    """Looks at the routes of an application when it is asked for the first time: all are known."""

    def __init__(self, views: _Views, decorated: list[tuple[Any, Any, dict[str, Any]]]) -> None:
        self._views, self._decorated = views, decorated
        self._passed = False

    def __call__(self) -> None:
        if self._passed:
            return
        check_protected(
            [
                Decorated(given, protected, self._views.rules_for(options).choices.methods)
                for given, protected, options in self._decorated
            ],
            [
                Routed(current_app.view_functions.get(rule.endpoint), rule.methods or ())
                for rule in current_app.url_map.iter_rules()
            ],
        )
        self._passed = True


def _check(options: dict[str, Any]) -> None:
    chosen(options)
    check_header_names(options)


def _configured(app: Flask) -> tuple[str | None, dict[str, Any]]:
    """Read the application's configuration: where records are kept, and options by their names."""
    found = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in app.config.items()
        if name.startswith(_PREFIX)
    }
    url = found.pop("url", None)
    known = MiddlewareOptions.__annotations__
    unknown = found.keys() - known.keys()
    if unknown:
        told = ", ".join(f"{_PREFIX}{name.upper()}" for name in ("url", *known))
        raise ConfigError(
            f"{_PREFIX}{min(unknown).upper()} in the configuration is no option; known: {told}"
        )
    return url, found
