"""FastAPI: a decorator for endpoints. It runs after authorization and every other dependency.

    idempotent = Idempotent("redis://localhost:6379/0")
    idempotent.init_app(app)

    @app.post("/payments", status_code=201)
    @idempotent(required=True)
    async def pay(payment: Payment) -> Receipt: ...

How a protected endpoint runs is Starlette's (`semel.adapters.starlette`). FastAPI reads a
function's signature to know what to give. So the decorated function has a signature of its own: the
endpoint's, with what the rules need added to it. FastAPI makes a response of a value after the
endpoint; the answer has to be saved before, so it is made here, with FastAPI's own parts. OpenAPI
shows where a protected endpoint takes its key, and the answers that semel adds.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from semel.core.optional import Needed, inside

with Needed("semel[fastapi]", by=__name__):
    import fastapi.routing
    from fastapi import FastAPI, Request, Response, params
    from fastapi.datastructures import DefaultPlaceholder

from semel.adapters import starlette
from semel.adapters.check_decorators import Routed
from semel.adapters.starlette import Endpoint, Invocation, plain_annotation
from semel.errors import ConfigError
from semel.http.options import Choices
from semel.http.problems import PROBLEMS
from semel.http.requests import key_pattern, line_pattern
from semel.http.rules import RouteRules

if TYPE_CHECKING:
    from semel.adapters.starlette_sessions import SessionChoice

__all__ = ["Idempotent"]

# Neither how FastAPI reads a signature nor what makes a response of a value is its public API.
serialize_response: Final = inside("fastapi", "fastapi.routing:serialize_response")
is_body_allowed_for_status_code: Final = inside(
    "fastapi", "fastapi.utils:is_body_allowed_for_status_code"
)

_KNOWN: Final = inspect.signature(serialize_response).parameters
"""What this FastAPI wants to know to serialize a value: older ones know less."""
get_typed_signature: Final = inside("fastapi", "fastapi.dependencies.utils:get_typed_signature")
get_typed_return_annotation: Final = inside(
    "fastapi", "fastapi.dependencies.utils:get_typed_return_annotation"
)

_REQUEST: Final = "semel_request"
_RESPONSE: Final = "semel_response"
_NOT_CALLED_BY_FASTAPI: Final = (
    "a decorated endpoint was called without what FastAPI gives to it: a decorator above "
    "@idempotent needs functools.wraps, and a test that calls an endpoint itself has to call the "
    "undecorated function"
)
MARK: Final = "semel_choices"
"""The attribute by which a decorated function is known."""


class Idempotent(starlette.Idempotent):
    """Protects endpoints: `@idempotent`, or `@idempotent(required=True, ...)` with more options.

    `idempotency` is a URL or an `AsyncIdempotency`. An `Idempotency` is for endpoints with
    `session=` and a sync session only; a URL opens the kind of engine that an endpoint needs.

    Examples:
        >>> idempotent = Idempotent("memory://")
        >>> @app.post("/payments")
        ... @idempotent
        ... async def pay() -> str:
        ...     return "paid"
    """

    def init_app(self, app: FastAPI) -> None:
        """Add the protected endpoints to `app`'s OpenAPI schema, and close the engine on shutdown.

        When `app` starts, a decorator that protects nothing raises `ConfigError`.
        """
        document(app)
        super().init_app(app)

    def _routed(self, app: Any) -> Iterable[Routed]:
        return (
            # A mounted application need not be of Starlette: its routes have other names.
            Routed(getattr(route, "endpoint", None), route.methods)
            for route in all_routes_of(app.routes)
        )

    def _endpoint(self, function: Callable[..., Any], choice: SessionChoice | None) -> Endpoint:
        return FastAPIEndpoint(function, choice)

    def _finish(self, decorated: Any, endpoint: Any, rules: RouteRules) -> None:
        decorated.__signature__ = endpoint.signature
        setattr(decorated, MARK, rules.choices)


class FastAPIEndpoint(Endpoint):
    """A function of the application; `signature` is what FastAPI is to see."""

    def __init__(self, function: Callable[..., Any], choice: SessionChoice | None = None) -> None:
        super().__init__(function, choice)
        self._choice = choice
        self._returns = get_typed_return_annotation(function)
        self.parameters: Mapping[str, inspect.Parameter] = get_typed_signature(function).parameters
        self.injected: Container[str] = {
            each.name for each in self.parameters.values() if _is_injected(each)
        }
        self._request = self._own(Request)
        self._response = self._own(Response)
        self._routes: dict[int, tuple[Any, Responses]] = {}

    @property
    def signature(self) -> inspect.Signature:
        """The endpoint's own, without the session that we give to it, and with what we need."""
        choice = self._choice
        hidden = None if choice is None or choice.depends else choice.parameter
        shown = [each for each in self.parameters.values() if each.name != hidden]
        # What follows the session may have no default, and FastAPI gives all by name.
        return inspect.Signature(
            sorted([*shown, *self._added()], key=lambda each: each.kind),
            return_annotation=self._returns,
        )

    def _added(self) -> list[inspect.Parameter]:
        """Return the parameters that we add to the endpoint's.

        FastAPI gives its request to one parameter only: the endpoint's own, if it has one. The
        key's header is none of them: FastAPI would validate it on each request, for nothing.
        """
        added = []
        if self._request is None:
            added.append(_parameter(_REQUEST, Request))
        if self._response is None:
            added.append(_parameter(_RESPONSE, Response))
        return added

    def invoked(self, args: tuple[Any, ...], values: dict[str, Any]) -> Invocation:
        """Separate our own arguments (request, response defaults) from the endpoint's."""
        if args:
            raise ConfigError(_NOT_CALLED_BY_FASTAPI)
        try:
            request = values.pop(_REQUEST) if self._request is None else values[self._request]
            response = values.pop(_RESPONSE) if self._response is None else values[self._response]
        except KeyError:
            raise ConfigError(_NOT_CALLED_BY_FASTAPI) from None
        respond = partial(self._responded, request, response)
        return Invocation(request, partial(self._function, **values), respond)

    async def _responded(self, request: Request, beginnings: Response, value: Any) -> Response:
        route = route_of(request)
        if id(route) not in self._routes:  # by id: a route need not have a hash
            # In a transaction no thread is waited for: its connection would wait as well.
            in_loop = self.is_coroutine or self._choice is not None
            self._routes[id(route)] = route, Responses(route, is_coroutine=in_loop)
        return await self._routes[id(route)][1].of(value, beginnings)

    def _own(self, kind: type) -> str | None:
        """Find the parameter to which FastAPI gives its request, or the answer's beginnings."""
        for parameter in self.parameters.values():
            annotation = plain_annotation(parameter)
            if parameter.name in self.injected or not isinstance(annotation, type):
                continue
            if issubclass(annotation, kind):
                return parameter.name
        return None


def _is_injected(parameter: inspect.Parameter) -> bool:
    """Return whether a dependency gives what a parameter has."""
    more = (parameter.default, *get_args(parameter.annotation)[1:])
    return any(isinstance(each, params.Depends) for each in more)


def _parameter(name: str, annotation: type) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


class Responses:
    """Makes the responses of one route, as the route was declared."""

    def __init__(self, route: Any, *, is_coroutine: bool) -> None:
        given, has_model = route.response_class, route.response_field is not None
        is_default = isinstance(given, DefaultPlaceholder)
        self._class: type[Response] = given.value if is_default else given
        self._status: int | None = route.status_code
        # FastAPI's quick way: a model is written to JSON at once.
        self._dumps_json = "dump_json" in _KNOWN and has_model and is_default
        options = {
            "field": route.response_field,
            "include": route.response_model_include,
            "exclude": route.response_model_exclude,
            "by_alias": route.response_model_by_alias,
            "exclude_unset": route.response_model_exclude_unset,
            "exclude_defaults": route.response_model_exclude_defaults,
            "exclude_none": route.response_model_exclude_none,
            "is_coroutine": is_coroutine,
            "dump_json": self._dumps_json,
        }
        self._serialize: Callable[..., Awaitable[Any]] = partial(
            serialize_response, **{name: value for name, value in options.items() if name in _KNOWN}
        )

    async def of(self, value: object, beginnings: Response) -> Response:
        """Make the response of a value; `beginnings` has what the endpoint set beside it."""
        if isinstance(value, Response):
            return value
        content = await self._serialize(response_content=value)
        status = beginnings.status_code or self._status
        options: dict[str, Any] = {} if status is None else {"status_code": status}
        if self._dumps_json:
            response = Response(content, media_type="application/json", **options)
        else:
            response = self._class(content, **options)
        if not is_body_allowed_for_status_code(response.status_code):
            response.body = b""
        response.raw_headers.extend(beginnings.raw_headers)
        return response


def route_of(request: Request) -> Any:
    """Return the route that was chosen, as the routers around it completed it."""
    route = request.scope["route"]
    completed = request.scope.get("fastapi", {}).get("effective_route_context")
    return completed if getattr(completed, "original_route", None) is route else route


# --- OpenAPI --------------------------------------------------------------------------------------

_MEDIA_TYPE: Final = "application/problem+json"
_SCHEMA: Final = "IdempotencyProblem"
_PARAMETERS: Final = "#/components/parameters/"
_DOCUMENTED: Final = (
    "key_missing",
    "invalid_key",
    "identity_missing",
    "concurrent_request",
    "duplicate_request",
    "outcome_unknown",
    "body_too_large",
    "unsupported_media_type",
    "payload_mismatch",
    "store_error",
)
"""The problems that a client should know of."""

_PROBLEM: Final = {
    "title": "Idempotency problem (RFC 9457)",
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "instance": {"type": "string", "format": "uri-reference"},
    },
    "required": ["type", "title", "status", "detail", "code"],
}


def document(app: FastAPI) -> None:
    """Add the protected endpoints to the application's OpenAPI schema."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schema = made()
        for route in routes_of(app.routes):
            choices: Choices | None = getattr(route.endpoint, MARK, None)
            if choices is None:
                continue
            operations = schema.get("paths", {}).get(route.path_format, {})
            for method in route.methods & choices.methods:
                if method.lower() in operations:
                    components = schema.setdefault("components", {})
                    _describe(operations[method.lower()], choices, components)
                    components.setdefault("schemas", {})[_SCHEMA] = _PROBLEM
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change it


def _describe(operation: dict[str, Any], choices: Choices, components: Mapping[str, Any]) -> None:
    known = components.get("parameters", {})
    for added in _parameters(choices):
        parameters = operation.setdefault("parameters", [])
        # Asked for once more, or the endpoint's own: one of a name is enough.
        parameters[:] = [each for each in parameters if _named(each, known) != _named(added, known)]
        parameters.append(added)
    for status, title in _answers(choices).items():
        answer = operation["responses"].setdefault(str(status), {"description": title})
        schema = {"$ref": f"#/components/schemas/{_SCHEMA}"}
        answer.setdefault("content", {})[_MEDIA_TYPE] = {"schema": schema}


def _named(parameter: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, str]:
    """Say which parameter it is; the names of headers have no case.

    One may be written elsewhere, and only named here (`$ref`); what is not found there is its own.
    """
    if "$ref" in parameter:
        reference: str = parameter["$ref"]
        found = known.get(reference.removeprefix(_PARAMETERS))
        return ("$ref", reference) if found is None else _named(found, {})
    place, name = parameter["in"], parameter["name"]
    return place, name.lower() if place == "header" else name


def _parameters(choices: Choices) -> Iterable[dict[str, Any]]:
    """Return the places that a key may come from, of those that are no part of the body."""
    sources = (choices.header, choices.query, choices.field, choices.key)
    required = choices.required and sum(each is not None for each in sources) == 1
    patterns = {
        ("header", choices.header): line_pattern(strict=choices.strict),
        ("query", choices.query): key_pattern(),
    }
    for (place, name), pattern in patterns.items():
        if name is not None:
            yield {
                "name": name,
                "in": place,
                "required": required,
                "description": "The same key with the same request gives the same answer.",
                "schema": {"type": "string", "pattern": pattern},
            }


def _answers(choices: Choices) -> dict[int, str]:
    """Return the statuses of our answers, each with its titles."""
    titles: dict[int, list[str]] = {}
    for code in _DOCUMENTED:
        if (
            (code == "key_missing" and not choices.required)
            or (code == "identity_missing" and choices.tenant is None)
            or (code == "unsupported_media_type" and not choices.reads_fields)
        ):
            continue
        words, known = choices.problems.get(code, {}), PROBLEMS[code]
        named = titles.setdefault(words.get("status", known.status), [])
        named.append(words.get("title", known.title))
    return {status: "; ".join(named) for status, named in titles.items()}


# --- the routes of an application, as old and new versions of FastAPI list them ------------------


def routes_of(routes: Any) -> Iterator[Any]:
    """Return the routes of endpoints, those of included routers with their whole paths."""
    return (route for route in _completed(routes) if getattr(route, "methods", None) is not None)


def all_routes_of(routes: Any) -> Iterator[Any]:
    """Return the routes of endpoints, those of mounted applications too."""
    yield from routes_of(routes)
    for route in _completed(routes):
        yield from all_routes_of(getattr(route, "routes", ()))


def _completed(routes: Any) -> Iterable[Any]:
    complete: Any = getattr(fastapi.routing, "iter_route_contexts", iter)
    return cast("Iterable[Any]", complete(routes))
