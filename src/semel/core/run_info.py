"""What a running record says about its attempt: which process runs it, and under which policy.

An engine sends it with every claim, and again, with `why`, when it parks an attempt. A store keeps
the bytes while the record is PROCESSING and does not look into them; an operator's tools read them.
They are JSON, at most `RUN_INFO_BYTES` of it:

    {"by":"web-1:4711","ttl":259200,"codec":"json/1","why":"TimeoutError","most":5}
"""

from __future__ import annotations

import os
from typing import Annotated, Final
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from semel.core.process import in_forked_child
from semel.core.records import LONGEST, RUN_INFO_BYTES

NAME_VARIABLE: Final = "SEMEL_NAME"
"""The environment variable that names a process where host and pid do not."""

LONGEST_CODEC: Final = 64
LONGEST_WHY: Final = 34
"""In bytes, so that at least 32 are left for the name of the process."""
LARGEST_MOST: Final = 999_999
"""A larger `max_attempts` is not written: no key is tried so often."""


class RunInfo(Struct, frozen=True, omit_defaults=True, gc=False):
    """The process that runs an attempt, and what its policy does with the outcome."""

    by: str
    """The process: `host:pid`, or the value of `SEMEL_NAME`."""
    ttl: Annotated[float, Meta(gt=0, le=LONGEST)]
    """Seconds that the policy keeps a success or a final failure."""
    codec: str
    """The name of the codec that writes the results; empty if it was too long to keep."""
    why: str | None = None
    """The type of the exception that parked the attempt, or None.

    Where a response parked it, `answered with 502`, for example. Where the call ended before it
    could report, `interrupted`."""
    most: int | None = None
    """The `max_attempts` of the policy."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RunInfo).decode


def process_name() -> str:
    """Name this process: by `SEMEL_NAME`, or by its host and pid.

    It goes into records, logs and the audit trail: a long name loses its beginning, and what is not
    printable is replaced, as `build` does.
    """
    from socket import gethostname  # noqa: PLC0415 - only here: `import semel` must stay cheap

    name = os.environ.get(NAME_VARIABLE) or f"{gethostname()}:{os.getpid()}"
    return _printable(name[-RUN_INFO_BYTES:])


def build(
    by: str, ttl: float, codec: str, why: str | None = None, most: int | None = None
) -> bytes:
    """Write it as JSON, cut to `RUN_INFO_BYTES`.

    A long `why` loses its end, and a long `by` its beginning, because the pid is at its end. The
    name of a codec is kept whole or left out: a part of it could be the name of another one.
    """
    rest = RunInfo(
        by="",
        ttl=int(ttl) if ttl == int(ttl) else ttl,
        codec=codec if len(_encode(codec)) <= LONGEST_CODEC else "",
        why=None if why is None else _printable(why).encode()[:LONGEST_WHY].decode(errors="ignore"),
        most=most if most is not None and most <= LARGEST_MOST else None,
    )
    name, room = _printable(by).encode(), RUN_INFO_BYTES - len(_encode(rest))
    return _encode(replace(rest, by=name[max(0, len(name) - room) :].decode(errors="ignore")))


def read(stored: bytes) -> RunInfo | None:
    """Return a `stored` run_info, as `build` wrote it, or None if there is none or another text."""
    try:
        return _decode(stored)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class OwnRunInfo:
    """What this process sends under one policy: `claim` with every claim, another when it parks.

    It is written when the policy's rules are resolved, and again in a forked child, whose pid is
    another. It follows from the rules that it belongs to, so it makes no two rules different.
    """

    __slots__ = ("__weakref__", "_by", "_codec", "_most", "_ttl", "claim")

    def __init__(self, ttl: float, codec: str, most: int | None = None) -> None:
        self._ttl = ttl
        self._codec = codec
        self._most = most
        self.write()
        _of_all_rules[id(self)] = self

    def write(self) -> None:
        """Write it for the process that runs now."""
        self._by = process_name()
        self.claim = build(self._by, self._ttl, self._codec, None, self._most)

    def parked(self, why: str) -> bytes:
        """Write what the record of a parked attempt says."""
        return build(self._by, self._ttl, self._codec, why, self._most)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnRunInfo)

    def __hash__(self) -> int:
        return 0


_of_all_rules: WeakValueDictionary[int, OwnRunInfo] = WeakValueDictionary()
"""By id, because they are all equal."""


@in_forked_child
def _write_again() -> None:
    for own in list(_of_all_rules.values()):
        own.write()


def _printable(text: str) -> str:
    """Replace what JSON would write longer than it is, and what has no place on a terminal."""
    return "".join(each if each.isprintable() and each not in '"\\' else "?" for each in text)
