"""A shop under uWSGI, which has used its engine before the workers are forked.

SEMEL_URL, LEDGER and FOLDER are in the environment. A payment takes effect, and then waits until
the file FOLDER/KEY is there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from common import effect

from semel import Idempotency, Policy
from semel.adapters.wsgi import IdempotencyMiddleware

LEDGER, FOLDER = os.environ["LEDGER"], Path(os.environ["FOLDER"])

idem = Idempotency(policy=Policy(lease=6, abandoned=os.environ["ABANDONED"]))
# Long enough that no timer of the master wakes up while uWSGI forks.
idem.execute("start", lambda: "the master has used the engine", policy=Policy(lease=3600))


def asleep(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code is threading.Condition.wait.__code__


# uWSGI forks whatever the threads of the master do: a worker that was forked while one of them had
# the GIL waits for it for ever. So they are all asleep first.
while not all(asleep(thread) for thread in threading.enumerate() if "semel" in thread.name):
    time.sleep(0.01)
time.sleep(0.2)  # They are in `wait`; its last steps take microseconds.


def shop(environ, start_response):
    key = environ["HTTP_IDEMPOTENCY_KEY"]
    effect(LEDGER, key)
    end = time.monotonic() + 60
    while not (FOLDER / key).exists() and time.monotonic() < end:
        time.sleep(0.01)
    start_response("201 Created", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]


app = IdempotencyMiddleware(shop, idem, tenant=lambda _: "ann")
