"""Who takes part: semel, the floors under it, the usual designs, and the alternatives.

Each is opened at a `Place` and gives a lap. Nobody is handicapped: an alternative is used as its
documentation says, with connections enough for all callers.
"""
