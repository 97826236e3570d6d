"""What both engines share: everything about a call that needs no waiting.

`semel.aio` adds the waiting to these classes and the pure core; `semel.sync` is generated from it.
"""
