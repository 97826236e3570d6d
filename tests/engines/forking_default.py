"""A program that forks while another thread makes the default engine; `test_default.py` starts it.

It prints what the child and then the parent got. A child that waits for the lock is ended by its
alarm, and its status becomes the program's.
"""

from __future__ import annotations

import os
import signal
import threading

import semel
from semel import Idempotency, default

SECONDS_UNTIL_THE_ALARM = 20

making, may_go_on = threading.Event(), threading.Event()


def slowly_made() -> Idempotency:
    """Make an engine, but not before the fork; only the parent's thread has to wait."""
    if threading.current_thread() is maker:
        making.set()
        may_go_on.wait()
    return Idempotency("memory://")


default.Idempotency = slowly_made
maker = threading.Thread(target=default.default_engine)
maker.start()
making.wait()
child = os.fork()
if child == 0:
    signal.alarm(SECONDS_UNTIL_THE_ALARM)
    print(semel.execute("k", lambda: "the child's"), flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
may_go_on.set()
maker.join()
print(semel.execute("k", lambda: "the parent's"))
raise SystemExit(os.waitstatus_to_exitcode(status))
