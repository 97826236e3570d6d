"""Kill servers of endpoints with `session=` many times, on every database and for every kind.

    make soak-sessions                    250 kills for each database and kind of endpoint
    make soak-sessions KILLS=50 MINUTES=5

The first difference between answers, effects and records ends the run with an error.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

from adapters.session_kills import KILLED, Till
from servers.mariadb import mariadb_server
from servers.postgres import postgres_server


def main() -> int:
    kills = int(os.environ.get("KILLS", "250"))
    deadline = time.monotonic() + 60 * float(os.environ.get("MINUTES", "30"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of the servers' own stop
    enough = True
    with postgres_server() as postgres, mariadb_server() as mariadb:
        makers = {"PostgreSQL": postgres.fresh_database, "MariaDB": mariadb.database}
        left = len(makers) * len(KILLED)
        for (name, fresh), kind in itertools.product(makers.items(), KILLED):
            began = time.monotonic()
            till = Till(fresh(), kind)
            till.run(kills, within=0.05, deadline=began + (deadline - began) / left)
            count, left = till.check(), left - 1
            enough &= till.kills == kills
            print(
                f"{name}, {kind}: {till.kills} of {kills} kills in {time.monotonic() - began:.0f} s,"
                f" {till.broken} requests met by them, {count} keys; answers, effects and records "
                "are equal",
                flush=True,
            )
    print("all kills done" if enough else "the time was up before all kills were done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
