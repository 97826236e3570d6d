"""Integrations for threads, generated from those for asyncio by `make generate`."""
