"""What must be true of every history.

This module judges a world that has come to its end. Each check looks at what the callers were told,
at what their functions did, and at what the store agreed to, and at nothing inside the engines;
only `_nothing_left` looks there, for what an engine has forgotten to put away.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

from proof.sim.clock import PROCESS
from proof.sim.plan import FAULTS_END, MIXED, ClockJump, NotDoneError, RefusedError, Repair
from proof.sim.store import Success
from proof.sim.world import CACHE_TTL, EPS, RAISED, Caller, Run, fingerprint_of
from semel import (
    AttemptsExhausted,
    ConcurrentRequest,
    DuplicateRequest,
    LeaseLost,
    OutcomeUnknown,
    PayloadMismatch,
    PreviousFailure,
    State,
    StoreError,
    WaitTimeout,
    events,
)

if TYPE_CHECKING:
    from proof.sim.world import World

LONGEST_CALL = 40.0
"""How long a call may last after the faults have ended."""

LONGEST_PROBE = 0.6


def check(world: World) -> None:
    """Note every violation in the world."""
    for caller in world.callers:
        _call_ended_well(world, caller)
    for key in {run.key for run in world.runs if run.protected}:
        runs = [run for run in world.runs if run.protected and run.key == key]
        _no_two_at_once(world, runs)
        _nothing_after_a_success(world, runs)
        _fences_are_unique(world, runs)
        _holds_are_kept(world, runs)
    for run in world.runs:
        _engine_was_open(world, run)
        if run.protected:
            _outcome_is_stored(world, run)
            _loss_was_announced_in_time(world, run)
    _unused_claims_are_given_back(world)
    _nothing_stays_processing(world)
    _events_are_true(world)
    _nothing_left(world)


def _differ(one: bytes | None, other: bytes | None) -> bool:
    return one is not None and other is not None and one != other


# --- what a caller is told ---------------------------------------------------------------


def _call_ended_well(world: World, caller: Caller) -> None:
    call = caller.call
    if caller.start is None:
        return  # its process was dead, or it was cancelled before it began
    if caller.end is None:
        if not caller.process.dead:
            world.violation("call hangs", f"{caller.name} never ended")
        return
    if caller.end > max(FAULTS_END, call.at) + LONGEST_CALL:
        world.violation("call is late", f"{caller.name} ended at {caller.end:.3f}")
    if call.probe and caller.end - caller.start > LONGEST_PROBE:
        world.violation("key is stuck", f"{caller.name} took {caller.end - caller.start:.3f}")
    if len(caller.runs) > 1:
        world.violation("ran twice", f"{caller.name} ran its function {len(caller.runs)} times")
    if caller.error is None:
        _value_is_right(world, caller)
    elif isinstance(caller.error, asyncio.CancelledError):
        if caller.cancelled_at is None:
            world.violation("cancelled", f"nobody cancelled {caller.name}")
    else:
        _error_is_right(world, caller, caller.error)
    cancelled = caller.end if caller.cancelled_at is None else caller.cancelled_at
    slowly = caller.end - cancelled > EPS
    if slowly and not caller.process.stood_still(cancelled - EPS, caller.end + EPS):
        world.violation("cancelled slowly", f"{caller.name} went on until {caller.end:.3f}")


def _value_is_right(world: World, caller: Caller) -> None:
    own, ledger = caller.own, world.ledger
    if caller.ran is not None and caller.ran != (own is not None):
        world.violation("wrong flag", f"{caller.name} was told ran={caller.ran}")
    if own is None:
        if not _some_success_fits(world, caller):
            kept = [
                (s.value, round(s.at, 3), s.gone, s.expires)
                for s in ledger.successes[caller.call.key]
            ]
            world.violation("wrong replay", f"{caller.name} got {caller.value!r}; stored: {kept}")
        return
    if own.error is not None:
        world.violation("value after a failure", f"{caller.name}")
    elif caller.call.method != "consume" and caller.value != own.value:
        world.violation("wrong value", f"{caller.name} got {caller.value!r}, not its own")
    stored = ledger.completed.get(own.owner)
    unsaved = own.protected and (stored is None or stored > caller.end + EPS)
    if unsaved and not _announced(world, events.ResultNotStored, own.owner):
        world.violation("silently unsaved", f"{caller.name} returned what was not stored")


def _some_success_fits(world: World, caller: Caller) -> bool:
    """Whether any result was stored that this caller may get."""
    call = caller.call
    for success in world.ledger.successes[call.key]:
        # The cache may answer what was forgotten elsewhere; not what its own engine has forgotten.
        known = success.gone is not None and any(
            world.process_of(engine) is caller.process
            and (engine == call.engine or not world.plan.network.cached)
            and key == call.key
            and success.gone <= at < caller.start
            for engine, key, at in world.forgotten
        )
        slack = CACHE_TTL + 1.0 if world.plan.network.cached and not known else 0.0
        if call.method != "consume" and success.value != caller.value:
            continue
        if _differ(success.fingerprint, fingerprint_of(call)) or success.at > caller.end + EPS:
            continue
        gone = success.gone is not None and success.gone + slack < caller.start - EPS
        if gone and (known or not _was_under_way(world, caller, success)):
            continue
        outdated = success.expires + slack < caller.start_in_store - EPS
        if outdated and not (world.plan.network.cached and world.plan.has(ClockJump)):
            continue
        return True
    return False


def _was_under_way(world: World, caller: Caller, success: Success) -> bool:
    """Whether a call of this process, which began while the result was stored, was still waiting.

    It waits for the answer to its claim or to its save. Who joins it shares that answer, even if the
    record was replaced meanwhile, or forgotten by another process.
    """
    return any(
        (other.process, other.call.key) == (caller.process, caller.call.key)
        and other is not caller
        and other.start is not None
        and other.start <= success.gone
        and (other.end is None or other.end >= caller.start)
        for other in world.callers
    )


def _error_is_right(world: World, caller: Caller, error: BaseException) -> None:
    call, own, ledger, kind = caller.call, caller.own, world.ledger, type(error)
    options = call.options
    claims = {o: g for o, g in ledger.granted.items() if g.key == call.key}
    wrong: str | None = None
    match error:
        case RefusedError() | NotDoneError():
            if own is None or own.error is not kind or RAISED[call.ends] is not kind:
                wrong = "it is not its own failure"
        case PreviousFailure():
            if not any(ledger.failed.get(owner) is False for owner in claims):
                wrong = "no final failure is stored"
        case ConcurrentRequest():
            rejects = "reject" in {options.get("concurrent"), options.get("duplicate")}
            if call.method != "consume" and not rejects:
                wrong = "this call waits"
        case PayloadMismatch():
            payloads = {g.fingerprint for g in claims.values() if g.at <= caller.end}
            if not payloads - {None, fingerprint_of(call)}:
                wrong = "there was no other payload"
        case AttemptsExhausted():
            if not options.get("max_attempts"):
                wrong = "there is no limit"
        case LeaseLost():
            if own is None:
                wrong = "nothing ran"
            elif own.owner not in ledger.replaced:
                wrong = "it was never replaced"
        case WaitTimeout():
            limit = options.get("wait_timeout")
            if limit is None or caller.end - caller.start < limit - EPS:
                wrong = "it may wait longer"
        case OutcomeUnknown():
            if options.get("abandoned") != "hold" and not any(g.hold for g in claims.values()):
                wrong = "nothing was held"
        case DuplicateRequest():
            if options.get("duplicate") != "reject":
                wrong = "this call replays"
        case StoreError():
            if own is not None and own.protected:
                wrong = "its function had run"
            elif not (
                world.plan.unsteady or world.plan.network.lossy or call.engine in world.closed
            ):
                wrong = "the store was never away"
        case _:
            wrong = f"unexpected {error!r}"
    if wrong is not None:
        world.violation(f"wrong {kind.__name__}", f"{caller.name}: {wrong}")


# --- what ran ----------------------------------------------------------------------------


def _no_two_at_once(world: World, runs: list[Run]) -> None:
    replaced = world.ledger.replaced
    for position, first in enumerate(runs):
        for second in runs[position + 1 :]:
            if first.end is not None and second.start >= first.end - EPS:
                continue
            if first.owner not in replaced and second.owner not in replaced:
                world.violation("overlap", f"{first.value} and {second.value} ran at once")
            elif first.caller.got_value and first.owner not in world.ledger.completed:
                lost = _announced(world, events.LostLease, first.owner)
                if not lost and not _announced(world, events.ResultNotStored, first.owner):
                    world.violation("silently replaced", f"{first.value} was replaced, untold")


def _nothing_after_a_success(world: World, runs: list[Run]) -> None:
    for run in runs:
        granted = world.ledger.granted.get(run.owner)
        if granted is None or run.caller.call.options.get("mismatch") == "replace":
            continue
        for success in world.ledger.successes[run.key]:
            if (
                success.at < granted.at - EPS
                and success.expires > granted.store_time + EPS
                and (success.gone is None or success.gone > granted.at + EPS)
            ):
                world.violation("ran after a success", f"{run.value} ran after {success.value}")


def _fences_are_unique(world: World, runs: list[Run]) -> None:
    fences = [run.fence for run in runs]
    # Without a record a fence is made of time, and here a forget and two claims may take none.
    removed = {
        action.key
        for action in world.plan.actions
        if isinstance(action, Repair) and action.what in {"forget", "delete"}
    }
    if len(set(fences)) != len(fences) and runs[0].key not in removed:
        world.violation("fence repeated", f"{runs[0].key}: {fences}")


def _holds_are_kept(world: World, runs: list[Run]) -> None:
    """Nothing runs after a held attempt of unknown outcome, whatever the later callers say."""
    if world.plan.has(Repair):
        return
    ledger = world.ledger
    for first, second in pairwise(runs):
        granted = ledger.granted.get(first.owner)
        if granted is None or not granted.hold or first.error is NotDoneError:
            continue
        known = first.owner in ledger.completed or ledger.failed.get(first.owner) is True
        if first.key != MIXED or not known:
            world.violation("hold broken", f"{second.value} ran after {first.value}")


def _engine_was_open(world: World, run: Run) -> None:
    closed = world.closed.get(run.caller.call.engine)
    if closed is not None and run.start > closed:
        world.violation("ran when closed", f"{run.value} began after its engine was closed")


def _outcome_is_stored(world: World, run: Run) -> None:
    """What a function did is in the store, unless its process died or was closed."""
    ledger, owner = world.ledger, run.owner
    if run.end is None or run.caller.process.dead or run.caller.call.engine in world.closed:
        return
    if run.succeeded:
        if owner not in ledger.completed and not _replaced_in_time(world, run):
            world.violation("not saved", f"{run.value} was done and never stored")
        if ledger.unsuccessful(owner):
            world.violation("success stored as failure", f"{run.value}")
    else:
        if owner in ledger.completed:
            world.violation("failure stored as success", f"{run.value}")
        excused = (
            owner in ledger.replaced
            or world.wires.faulted[owner] & {"fail", "renew"}
            or world.plan.unsteady
        )
        if not ledger.unsuccessful(owner) and not excused:
            world.violation("failure not recorded", f"{run.value} ended with {run.error}")
    until = _lease_end(world, owner, run.end)
    late = until is not None and run.end > until + EPS
    if late and not run.lost and not ledger.unsuccessful(owner):
        world.violation("loss not noticed", f"{run.value} had its lease until {until:.3f}")


def _replaced_in_time(world: World, run: Run) -> bool:
    """Whether another attempt came before this one's result could be saved."""
    at, lease = world.ledger.replaced.get(run.owner), run.caller.call.lease
    if at is None or run.end is None:
        return False
    disturbed = (
        world.plan.unsteady or world.plan.network.lossy or world.jumps or run.caller.process.pauses
    )
    return at <= run.end + lease + EPS or bool(disturbed) or world.plan.has(Repair)


def _lease_end(world: World, owner: bytes, at: float) -> float | None:
    """Until when an owner has its lease, as far as its process knows at a moment."""
    sent = [d.sent for d in world.wires.delivered[owner] if d.grants and d.at <= at]
    return max(sent) + world.ledger.granted[owner].lease if sent else None


def _loss_was_announced_in_time(world: World, run: Run) -> None:
    process, granted = run.caller.process, world.ledger.granted.get(run.owner)
    if granted is None or process.dead or run.caller.call.engine in world.closed:
        return
    delivered = world.wires.delivered[run.owner]
    good = sorted((d.sent, d.at) for d in delivered if d.grants)
    refused = [d.at for d in delivered if d.verb == "renew" and d.answer is False]
    end = world.loop.now if run.end is None else run.end
    for position, (sent, _) in enumerate(good):
        over = sent + granted.lease
        renewed = good[position + 1][1] if position + 1 < len(good) else float("inf")
        if renewed <= over or end <= over + EPS or over <= run.start:
            continue
        if any(moment <= over for moment in refused) or process.stood_still(sent - EPS, over + EPS):
            continue
        if not _announced(world, events.LostLease, run.owner, until=over + EPS):
            world.violation("loss not announced", f"{run.value} had its lease until {over:.3f}")
        return


# --- what is left ------------------------------------------------------------------------


def _unused_claims_are_given_back(world: World) -> None:
    """No caller has to wait for the lease of a claim that never ran, if nothing was in the way."""
    plan, ran = world.plan, {run.owner for run in world.runs}
    if plan.unsteady or world.jumps or world.closed:
        return
    for owner, by in world.ledger.taken_over:
        granted = world.ledger.granted.get(owner)
        if granted is None or owner in ran or granted.process.dead or granted.process.pauses:
            continue
        # A command that was overtaken by the one that should give it back is looked for later.
        overtaken = any(
            told.verb == "claim" and not told.grants for told in world.wires.delivered[owner]
        )
        excused = overtaken or world.wires.faulted[owner]
        if not excused and not world.ledger.unsuccessful(owner):
            name = world.ledger.name
            world.violation("not given back", f"{name(by)} waited for {name(owner)}")


def _nothing_stays_processing(world: World) -> None:
    ran = {run.owner for run in world.runs}
    for identity, record in world.ledger.records.items():
        granted = world.ledger.granted.get(record.owner)
        if record.state is not State.PROCESSING or granted is None or granted.process.dead:
            continue
        if world.ledger.unsuccessful(record.owner) or world.closed:
            continue
        if record.owner not in ran and record.hold and not identity.key.startswith("inside"):
            world.violation("held for nothing", f"{identity.key}: its function never ran")
        elif not (
            world.wires.faulted[record.owner]
            or world.plan.unsteady
            or identity.key.startswith("inside")
        ):
            world.violation("left processing", f"{identity.key}")


def _nothing_left(world: World) -> None:
    """No engine keeps what has ended."""
    for number, engine in enumerate(world.engines):
        if world.process_of(number).dead:
            continue
        left = {
            "task": engine.internals.in_background,
            "timer": engine.internals.renewer.timer._ticking
            or engine.internals.renewer.watch._ticking,
            "shared run": engine.internals.shared_runs._leaders._waiting,
        }
        if number not in world.closed:
            left |= {
                "lease": len(engine.internals.leases),
                "doubt": engine.internals.leases._unsure,
            }
        for what, remains in left.items():
            if remains:
                world.violation(f"{what} left", f"E{number}: {remains}")
    for proxy in world.proxies:
        if proxy.watching and not proxy.process.dead:
            world.violation("watch left", proxy.process.name)
    if world.loop.now > world.loop.end - 10:
        world.violation("never quiet", f"at {world.loop.now:.3f}")
    for task in asyncio.all_tasks(world.loop):
        process = task.get_context().get(PROCESS) if hasattr(task, "get_context") else None
        if process is not None and not process.dead:
            world.violation("task left", f"{task.get_coro()}")


# --- what is announced -------------------------------------------------------------------


def _announced(world: World, kind: type, owner: bytes, *, until: float = float("inf")) -> bool:
    """Whether an event of this kind was announced for an owner, as far as can be told."""
    return any(
        isinstance(event, kind) and known in {None, owner} and at <= until
        for at, event, known in world.events
    )


def _events_are_true(world: World) -> None:
    ledger = world.ledger
    for at, event, owner in world.events:
        if owner is None:
            continue
        name, kind = ledger.name(owner), type(event).__name__
        match event:
            case events.LostLease():
                _loss_is_true(world, owner, at)
            case events.Ran() | events.ResultStoredLate():
                if ledger.completed.get(owner, float("inf")) > at + EPS:
                    world.violation(f"false {kind}", f"nothing of {name} is stored")
            case events.Failed() | events.Parked():
                if not ledger.unsuccessful(owner):
                    world.violation(f"false {kind}", f"nothing of {name} is recorded")
            case events.TakenOver():
                if owner not in {taker for _, taker in ledger.taken_over}:
                    world.violation(f"false {kind}", f"{name} took nothing over")


def _loss_is_true(world: World, owner: bytes, at: float) -> None:
    """A loss is announced when it happened or is about to."""
    ledger, granted = world.ledger, world.ledger.granted[owner]
    if ledger.replaced.get(owner, float("inf")) <= at + EPS or world.plan.network.batches:
        return  # (what the members of a batch got is not known before all of them have answered)
    # Before that moment: a process that resumes may notice the loss in the very moment in which its
    # renewal is answered.
    until = _lease_end(world, owner, at - EPS) or granted.at + granted.lease
    if at < until - 0.1 * granted.lease - EPS:
        kind = "LostLease after its end" if ledger.ended(owner) else "false LostLease"
        world.violation(kind, f"{ledger.name(owner)} has its lease until {until:.3f}")
