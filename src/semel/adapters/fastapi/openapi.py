"""What OpenAPI says of protected endpoints: where the key is, and the answers that are ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import fastapi.routing
from fastapi import FastAPI

from semel.http.keys import key_pattern, line_pattern
from semel.http.options import Choices
from semel.http.problems import PROBLEMS

MARK: Final = "semel_choices"
"""The attribute by which a decorated function is known."""

_MEDIA_TYPE: Final = "application/problem+json"
_SCHEMA: Final = "IdempotencyProblem"
_PARAMETERS: Final = "#/components/parameters/"
_TOLD: Final = (
    "key_missing",
    "invalid_key",
    "identity_missing",
    "concurrent_request",
    "duplicate_request",
    "outcome_unknown",
    "body_too_large",
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
    },
    "required": ["type", "title", "status", "detail", "code"],
}


def document(app: FastAPI) -> None:
    """Let the application's OpenAPI tell of its protected endpoints."""
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
    for told in _parameters(choices):
        parameters = operation.setdefault("parameters", [])
        # Asked for once more, or the endpoint's own: one of a name is enough.
        parameters[:] = [each for each in parameters if _named(each, known) != _named(told, known)]
        parameters.append(told)
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
    for code in _TOLD:
        if (code == "key_missing" and not choices.required) or (
            code == "identity_missing" and choices.tenant is None
        ):
            continue
        words, known = choices.problems.get(code, {}), PROBLEMS[code]
        told = titles.setdefault(words.get("status", known.status), [])
        told.append(words.get("title", known.title))
    return {status: "; ".join(told) for status, told in titles.items()}


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
