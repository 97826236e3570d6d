"""Commands that show what is stored: list, show, counts.

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
    age,
    as_json,
    columns,
    exhausted,
    fields,
    pairs,
    row,
    state_of,
)
from semel.cli.results import (
    how_to_decide,
    how_to_run_again,
    result_data,
    result_summary,
    result_text,
)
from semel.cli.store import NO_RECORD, PAGE, hint_if_empty, key_of, open_engine, read_pages
from semel.cli.terminal import Progress, coloured, say
from semel.core.records import Record
from semel.http import part_of_call
from semel.repair.maintenance import store_of
from semel.sync import Idempotency


def list_records(options: Namespace) -> int:
    """List records by scope, beginning of the key and state, as the column shows it."""
    with open_engine(options) as engine:
        with Progress() as progress:
            records = list(islice(_listed(engine, options, progress), options.limit + 1))
        enter_view(engine, records[: options.limit], options)
        print_records(records[: options.limit], options)
        if len(records) > options.limit:
            say(f"there are more than {options.limit}: see --limit")
        if not records:
            _say_why_empty(engine, options)
    return 0


def _say_why_empty(engine: Idempotency, options: Namespace) -> None:
    hint = hint_if_empty(engine, options)
    if hint is not None:
        say(hint)
    elif options.prefix:
        say(
            "--prefix is the beginning of the stored key, where a tenant comes first: semel find "
            "KEY finds the key of a client below any tenant"
        )


def _listed(engine: Idempotency, options: Namespace, progress: Progress) -> Iterator[Record]:
    limit = min(PAGE, options.limit + 1)
    narrowed = {"scope": options.scope, "prefix": options.prefix}
    read = 0
    for stored in (None,) if options.state is None else STATES[options.state]:
        for page in read_pages(engine, limit, **narrowed, state=stored):
            for record in page:
                if options.state in {None, state_of(record)} and age(record) >= options.age:
                    yield record
            read += len(page)
            progress.show(f"{read:,} records read")


def show(options: Namespace) -> int:
    """Show everything about one record."""
    with open_engine(options) as engine:
        key = key_of(engine, options)
        record = None if key is None else engine.peek(key, scope=options.scope)
        if record is None:
            say(NO_RECORD)
            return 1
        enter_view(engine, [record], options)
    derived = {part: _derived(record, part) for part in options.derive}
    if options.json:
        print(as_json(_shown(record, options) | ({"derived": derived} if derived else {})))
        return 0
    sent = {f"derived {part}": key for part, key in derived.items()}
    _print_fields(fields(record) | sent, options)
    if options.result:
        print(f"\n{result_text(record)}")
    if record.abandoned:
        print(f"\n{how_to_decide(record)}")
    elif exhausted(record):
        print(f"\n{how_to_run_again(record)}")
    return 0


def _derived(record: Record, part: str) -> str:
    """Return the key of a downstream call; a part has no space, so one with a space is a call."""
    method, space, url = part.partition(" ")
    return record.derive(part_of_call(method, url) if space else part)


def counts(options: Namespace) -> int:
    """Count the records by state."""
    with open_engine(options) as engine:
        counted = asdict(store_of(engine).counts())
        hint = None if any(counted.values()) else hint_if_empty(engine, options)
    _print_fields(counted, options)
    if hint is not None:
        say(hint)
    return 0


def print_records(records: Sequence[Record], options: Namespace) -> None:
    """Print a table of records, or what programs read."""
    if options.json:
        print(as_json([_shown(record, options) for record in records]))
        return
    if not records:
        print("no record")
        return
    heads, rows = list(COLUMNS), [list(row(record)) for record in records]
    if options.result:
        heads.append("RESULT")
        for line, record in zip(rows, records, strict=True):
            line.append(result_summary(record))
    print(columns(heads, rows, colour=coloured(sys.stdout)))


def _shown(record: Record, options: Namespace) -> dict[str, Any]:
    shown = fields(record)
    if options.result:
        shown["result"] = result_data(record)
    return shown


def _print_fields(shown: dict[str, Any], options: Namespace) -> None:
    print(as_json(shown) if options.json else pairs(shown, colour=coloured(sys.stdout)))
