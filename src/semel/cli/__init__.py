"""The command `semel`: look at records, resolve what is stuck, keep the store in order.

    reading      list, show, counts            finding    find: the records of a client's key
    stuck        stuck, watch                  deciding   forget, resolve
    upkeep       purge, reconcile, migrate     doctor     check the settings and the store
    results      results given and shown       audit      who did what
    serving      serve and token: the service
    formatting   records as columns and JSON   terminal   color, progress, questions
    store        the engine and store behind the settings

Exit codes: 0 success; 1 problem found (stuck records, warnings) or command failed; 2 invalid usage
or settings; 130 and 141 ended by Ctrl-C or a closed pipe. docs/reference/cli.md has the table.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn

from semel import __version__
from semel.cli import audit, deciding, doctor, finding, reading, serving, stuck, upkeep
from semel.cli.formatting import STATES
from semel.cli.store import LIMIT
from semel.cli.terminal import LogLines, escape_unknown, say
from semel.core.keys import KeyGenerator
from semel.core.policy import PRESETS
from semel.core.records import LONGEST
from semel.core.settings import parse_duration
from semel.errors import ConfigError, IdempotencyError, InvalidKey
from semel.http.options import MIB
from semel.repair.maintenance import ALERT_AFTER, BATCH, PAUSE

OK, FOUND, USAGE = 0, 1, 2
MOST: Final = 1_000_000_000
"""The largest number of anything; databases take no number without a limit."""
INTERRUPTED, PIPE_CLOSED = 130, 141
"""What shells expect of a program that Ctrl-C (SIGINT) or a closed pipe (SIGPIPE) ended."""


def main(arguments: Sequence[str] | None = None, *, engine: Mapping[str, Any] | None = None) -> int:
    """Run one command and return the exit code; `engine` has further arguments of its engine."""
    if sys.stderr is None:  # it is closed, and what is printed to None goes to the output
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
            return main(arguments, engine=engine)
    try:
        return _written(arguments, engine or {})
    except BrokenPipeError:
        _drop_output()  # the reader, `head` perhaps, has seen enough
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None:  # another file than the output
            raise
        _drop_output()
        return _complain(f"can't write the output: {error.strerror}", FOUND)
    except KeyboardInterrupt:
        return INTERRUPTED


def _written(arguments: Sequence[str] | None, engine: Mapping[str, Any]) -> int:
    """Run the command, and flush its output and that of --help."""
    try:
        code = _run(arguments, engine)
    finally:  # also when argparse ends it, which has written its own lines
        if sys.stdout is not None:
            sys.stdout.flush()  # here a failure can still be answered
    return code


def _run(arguments: Sequence[str] | None, engine: Mapping[str, Any]) -> int:
    options, unknown = parser().parse_known_args(arguments)
    options.engine = engine
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if sys.stdout is None:
        # Before anything is done, because its report would be lost.
        return _complain("the standard output is closed; to drop it, write >/dev/null", USAGE)
    escape_unknown(sys.stdout)
    logging.basicConfig(
        format="%(asctime)s %(name)s %(levelname)s %(message)s", handlers=[LogLines()]
    )
    try:
        code: int = options.run(options)
    except (ConfigError, InvalidKey) as error:
        return _complain(error, USAGE)
    except IdempotencyError as error:
        return _complain(error, FOUND)
    return code


def _drop_output() -> None:
    """Let what is left go nowhere: Python writes it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(what: object, code: int) -> int:
    say(f"semel: {what}")
    return code


# --- arguments -----------------------------------------------------------------------------------

_FINAL = """\
A decision is final: you can't resolve the record again. If it was wrong:
  it happened, and callers get a wrong result or a failure
      Don't forget the record: the next call would do it a second time. Tell the callers what is
      right. A program can replace the result: docs/operate/repair.md, "If a decision was wrong".
  it did not happen, and no longer can
      Run semel forget SCOPE KEY: the next call runs.
  it happened, and the next call may run (--retryable)
      Keep the callers from retrying, or be ready to undo the second effect."""
_EXIT_CODES = "exit codes: 0 success, 1 problem found or command failed, 2 invalid usage"


class _Parser(argparse.ArgumentParser):
    """Explains how to write a key that looks like an option."""

    def error(self, message: str) -> NoReturn:
        """Write the usage and what is wrong, and exit."""
        named = {action.metavar for action in self._get_positional_actions()}
        missing = message.endswith((" KEY", " TEXT"))
        if missing or (message.startswith("unrecognized") and "KEY" in named):
            scope = "SCOPE " if "KEY" in named else ""
            message += f"; a key that begins with - goes after --: {self.prog} {scope}-- -x"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; each one sets `run`."""
    whole = _Parser(
        prog="semel",
        description="inspect and repair idempotency records",
        epilog=_EXIT_CODES,
    )
    version = f"semel {__version__}"
    whole.add_argument("--version", action="version", version=version, help="print the version")
    whole.add_argument("--url", metavar="URL", help=_URL)
    whole.add_argument(
        "--prefix", dest="store_prefix", metavar="PREFIX", help="store prefix (default: idem:)"
    )
    whole.add_argument("--config", metavar="FILE", help=_CONFIG)
    subparsers = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        made = subparsers.add_parser(name, help=text, description=text, epilog=_EXIT_CODES)
        # Also behind the command; SUPPRESS: not given here is not a word against what came before.
        made.add_argument("--url", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        made.add_argument("--config", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        made.set_defaults(run=run, parser=made)  # whose usage an error shows
        return made

    _reading(command)
    _deciding(command)
    _upkeep(command)
    _serving(command)
    _json(command("doctor", doctor.doctor, "check the settings and the store"))
    made = command("new-key", _new_key, "print a new key")
    made.add_argument("--app", metavar="NAME", help="start the key with this application name")
    text = "print the alert rules for Prometheus, or the dashboard for Grafana"
    made = command("monitoring", _monitoring, text)
    made.add_argument("what", choices=list(_MONITORING), help="file to print")
    made.add_argument(
        "--runbook",
        type=_address,
        metavar="URL",
        help="with alerts: web address of your runbook (default: its path in semel's repository)",
    )
    return whole


_URL: Final = "store URL (default: $SEMEL_URL, then semel.toml)"
_CONFIG: Final = "settings file (default: $SEMEL_CONFIG, then semel.toml)"
_SCOPE: Final = "only records of this scope (default: all scopes)"
_ROWS: Final = f"most records to list (default: {LIMIT})"
_AGAIN: Final = "repeat at this interval until interrupted (default: run once)"

_Command = Callable[[str, Callable[..., int], str], argparse.ArgumentParser]


def _reading(command: _Command) -> None:
    made = command("list", reading.list_records, "list records")
    made.add_argument("--scope", metavar="SCOPE", help=_SCOPE)
    made.add_argument(
        "--prefix", default="", metavar="TEXT", help="only keys that begin with this text"
    )
    made.add_argument(
        "--state",
        choices=list(STATES),
        metavar="STATE",
        help=f"only records in this state: {', '.join(STATES)}",
    )
    made.add_argument(
        "--age",
        type=_duration,
        default=0.0,
        metavar="1h",
        help="only records created at least this long ago (default: 0s)",
    )
    made.add_argument("--limit", type=_whole, default=LIMIT, metavar="N", help=_ROWS)
    _json(made, result=True)
    _who(made)
    made = command("find", finding.find, "find the records of a key; exit with 1 if there are none")
    made.add_argument(
        "text",
        metavar="TEXT",
        help="whole key, a client's key below any tenant or route, key digest, or a problem or log "
        "line that has one",
    )
    made.add_argument("--scope", metavar="SCOPE", help=_SCOPE)
    made.add_argument("--tenant", metavar="TENANT", help="tenant that the key belongs to")
    made.add_argument(
        "--route", metavar="'POST /pay'", help="route or gRPC method that the key was sent to"
    )
    made.add_argument("--limit", type=_whole, default=LIMIT, metavar="N", help=_ROWS)
    made.set_defaults(result=False)  # semel show has it
    _json(made)
    made = command("show", reading.show, "show one record")
    _identity(made)
    made.add_argument(
        "--derive",
        action="append",
        default=[],
        metavar="PART",
        help="also show the key that attempt.derive(PART) sent downstream, or, for 'POST URL', the "
        "key of that call by semel's HTTP clients; repeatable",
    )
    _json(made, result=True)
    _who(made)
    made = command("stuck", stuck.stuck, "list stuck attempts, the oldest first")
    _stuck(made)
    _json(made)
    made = command("watch", stuck.watch, "show stuck attempts, and refresh")
    _stuck(made)
    made.add_argument(
        "--every",
        type=_positive,
        default=2.0,
        metavar="2s",
        help="time between two refreshes (default: 2s)",
    )
    made.add_argument(
        "--count",
        type=_whole,
        metavar="N",
        help="exit after this many refreshes (default: run until interrupted)",
    )
    _json(command("counts", reading.counts, "count records by state"))
    made = command("audit", audit.list_entries, "list who did what to the records, newest first")
    made.add_argument("--scope", metavar="SCOPE", help="only entries about this scope")
    which = made.add_mutually_exclusive_group()
    which.add_argument(
        "--key", metavar="KEY", help="with --scope: only entries about the record of this key"
    )
    which.add_argument(
        "--key-digest",
        metavar="DIGEST",
        help="only entries about the record that has this key_digest",
    )
    made.add_argument(
        "--since",
        type=_positive,
        metavar="7d",
        help="only entries of this most recent time (default: 400d)",
    )
    made.add_argument(
        "--limit",
        type=_whole,
        default=LIMIT,
        metavar="N",
        help=f"most entries to list (default: {LIMIT})",
    )
    _json(made)


def _deciding(command: _Command) -> None:
    text = "remove a record, or a scope's finished records, so that the next call runs again"
    made = command("forget", deciding.forget, text)
    _identity(made, needed=False)
    made.add_argument(
        "--scope",
        dest="of_scope",
        metavar="SCOPE",
        help="with --older-than: remove the finished records of this scope",
    )
    made.add_argument(
        "--older-than",
        type=_duration,
        metavar="30d",
        help="with --scope: remove records that ended at least this long ago",
    )
    made.add_argument("--yes", action="store_true", help="skip the confirmation")
    _who(made)
    made = command("resolve", deciding.resolve, "decide what a stuck attempt did")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.epilog = f"{_FINAL}\n\n{_EXIT_CODES}"
    _identity(made)
    outcome = made.add_mutually_exclusive_group(required=True)
    outcome.add_argument(
        "--succeeded",
        metavar="JSON",
        help="it happened: result in the form that semel show --result prints",
    )
    made.add_argument(
        "--like",
        metavar="KEY",
        help="with --succeeded: take the classes from the result of this finished record",
    )
    made.add_argument(
        "--yes",
        action="store_true",
        help="with --succeeded: decide even if the result differs in form from similar results",
    )
    outcome.add_argument(
        "--status",
        type=_whole,
        metavar="CODE",
        help="it happened: HTTP status that retries get, such as 201",
    )
    outcome.add_argument(
        "--message",
        metavar="@FILE",
        help="it happened: file with the serialized message that retries of a gRPC call get; @- "
        "reads the standard input",
    )
    outcome.add_argument(
        "--failed", type=_text, metavar="TEXT", help="it did not happen, for this reason"
    )
    made.add_argument(
        "--retryable", action="store_true", help="with --failed: let the next call run"
    )
    made.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="with --status: header of the response; repeatable; a body needs Content-Type",
    )
    made.add_argument(
        "--body",
        metavar="TEXT",
        help="with --status: body of the response; @FILE reads a file, @- the standard input",
    )
    made.add_argument(
        "--ttl",
        type=_positive,
        metavar="3d",
        help="time to keep the outcome (default: the attempt's policy)",
    )
    _who(made)
    _audit(made)


def _upkeep(command: _Command) -> None:
    made = command("purge", upkeep.purge_records, "remove expired records in small batches")
    made.add_argument(
        "--abandoned-after",
        type=_positive,
        metavar="7d",
        help="also remove attempts that are not held and were abandoned this long ago (default: "
        "keep them)",
    )
    made.add_argument(
        "--batch",
        type=_whole,
        default=BATCH,
        metavar="N",
        help=f"records to remove at a time (default: {BATCH})",
    )
    made.add_argument(
        "--pause",
        type=_duration,
        default=PAUSE,
        metavar="10ms",
        help="shortest rest after each batch; 0s never rests (default: 10ms)",
    )
    made.add_argument("--every", type=_positive, metavar="1h", help=_AGAIN)
    _who(made)
    made = command("reconcile", upkeep.reconcile, "run resolvers over stuck attempts")
    made.add_argument(
        "--resolvers",
        required=True,
        metavar="MODULE:ATTRIBUTE",
        help="mapping from scope to resolver, such as shop.repair:RESOLVERS",
    )
    made.add_argument(
        "--older-than",
        type=_duration,
        default=600.0,
        metavar="10m",
        help="only attempts that have been stuck for this long (default: 10m)",
    )
    made.add_argument(
        "--max-tries",
        type=_whole,
        default=5,
        metavar="N",
        help="resolver runs per attempt before it waits for a person (default: 5)",
    )
    made.add_argument("--full", action="store_true", help="read every record instead of an index")
    _who(made)
    made.add_argument("--every", type=_positive, metavar="1m", help=_AGAIN)
    _audit(made)
    made = command("migrate", upkeep.migrate, "create or upgrade the store's tables")
    made.add_argument("--print", action="store_true", help="print the SQL and run nothing")


def _serving(command: _Command) -> None:
    made = command("serve", serving.serve, "run the service, for programs in every language")
    made.add_argument("--store", dest="url", default=argparse.SUPPRESS, metavar="URL", help=_URL)
    made.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1)",
    )
    made.add_argument(
        "--port", type=_port, default=8600, metavar="N", help="port to listen on (default: 8600)"
    )
    made.add_argument("--tokens", metavar="FILE", help="tokens file (default: no tokens)")
    made.add_argument("--tls-cert", metavar="FILE", help="certificate chain (default: no TLS)")
    made.add_argument("--tls-key", metavar="FILE", help="private key of the certificate")
    made.add_argument(
        "--behind-proxy",
        action="store_true",
        help="a proxy in front of the service does TLS: let other hosts connect without it",
    )
    made.add_argument(
        "--max-waiting",
        type=_whole,
        metavar="N",
        help="most starts that wait at a time (default: 1000, or what the file limit permits)",
    )
    made.add_argument(
        "--max-waiting-per-token",
        type=_whole,
        metavar="N",
        help="most starts of one token that wait at a time (default: --max-waiting)",
    )
    made.add_argument(
        "--grace",
        type=_positive,
        default=30.0,
        metavar="30s",
        help="time for running requests to finish after SIGTERM (default: 30s)",
    )
    _proxying(
        command("proxy", serving.proxy, "run a proxy in front of a service that has no semel")
    )
    made = command("token", serving.token, "make a token for the service")
    made.add_argument("what", choices=["new"], help="what to do")
    made.add_argument("name", metavar="NAME", help="who has the token, such as shop-backend")
    made.add_argument(
        "--right",
        action="append",
        choices=["use", "store", "view", "operate"],
        metavar="RIGHT",
        help="what the token permits: use, store, view, operate; repeatable (default: use)",
    )
    made.add_argument(
        "--scope",
        action="append",
        required=True,
        metavar="SCOPE",
        help="scope, or pattern that ends in *; repeatable",
    )
    made.add_argument(
        "--rate", type=_whole, metavar="N", help="starts and claims a second (default: any)"
    )


def _proxying(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--upstream", required=True, metavar="URL", help="service to forward to, http or https"
    )
    made.add_argument("--store", dest="url", default=argparse.SUPPRESS, metavar="URL", help=_URL)
    made.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1)",
    )
    made.add_argument(
        "--port", type=_port, default=8601, metavar="N", help="port to listen on (default: 8601)"
    )
    made.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="header that says whose key it is; the gateway in front of the proxy must set it "
        "(default: all clients share their keys)",
    )
    made.add_argument(
        "--include",
        action="append",
        metavar="PATTERN",
        help="protect only paths that match, such as '/pay/*'; repeatable (default: all paths)",
    )
    made.add_argument(
        "--exclude",
        action="append",
        metavar="PATTERN",
        help="forward paths that match without protection; repeatable",
    )
    made.add_argument(
        "--required", action="store_true", help="reject POST and PATCH without a key with 400"
    )
    made.add_argument(
        "--policy",
        choices=list(PRESETS),
        metavar="PRESET",
        help=f"policy of the keys: {', '.join(PRESETS)} (default: scope http in semel.toml)",
    )
    made.add_argument(
        "--max-body",
        type=_whole,
        default=MIB,
        metavar="BYTES",
        help=f"largest body of a request with a key (default: {MIB})",
    )
    made.add_argument(
        "--grace",
        type=_positive,
        default=30.0,
        metavar="30s",
        help="time for running requests to finish after SIGTERM (default: 30s)",
    )


def _stuck(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--older-than",
        type=_duration,
        default=ALERT_AFTER,
        metavar="5m",
        help="exit with 1 if an attempt has been stuck for this long (default: 5m)",
    )
    made.add_argument("--scope", metavar="SCOPE", help=_SCOPE)
    made.add_argument(
        "--limit",
        type=_whole,
        default=LIMIT,
        metavar="N",
        help=f"most attempts to list (default: {LIMIT})",
    )


def _identity(made: argparse.ArgumentParser, *, needed: bool = True) -> None:
    for name, text in (
        ("scope", "scope of the record"),
        ("key", "key of the record, as semel list shows it"),
    ):
        made.add_argument(name, metavar=name.upper(), nargs=None if needed else "?", help=text)
    made.add_argument(
        "--digest",
        action="store_true",
        help="read KEY as the key_digest of an error, an event, or a log line",
    )


def _json(made: argparse.ArgumentParser, *, result: bool = False) -> None:
    made.add_argument("--json", action="store_true", help="print JSON")
    if result:
        made.add_argument("--result", action="store_true", help="also show stored results")


def _who(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--by",
        type=_text,
        metavar="NAME",
        help="who acts, for the audit trail (default: your user name)",
    )
    made.add_argument("--reason", type=_text, metavar="TEXT", help="why, for the audit trail")


def _audit(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--audit", metavar="FILE", help="append decisions to this file (default: log them)"
    )


def _new_key(options: argparse.Namespace) -> int:
    print(KeyGenerator(options.app).new())
    return 0


_MONITORING: Final = {"alerts": "alerts.yml", "dashboard": "dashboard.json"}
"""What is shipped for monitoring, beside the metrics that it is made for."""


_RUNBOOK: Final = "runbook: docs/operate/runbook.md#"
"""How the annotation of each alert begins; its section follows."""


def _monitoring(options: argparse.Namespace) -> int:
    text = files("semel.observe").joinpath(_MONITORING[options.what]).read_text(encoding="utf-8")
    if options.runbook is not None:
        if _RUNBOOK not in text:
            raise ConfigError(f"--runbook goes with alerts, not with {options.what}")
        text = text.replace(_RUNBOOK, f"runbook: {options.runbook}#")
    print(text, end="")
    return OK


def _address(text: str) -> str:
    # No brace: annotations are templates of Prometheus.
    if not re.fullmatch(r"https?://[^\s#{}]+", text) or not text.isprintable():
        raise argparse.ArgumentTypeError(
            "must be a web address without a # part, because each alert adds its own"
        )
    return text


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if seconds < 0:
        raise argparse.ArgumentTypeError("must be 0 seconds or longer")
    if seconds > LONGEST:
        raise argparse.ArgumentTypeError("must be at most 100 years")
    return seconds


def _positive(text: str) -> float:
    seconds = _duration(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError("must be longer than 0 seconds")
    return seconds


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > len("65535") or int(text) > 65535:  # noqa: PLR2004
        raise argparse.ArgumentTypeError("must be a port, 0 to 65535; 0 takes one that is free")
    return int(text)


def _whole(text: str) -> int:
    # By its length first: Python reads no number of many thousand digits.
    if not text.isdecimal() or len(text) > len(str(MOST)) or not 0 < int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MOST}")
    return int(text)
