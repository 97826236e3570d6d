"""Does time grow linearly with what a client sends? Each parser, with its worst input.

Told is the CPU time of this thread alone, the least of several rounds, for n and for 4n characters.
Their ratio is about 4 if time grows linearly, 16 if with the square. Exits non-zero above 8.

    python -m benchmarks.linear [--size 50000]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from semel.cli.store import _NAMED_DIGEST
from semel.core.policy import resolve
from semel.errors import InvalidKey
from semel.http.options import chosen, path_matcher
from semel.http.requests import Headers, Request, content, key_in_query, parse_key
from semel.http.rules import Rejected, RouteRules, Routing
from semel.http.storing import kept_lines
from semel.observe import _escaped

LONGER = 4
LIMIT = 8.0
ROUNDS = 7
ENOUGH = 0.002
"""Seconds that one measurement takes at least: a shorter one would only measure the clock."""

JSON, FORM, PARTS = b"application/json", "application/x-www-form-urlencoded", b"multipart/form-data"


def asked(kind: str = "", query: bytes = b"") -> Request:
    return Request("POST", "/pay", query, Headers([(b"content-type", kind.encode())]), None)


def resolved(_: str, *policies: Any) -> Any:
    return resolve(*policies)


STARS = path_matcher("/a*/a*/c*/b")
ROUTES = Routing(resolved=resolved, include=["/a*/a*/b"])
FIELDS = RouteRules(chosen({"payload": ["a.b"]}), resolved)
FORMS = RouteRules(chosen({"payload": ["a"], "format": "form"}), resolved)


def find(method: str, path: str, root: str = "") -> None:
    ROUTES.find(method, path, root)


CASES: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "content type: boundaries": (
        lambda n: PARTS + b"; boundary=x" * (n // 12) + b'"',
        lambda given: content(given, b"abc"),
    ),
    "content type: spaces": (
        lambda n: PARTS + b";" + b" " * n + b"x",
        lambda given: content(given, b"abc"),
    ),
    "multipart: half a boundary": (
        lambda n: (b"\r\n--" + b"a" * 60) * (n // 64),
        lambda given: content(PARTS + b"; boundary=" + b"a" * 60 + b"b", given),
    ),
    "multipart: boundaries": (
        lambda n: b"\r\n--b\r\n" * (n // 7),
        lambda given: content(PARTS + b"; boundary=b", given),
    ),
    "JSON: digits": (lambda n: b"1" * n, lambda given: content(JSON, given)),
    "JSON: arrays": (lambda n: b"[" * n, lambda given: content(JSON, given)),
    "JSON: escapes": (
        lambda n: b'"' + b"\\u00e9" * (n // 6) + b'"',
        lambda given: content(JSON, given),
    ),
    "JSON: fields": (
        lambda n: b"{" + b",".join(b'"%09d":0' % (n - each) for each in range(n // 14)) + b"}",
        lambda given: FIELDS.fingerprint(asked("application/json"), given),
    ),
    "form: fields": (
        lambda n: b"a=%2b&" * (n // 6),
        lambda given: FORMS.fingerprint(asked(FORM), given),
    ),
    "query: fields": (
        lambda n: b"a=%2b&" * (n // 6),
        lambda given: key_in_query("key", asked(query=given), None),
    ),
    "key: escapes": (lambda n: '"' + "\\\\" * (n // 2), parse_key),
    "key: parameters": (lambda n: '"k"' + ";a=1" * (n // 4) + ",", parse_key),
    "key: spaces": (lambda n: '"k"' + "; " * (n // 2), parse_key),
    "path: stars": (lambda n: "/a" * (n // 2) + "/b", STARS),
    "path: slashes": (lambda n: "/" * n, lambda given: find("POST", given)),
    "path: roots": (lambda n: "/a" * (n // 2), lambda given: find("POST", given, given)),
    "stored headers": (
        lambda n: [(b"x-%d" % (each % 999), b"a") for each in range(n // 8)],
        lambda given: kept_lines(given, frozenset()),
    ),
    "comment in SQL": (lambda n: "*/" * (n // 2), _escaped),
    "digest in a report": (lambda n: "key_digest" + " " * n, _NAMED_DIGEST.search),
}
"""For each: the input of about n characters, and what reads it."""


def seconds(read: Callable[[Any], object], given: object) -> float:
    """Return the CPU time of one reading, the least of several rounds."""

    def go(times: int) -> float:
        begun = time.thread_time()
        for _ in range(times):
            with suppress(InvalidKey, Rejected):
                read(given)
        return time.thread_time() - begun

    times = 1
    while go(times) < ENOUGH and times < 1 << 16:
        times *= 2
    return min(go(times) for _ in range(ROUNDS)) / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=50_000)
    size = parser.parse_args().size
    slow = []
    for name, (made, read) in CASES.items():
        short, long = (seconds(read, made(length)) for length in (size, LONGER * size))
        ratio = long / short
        print(f"{name:28} {short * 1e6:9.1f} us {long * 1e6:9.1f} us   x {ratio:.1f}", flush=True)
        if ratio > LIMIT:
            slow.append(name)
    if slow:
        sys.exit(f"more than linear: {', '.join(slow)}")


if __name__ == "__main__":
    main()
