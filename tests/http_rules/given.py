"""Requests and route rules of the pure rules' tests."""

from __future__ import annotations

from semel.core.policy import Rules, resolve
from semel.http.options import chosen
from semel.http.requests import Headers, Request
from semel.http.rules import BODY, RouteRules

JSON = ("content-type", "application/json")


def a_request(*lines, method="POST", path="/pay", query=b"", raw=None):
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in lines]
    return Request(method, path, query, Headers(encoded), raw)


def as_an_engine(_scope: str, *policies) -> Rules:
    return resolve(*policies)


def route_rules(pattern=None, **options):
    return RouteRules(chosen(options), as_an_engine, pattern)


def asked(rules, request, body=b""):
    """Drive the question as an integration does; also tells how often the body was asked for."""
    waiting, given, bodies = rules.identify(request), None, 0
    try:
        while True:
            need = waiting.send(given)
            bodies += need is BODY
            given = body if need is BODY else need
    except StopIteration as end:
        return end.value, bodies
