"""What both engines share: everything about a call that needs no waiting.

`semel.sync` and `semel.aio` add the waiting; they are twins over these classes and the pure core.
"""
