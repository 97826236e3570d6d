"""The command `semel`: look at records, resolve what is stuck, keep the store in order.

    reading      list, show, counts            finding    find: the records of a client's key
    stuck        stuck, watch                  deciding   forget, resolve
    upkeep       purge, reconcile, migrate     doctor     are settings and store in order?
    results      results given and shown       audit      who did what
    formatting   records as columns and JSON   terminal   colour, progress, questions
    store        the engine and store behind the settings

Exit codes: 0 it went well; 1 something was found (stuck records, warnings) or could not be done;
2 the command or the settings are wrong; 130 and 141 Ctrl-C or a closed pipe ended it. The reference
of the command line has them command by command.
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
from semel.cli import audit, deciding, doctor, finding, reading, stuck, upkeep
from semel.cli.formatting import STATES
from semel.cli.store import LIMIT
from semel.cli.terminal import LogLines, escape_unknown, say
from semel.core.keys import KeyGenerator
from semel.core.records import LONGEST
from semel.core.settings import parse_duration
from semel.errors import ConfigError, IdempotencyError, InvalidKey
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
        return _complain(f"the output could not be written: {error.strerror}", FOUND)
    except KeyboardInterrupt:
        return INTERRUPTED


def _written(arguments: Sequence[str] | None, engine: Mapping[str, Any]) -> int:
    """Run the command and see to it that its output is written, that of --help too."""
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
        # Before anything is done, of which nobody would see the report.
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
A decision is final: it cannot be resolved again. If it was wrong:
  it happened, and callers get a wrong result or a failure
      Do not forget the record: the next call would do it a second time. Tell the callers what is
      right. A program can replace the result: docs/operate/repair.md, "If a decision was wrong".
  it did not happen, and no longer can
      semel forget SCOPE KEY: the next call runs.
  it happened, and the next call may run (--retryable)
      Keep the callers from retrying, or be ready to undo the second effect."""
_EXIT_CODES = "exit codes: 0 = well, 1 = something was found or could not be done, 2 = wrong usage"


class _Parser(argparse.ArgumentParser):
    """Explains how to write a key that looks like an option."""

    def error(self, message: str) -> NoReturn:
        """Write the usage and what is wrong, and exit."""
        named = {action.metavar for action in self._actions}
        missing = message.endswith((" KEY", " TEXT"))
        if missing or (message.startswith("unrecognized") and "KEY" in named):
            scope = "SCOPE " if "KEY" in named else ""
            message += f"; a key that begins with - goes after --: {self.prog} {scope}-- -x"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; each one sets `run`."""
    whole = _Parser(prog="semel", description="Look after idempotency records.", epilog=_EXIT_CODES)
    whole.add_argument("--version", action="version", version=f"semel {__version__}")
    whole.add_argument("--url", help="the store; else SEMEL_URL, semel.toml")
    whole.add_argument("--prefix", dest="store_prefix", help="the store's prefix (idem:)")
    whole.add_argument("--config", help="the settings file; else SEMEL_CONFIG, semel.toml")
    subparsers = whole.add_subparsers(metavar="COMMAND", required=True)

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
    text = "see whether settings and store are as they should be"
    _json(command("doctor", doctor.doctor, text))
    made = command("new-key", _new_key, "make a new key")
    made.add_argument("--app", help="put the application's name in front")
    text = "print the alert rules for Prometheus, or the dashboard for Grafana"
    made = command("monitoring", _monitoring, text)
    made.add_argument("what", choices=list(_MONITORING), help="which of the two")
    made.add_argument(
        "--runbook", type=_address, metavar="URL", help="where the alerts' runbook is kept"
    )
    return whole


_Command = Callable[[str, Callable[..., int], str], argparse.ArgumentParser]


def _reading(command: _Command) -> None:
    made = command("list", reading.list_records, "list records")
    made.add_argument("--scope")
    made.add_argument("--prefix", default="", help="the beginning of the key")
    made.add_argument("--state", choices=list(STATES))
    made.add_argument(
        "--age", type=_duration, default=0.0, metavar="1h", help="created at least so long ago"
    )
    made.add_argument("--limit", type=_whole, default=LIMIT, metavar="N")
    _json(made, result=True)
    _who(made)
    made = command("find", finding.find, "find the records of a key; exit code 1 if there are none")
    made.add_argument(
        "text",
        metavar="TEXT",
        help="a whole key, a client's key below any tenant or route, a key digest, or a problem or "
        "log line that has one",
    )
    made.add_argument("--scope")
    made.add_argument("--tenant", help="whose key it is")
    made.add_argument("--route", metavar="'POST /pay'", help="of which route or gRPC method")
    made.add_argument("--limit", type=_whole, default=LIMIT, metavar="N")
    made.set_defaults(result=False)  # semel show has it
    _json(made)
    made = command("show", reading.show, "show one record")
    _identity(made)
    made.add_argument(
        "--derive",
        action="append",
        default=[],
        metavar="PART",
        help="show the key that attempt.derive(PART) sent downstream, or for 'POST URL' the key of "
        "that call by semel's HTTP clients; may be repeated",
    )
    _json(made, result=True)
    _who(made)
    made = command("stuck", stuck.stuck, "list abandoned attempts")
    _stuck(made)
    _json(made)
    made = command("watch", stuck.watch, "list abandoned attempts again and again")
    _stuck(made)
    made.add_argument("--every", type=_positive, default=2.0, metavar="2s")
    made.add_argument("--count", type=_whole, metavar="N", help="end after so many; else by Ctrl-C")
    _json(command("counts", reading.counts, "count the records by state"))
    made = command("audit", audit.list_entries, "list who did what to the records, newest first")
    made.add_argument("--scope")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--key", help="the key of a record; with --scope")
    which.add_argument("--key-digest", metavar="DIGEST", help="the key_digest of a record")
    made.add_argument("--since", type=_positive, metavar="7d", help="how far back; else 400 days")
    made.add_argument("--limit", type=_whole, default=LIMIT, metavar="N")
    _json(made)


def _deciding(command: _Command) -> None:
    text = "remove a record, or the old records of a scope: the next call runs again"
    made = command("forget", deciding.forget, text)
    _identity(made, needed=False)
    made.add_argument(
        "--scope", dest="of_scope", help="with --older-than: all finished records of this scope"
    )
    made.add_argument(
        "--older-than", type=_duration, metavar="30d", help="with --scope: ended so long ago"
    )
    made.add_argument("--yes", action="store_true", help="don't ask for confirmation")
    _who(made)
    made = command("resolve", deciding.resolve, "decide what became of an abandoned attempt")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.epilog = f"{_FINAL}\n\n{_EXIT_CODES}"
    _identity(made)
    outcome = made.add_mutually_exclusive_group(required=True)
    outcome.add_argument(
        "--succeeded",
        metavar="JSON",
        help="it happened, with this result, as semel show --result shows that of a similar call",
    )
    made.add_argument(
        "--like",
        metavar="KEY",
        help="with --succeeded: take the classes from the result of this finished record",
    )
    made.add_argument(
        "--yes", action="store_true", help="with --succeeded: also if similar results differ"
    )
    outcome.add_argument(
        "--status",
        type=_whole,
        metavar="CODE",
        help="it happened: the HTTP status that retries of a request get, such as 201",
    )
    outcome.add_argument(
        "--message",
        metavar="@FILE",
        help="it happened: the serialized message that retries of a gRPC call get; @- reads stdin",
    )
    outcome.add_argument(
        "--failed", type=_text, metavar="TEXT", help="it did not happen, for this reason"
    )
    made.add_argument("--retryable", action="store_true", help="... and it may run again")
    made.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="with --status: a header of the answer; may be repeated. A body needs Content-Type",
    )
    made.add_argument(
        "--body",
        metavar="TEXT|@FILE",
        help="with --status: the body of the answer, or the file that has it; @- reads stdin",
    )
    made.add_argument(
        "--ttl",
        type=_positive,
        metavar="3d",
        help="keep the outcome for this time; else as long as the policy of the attempt says",
    )
    _who(made)
    _audit(made)


def _upkeep(command: _Command) -> None:
    made = command("purge", upkeep.purge_records, "remove expired records, in small batches")
    made.add_argument("--abandoned-after", type=_positive, metavar="7d")
    made.add_argument("--batch", type=_whole, default=BATCH, metavar="N")
    made.add_argument("--pause", type=_duration, default=PAUSE, metavar="10ms")
    made.add_argument("--every", type=_positive, metavar="1h", help="do not end; do it again")
    _who(made)
    made = command("reconcile", upkeep.reconcile, "let resolvers look into what is stuck")
    made.add_argument("--resolvers", required=True, metavar="MODULE:ATTRIBUTE")
    made.add_argument("--older-than", type=_duration, default=600.0, metavar="10m")
    made.add_argument("--max-tries", type=_whole, default=5, metavar="N")
    made.add_argument("--full", action="store_true", help="read every record, trust no index")
    _who(made)
    made.add_argument("--every", type=_positive, metavar="1m", help="do not end; do it again")
    _audit(made)
    made = command("migrate", upkeep.migrate, "make the store's tables, or bring them up to date")
    made.add_argument("--print", action="store_true", help="show the SQL, and run nothing")


def _stuck(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--older-than",
        type=_duration,
        default=ALERT_AFTER,
        metavar="5m",
        help="exit code 1 if one has been stuck for so long",
    )
    made.add_argument("--scope")
    made.add_argument("--limit", type=_whole, default=LIMIT, metavar="N")


def _identity(made: argparse.ArgumentParser, *, needed: bool = True) -> None:
    for name in ("scope", "key"):
        made.add_argument(name, metavar=name.upper(), nargs=None if needed else "?")
    made.add_argument(
        "--digest",
        action="store_true",
        help="KEY is the key_digest of an error, an event or a log line",
    )


def _json(made: argparse.ArgumentParser, *, result: bool = False) -> None:
    made.add_argument("--json", action="store_true", help="write for programs")
    if result:
        made.add_argument("--result", action="store_true", help="show what is stored, too")


def _who(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--by", type=_text, metavar="NAME", help="who, in the audit trail; else the user's name"
    )
    made.add_argument("--reason", type=_text, metavar="TEXT", help="why, in the audit trail")


def _audit(made: argparse.ArgumentParser) -> None:
    made.add_argument("--audit", metavar="FILE", help="append decisions here; else they are logged")


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
            raise ConfigError(f"--runbook is for the alerts: the {options.what} names no address")
        text = text.replace(_RUNBOOK, f"runbook: {options.runbook}#")
    print(text, end="")
    return OK


def _address(text: str) -> str:
    # No brace: annotations are templates of Prometheus.
    if not re.fullmatch(r"https?://[^\s#{}]+", text) or not text.isprintable():
        raise argparse.ArgumentTypeError(
            "must be a web address without a part after #: each alert adds its own"
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


def _whole(text: str) -> int:
    # By its length first: Python reads no number of many thousand digits.
    if not text.isdecimal() or len(text) > len(str(MOST)) or not 0 < int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MOST}")
    return int(text)
