"""Makes a failing plan as small as it gets while it still fails in the same way.

Greedy: actions go, one by one; then what is wrong with the network; then each call is made plainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from proof.sim.plan import Action, Call, Cancel, Plan

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails) -> Plan:
    """Give the smallest plan found that `fails`, which the given one must do."""
    smaller: Plan | None = plan
    while smaller is not None:
        plan = smaller
        smaller = next((less for less in _smaller(plan) if fails(less)), None)
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that are a step smaller, the greatest steps first."""
    actions = plan.actions
    size = len(actions) // 2
    while size:  # halves, quarters, ... and at last single actions
        for start in range(0, len(actions), size):
            yield replace(plan, actions=actions[:start] + actions[start + size :])
        size //= 2
    for flag in fields(plan.network):
        if getattr(plan.network, flag.name):
            yield replace(plan, network=replace(plan.network, **{flag.name: False}))
    for place, action in enumerate(actions):
        for plainer in _plainer(action):
            yield replace(plan, actions=(*actions[:place], plainer, *actions[place + 1 :]))


def _plainer(action: Action) -> Iterator[Action]:
    if not isinstance(action, Call):
        return
    for number in range(len(action.works)):
        yield replace(action, works=action.works[:number] + action.works[number + 1 :])
    plain = {"cancel": None, "nested": False, "ends": "ok", "method": "execute", "payload": None}
    for name, value in plain.items():
        if getattr(action, name) != value:
            yield replace(action, **{name: value})
    if action.cancel is not None and action.cancel.after:
        yield replace(action, cancel=Cancel(0, action.cancel.command))
    if action.at and not action.probe:
        yield replace(action, at=0.0)
