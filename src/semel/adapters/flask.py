"""Flask: a decorator for views. It runs after `before_request`, and so after authorization.

    idempotent = Idempotent("redis://localhost:6379/0")

    @app.post("/payments")
    @idempotent(required=True)
    def pay(): ...

What the view returns becomes a response here, is saved, and goes on its way through
`after_request`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from itertools import chain
from operator import methodcaller
from typing import Any, Final, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary, ref
from wsgiref.util import FileWrapper

from semel.adapters import wsgi
from semel.adapters._sync.integration import Exchange, Integration
from semel.adapters.check_decorators import PROTECTED, Decorated, Routed, check_protected
from semel.adapters.wsgi import (
    IdempotencyMiddleware,
    StreamedAnswer,
    check_header_names,
    texts,
    up_to,
)
from semel.core.optional import Needed
from semel.errors import ConfigError
from semel.http.options import IntegrationOptions, MiddlewareOptions, PathOptions, chosen
from semel.http.requests import (
    FORMS,
    HeaderLine,
    Headers,
    Request,
    form_bytes,
    upload_of,
    without_boundary,
)
from semel.http.rules import Rejected, RouteRules
from semel.http.storing import UNPROTECTED, Answer, is_event_stream
from semel.sync import Idempotency

with Needed("semel[flask]", by=__name__):
    from flask import Flask, Response, current_app, got_request_exception, request
    from werkzeug.exceptions import HTTPException
    from werkzeug.urls import iri_to_uri

__all__ = ["Idempotent"]

F = TypeVar("F", bound=Callable[..., Any])

_ADDRESSES: Final = frozenset({"location", "content-location"})
_HANDLED: Final = "semel.handled"
"""Is in the environ of a request whose error has its answer: the error, and the answer."""
_STREAMED: Final = "semel.streamed"
"""Is in the environ of a request whose answer is sent as it comes: a weak reference to the answer.

A strong one would keep the answer as long as its own stream keeps the request's context.
"""
_PREFIX: Final = "SEMEL_"

_behind: Final = methodcaller("_get_current_object")
"""Returns what one of Flask's proxies stands for: Werkzeug's documented way."""


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
        self, idempotency: Idempotency | str | None = None, **options: Unpack[IntegrationOptions]
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
    def __call__(self, **options: Unpack[IntegrationOptions]) -> Callable[[F], F]: ...
    def __call__(self, view: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # Any takes all of them
        """Decorate a view; the route's own decorator goes above this one."""
        _check({**self._options, **options})
        return partial(self._protect, options) if view is None else self._protect(options, view)

    def init_app(
        self, app: Flask, *, middleware: bool = False, **paths: Unpack[PathOptions]
    ) -> None:
        """Read the configuration of `app`; you can call it for several applications.

        `middleware=True` protects every view without a decorator, but outside `before_request`;
        `include`, `exclude`, and `routes` select views.

        At the first request, a decorator that protects nothing raises `ConfigError`.
        """
        url, configured = _configured(app)
        options = {**configured, **self._options}
        integration = self._given
        if integration is None:
            integration = Integration(Idempotency(url), {})
            self._opened.append(integration.engine)
        if middleware:
            everything: Any = {**options, **paths}
            wrapped = IdempotencyMiddleware(app.wsgi_app, integration.engine, **everything)
            app.wsgi_app = wrapped  # type: ignore[method-assign]  # Flask's own way to wrap it
            options = {
                name: value
                for name, value in options.items()
                if name in IntegrationOptions.__annotations__
            }
        elif paths:
            raise ConfigError(
                f"{', '.join(paths)}: only the middleware takes paths (middleware=True)"
            )
        views = self._views_of[app] = _Views(integration, options)

        @cache  # With the first request, when all routes are known.
        def check() -> None:
            check_protected(
                [
                    Decorated(given, protected, views.rules_for(options).choices.methods)
                    for given, protected, options in self._decorated
                ],
                [
                    Routed(current_app.view_functions.get(rule.endpoint), rule.methods or ())
                    for rule in current_app.url_map.iter_rules()
                ],
            )

        app.before_request(check)
        app.extensions["semel"] = self

    def close(self) -> None:
        """Close the engines that this object opened."""
        for engine in self._opened:
            engine.close()
        if self._given is not None:
            self._given.close()

    def _protect(self, options: dict[str, Any], view: F) -> F:
        if self._views is not None:
            self._views.rules_for(options)  # what the engine cannot do is an error now

        @wraps(view)
        def protected(*args: Any, **kwargs: Any) -> Any:
            views = self._of_this_app()
            run = partial(current_app.ensure_sync(view), *args, **kwargs)
            return answered(views.integration, views.rules_for(options), run)

        self._decorated.append((view, protected, options))
        return cast("F", protected)

    def _of_this_app(self) -> _Views:
        views = self._views_of.get(_behind(current_app), self._views)
        if views is None:
            raise ConfigError(
                "this application is not initialized yet: call idempotent.init_app(app)"
            )
        return views


class _Views:
    """The integration of one application, and the rules of its views."""

    def __init__(self, integration: Integration, options: dict[str, Any]) -> None:
        self.integration = integration
        self._options = options
        self._known_rules: dict[int, tuple[dict[str, Any], RouteRules]] = {}
        self.rules_for({})

    def rules_for(self, options: dict[str, Any]) -> RouteRules:
        """Return the rules of a view that has these options of its own."""
        known = self._known_rules.get(id(options))
        if known is None:
            known = options, self.integration.rules_for({**self._options, **options})
            # With the options: another dict may get their id.
            self._known_rules[id(options)] = known
        return known[1]


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
        names = ", ".join(f"{_PREFIX}{name.upper()}" for name in ("url", *known))
        raise ConfigError(
            f"{_PREFIX}{min(unknown).upper()} in the configuration is not an option; known: {names}"
        )
    return url, found


# --- one protected request ------------------------------------------------------------


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
            _rejected(begun, error)
            raise
        return _recorded(begun, response)
    except BaseException as error:
        if not begun.ended:
            begun.raised(error)
        raise


def _rejected(exchange: Exchange, error: HTTPException) -> None:
    """Record an answer that was raised, as by `abort(404)`; the error is raised further."""
    raised = error.get_response()
    status, lines = raised.status_code, _lines(raised)
    decision = exchange.rules.decide(status, lines)
    if decision == "store":
        # As the application's error handler words it, which is not asked a second time: the first
        # caller gets the answer that is stored.
        app = _behind(current_app)
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
    app.handle_http_exception = handled  # type: ignore[method-assign, assignment]  # returns what Flask's own does


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
    source = response.response
    if not whole and not response.is_sequence:  # sent as it comes
        rest = chain(held, chunks)
        streamed = StreamedAnswer(exchange, status, lines, rest, source)
        response.response = streamed
        request.environ[_STREAMED] = ref(streamed)
        response.direct_passthrough = False
        return response
    instead = exchange.answered(status, lines, b"".join(held) if whole else None)
    if instead is not None:
        other = _response(instead)
        other.call_on_close(response.close)  # what belongs to this one is closed with it
        return other
    if not response.is_sequence:
        response.call_on_close(partial(wsgi.close, source))  # when the chunks are out
        response.response = held
        response.direct_passthrough = False
    return response


def _close_unsent(_: Flask, **__: object) -> None:
    """Read an answer to its end that is not sent: a function of `after_request` raised.

    The error, and with it the answer, are kept by what handles it until the garbage collector runs.
    """
    streamed: StreamedAnswer | None = request.environ.pop(_STREAMED, lambda: None)()
    if streamed is not None:
        with suppress(Exception):  # it is recorded, and the caller has another one
            streamed.close()


# Not when the request is torn down: what streams with the context tears it down from inside.
got_request_exception.connect(_close_unsent)


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


class Body:
    """A request for the rules, and its body, which may have been read before us."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        this = _behind(request)
        environ, known = this.environ, vars(this)
        self._untouched = "stream" not in known
        self._cached = "_cached_data" in known
        self._parsed = "form" in known
        self._form = "form" in known and this.mimetype in FORMS and not this.get_data()
        lines = wsgi.header_lines(environ)
        self.request = Request(
            request.method,
            wsgi.path_of(environ),
            request.query_string,
            Headers(without_boundary(lines) if self._form else lines),
            this,
        )

    def read(self) -> bytes:
        """Return the body; the view can read it again."""
        if self._untouched:
            return wsgi.Body(request.environ, self._limit).read()
        chunked = wsgi.is_chunked(request.environ)
        if chunked and not request.environ.get("wsgi.input_terminated"):
            raise Rejected("body_incomplete")  # Flask takes it for empty
        length = request.content_length or 0  # of chunks it is not known
        if length > self._limit:
            raise Rejected("body_too_large")
        body = self._form_bytes() if self._form else request.get_data()
        if len(body) > self._limit:
            raise Rejected("body_too_large")
        if self._form and not body and (chunked or length > 0):
            # Flask parses a form with errors as an empty one, and empty forms all look alike.
            raise Rejected("body_incomplete")
        if not self._cached and self._is_cut(body, length, chunked=chunked):
            raise ConfigError(
                "the body was read from request.stream before the view: use "
                "request.get_data(), which keeps it"
            )
        return body

    def _is_cut(self, body: bytes, length: int, *, chunked: bool) -> bool:
        """Return whether other code has already read a part of the body, or all, from the stream.

        How long a body in chunks was cannot be known then, so its stream may not be touched; the
        parser of forms leaves what is no form where it is.
        """
        if self._parsed:
            return not body and (chunked or length > 0)
        return chunked or len(body) < length

    def _form_bytes(self) -> bytes:
        uploads = [
            upload_of(name, file.filename, file.content_type, file.stream)
            for name, file in request.files.items(multi=True)
        ]
        return form_bytes(request.form.items(multi=True), uploads)
