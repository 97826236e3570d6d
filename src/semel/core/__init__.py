"""The pure core: it decides. It never waits, reads a clock or touches a store."""
