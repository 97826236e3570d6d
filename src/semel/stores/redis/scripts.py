"""The Lua scripts and what a call of one looks like.

This module holds text and values. It sends nothing: a transport takes a `Call`, and its `read`
turns the reply into the answer. Every key that a script touches is named in the call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any, Final, Generic, TypeVar

from hiredis import pack_command
from msgspec import Struct
from msgspec.structs import replace

Answer = TypeVar("Answer")
Argument = bytes | str | int


def packed(arguments: tuple[Argument, ...]) -> bytes:
    """Write a command the way a server reads it."""
    # Numbers as text: where hiredis writes them, a handler of a signal that raises just then ends
    # the whole process (it does not expect that of `repr`).
    plain = tuple([b"%d" % part if isinstance(part, int) else part for part in arguments])
    wire: bytes = pack_command(plain)  # type: ignore[arg-type]  # its stub says one argument
    return wire


def size(length: int) -> bytes:
    """Write what stands before an argument of this length: the end of the line before, its size."""
    return _SIZES[length] if length < len(_SIZES) else b"\r\n$%d\r\n" % length


_SIZES: Final = tuple(b"\r\n$%d\r\n" % length for length in range(512))


class Script(Struct, frozen=True):
    """One Lua script and the digest by which a server remembers it."""

    text: str
    sha: str
    opening: bytes
    """How a command that runs it by its digest goes on after the number of its parts, when it is
    about a record and its index."""


def load(package: str, *names: str) -> Script:
    """Make one script of the files of these names in a package's folder `lua`."""
    folder = files(package).joinpath("lua")
    return script("\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names))


def script(text: str) -> Script:
    """Name a script by its digest."""
    # Redis names a script by its SHA-1; nothing here is a secret.
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    parts = (b"EVALSHA", sha.encode(), b"2")
    return Script(text, sha, b"".join(size(len(part)) + part for part in parts))


_load = partial(load, "semel.stores.redis", "record")

CLAIM = load("semel.stores.redis", "claim_plain", "record", "claim")
RENEW = _load("renew")
END = load("semel.stores.redis", "end_plain", "record", "end")
PUT = _load("put")
GET = _load("get")
TOUCH = _load("touch")
FORGET = _load("forget")
ADOPT = _load("adopt")
DUE = _load("due")
CHECK = _load("check")
PURGE = _load("purge")
NOTE = _load("note")
STATE = _load("state")
INFO = _load("info")


class Call(Struct, Generic[Answer], frozen=True, gc=False):
    """One run of a script: what to send, and how to read the reply."""

    script: Script
    keys: tuple[bytes, ...]
    """The record, and the index of its bucket where the script keeps that in order."""
    args: tuple[Argument, ...]
    read: Callable[[Any], Answer]
    lease: int | None = None
    """What the index should say of a record that is PROCESSING after this call: how many
    microseconds its lease lasts; None = it ended."""
    written: bytes | None = None
    """The command as it is sent, for the calls that are made most."""

    def wire(self) -> bytes:
        """Write the command that runs the script by its digest."""
        if self.written is None:
            return packed(self.command(with_text=False))
        return self.written

    def command(self, *, with_text: bool) -> tuple[Argument, ...]:
        """The command to send: by digest, or with the whole text for a server that forgot it."""
        head = ("EVAL", self.script.text) if with_text else ("EVALSHA", self.script.sha)
        return (*head, len(self.keys), *self.keys, *self.args)

    def without_index(self) -> Call[Answer]:
        """The same call on the record alone: a slot on the move refuses two keys (TRYAGAIN)."""
        return replace(self, keys=self.keys[:1], written=None)

    def note(self) -> Call[bool]:
        """Writes the index entry of a record that went alone."""
        record, index = self.keys
        lease = "" if self.lease is None else self.lease
        return Call(NOTE, (index,), (record.partition(b"}")[2], lease), bool)
