"""Runs the demo: `python -m examples.demo --help`."""

from __future__ import annotations

import argparse
import sys
import time

from .audit import Audit
from .clients import Clients
from .place import Place, new_place
from .screen import Bar, table
from .staff import staff
from .storm import SMALLEST, storm

LONGEST = 55.0
"""Seconds after which the demo gives up; it usually takes about ten."""

PROBLEMS_SHOWN = 12


def main() -> int:
    """Run the storm, show what happened, and say whether every payment was charged once."""
    options = read_options()
    with new_place(keep=options.keep) as place:
        try:
            clients = run_storm(place, options)
        except (TimeoutError, ChildProcessError) as failure:
            print(f"\nFAILED: {failure}")
            return 1
        audit = Audit(place, clients)
        problems = compare(audit, clients)
        print(f"\n{summary(clients, audit)}\n\n{story_of_kills(clients)}\n")
        return verdict(problems, clients)


def run_storm(place: Place, options: argparse.Namespace) -> Clients:
    """Start the workers and let the clients send everything to them."""
    deadline = time.monotonic() + LONGEST
    clients = Clients(storm(options.requests, options.seed))
    with staff(options.workers, place, sabotage=options.sabotage) as workers:
        with Bar("starting workers") as bar:
            for ready in workers.start(deadline):
                bar.show(ready, options.workers)
        with Bar("storm of requests") as bar:
            for _ in clients.send_all(workers, deadline):
                note = f"replays: {len(clients.replays)}, killed: {len(clients.kills)}"
                bar.show(clients.ended, clients.total, note)
    return clients


def compare(audit: Audit, clients: Clients) -> list[str]:
    """Hold ledger, store and clients against each other, key by key."""
    problems: list[str] = []
    with Bar("comparing keys") as bar:
        for done, key in enumerate(clients.keys, start=1):
            problems += audit.of_key(key)
            bar.show(done, len(clients.keys), f"problems: {len(problems)}")
    return [*problems, *audit.of_kills(), *audit.of_strangers()]


def summary(clients: Clients, audit: Audit) -> str:
    """The table of what happened."""
    waits = sum(replay.waited for replay in clients.replays)
    return table(
        [
            ("requests", clients.sent, f"for {len(clients.keys)} payments"),
            ("charges", audit.charges, "in the card network's ledger"),
            ("replays", len(clients.replays), "duplicates that got the first receipt"),
            ("waits", waits, "of them came while the first ran"),
            ("mismatches", clients.mismatches, "same key, another amount: rejected"),
            ("retries", clients.retries, "after a network or worker failure"),
            ("killed workers", len(clients.kills), "by SIGKILL, in the middle of a payment"),
            ("takeovers", len(clients.takeovers), "of a dead worker's key"),
            ("absorbed", audit.absorbed, "repeated charges, known by their token"),
        ]
    )


def story_of_kills(clients: Clients) -> str:
    """What became of the payments whose workers died."""
    taken_over = {
        event.identity.key: f"attempt {event.number} took over" for event in clients.takeovers
    }
    return "\n".join(
        f"  {kill.request.key}: {kill.cause} {kill.moment};"
        f" {taken_over.get(kill.request.key, 'no attempt took over')}"
        for kill in clients.kills
    )


def verdict(problems: list[str], clients: Clients) -> int:
    """Say how it ended; the number is the exit status."""
    if not problems:
        print(f"OK: each of {len(clients.keys)} payments was charged exactly once.")
        return 0
    print(f"FAILED: {len(problems)} problems")
    for problem in problems[:PROBLEMS_SHOWN]:
        print(f"  {problem}")
    if len(problems) > PROBLEMS_SHOWN:
        print(f"  and {len(problems) - PROBLEMS_SHOWN} more")
    return 1


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=main.__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="before retries (%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="processes (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another storm (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep store, ledger and log")
    parser.add_argument(
        "--sabotage",
        action="store_true",
        help="give each request a new key, the classic mistake, and see the check fail",
    )
    options = parser.parse_args()
    if options.requests < SMALLEST:
        parser.error(f"--requests must be at least {SMALLEST}")
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
