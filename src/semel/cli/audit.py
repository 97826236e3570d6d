"""The audit trail of commands: who runs one (`user`), and the command that lists the entries.

A command that is about to remove, decide or show something writes an entry first.
"""

from __future__ import annotations

import getpass
import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from msgspec.structs import asdict

from semel.cli.formatting import as_json, columns, moment
from semel.cli.store import checked_digest, open_engine
from semel.cli.terminal import coloured, say
from semel.core.records import Identity, Record
from semel.errors import ConfigError
from semel.repair import AuditEntry, AuditTrail
from semel.sync import Idempotency

HEADS = ("AT", "ACTION", "DETAILS", "SCOPE", "KEY DIGEST", "BY", "REASON")


def user(options: Namespace) -> str:
    """Name who runs the command: --by, else the user of the operating system."""
    if options.by is not None:
        return str(options.by)
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may run as a number without a name
        return f"uid-{os.getuid()}"


def enter_view(engine: Idempotency, records: Sequence[Record], options: Namespace) -> None:
    """Write an entry for each record whose result is about to be shown."""
    shown = [record.identity for record in records if record.outcome is not None]
    if options.result and shown:
        AuditTrail(engine, name=user(options)).write("view", shown, reason=options.reason)


def list_entries(options: Namespace) -> int:
    """List entries of the audit trail, the newest first."""
    digest = _wanted_digest(options)
    with open_engine(options) as engine:
        found = AuditTrail(engine).read(
            scope=options.scope, key_digest=digest, since=options.since, limit=options.limit + 1
        )
    entries = found[: options.limit]
    if options.json:
        print(as_json([asdict(entry) | {"at": moment(entry.at)} for entry in entries]))
    elif entries:
        print(columns(HEADS, map(_row, entries), colour=coloured(sys.stdout)))
    else:
        print("the audit trail has no such entries")
    if len(found) > options.limit:
        say(f"there are more than {options.limit}: see --limit")
    return 0


def _wanted_digest(options: Namespace) -> str | None:
    if options.key_digest is not None:
        return checked_digest(options.key_digest, "--key-digest", "use --scope and --key")
    if options.key is None:
        return None
    if options.scope is None:
        raise ConfigError("--key needs --scope: each scope has its own keys")
    if not (options.scope + options.key).isprintable():
        raise ConfigError("no record has a scope or a key that is not printable")
    return Identity(options.scope, options.key).key_digest


def _row(entry: AuditEntry) -> tuple[str, ...]:
    texts = (entry.action, entry.details, entry.scope, entry.key_digest, entry.by, entry.reason)
    return (moment(entry.at) or "-", *(text or "-" for text in texts))
