"""The OpenAPI 3.1 of the service, made from the structs of the wire."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import msgspec

from semel import __version__
from semel.server.problems import CODES
from semel.server.wire import JSON, MSGPACK, VERBS

_REF: Final = "#/components/schemas/{name}"


@lru_cache(maxsize=1)
def document() -> bytes:
    """Return it as JSON."""
    kinds = [kind for verb in VERBS.values() for kind in (verb.asks, *verb.answers)]
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    of = dict(zip(kinds, refs, strict=True))
    paths: dict[str, Any] = {
        f"/v1/{name}": {
            "post": {
                "operationId": name,
                "summary": verb.summary,
                "security": [{"token": []}, {}],
                "requestBody": {"required": True, "content": _content(of[verb.asks])},
                "responses": {
                    "200": {
                        "description": "Done",
                        "content": _content(_one_of([of[each] for each in verb.answers])),
                    },
                    **_errors(),
                },
            }
        }
        for name, verb in VERBS.items()
    }
    for name, summary in {
        "/live": "Whether this process runs",
        "/ready": "... and its store",
    }.items():
        paths[name] = {
            "get": {
                "operationId": name[1:],
                "summary": summary,
                "security": [],
                "responses": {
                    "200": {
                        "description": "Yes",
                        "content": {JSON: {"schema": {"type": "object"}}},
                    },
                    **_errors(),
                },
            }
        }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "semel", "version": __version__, "summary": "Run it once per key."},
            "paths": paths,
            "components": {
                "schemas": {**schemas, "Problem": _PROBLEM},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _content(schema: Any) -> dict[str, Any]:
    return {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}


def _one_of(refs: list[Any]) -> Any:
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _errors() -> dict[str, Any]:
    errors: dict[str, Any] = {}
    for code, kind in CODES.items():
        errors.setdefault(str(kind.status), []).append(code)
    return {
        status: {
            "description": ", ".join(codes),
            "content": {
                "application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}
            },
        }
        for status, codes in errors.items()
    }


_PROBLEM: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"enum": list(CODES)},
        "field": {"type": "string"},
        "instance": {"type": "string"},
        "superseded": {"type": "boolean"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
