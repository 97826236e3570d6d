"""What the child processes of the fault tests share: they tell, wait, and count their effects.

A child tells what happens on its standard output, one JSON object per line, and goes on from a
wait when a line comes on its standard input. Effects are lines at the end of a file, so that they
are counted outside the library and survive whatever happens to the process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from semel import current_attempt


def tell(**news: Any) -> None:
    """One line, in one write: children that share a pipe do not mix."""
    os.write(1, json.dumps(news).encode() + b"\n")


def wait() -> None:
    """Say so, and wait for the parent."""
    tell(waiting=True)
    if not sys.stdin.readline():
        os._exit(1)  # the parent is gone


def effect(ledger: str, key: str) -> None:
    """Do what must be done once."""
    attempt = current_attempt()
    append(ledger, f"{key} {os.getpid()} {attempt.number} {attempt.derive('charge')}")


def append(path: str, line: str) -> None:
    """One line, in one write: processes that share a file do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode() + b"\n")
    os.close(file)
