"""Commands by which a person decides about a record: forget, resolve.

Each takes the parsed options and returns the exit code.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from shlex import quote
from typing import Final, NamedTuple

from semel import repair
from semel.cli.audit import user
from semel.cli.formatting import duration, is_last, moment, state_of
from semel.cli.results import given_tree, resolution_of
from semel.cli.store import NO_RECORD, PAGE, key_of, open_engine, read_pages
from semel.cli.terminal import Progress, can_ask, confirmed, say
from semel.core import run_info
from semel.core.observers import printable
from semel.core.records import Record, State
from semel.errors import ConfigError, RecordUnreadable
from semel.repair import (
    Audit,
    AuditFile,
    Failed,
    GrpcAnswer,
    HttpAnswer,
    PlainValue,
    Resolved,
    Succeeded,
    log_audit,
    read_result,
    settle,
)
from semel.repair.decisions import audit_logger
from semel.repair.maintenance import ended_before, store_of
from semel.repair.results import in_form_of, unlike
from semel.sync import Idempotency

SIMILAR: Final = 100
"""Finished records among which the newest is looked for that a result is compared with."""

FINAL: Final = "this is final: if it was wrong, semel resolve --help says what to do"


def forget(options: Namespace) -> int:
    """Remove a record, or the old records of a scope: the next call runs again."""
    one = (options.scope, options.key) != (None, None)
    many = (options.of_scope, options.older_than) != (None, None)
    if one is many or (one and options.key is None):
        raise ConfigError("forget takes SCOPE KEY, or --scope SCOPE --older-than AGE")
    return _forget_one(options) if one else _forget_finished(options)


def _forget_finished(options: Namespace) -> int:
    """Remove the finished records of a scope that ended so long ago."""
    scope, age = options.of_scope, options.older_than
    if scope is None or age is None or options.digest:
        raise ConfigError("--scope and --older-than go together, and without --digest")
    with open_engine(options) as engine, Progress() as progress:
        found = 0
        for page in read_pages(engine, PAGE, scope=scope):
            found += sum(1 for _ in ended_before(page, age))
            progress.show(f"{found:,} records found")
        progress.clear()
        what = f"{found} records of {printable(scope)} that ended {duration(age)} ago or before"
        if found and not options.yes:
            danger = f"{what} would be forgotten, and a call with one of their keys runs again"
            if not can_ask():
                raise ConfigError(f"{danger}. Confirm with --yes")
            if not confirmed(f"{danger}. Forget them?"):
                say("nothing was forgotten")
                return 1
        forgotten = found and repair.forget_finished(
            engine,
            scope,
            older_than=age,
            name=user(options),
            reason=options.reason,
            progress=lambda so_far: progress.show(f"{so_far:,} records forgotten"),
        )
    print(f"forgot {forgotten} records")
    return 0


def _forget_one(options: Namespace) -> int:
    with open_engine(options) as engine:
        key = key_of(engine, options)
        found = None if key is None else _peek(engine, key, options.scope)
        if key is None or found is None:
            say(NO_RECORD)
            return 1
        if not options.yes and _may_run(found):
            if not _confirmed(found, f"{options.scope} {printable(key)}"):
                say("nothing was forgotten")
                return 1
            if not _same(found, _peek(engine, key, options.scope)):
                say("nothing was forgotten: the record changed in the meantime")
                return 1
        if not repair.forget(
            engine, key, scope=options.scope, name=user(options), reason=options.reason
        ):
            say(NO_RECORD)
            return 1
    print("forgotten: the next call runs again")
    if isinstance(found, RecordUnreadable) or found.state is State.PROCESSING:
        was = "unreadable" if isinstance(found, RecordUnreadable) else state_of(found)
        say(f"it was {was}: it may have happened already")
    return 0


def _peek(engine: Idempotency, key: str, scope: str) -> Record | RecordUnreadable | None:
    """Read a record; one that cannot be read can still be forgotten."""
    try:
        return engine.peek(key, scope=scope)
    except RecordUnreadable as error:
        return error


def _may_run(found: Record | RecordUnreadable) -> bool:
    """Return whether an attempt runs or waits for a decision, as far as is known.

    One that is abandoned and not held is run again by the next call anyway.
    """
    return isinstance(found, RecordUnreadable) or (
        found.state is State.PROCESSING and (found.hold or not found.abandoned)
    )


def _confirmed(found: Record | RecordUnreadable, name: str) -> bool:
    standing, instead = _standing(found)
    danger = (
        f"{name} {standing}. If it is forgotten, the next call runs, and what has happened already "
        "happens twice"
    )
    if not can_ask():
        raise ConfigError(f"{danger}. {instead}, or confirm with --yes")
    return confirmed(f"{danger}. Forget it?")


def _standing(found: Record | RecordUnreadable) -> tuple[str, str]:
    """Say how it is with an attempt, and what to do instead of forgetting it."""
    if isinstance(found, RecordUnreadable):
        return "cannot be read: it may be running or held", "Find out what happened"
    info = run_info.read(found.run_info)
    by = "" if info is None else f" (by {printable(info.by)})"
    if found.abandoned:
        age = duration(found.abandoned_for)
        return f"is held: it was abandoned {age} ago{by}", "Find out what happened and use resolve"
    return f"is running{by}, {_lease_left(found)}", "Wait until it has ended"


def _same(before: Record | RecordUnreadable, now: Record | RecordUnreadable | None) -> bool:
    """Return whether a record is still what the question was about."""
    if isinstance(before, Record) and isinstance(now, Record):
        return (before.owner, before.state, before.abandoned) == (
            now.owner,
            now.state,
            now.abandoned,
        )
    return type(before) is type(now)


def resolve(options: Namespace) -> int:
    """Write the outcome of an abandoned attempt, as a person found it out."""
    resolution = resolution_of(options)
    with open_engine(options) as engine:
        key = key_of(engine, options)
        if key is None:
            say(f"nothing was decided: {NO_RECORD}")
            return 1
        if options.succeeded is not None:
            similar = _similar(engine, options)
            model = None if similar is None else similar.value
            if options.like is not None:
                resolution = resolution_of(options, model)
            if not options.yes and not _has_form(options, similar):
                say("nothing was decided")
                return 1
        retryable = isinstance(resolution, Failed) and resolution.retryable
        before = engine.peek(key, scope=options.scope) if retryable else None
        decision = settle(
            engine,
            key,
            resolution,
            scope=options.scope,
            ttl=options.ttl,
            name=user(options),
            audit=audit_of(options),
            reason=options.reason,
        )
        if decision is None:
            why = _why_not(engine.peek(key, scope=options.scope))
            say(f"nothing was decided: {why}")
            return 1
    if not isinstance(decision, Resolved):
        say("nothing was decided: another process was faster")
        return 1
    runs = before is None or not is_last(before)
    print(f"resolved as {_named(resolution, runs=runs)}")
    left = duration(decision.kept_until - decision.at)
    again = "a call after that runs again"
    if retryable and runs:
        again = "until then only a call with the same payload runs"
    print(f"kept until {moment(decision.kept_until)} ({left}); {again}")
    say(FINAL)
    return 0


class _Similar(NamedTuple):
    """The result of a finished record, as `semel show` shows it."""

    key: str
    value: object


def _similar(engine: Idempotency, options: Namespace) -> _Similar | None:
    """Find the finished record that --like names, or else the newest; None: there is none."""
    if options.like is None:
        page = store_of(engine).scan(scope=options.scope, state=State.SUCCEEDED, limit=SIMILAR)
        newest_first = sorted(page.records, key=lambda record: record.updated_at, reverse=True)
        return next(filter(None, map(_shown, newest_first)), None)
    named = engine.peek(options.like, scope=options.scope)
    shown = None if named is None else _shown(named)
    if shown is None:
        raise ConfigError(
            f"--like: {options.scope} {printable(options.like)} is no finished record whose result "
            "can be shown: semel list --state succeeded lists them"
        )
    return shown


def _shown(record: Record) -> _Similar | None:
    """Return the result of a success; None: it can't be shown, or is not that of a function."""
    if record.state is not State.SUCCEEDED or record.outcome is None:
        return None
    result = read_result(record.outcome)
    return _Similar(record.key, result.value) if isinstance(result, PlainValue) else None


def _has_form(options: Namespace, similar: _Similar | None) -> bool:
    """Return whether a result has the form of a similar one, or a person wants it all the same.

    Callers read the result as they read that one, and a decision is final.
    """
    if similar is None:
        return True
    given = given_tree(options)
    tree = given if options.like is None else in_form_of(given, similar.value)
    found = unlike(tree, similar.value)
    if found is None:
        return True
    key = quote(printable(similar.key))
    danger = f"{printable(found)} ({key}). Callers may fail on it, and a decision is final"
    if not can_ask():
        raise ConfigError(
            f"{danger}. Take the form from there with --like {key}, or confirm with --yes"
        )
    return confirmed(f"{danger}. Take the form from there with --like {key}. Decide as it is?")


def audit_of(options: Namespace) -> Audit:
    """Choose where decisions are written: a file, or the log.

    A file that cannot be written is rejected before anything is decided.
    """
    if options.audit is not None:
        try:
            Path(options.audit).open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"--audit: {options.audit!r} cannot be written: {error.strerror}"
            ) from error
        return AuditFile(options.audit)
    audit_logger.setLevel(logging.INFO)
    return log_audit


def _named(resolution: Succeeded | Failed, *, runs: bool) -> str:
    if isinstance(resolution, Succeeded):
        return f"succeeded{_given(resolution.value)}"
    if not resolution.retryable:
        return "failed"
    no_attempt_left = (
        "no attempt is left, so calls get AttemptsExhausted until you forget it or it expires"
    )
    return f"retryable: {'the next call runs' if runs else no_attempt_left}"


def _given(value: object) -> str:
    match value:
        case HttpAnswer(status=status, body=bytes(body)):
            return f": retries get HTTP {status} and {len(body)} bytes"
        case GrpcAnswer(message=bytes(message)):
            return f": retries get a message of {len(message)} bytes"
        case _:
            return ""


def _why_not(record: Record | None) -> str:
    if record is None:
        return NO_RECORD
    if record.state is not State.PROCESSING:
        return f"it has ended as {state_of(record)}. That is final: see semel resolve --help"
    process, running = "its process", "it is running"
    info = run_info.read(record.run_info)
    if info is not None:
        process = printable(info.by)
        running = f"it is running in {process}"
    return (
        f"{running}, {_lease_left(record)}. Wait until it has ended. If it hangs, end {process} "
        "first, which cuts off its other work, too, and decide when the lease has ended"
    )


def _lease_left(record: Record) -> str:
    ends = record.now if record.lease_until is None else record.lease_until
    return f"with a lease for another {duration(ends - record.now)}"
