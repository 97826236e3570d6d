"""The command `semel`: look at records, resolve what is stuck, keep the store in order.

    parser     what may be asked           opening    the engine behind the settings
    reading    list, show, stuck, counts   showing    records as columns and as JSON
    deciding   forget, resolve             upkeep     purge, reconcile, migrate
    doctor     is everything as it should be?

Exit codes: 0 it went well; 1 something was found (stuck records, warnings) or could not be done;
2 the command or the settings are wrong; 130 and 141 Ctrl-C or a closed pipe ended it. The reference
of the command line has them command by command.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from semel.cli.parser import parser
from semel.errors import ConfigError, IdempotencyError, InvalidKey

OK, FOUND, USAGE = 0, 1, 2
INTERRUPTED, PIPE_CLOSED = 130, 141
"""What shells expect of a program that Ctrl-C (SIGINT) or a closed pipe (SIGPIPE) ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    try:
        return _written(arguments)
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


def _written(arguments: Sequence[str] | None) -> int:
    """Run the command and see to it that its output is written, that of --help too."""
    try:
        code = _run(arguments)
    finally:  # also when argparse ends it, which has written its own lines
        if sys.stdout is not None:
            sys.stdout.flush()  # here a failure can still be answered
    return code


def _run(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    if sys.stdout is None:
        # Before anything is done, of which nobody would see the report.
        return _complain("the standard output is closed; to drop it, write >/dev/null", USAGE)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
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
    print(f"semel: {what}", file=sys.stderr)
    return code
