"""Runs the scenarios of `clients/vectors.json` against a service, from Python.

Other languages have such a runner too: each sends the same steps through its own client.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "clients" / "vectors.json"
VECTORS: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
PATIENCE = 60.0

JSON, MSGPACK = "application/json", "application/msgpack"
CODECS: Mapping[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    JSON: (lambda value: json.dumps(value).encode(), json.loads),
    MSGPACK: (msgspec.msgpack.encode, msgspec.msgpack.decode),
}


class Answer(NamedTuple):
    status: int
    retry_after: str | None
    body: Any


def settings() -> str:
    """The semel.toml that the scenarios need: a value in JSON is one in TOML, but for tables."""
    lines = []
    for scope, fields in VECTORS["scopes"].items():
        lines.append(f'[scopes."{scope}"]')
        for name, value in fields.items():
            if isinstance(value, dict):
                inner = ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items())
                lines.append(f"{name} = {{ {inner} }}")
            else:
                lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def post(port: int, verb: str, body: bytes, media_type: str) -> Answer:
    """Send one request on a connection of its own."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    ) as connection:
        connection.request("POST", f"/v1/{verb}", body, {"Content-Type": media_type})
        response = connection.getresponse()
        text, found = response.read(), response.getheader("Content-Type", "")
    unpack = CODECS[MSGPACK][1] if found == MSGPACK else json.loads
    return Answer(response.status, response.getheader("Retry-After"), unpack(text))


def run_scenario(scenario: Mapping[str, Any], port: int, media_type: str = JSON) -> None:
    """Send the steps of a scenario, and check each answer."""
    known = {"key": f"k-{uuid.uuid4().hex}", "other": f"o-{uuid.uuid4().hex}"}
    begun: dict[str, Future[Answer]] = {}
    with ThreadPoolExecutor() as pool:
        for number, step in enumerate(scenario["steps"], 1):
            if "end" in step:
                answer = begun.pop(step["end"]).result(PATIENCE)
            else:
                asked = pool.submit(post, port, step["verb"], *body_of(step, known, media_type))
                if "begin" in step:
                    begun[step["begin"]] = asked
                    continue
                answer = asked.result(PATIENCE)
            wrong = difference(answer, step["expect"])
            assert wrong is None, f"step {number}: {wrong}; the answer: {answer}"
            for field, name in step.get("save", {}).items():
                known[name] = answer.body[field]


def body_of(
    step: Mapping[str, Any], known: Mapping[str, str], media_type: str
) -> tuple[bytes, str]:
    if "text" in step:
        text = step["text"]
        for name, value in known.items():
            text = text.replace(f"${name}", value)
        return text.encode(), JSON
    pack, _ = CODECS[media_type]
    return pack(filled(step["send"], known)), media_type


def filled(value: Any, known: Mapping[str, str]) -> Any:
    """Put what is known in the place of "$name"."""
    match value:
        case dict():
            return {key: filled(each, known) for key, each in value.items()}
        case list():
            return [filled(each, known) for each in value]
        case str() if value.startswith("$") and value[1:] in known:
            return known[value[1:]]
    return value


def difference(answer: Answer, expected: Mapping[str, Any]) -> str | None:
    """Say what is wrong with an answer; None = nothing."""
    if answer.status != expected["status"]:
        return f"the status is {answer.status}, not {expected['status']}"
    if expected.get("retry_after") and not re.fullmatch("[1-9][0-9]*", answer.retry_after or ""):
        return f"Retry-After is {answer.retry_after!r}"
    for field, value in expected["body"].items():
        if field not in answer.body or not same(answer.body[field], value):
            return f"{field} is {answer.body.get(field)!r}, not {value!r}"
    for field in expected.get("absent", ()):
        if field in answer.body:
            return f"{field} is there"
    return None


def same(found: Any, expected: Any) -> bool:
    """Tell whether a value is the expected one; True is not 1."""
    number = isinstance(found, int | float) and not isinstance(found, bool)
    match expected:
        case "$number":
            return number
        case "$text":
            return isinstance(found, str) and found != ""
        case "$hex24":
            return isinstance(found, str) and re.fullmatch("[0-9a-f]{24}", found) is not None
        case bool() | None:
            return found is expected
        case int() | float():
            return number and found == expected
        case list():
            return (
                isinstance(found, list | tuple)
                and len(found) == len(expected)
                and all(map(same, found, expected))
            )
        case dict():
            return (
                isinstance(found, dict)
                and found.keys() == expected.keys()
                and all(same(found[name], each) for name, each in expected.items())
            )
    return bool(found == expected)
