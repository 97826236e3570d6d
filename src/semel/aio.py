"""The public import path of the engine for asyncio."""

from __future__ import annotations

from semel.engine.facade import AsyncAttemptContext, AsyncIdempotency
from semel.engine.marks import AsyncMarks
from semel.engine.once import AsyncOnce
from semel.engine.once_per import AsyncOncePer

__all__ = ["AsyncAttemptContext", "AsyncIdempotency", "AsyncMarks", "AsyncOnce", "AsyncOncePer"]
