"""A script that cron starts on every machine: it tells whether its job ran, and notes each effect.

Everything is told by the environment. NOW is what its clock shows at the start, SKEW how wrong that
clock is: of this program, not of the library.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from semel import Idempotency, Policy, current_attempt

told = os.environ
began = time.monotonic()
shown = float(told["NOW"]) + float(told.get("SKEW", "0"))


def clock() -> float:
    return shown + time.monotonic() - began


with Idempotency(told["URL"], policy=Policy(lease=float(told.get("LEASE", "60")))) as idem:

    @idem.once_per(
        "day", tz="Europe/Berlin", scope="report", standby="STANDBY" in told, clock=clock
    )
    def report() -> None:
        attempt = current_attempt()
        if "HANGS" in told:
            print("started", flush=True)
            time.sleep(600)
        with Path(told["LEDGER"]).open("a") as ledger:
            ledger.write(f"{attempt.key} {attempt.number}\n")

    print(report(), flush=True)
