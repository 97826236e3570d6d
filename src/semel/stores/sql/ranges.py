"""Ranges of keys, for databases that compare text by code points."""

from __future__ import annotations


def behind(prefix: str) -> str | None:
    """Find the least text above all that begin with `prefix`; None when nothing is."""
    while prefix:
        last = ord(prefix[-1]) + 1
        prefix = prefix[:-1]
        if last <= 0x10FFFF:  # noqa: PLR2004 - the last code point
            return prefix + chr(0xE000 if 0xD800 <= last < 0xE000 else last)  # noqa: PLR2004 - no surrogates
    return None
