"""What this package does on threads, generated from what it does on asyncio by `make generate`."""
