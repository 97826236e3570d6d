"""Runs a command beside a load that keeps every core busy.

    python scripts/busy.py make quick

One process for each core computes without a pause until the command ends. The tests must pass
beside it: a test that fails here depends on the speed of the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys

SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"
"""Ends by itself when this script is killed."""


def main(command: list[str]) -> int:
    """Run the command; the exit status is its own."""
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    load = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for spinning in load:
            spinning.kill()
            spinning.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
