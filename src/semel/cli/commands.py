"""What each command does: it takes the parsed options and returns the exit code."""

from __future__ import annotations

import getpass
import importlib
import logging
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import asdict

from semel.cli.formatting import (
    COLUMNS,
    STATES,
    as_json,
    columns,
    duration,
    fields,
    moment,
    outcome_of,
    row,
    state_of,
)
from semel.cli.store import (
    NO_RECORD,
    PAGE,
    key_of,
    open_deciding_store,
    open_engine,
    read_records,
    read_settings,
)
from semel.core.attempts import OwnerIds
from semel.core.codec import omitted
from semel.core.keys import new_key
from semel.core.records import Identity, Record, ScanRequest, State
from semel.core.settings import Settings
from semel.errors import ConfigError, StoreError, StoreRefused
from semel.repair import (
    Audit,
    AuditFile,
    Failed,
    GaveUp,
    Report,
    Resolved,
    Succeeded,
    Unresolved,
    health,
    log_audit,
    purge,
    settle,
)
from semel.repair._sync.reconcile import Reconciliation
from semel.repair._sync.resolve import Decider
from semel.repair.maintenance import store_of
from semel.stores.base import Migrating, Store
from semel.sync import Idempotency

# --- commands that change nothing: list, show, stuck, counts --------------------------------------


def list_records(options: Namespace) -> int:
    """List records by scope, beginning of the key and state, as the column shows it."""
    with open_engine(options) as engine:
        records = list(islice(_listed(engine, options), options.limit + 1))
        _print(engine, records[: options.limit], options)
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
            _print(engine, found, options)
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
        _print_fields(_shown(engine, record, options), options)
    return 0


def counts(options: Namespace) -> int:
    """Count the records by state."""
    with open_engine(options) as engine:
        _print_fields(asdict(store_of(engine).counts()), options)
    return 0


def _print(engine: Idempotency, records: Sequence[Record], options: Namespace) -> None:
    if options.json:
        print(as_json([_shown(engine, record, options) for record in records]))
        return
    heads, rows = list(COLUMNS), [list(row(record)) for record in records]
    if options.result:
        heads.append("RESULT")
        for line, record in zip(rows, records, strict=True):
            line.append(repr(outcome_of(engine, record)))
    print(columns(heads, rows))


def _shown(engine: Idempotency, record: Record, options: Namespace) -> dict[str, Any]:
    shown = fields(record)
    if options.result:
        shown["result"] = outcome_of(engine, record)
    return shown


def _print_fields(shown: dict[str, Any], options: Namespace) -> None:
    """Print fields one below the other."""
    if options.json:
        print(as_json(shown))
        return
    first, *rest = ((name, "-" if value is None else str(value)) for name, value in shown.items())
    print(columns(first, rest))


# --- commands by which a person decides: forget, resolve ------------------------------------------


def forget(options: Namespace) -> int:
    """Remove a record: the next call runs again."""
    with open_engine(options) as engine:
        key = key_of(engine, options)
        record = None if key is None else engine.peek(key, scope=options.scope)
        if key is None or not engine.forget(key, scope=options.scope):
            print(NO_RECORD, file=sys.stderr)
            return 1
    print("forgotten: the next call runs again")
    if record is not None and record.state is State.PROCESSING:
        print(f"it was {state_of(record)}: it may have happened already", file=sys.stderr)
    return 0


def resolve(options: Namespace) -> int:
    """Write the outcome of an abandoned attempt, as a person found it out."""
    resolution = _resolution(options)
    with open_engine(options) as engine:
        key = key_of(engine, options)
        if key is None:
            print(f"nothing was decided: {NO_RECORD}", file=sys.stderr)
            return 1
        decision = settle(
            engine,
            key,
            resolution,
            scope=options.scope,
            ttl=options.ttl,
            name=getpass.getuser() if options.by is None else options.by,
            audit=audit_of(options),
        )
        record = engine.peek(key, scope=options.scope)
    if decision is None:
        print(f"nothing was decided: {_why_not(record)}", file=sys.stderr)
        return 1
    if not isinstance(decision, Resolved):
        print("nothing was decided: somebody else was faster", file=sys.stderr)
        return 1
    print(f"resolved as {_named(resolution)}")
    left = duration(decision.kept_until - decision.at)
    again = "until then only a call with the same payload runs"
    if not (isinstance(resolution, Failed) and resolution.retryable):
        again = "a call after that runs again"
    print(f"kept until {moment(decision.kept_until)} ({left}); {again}")
    return 0


def audit_of(options: Namespace) -> Audit:
    """Choose where decisions are written: a file, or the log."""
    if options.audit is not None:
        return AuditFile(options.audit)
    logging.getLogger("semel.audit").setLevel(logging.INFO)
    return log_audit


def _resolution(options: Namespace) -> Succeeded | Failed:
    if options.failed is not None:
        return Failed(options.failed, options.retryable)
    if options.retryable:
        raise ConfigError("--retryable goes with --failed")
    try:
        return Succeeded(msgspec.json.decode(options.succeeded))
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"--succeeded takes the result as JSON: {error}; "
            """a text has quotes of its own, as in --succeeded '"ch_42"', nothing is null"""
        ) from error


def _named(resolution: Succeeded | Failed) -> str:
    if isinstance(resolution, Succeeded):
        return "succeeded"
    return "retryable: the next call runs" if resolution.retryable else "failed"


def _why_not(record: Record | None) -> str:
    if record is None:
        return NO_RECORD
    if record.lease_until is None:
        return f"it has ended as {state_of(record)}"
    return f"it is running, with a lease for another {duration(record.lease_until - record.now)}"


# --- commands that keep a store in order: purge, reconcile, migrate -------------------------------


def purge_records(options: Namespace) -> int:
    """Remove expired records, once or again and again."""
    with open_engine(options) as engine:

        def once(_: Callable[[], bool]) -> int:
            removed = purge(
                engine,
                batch=options.batch,
                pause=options.pause,
                abandoned_after=options.abandoned_after,
            )
            print(f"removed {removed} records", flush=True)
            return 0

        return _repeated(once, options.every)


def reconcile(options: Namespace) -> int:
    """Let resolvers say what became of stuck records, once or again and again."""
    resolvers = _imported(options.resolvers)
    with open_engine(options) as engine:
        reconciliation = Reconciliation(
            Decider(engine, name=options.name, audit=audit_of(options)),
            resolvers,
            older_than=options.older_than,
            max_tries=options.max_tries,
        )

        def once(stopped: Callable[[], bool]) -> int:
            return _reported(reconciliation.run(full=options.full, stopped=stopped))

        return _repeated(once, options.every)


def migrate(options: Namespace) -> int:
    """Make the tables of the store, or bring them up to date."""
    with closing(open_deciding_store(options, create=True)) as store:
        if not isinstance(store, Migrating):
            print("this store makes what it needs by itself: nothing to migrate")
        elif options.print:
            print(store.migration())
        else:
            print(f"the table is at version {store.migrate()}")
    return 0


def _reported(report: Report) -> int:
    unresolved = sum(isinstance(each, Unresolved) for each in report.decisions)
    gave_up = sum(isinstance(each, GaveUp) for each in report.decisions)
    print(
        f"resolved {report.resolved}, unresolved {unresolved}, gave up {gave_up}, "
        f"moved on {report.moved_on}, errors {report.errors}, "
        f"waiting for a person {report.waiting}",
        flush=True,
    )
    return 1 if unresolved or report.errors or report.waiting else 0


def _repeated(once: Callable[[Callable[[], bool]], int], every: float | None) -> int:
    """Do it once; or until a signal says stop, whatever one round may meet.

    A round can ask whether it has to end early.
    """
    stopped = threading.Event()
    if every is None:
        return once(stopped.is_set)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    while True:
        try:
            once(stopped.is_set)
        except StoreError as error:
            print(f"semel: {error}; trying again", file=sys.stderr, flush=True)
        if stopped.wait(every):
            return 0


def _imported(path: str) -> Mapping[str, Any]:
    """Import `module:attribute`, from the working directory too."""
    name, colon, attribute = path.partition(":")
    if not name or not colon or not attribute:
        raise ConfigError(f"--resolvers takes module:attribute, not {path!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        resolvers = getattr(importlib.import_module(name), attribute)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise
        raise ConfigError(f"there is no module {name}") from missing
    except AttributeError as missing:
        raise ConfigError(f"the module {name} has no {attribute}") from missing
    finally:
        sys.path.pop(0)
    if not isinstance(resolvers, Mapping):
        raise ConfigError(f"{path} must be a mapping from scope to resolver")
    return resolvers


# --- doctor: is everything as it should be? -------------------------------------------------------

Level: TypeAlias = Literal["ok", "skipped", "warning", "problem"]
"""`skipped`: nobody could look. That says nothing about the store, good or bad."""

CLOCKS_APART = 5.0
"""Seconds between our clock and the store's that are worth a word. Nothing depends on them."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    level: Level
    about: str
    text: str


def doctor(options: Namespace) -> int:
    """Look at the settings and at the store."""
    settings = read_settings(options)
    findings = list(_settings(settings))
    with open_engine(options) as engine:
        try:
            findings += _store(engine, options)
        except (StoreError, ConfigError) as error:
            findings.append(Finding("problem", "store", str(error)))
    if options.json:
        print(as_json([finding._asdict() for finding in findings]))
    else:
        print(columns(("RESULT", "ABOUT", ""), findings))
    return 0 if all(finding.level in {"ok", "skipped"} for finding in findings) else 1


def _settings(settings: Settings) -> Iterator[Finding]:
    yield Finding(
        "ok", "settings", f"environment {settings.environment}, {len(settings.scopes)} scopes"
    )
    if settings.disabled:
        yield Finding("warning", "settings", "idempotency is disabled: every call runs unprotected")
    stores = [_scheme(url) for url in (settings.url, settings.behind) if url is not None]
    yield Finding("ok", "store", f"{' in front of '.join(stores)}, prefix {settings.prefix}")


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _store(engine: Idempotency, options: Namespace) -> Iterator[Finding]:
    store = engine.internals.store
    identity = Identity("semel.doctor", new_key())
    behind = read_settings(options).behind
    if behind is None:
        yield from _written_and_read(store, identity)
        yield from _diagnosed(store)
    else:
        # By itself: it decides, and what is written to it alone is forgotten without the front.
        with closing(open_deciding_store(options, create=False)) as deciding:
            yield from _written_and_read(deciding, identity)
            yield from _diagnosed(deciding)
        yield _front(store, identity, _scheme(behind))
    if ScanRequest not in store.unsupported:
        looked = health(store)
        age = (
            "nothing is stuck"
            if looked.oldest is None
            else (f"the oldest has been stuck for {duration(looked.oldest)}: see semel stuck")
        )
        yield Finding("warning" if looked.alert else "ok", "stuck", age)


def _diagnosed(store: Store) -> Iterator[Finding]:
    """Ask the server whose word counts: what a front forgets, SQL still has."""
    try:
        for danger in store.diagnose():
            yield Finding("warning", "server", danger)
    except StoreRefused as error:
        yield Finding("skipped", "server", f"its settings were not looked at: {error}")
    except StoreError as error:
        yield Finding("warning", "server", f"it does not tell about itself: {error}")


def _front(tiers: Any, identity: Identity, behind: str) -> Finding:
    """Ask for the one thing that needs an answer of the front: to forget."""
    try:
        tiers.forget(identity)
    except StoreError as error:
        return Finding(
            "warning",
            "front",
            f"it is away, and {behind} answers alone: calls are slower, not wrong; only forget is "
            f"refused until it is back ({error.__cause__ or error})",
        )
    return Finding("ok", "front", "it answers")


def _written_and_read(store: Any, identity: Identity) -> Iterator[Finding]:
    """Write a record of our own, read it back, and remove it."""
    started, wall = time.monotonic(), time.time()
    store.put(identity, omitted("written by semel doctor"), 60.0, owner=OwnerIds().next())
    record = store.get(identity)
    store.forget(identity)
    took = time.monotonic() - started
    if record is None:
        yield Finding("problem", "store", "what was written just now is not there")
        return
    yield Finding("ok", "store", f"written, read and removed a record in {took * 1000:.1f} ms")
    apart = record.now - (wall + took / 2)
    level: Level = "ok" if abs(apart) < CLOCKS_APART + took else "warning"
    yield Finding(level, "clock", f"the store's clock is {duration(apart)} from this one")
