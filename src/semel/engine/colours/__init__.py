"""The few primitives in which threads and asyncio differ, once for each kind.

The engine for threads takes `threads`, the one for asyncio takes `tasks`: the same names in both,
so that one can be generated from the other. What is here never decides anything about an operation.

    sleep               wait for some seconds
    finished            what a function returned, awaited where it must be
    unawaited           reject a coroutine that a plain function returned
    background          let a step end after its caller is gone (a thread does it at once)
    start_beside        do a step beside its caller
    in_thread           run a plain function of the application beside the loop
    can_go_on           whether an attempt may still be ended by the code that runs it
    raise_if_cancelled  notice a cancellation (counted by `cancellations`) that a driver swallowed
    drain               wait for background steps
    LoopGuard           the event loop an engine belongs to
    SharedRuns          calls of one process that share one running execution
    shared_runs_of      those of a store: engines on the same store share them
    Timer               calls `tick` when it is due
"""
