"""The audit trail: one entry for each decision, for people who ask later who decided what.

An audit is any callable that takes a `Decision`. `log_audit` writes to the logger `semel.audit`,
`AuditFile` appends to a file. The raw key is never in it; `semel show` tells a key's digest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from semel.repair.decisions import Decision

Audit: TypeAlias = Callable[[Decision], object]

_TIMES: Final = {"at", "kept_until"}

audit_logger = logging.getLogger("semel.audit")


def entry(decision: Decision) -> dict[str, Any]:
    """Write a decision as plain fields."""
    fields = {name: getattr(decision, name) for name in decision.__struct_fields__}
    del fields["identity"]
    for name in _TIMES & fields.keys():
        fields[name] = datetime.fromtimestamp(fields[name], UTC).isoformat(timespec="microseconds")
    return {
        "decision": decision.name,
        "scope": decision.scope,
        "key_digest": decision.key_digest,
        **fields,
    }


def log_audit(decision: Decision) -> None:
    """Write a `decision` to the logger `semel.audit`; its fields are in the record's `semel`."""
    fields = entry(decision)
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    audit_logger.log(max(decision.level, logging.INFO), "%s", text, extra={"semel": fields})


class AuditFile:
    """Appends one line of JSON for each decision to the file at `path`.

    Several processes may share the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __call__(self, decision: Decision) -> None:
        """Write the entry with one append, so that lines of two processes never mix."""
        line = msgspec.json.encode(entry(decision)) + b"\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line)
