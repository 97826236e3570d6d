"""The engine for threads, generated from the engine for asyncio by `make generate`."""
