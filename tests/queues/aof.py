"""What a Redis server has written of one record: read from its append-only file.

The file shows what outlives a kill. A write that is answered and not in the file is one that the
server has lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STATES = ("processing", "succeeded", "failed")
HEADER = struct.Struct(">BBBI7s6s6s12s")
"""As src/semel/stores/redis/lua/record.lua describes it."""


class Write(NamedTuple):
    """A record as one command of the file leaves it."""

    ends: int
    """The byte after the command."""
    state: str
    owner: str
    number: int
    fence: int
    lease_until: float | None
    """By the server's clock; None when the attempt has ended."""


def size(folder: Path) -> int:
    """How many bytes a server has written."""
    return sum(path.stat().st_size for path in _files(folder))


def writes(folder: Path, key: str) -> list[Write]:
    """What was written to the record of a key, in this order."""
    found, before = [], 0
    for path in _files(folder):
        content = path.read_bytes()
        for ends, command in _commands(content):
            name = command[0].upper()
            if name == b"SET" and command[1].endswith(b":" + key.encode()):
                found.append(_read(before + ends, command[2]))
        before += len(content)
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("appendonlydir/*.incr.aof"))


def _commands(content: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Each command, and the byte after it; half of one at the end was never answered."""
    at = 0
    try:
        while at < len(content):
            line, at = _line(content, at)
            if line.startswith(b"*"):
                command = []
                for _ in range(int(line[1:])):
                    length, at = _line(content, at)
                    end = at + int(length[1:])
                    command.append(content[at:end])
                    at = end + 2
                if at <= len(content):
                    yield at, command
    except ValueError:
        return


def _line(content: bytes, at: int) -> tuple[bytes, int]:
    end = content.index(b"\r\n", at)
    return content[at:end], end + 2


def _read(ends: int, record: bytes) -> Write:
    _, flags, replaced, number, fence, _, _, owner = HEADER.unpack_from(record)
    tail = HEADER.size + 16 * (replaced + (flags % 32 >= 16))
    until = int.from_bytes(record[tail : tail + 7], "big") / 1e6 if flags % 4 == 0 else None
    return Write(ends, STATES[flags % 4], owner.hex(), number, int.from_bytes(fence, "big"), until)
