"""Searches new seeds for violations: `make simulate MINUTES=n`.

Prints how many seeds a second it lives, and for each kind of violation the first seed with its plan
made as small as possible, ready to be pasted into `regressions.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

from proof.sim.plan import Plan, make_plan
from proof.sim.planted import PLANTED, planted
from proof.sim.shrinking import shrink
from proof.sim.world import Violation, World, simulating

Live = Callable[[Plan], list[Violation]]

REPORTED_EVERY = 60.0


def hunt(live: Live, first: int, *, seconds: float, most: int) -> dict[str, list[int]]:
    """Live seeds from `first` on until the time or the number is over; gives kinds with seeds."""
    found: dict[str, list[int]] = {}
    begun = reported = time.perf_counter()
    seed = first
    while seed < first + most and (now := time.perf_counter()) < begun + seconds:
        for kind in {violation.kind for violation in live(make_plan(seed))}:
            found.setdefault(kind, []).append(seed)
        seed += 1
        if now >= reported + REPORTED_EVERY:
            reported = now
            print(f"... {seed - first} seeds, violations: {_counted(found)}", flush=True)
    took = time.perf_counter() - begun
    count = seed - first
    print(f"{count} seeds from {first} on in {took:.0f} s: {count / took:.0f} seeds a second")
    print(f"violations: {_counted(found)}", flush=True)
    return found


def _counted(found: dict[str, list[int]]) -> str:
    return ", ".join(f"{kind} {len(seeds)}" for kind, seeds in found.items()) or "none"


def explain(live: Live, kind: str, seed: int) -> None:
    """Print the smallest plan that shows a violation, and its history."""

    def shows_it(plan: Plan) -> bool:
        return any(violation.kind == kind for violation in live(plan))

    smallest = shrink(make_plan(seed), shows_it)
    world = World(smallest)
    world.run()
    print(f"\n=== {kind}: seed {seed}, made smaller:\n{smallest}")
    for line in world.history:
        print("   ", *line)
    for violation in world.violations:
        print("  !", *violation, flush=True)


def main() -> None:
    """Hunt, as the command line says."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--minutes", type=float, default=1.0)
    arguments.add_argument("--first", type=int, help="the first seed; by the clock if not given")
    arguments.add_argument("--count", type=int, default=sys.maxsize, help="the most seeds to live")
    arguments.add_argument("--plant", choices=PLANTED, help="a bug to plant")
    told = arguments.parse_args()
    first = int(time.time()) * 1000 if told.first is None else told.first
    with simulating() as live, planted(told.plant) if told.plant else nullcontext():
        found = hunt(live, first, seconds=told.minutes * 60, most=told.count)
        for kind, seeds in found.items():
            explain(live, kind, seeds[0])
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
