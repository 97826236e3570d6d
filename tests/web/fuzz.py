"""Odd requests without end: headers, bodies, chunking, encodings.

    make fuzz-http                     10,000 requests, spread over the stacks
    make fuzz-http COUNT=2000 MINUTES=3

No answer may be an error of the server, no request may hang, no key may stay held, and a worker's memory
may not grow with the number of requests.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from semel import Idempotency
from web.client import Connection
from web.serve import STACKS
from web.workers import Worker, nothing_runs, working

MIB = 1024 * 1024
GROWTH = 48 * MIB
"""What a worker may grow after its first requests: caches fill, allocators keep what they have."""
WARM = 200
PROFILES = (
    "default", "required", "strict", "query", "field", "order", "tenant", "separate-routes", "fields",
    "payload-function", "secret", "deterministic", "small", "encrypted", "guard", "more-methods",
)  # fmt: skip
KEYS = ("fuzz-1", "fuzz-2", "fuzz-3")
PATHS = (
    "/pay", "/refund", "/echo", "/chunks", "/empty", "/secret", "/large/9000", "/large_chunks/9",
    "/status/404", "/status/503", "/pay/%2e%2e/x", "/%ff%fe", "/p%00y", "//pay", "/pay;a=b", "/%",
    "/" + "p" * 3000, "/pay/é",
)  # fmt: skip

_PRINTABLE = bytes(range(32, 127))
_line_bytes = st.one_of(
    st.lists(st.sampled_from(_PRINTABLE), max_size=40).map(bytes),
    st.lists(st.sampled_from(_PRINTABLE), max_size=40).map(bytes),
    st.lists(st.sampled_from(_PRINTABLE + bytes(range(128, 256))), max_size=40).map(bytes),
    st.binary(max_size=40).map(lambda raw: raw.translate(None, b"\r\n\0")),
)
_names = st.sampled_from(
    ["X-User", "X-Order", "Accept-Encoding", "Content-Encoding", "Expect", "X-Forwarded-For", "Origin",
     "Cookie", "Authorization", "Idempotent-Replayed", "Idempotency_Key", "TE", "Trailer", "Range",
     "If-Match", "X-HTTP-Method-Override", "Accept", "Forwarded", "Via"]
)  # fmt: skip
_values = st.one_of(
    st.sampled_from(
        ["gzip", "deflate, br", "100-continue", "https://shop.example", "trailers", "ann"]
    ).map(str.encode),
    _line_bytes,
)
_keys = st.one_of(
    st.sampled_from(KEYS).map(str.encode),
    st.sampled_from(KEYS).map(lambda key: f'"{key}"'.encode()),
    _line_bytes,
    st.integers(250, 600).map(lambda length: b"k" * length),
)
_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_bodies = st.one_of(
    st.sampled_from(
        [
            b"",
            b"{}",
            b'{"amount": 5}',
            b'{"payment": {"reference": "fuzz-4"}}',
            b"[" * 5000,
            b'{"a":' * 2000,
            b"--b\r\n\r\nx\r\n--b--\r\n",
            b"--b",
            b"\r\n--b--",
            b"payment.reference=fuzz-5&a=%ff",
            b'{"a": 1e999}',
            b'{"a": "\\ud800"}',
            b"\xef\xbb\xbf{}",
            b"1" * 5000,
            b"a=1&" * 2000,
            b"x" * 4097,
            b"x" * 70_000,
        ]
    ),
    _json_values.map(lambda value: repr(value).replace("'", '"').encode("utf-8", "replace")),
    st.binary(max_size=60),
)
_content_types = st.one_of(
    st.sampled_from(
        [
            b"application/json",
            b"application/json; charset=utf-16",
            b"application/problem+json",
            b"text/plain",
            b"application/x-www-form-urlencoded",
            b"multipart/form-data; boundary=b",
            b"multipart/form-data",
            b'multipart/mixed; boundary="b"',
            b"multipart/form-data; boundary=\xff",
            b"multipart/form-data; boundary=",
            b"",
            b";",
            b"application/json, text/plain",
            b"\xe4/\xf6",
        ]
    ),
    _line_bytes,
)
_lengths = st.sampled_from(
    [b"0", b"1", b"7", b"-1", b"+5", b"abc", b"1e3", b"5, 5", b"", b"9" * 19, b"9" * 5000]
)


@st.composite
def framings(draw: st.DrawFn, body: bytes) -> tuple[list[tuple[bytes, bytes]], bytes, bool]:
    """Header lines that say how long the body is; the body as it is sent; whether that is true."""
    match draw(
        st.sampled_from(
            ["true", "true", "true", "chunks", "chunks", "wrong", "both", "none", "odd chunks"]
        )
    ):
        case "true":
            return [(b"Content-Length", b"%d" % len(body))], body, True
        case "chunks":
            return [(b"Transfer-Encoding", b"chunked")], _chunks(draw, body) + b"0\r\n\r\n", True
        case "wrong":
            return [(b"Content-Length", draw(_lengths))], body, False
        case "both":
            length = (b"Content-Length", b"%d" % len(body))
            return (
                [length, (b"Transfer-Encoding", b"chunked")],
                _chunks(draw, body) + b"0\r\n\r\n",
                False,
            )
        case "odd chunks":
            end = draw(
                st.sampled_from([b"", b"0\r\n", b"zz\r\n", b"-1\r\n", b"0\r\nX-Trailer: 1\r\n\r\n"])
            )
            return [(b"Transfer-Encoding", b"chunked")], _chunks(draw, body) + end, False
        case _:
            return [], body, False


def _chunks(draw: st.DrawFn, body: bytes) -> bytes:
    size = draw(st.sampled_from([1, 5, 4096])) if len(body) < 500 else 4096
    extension = draw(st.sampled_from([b"", b";a=b", b' ; q="x"']))
    pieces = (body[begin : begin + size] for begin in range(0, len(body), size))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bool]:
    """The bytes of one request, to any profile, and whether they are a whole one."""
    method = draw(
        st.sampled_from(
            ["POST"] * 6 + ["PATCH", "PUT", "GET", "DELETE", "OPTIONS", "post", "QUERY"]
        )
    )
    query = draw(
        st.sampled_from(
            ["", "", "?", "?a=1", "?idempotency_key=fuzz-6", "?idempotency_key=%ff", "?%=&&"]
        )
    )
    target = (draw(st.sampled_from(PATHS)) + query).encode()
    lines = [
        (b"Host", draw(st.sampled_from(PROFILES)).encode() + b".sqlite"),
        (b"Connection", b"close"),
    ]
    lines += [
        (b"Idempotency-Key", key) for key in draw(st.lists(_keys, min_size=0, max_size=2))[:1]
    ]
    if draw(st.integers(0, 19)) == 0:
        lines.append((b"Idempotency-Key", draw(_keys)))
    if draw(st.booleans()):
        lines.append((b"Content-Type", draw(_content_types)))
    extra = draw(st.lists(st.tuples(_names, _values), max_size=4))
    lines += [(name.encode(), value) for name, value in extra]
    framing, body, whole = draw(framings(draw(_bodies)))
    head = b"".join(b"%s: %s\r\n" % line for line in (*lines, *framing))
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method.encode(), target, head, body), whole


def exchange(port: int, request: bytes, *, whole: bool) -> bytes:
    """Send all of it, and give whatever is answered; of a request that is not whole no more comes."""
    connection = Connection(port)
    with contextlib.suppress(OSError):  # a server may answer and close before it has read it all
        connection.send(request)
        if not whole:
            connection.end()
    return connection.hurried()


def fuzz(worker: Worker, count: int, *, number: int = 0, until: float = float("inf")) -> int:
    """Send so many odd requests, or as many as there is time for; tells how many."""
    sent = 0

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # the first failure is told as it is: it may depend on others
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def send(told: tuple[bytes, bool]) -> None:
        nonlocal sent
        request, whole = told
        assume(time.monotonic() < until)
        try:
            answer = exchange(worker.port, request, whole=whole)
        except TimeoutError:
            raise AssertionError(f"neither answered nor closed: {request[:800]!r}") from None
        sent += 1
        status = answer.split(b" ", 2)[1] if answer else b""
        assert status not in {b"500", b"502"}, (request[:800], answer[:600], worker.log()[-3000:])

    send()
    return sent


def check_keys(worker: Worker, url: str) -> None:
    """No record is held by anybody, and every key answers."""
    with Idempotency(url) as engine:
        nothing_runs(engine)
    for key in KEYS:
        answer = worker.client().post("/pay", key=key)
        assert answer.status in {201, 422}, answer


def grown(worker: Worker, send: Callable[[], object]) -> int:
    """How many bytes of memory a worker has more afterwards."""
    before = worker.memory()
    send()
    return worker.memory() - before


def main() -> None:
    count = int(os.environ.get("COUNT", "10000")) // len(STACKS) + 1
    after = max(1, count - WARM)  # of a small count, too, the first ones fill caches
    end = time.monotonic() + 60 * float(os.environ.get("MINUTES", "10"))
    with tempfile.TemporaryDirectory(prefix="semel-fuzz-") as root, working(Path(root)) as workers:
        total = 0
        for number, stack in enumerate(STACKS):
            worker, began = workers.first(stack), time.monotonic()
            total += fuzz(worker, WARM, number=number, until=end)
            more = []
            growth = grown(
                worker,
                lambda: more.append(fuzz(worker, after, number=number + 100, until=end)),  # noqa: B023 - called at once
            )
            total += more[0]
            check_keys(worker, workers.folder.store("sqlite"))
            print(
                f"{stack}: {WARM + more[0]} requests in {time.monotonic() - began:.0f} s, "
                f"memory {growth / MIB:+.1f} MiB"
            )
            if growth > GROWTH:
                sys.exit(f"{stack}: the memory grew by {growth / MIB:.0f} MiB")
    print(f"{total} requests: no error of the server, no hanging, no stuck key")


if __name__ == "__main__":
    main()
