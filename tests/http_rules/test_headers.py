"""Header lines: in order, unsplit, found without regard to case."""

from __future__ import annotations

from semel.http import Headers

LINES = [
    (b"Accept", b"a"),
    (b"x-tag", b"1"),
    (b"X-Tag", b"2, 3"),
    (b"x-name", "é".encode("latin-1")),
]


def test_a_header_is_found_however_its_name_is_written():
    headers = Headers(LINES)
    assert headers.get("ACCEPT") == "a"
    assert headers.get("x-tag") == "1"
    assert headers.get("x-name") == "é"
    assert headers.get("x-ta") is None
    assert headers.get("x-ta", "") == ""
    assert headers.get("accept", "") == "a"
    assert headers.get_all("X-TAG") == ["1", "2, 3"]
    assert headers.get_all("missing") == []
    assert headers.values(b"x-tag") == [b"1", b"2, 3"]
    assert headers.lines == tuple(LINES)
