"""The engine for asyncio in simulated histories: virtual time, faults of every kind, every check.

The seeds are always the same: they prove that nothing has changed for the worse. `make simulate`
lives new ones. What a history consists of is in `sim/plan.py`, what must be true in `sim/checks.py`.
"""

from __future__ import annotations

import pytest

from proof.sim import plan as plans
from proof.sim.plan import Network, Pause, make_plan
from proof.sim.planted import PLANTED, planted
from proof.sim.regressions import REGRESSIONS
from proof.sim.shrinking import shrink
from proof.sim.world import World, simulating

pytestmark = pytest.mark.usefixtures("not_measured")

SEEDS = 1000
PARTS = 10
FEW = [*range(4), *(pytest.param(part, marks=pytest.mark.more) for part in range(4, PARTS))]


@pytest.mark.parametrize("part", FEW)
def test_a_simulated_history_has_no_violation(part):
    size = SEEDS // PARTS
    with simulating() as live:
        for seed in range(part * size, (part + 1) * size):
            found = live(make_plan(seed))
            assert not found, f"`make simulate FIRST={seed} COUNT=1` makes its plan smaller"


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_was_found_once_is_mended(name):
    with simulating() as live:
        assert live(REGRESSIONS[name]) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name):
    bug = PLANTED[name]
    with simulating() as live, planted(name):
        for seed in range(bug.within):
            found = {violation.kind for violation in live(make_plan(seed))}
            assert not found & {"wrong TypeError", "wrong AttributeError"}, "plant it anew"
            if found:
                return
    pytest.fail(f"no violation in {bug.within} seeds")


def test_the_same_plan_has_the_same_history():
    def lived(plan):
        world = World(plan)
        world.run()
        return world.history, world.violations

    with simulating():
        for seed in range(20):
            assert lived(make_plan(seed)) == lived(make_plan(seed))


def test_a_plan_is_printed_as_the_python_that_makes_it():
    names = vars(plans)
    for seed in range(50):
        plan = make_plan(seed)
        assert eval(str(plan), names) == plan  # noqa: S307 - our own text


def test_a_failing_plan_is_made_smaller():
    def fails(plan):
        return len([call for call in plan.calls if call.engine == 2]) >= 2 and plan.has(Pause)

    plan = next(plan for plan in map(make_plan, range(1000)) if fails(plan))
    smallest = shrink(plan, fails)
    assert len(smallest.actions) == 3
    assert smallest.network == Network()
    assert all(call.works == () and call.cancel is None for call in smallest.calls)
