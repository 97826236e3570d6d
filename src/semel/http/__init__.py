"""The web rules, pure: what is protected, what is stored of an answer, how errors are worded.

messages      requests and answers as values      keys          where a key comes from
fingerprints  what tells two requests apart       bodies        fields of a body
storing       what is stored, what is replayed    problems      the answers that are ours
options       what an application may choose      checking      whether an option can be used
policies      policies over the engine's          routing       which rules hold for a request
rulebook      all of it together, for one route   retrying      what clients do with keys

Nothing here waits, reads a socket or touches a store; the integrations in `semel.adapters` do.
"""

from semel.http.keys import KeyMissing, parse_key
from semel.http.messages import Answer, Headers, Request
from semel.http.options import DoorOptions, Route
from semel.http.problems import ProblemResponse, problem_response

__all__ = [
    "Answer",
    "DoorOptions",
    "Headers",
    "KeyMissing",
    "ProblemResponse",
    "Request",
    "Route",
    "parse_key",
    "problem_response",
]
