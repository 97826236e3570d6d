"""Commands that change nothing: list, show, stuck, counts.

Each takes the parsed options and returns the exit code.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import asdict

from semel.cli.audit import enter_view
from semel.cli.formatting import (
    COLUMNS,
    STATES,
    as_json,
    columns,
    duration,
    fields,
    row,
    state_of,
)
from semel.cli.results import result_data, result_summary, result_text
from semel.cli.store import NO_RECORD, PAGE, key_of, open_engine, read_records
from semel.core.records import Record
from semel.repair.maintenance import store_of
from semel.sync import Idempotency


def list_records(options: Namespace) -> int:
    """List records by scope, beginning of the key and state, as the column shows it."""
    with open_engine(options) as engine:
        records = list(islice(_listed(engine, options), options.limit + 1))
        enter_view(engine, records[: options.limit], options)
        _print(records[: options.limit], options)
        if len(records) > options.limit:
            print(f"there are more than {options.limit}: see --limit", file=sys.stderr)
    return 0


def _listed(engine: Idempotency, options: Namespace) -> Iterator[Record]:
    limit = min(PAGE, options.limit + 1)
    stored = None if options.state is None else STATES[options.state]
    found = read_records(engine, limit, scope=options.scope, prefix=options.prefix, state=stored)
    return (record for record in found if options.state in {None, state_of(record)})


def stuck(options: Namespace) -> int:
    """List abandoned attempts; the exit code says whether there are any."""
    with open_engine(options) as engine:
        found = store_of(engine).stuck(older_than=options.older_than, limit=options.limit)
        if found or options.json:
            _print(found, options)
        else:
            print(f"nothing is stuck (--older-than {duration(options.older_than)})")
    return 1 if found else 0


def show(options: Namespace) -> int:
    """Show everything about one record."""
    with open_engine(options) as engine:
        key = key_of(engine, options)
        record = None if key is None else engine.peek(key, scope=options.scope)
        if record is None:
            print(NO_RECORD, file=sys.stderr)
            return 1
        enter_view(engine, [record], options)
    if options.json:
        print(as_json(_shown(record, options)))
        return 0
    _print_fields(fields(record), options)
    if options.result:
        print(f"\n{result_text(record)}")
    return 0


def counts(options: Namespace) -> int:
    """Count the records by state."""
    with open_engine(options) as engine:
        _print_fields(asdict(store_of(engine).counts()), options)
    return 0


def _print(records: Sequence[Record], options: Namespace) -> None:
    if options.json:
        print(as_json([_shown(record, options) for record in records]))
        return
    heads, rows = list(COLUMNS), [list(row(record)) for record in records]
    if options.result:
        heads.append("RESULT")
        for line, record in zip(rows, records, strict=True):
            line.append(result_summary(record))
    print(columns(heads, rows))


def _shown(record: Record, options: Namespace) -> dict[str, Any]:
    shown = fields(record)
    if options.result:
        shown["result"] = result_data(record)
    return shown


def _print_fields(shown: dict[str, Any], options: Namespace) -> None:
    """Print fields one below the other."""
    if options.json:
        print(as_json(shown))
        return
    first, *rest = ((name, "-" if value is None else str(value)) for name, value in shown.items())
    print(columns(first, rest))
