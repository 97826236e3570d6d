"""The web rules, pure: what is protected, what is stored of an answer, how errors are worded.

messages  requests and answers as values, fingerprints    keys      where a key comes from
options   what an application may choose                  rules     the rules of a route
storing   what is stored, what is replayed                problems  the answers that are ours
client    what clients do with keys

Nothing here waits, reads a socket or touches a store; the integrations in `semel.adapters` do.
"""

from semel.http.keys import KeyMissing, parse_key
from semel.http.messages import Answer, Headers, Request
from semel.http.options import IntegrationOptions, Route
from semel.http.problems import ProblemResponse, problem_response

__all__ = [
    "Answer",
    "Headers",
    "IntegrationOptions",
    "KeyMissing",
    "ProblemResponse",
    "Request",
    "Route",
    "parse_key",
    "problem_response",
]
