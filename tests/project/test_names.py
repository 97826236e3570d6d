"""The code says things in the words of its field, and does not fall back into words of its own."""

from __future__ import annotations

import ast
import re

LEFT = {
    "aside": "background",
    "book": "RouteRules",
    "casework": "reconcile",
    "cases": "open_cases",
    "dangers": "diagnose",
    "deafen": "lose",
    "desk": "resolve",
    "door": "integration, middleware",
    "doors": "integrations",
    "ear": "Listener",
    "effort": "Deadline, Backoff",
    "flights": "SharedRuns",
    "following": "streaming, waiting",
    "foreign": "optional",
    "gate": "Limit",
    "grouping": "batch",
    "hearing": "Listening",
    "hearsay": "messages",
    "heed": "raise_if_cancelled",
    "home": "LoopGuard",
    "joint": "batch",
    "keeper": "Renewer",
    "keeping": "renewing",
    "kinds": "class_formats",
    "lane": "Slot",
    "lanes": "Connections",
    "lending": "pool",
    "line": "Connection",
    "mirror": "colours",
    "misplaced": "check_decorators",
    "nesting": "check_decorators",
    "outage": "Deadline, Backoff",
    "patience": "Deadline, Backoff",
    "places": "targets, Slots",
    "quick": "prepared",
    "refusal": "rejection",
    "refusals": "rejections, checks",
    "refuse": "reject",
    "refused": "rejected",
    "repeating": "Backoff",
    "room": "Channel",
    "rooms": "Subscriptions",
    "rulebook": "RouteRules",
    "seat": "Waiter",
    "seats": "Leaders",
    "settling": "decide_by_hand",
    "sharing": "batch",
    "shelf": "records",
    "switch": "bypass",
    "together": "batch",
    "trouble": "error",
    "troubles": "db_errors",
    "walk": "tree",
    "wire": "codecs",
    "wires": "Connections",
    "words": "fragments",
}
"""Words that names were once made of, and what to say instead."""

# The old list also has answers, batches, given, Kept, logged, many, members and parts: as names of
# modules they said nothing, but they are plain English for what is answered, passed by the user,
# kept for a time, written to a log, or belongs to a batch or a message.

ALLOWED = {
    "HeaderLine": "a line of a header is what HTTP calls it",
    "OpenCases": "what a reconciler has still to close",
    "Refuse": "public: the fault of a test",
    "StoreRefused": "public: the server does not let us in",
    "_LONGEST_LINE": "of a header",
    "_NEW_LINE": "the characters",
    "_QUOTED_LINE": "of a header",
    "_RAW_LINE": "of a header",
    "_REFUSED": "connections: as in StoreRefused",
    "_first_line": "of a text",
    "_line": "of a header",
    "_open_cases": "what a reconciler has still to close",
    "_status_line": "of a response",
    "_tls_refused": "a connection: as in StoreRefused",
    "REFUSED": "what the contract expects of a write",
    "TLS_REFUSED": "a connection: as in StoreRefused",
    "has_room": "space for one more record",
    "line": "of a header",
    "line_of_key": "of a header",
    "line_pattern": "of a header",
    "room": "space for records",
    "wire": "the form in which requests travel: the wire format",
}
"""Names that have such a word in its ordinary sense."""


def test_no_name_is_made_of_the_private_words_of_earlier_days(project):
    source = project / "src" / "semel"
    wrong = [
        f"{path.relative_to(source)}: {name}: say {LEFT[word]}"
        for path in sorted(source.rglob("*.py"))
        for name in names_of(ast.parse(path.read_text("utf-8")), path.stem)
        for word in words_of(name)
        if word in LEFT and name not in ALLOWED
    ]
    assert wrong == []


def test_every_exception_is_still_needed(project):
    sources = (project / "src" / "semel").rglob("*.py")
    used = {
        name
        for path in sources
        for name in names_of(ast.parse(path.read_text("utf-8")), path.stem)
    }
    assert ALLOWED.keys() - used == set()


def names_of(tree, module):
    """Classes, functions, attributes and names of a module, and its own; no local variables."""
    yield module
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name, body=body):
                yield name
                yield from assigned(body)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                # The tests of the public contract have sentences for names.
                if not name.startswith("test_"):
                    yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
    yield from assigned(tree.body)


def assigned(body):
    for statement in body:
        match statement:
            case ast.Assign(targets=targets):
                yield from (each.id for each in targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def words_of(name):
    """Split `SaveBackoff`, `_save_backoff` and `SAVE_BACKOFF` into save and backoff."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
