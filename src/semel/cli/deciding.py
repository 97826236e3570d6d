"""Commands by which a person decides about a record: forget, resolve.

Each takes the parsed options and returns the exit code.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace

import msgspec

from semel import repair
from semel.cli.audit import user
from semel.cli.formatting import duration, moment, state_of
from semel.cli.store import NO_RECORD, key_of, open_engine
from semel.core.records import Record, State
from semel.errors import ConfigError
from semel.repair import Audit, AuditFile, Failed, Resolved, Succeeded, log_audit, settle


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
