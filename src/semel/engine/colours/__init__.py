"""The few primitives in which threads and asyncio differ, once for each kind.

`semel.sync` takes `threads`, `semel.aio` takes `tasks`: the same names in both, so that the
engines read alike. What is here never decides anything about an operation.

    sleep        wait for some seconds
    Polling      waits for a store that cannot tell when something changed
    finished     what a function gave, awaited where it must be
    unawaited    refuse a coroutine that a plain function gave
    background   let a step end after its caller is gone (a thread does it at once)
    aside        do a step beside its caller
    can_go_on    whether an attempt may still be ended by the code that runs it
    heed         notice a cancellation (counted by `cancellations`) that a driver swallowed
    drain        wait for background steps
    Home         the event loop an engine belongs to
    Flights      calls of one process that share one running execution
    flights_of   the flights of a store: engines on the same store share them
    Timer        calls `tick` when it is due
"""
