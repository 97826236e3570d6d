"""Commands that change nothing: list, show, stuck, counts."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import asdict

from semel.cli import showing
from semel.cli.opening import NO_RECORD, PAGE, key_of, listing_of, opened
from semel.core.records import Record
from semel.sync import Idempotency


def list_records(options: Namespace) -> int:
    """List records by scope, beginning of the key and state, as the column tells it."""
    with opened(options) as engine:
        records = list(islice(_all(engine, options), options.limit + 1))
        _print(engine, records[: options.limit], options)
        if len(records) > options.limit:
            print(f"there are more than {options.limit}: see --limit", file=sys.stderr)
    return 0


def _all(engine: Idempotency, options: Namespace) -> Iterator[Record]:
    store, cursor = listing_of(engine), None
    stored = None if options.state is None else showing.STATES[options.state]
    limit = min(PAGE, options.limit + 1)
    while True:
        page = store.scan(
            scope=options.scope, prefix=options.prefix, state=stored, limit=limit, cursor=cursor
        )
        for record in page.records:
            if options.state is None or showing.state_of(record) == options.state:
                yield record
        cursor = page.cursor
        if cursor is None:
            return


def stuck(options: Namespace) -> int:
    """List abandoned attempts; the exit code says whether there are any."""
    with opened(options) as engine:
        found = listing_of(engine).stuck(older_than=options.older_than, limit=options.limit)
        if found or options.json:
            _print(engine, found, options)
        else:
            print(f"nothing is stuck (--older-than {showing.duration(options.older_than)})")
    return 1 if found else 0


def show(options: Namespace) -> int:
    """Show everything about one record."""
    with opened(options) as engine:
        key = key_of(engine, options)
        record = None if key is None else engine.peek(key, scope=options.scope)
        if record is None:
            print(NO_RECORD, file=sys.stderr)
            return 1
        shown = _shown(engine, record, options)
    if options.json:
        print(showing.as_json(shown))
    else:
        print(showing.columns(*_vertical(shown)))
    return 0


def counts(options: Namespace) -> int:
    """Count the records by state."""
    with opened(options) as engine:
        counted = asdict(listing_of(engine).counts())
    if options.json:
        print(showing.as_json(counted))
    else:
        print(showing.columns(*_vertical(counted)))
    return 0


def _print(engine: Idempotency, records: Sequence[Record], options: Namespace) -> None:
    if options.json:
        print(showing.as_json([_shown(engine, record, options) for record in records]))
        return
    heads, rows = list(showing.COLUMNS), [list(showing.row(record)) for record in records]
    if options.result:
        heads.append("RESULT")
        for line, record in zip(rows, records, strict=True):
            line.append(repr(showing.outcome_of(engine, record)))
    print(showing.columns(heads, rows))


def _shown(engine: Idempotency, record: Record, options: Namespace) -> dict[str, Any]:
    shown = showing.fields(record)
    if options.result:
        shown["result"] = showing.outcome_of(engine, record)
    return shown


def _vertical(shown: dict[str, Any]) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """Lay fields out one below the other."""
    first, *rest = ((name, "-" if value is None else str(value)) for name, value in shown.items())
    return first, rest
