"""A program that counts while it forks; the tests of tally and exporter start it and read its report.

    python counting.py tally
    PROMETHEUS_MULTIPROC_DIR=... python counting.py prometheus

Eight threads make 10,000 calls each. Meanwhile the process forks again and again, and each child
makes calls of its own. With a tally, one line of JSON says what the children counted, the next what
the parent did. In the multi-process mode of Prometheus, the metrics of all of them are printed.

Nobody may measure its coverage (`measuring.unmeasured`): the children would wait for a lock of
coverage.py. A process that hangs all the same says where, and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from typing import NoReturn

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from semel import Idempotency
from semel.observe import Tally
from semel.observe.prometheus import prometheus_hook

THREADS = 8
CALLS = 10_000
FORKS = 10
CALLS_OF_A_CHILD = 25
PATIENCE = 100
"""Seconds after which a process hangs: it takes two."""


def main(hook) -> None:
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(PATIENCE)
    idem = Idempotency("memory://", hooks=[hook])

    def work(number: int) -> None:
        for call in range(CALLS):
            idem.execute(f"{number}:{call % 100}", lambda: "done", scope="shop")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    read, write = os.pipe()
    for fork in range(FORKS):
        if os.fork() == 0:
            in_child(idem, hook, fork, write)
    failed = any(os.wait()[1] for _ in range(FORKS))
    for thread in threads:
        thread.join()
    os.close(write)
    with os.fdopen(read) as children:
        report(hook, [json.loads(line) for line in children])
    idem.close()
    sys.exit(failed)


def in_child(idem: Idempotency, hook, fork: int, write: int) -> NoReturn:
    """Make calls and report; whatever happens, the child never goes on as a second parent."""
    signal.alarm(PATIENCE)
    try:
        for call in range(CALLS_OF_A_CHILD):
            idem.execute(f"child-{fork}:{call}", lambda: "done", scope="child")
        if isinstance(hook, Tally):
            os.write(write, json.dumps(hook.totals().events).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def report(hook, children) -> None:
    if isinstance(hook, Tally):
        print(json.dumps(children))
        print(json.dumps(hook.totals().events))
    else:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        print(generate_latest(registry).decode())


if __name__ == "__main__":
    main(Tally() if sys.argv[1] == "tally" else prometheus_hook())
