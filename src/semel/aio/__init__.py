"""The engine for asyncio."""

from semel.aio.engine import AsyncAttemptContext, AsyncIdempotency
from semel.aio.marks import AsyncMarks
from semel.aio.once import AsyncOnce

__all__ = ["AsyncAttemptContext", "AsyncIdempotency", "AsyncMarks", "AsyncOnce"]
