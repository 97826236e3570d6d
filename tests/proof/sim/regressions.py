"""Plans that once showed a defect, made as small as they get. None of them may show one again."""

from __future__ import annotations

from proof.sim.plan import Call, Network, Plan

REGRESSIONS: dict[str, Plan] = {
    "a function started on a lease that its engine knew was over": Plan(
        seed=30,
        network=Network(slow=True, late=True),
        actions=(Call(at=0.0, name="c8", engine=2, key="mixed", policy="limited", lease=0.5),),
    ),
    "the loss of a lease that began while a renewal hung was announced too late": Plan(
        seed=83,
        network=Network(slow=True, repeats=True),
        actions=(
            Call(
                at=0.0, name="c3", engine=2, key="hold/0", policy="hold", lease=0.5, ends="refused"
            ),
            Call(
                at=1.34, name="c5", engine=2, key="open/0", policy="open", lease=0.5, works=(1.25,)
            ),
        ),
    ),
}
