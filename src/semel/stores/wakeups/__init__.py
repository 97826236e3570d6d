"""How a store hears that a record has changed, so that nobody has to poll for it.

    rooms      who waits for which record, and what has been heard: no waiting, no connection
    threads    watches for threads, and the thread that reads their one connection
    tasks      the same for asyncio

A database brings the line: how to connect, how to subscribe, what its messages say. A wake-up is
only a hint. Whatever fails here, a lost message or a server that refuses, is no error of the
caller's: its watch says that it hears nothing, and the engine polls.
"""
