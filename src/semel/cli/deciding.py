"""Commands by which a person decides about a record: forget, resolve.

Each takes the parsed options and returns the exit code.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace

from semel import repair
from semel.cli.audit import user
from semel.cli.formatting import duration, moment, state_of
from semel.cli.results import resolution_of
from semel.cli.store import NO_RECORD, key_of, open_engine
from semel.core.records import Record, State
from semel.repair import (
    Audit,
    AuditFile,
    Failed,
    GrpcAnswer,
    HttpAnswer,
    Resolved,
    Succeeded,
    log_audit,
    settle,
)


def forget(options: Namespace) -> int:
    """Remove a record: the next call runs again."""
    with open_engine(options) as engine:
        key = key_of(engine, options)
        record = None if key is None else engine.peek(key, scope=options.scope)
        if key is None or not repair.forget(
            engine, key, scope=options.scope, name=user(options), reason=options.reason
        ):
            print(NO_RECORD, file=sys.stderr)
            return 1
    print("forgotten: the next call runs again")
    if record is not None and record.state is State.PROCESSING:
        print(f"it was {state_of(record)}: it may have happened already", file=sys.stderr)
    return 0


def resolve(options: Namespace) -> int:
    """Write the outcome of an abandoned attempt, as a person found it out."""
    resolution = resolution_of(options)
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
            name=user(options),
            audit=audit_of(options),
            reason=options.reason,
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
    if isinstance(resolution, Succeeded) and _lacks_type(resolution.value):
        print("the answer has a body and no Content-Type: see --header", file=sys.stderr)
    return 0


def audit_of(options: Namespace) -> Audit:
    """Choose where decisions are written: a file, or the log."""
    if options.audit is not None:
        return AuditFile(options.audit)
    logging.getLogger("semel.audit").setLevel(logging.INFO)
    return log_audit


def _named(resolution: Succeeded | Failed) -> str:
    if isinstance(resolution, Succeeded):
        return f"succeeded{_given(resolution.value)}"
    return "retryable: the next call runs" if resolution.retryable else "failed"


def _given(value: object) -> str:
    match value:
        case HttpAnswer(status=status, body=bytes(body)):
            return f": retries get HTTP {status} and {len(body)} bytes"
        case GrpcAnswer(message=bytes(message)):
            return f": retries get a message of {len(message)} bytes"
        case _:
            return ""


def _lacks_type(value: object) -> bool:
    return (
        isinstance(value, HttpAnswer)
        and bool(value.body)
        and all(name.lower() != "content-type" for name, _ in value.lines)
    )


def _why_not(record: Record | None) -> str:
    if record is None:
        return NO_RECORD
    if record.lease_until is None:
        return f"it has ended as {state_of(record)}"
    return f"it is running, with a lease for another {duration(record.lease_until - record.now)}"
