"""The command `semel`: look at records, resolve what is stuck, keep the store in order.

    parser     what may be asked           opening    the engine behind the settings
    reading    list, show, stuck, counts   showing    records as columns and as JSON
    deciding   forget, resolve             upkeep     purge, reconcile, migrate
    doctor     is everything as it should be?

Exit codes: 0 it went well; 1 something was found (stuck records, warnings) or could not be done;
2 the command or the settings are wrong. The reference of the command line has them command by
command.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from semel.cli.parser import parser
from semel.errors import ConfigError, IdempotencyError, InvalidKey

OK, FOUND, USAGE = 0, 1, 2
INTERRUPTED = 130
"""What shells expect of a program that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        code: int = options.run(options)
        sys.stdout.flush()  # here a closed pipe can still be answered
    except (ConfigError, InvalidKey) as error:
        return _complain(error, USAGE)
    except IdempotencyError as error:
        return _complain(error, FOUND)
    except BrokenPipeError:
        # The reader, `head` perhaps, has seen enough; Python must not flush into the void again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _complain(error: IdempotencyError, code: int) -> int:
    print(f"semel: {error}", file=sys.stderr)
    return code
