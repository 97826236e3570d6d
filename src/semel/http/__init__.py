"""The web rules, pure: what is protected, what is stored of an answer, how errors are worded.

requests  what a request says: key, fingerprint   rules     the rules of a route
options   what an application may choose          storing   what is stored, what is replayed
problems  semel's own answers                     client    what clients do with keys

Nothing here waits, reads a socket or touches a store; the integrations in `semel.adapters` do.
"""

from semel.http.client import part_of_call
from semel.http.options import IntegrationOptions, Route
from semel.http.problems import ProblemResponse, problem_response
from semel.http.requests import Headers, KeyMissing, Request, parse_key
from semel.http.storing import Answer

__all__ = [
    "Answer",
    "Headers",
    "IntegrationOptions",
    "KeyMissing",
    "ProblemResponse",
    "Request",
    "Route",
    "parse_key",
    "part_of_call",
    "problem_response",
]
