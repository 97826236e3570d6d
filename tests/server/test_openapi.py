"""The OpenAPI of the service, and a service that answers as it says: nothing else, and no 5xx."""

from __future__ import annotations

import json

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from semel.server.openapi import document
from semel.server.problems import CODES
from semel.server.wire import VERBS

SCHEMA = json.loads(document())


def test_every_verb_and_every_code_is_there():
    assert {path for path in SCHEMA["paths"] if path.startswith("/v1/")} == {
        f"/v1/{name}" for name in VERBS
    }
    codes = SCHEMA["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]
    assert codes == list(CODES)
    for name in VERBS:
        answers = SCHEMA["paths"][f"/v1/{name}"]["post"]["responses"]
        assert {str(kind.status) for kind in CODES.values()} | {"200"} == answers.keys()


def test_limits_are_in_it():
    start = SCHEMA["components"]["schemas"]["Start"]
    assert start["additionalProperties"] is False
    fields = start["properties"]
    assert (fields["key"]["minLength"], fields["key"]["maxLength"]) == (1, 255)
    assert (fields["wait"]["minimum"], fields["wait"]["maximum"]) == (0, 25)
    assert (fields["lease"]["minimum"], fields["lease"]["maximum"]) == (0.05, 86400)
    assert (fields["owner"]["minLength"], fields["owner"]["maxLength"]) == (24, 24)


def test_the_service_gives_it_without_a_token(centre):
    answer = centre.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.data == SCHEMA


@schemathesis.serializer("application/msgpack")
def _pack(_context, value):
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, ValueError):  # an integer or a text that it cannot hold
        return None


@schemathesis.deserializer("application/msgpack")
def _unpack(_context, response):
    return msgspec.msgpack.decode(response.content)


schema = schemathesis.openapi.from_dict(SCHEMA)


@pytest.fixture
def address(centre):
    return centre.url


@schema.parametrize()
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_answer_is_in_the_schema_and_none_is_a_5xx(case, address):
    if isinstance(case.body, dict) and "wait" in case.body:
        case.body = {**case.body, "wait": 0}  # as valid as any, and it takes no time
    response = case.call(base_url=address)
    assert response.status_code < 500, response.text
    case.validate_response(
        response,
        checks=[
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
            negative_data_rejection,
        ],
    )
