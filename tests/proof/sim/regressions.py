"""Plans that once showed a defect, made as small as they get. None of them may show one again."""

from __future__ import annotations

from proof.sim.plan import Call, Network, Pause, Plan

REGRESSIONS: dict[str, Plan] = {}
