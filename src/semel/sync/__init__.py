# Generated from aio/__init__.py by `make generate`: change that file instead.
"""The engine for threads."""

from semel.sync.engine import AttemptContext, Idempotency
from semel.sync.marks import Marks
from semel.sync.once import Once

__all__ = ["AttemptContext", "Idempotency", "Marks", "Once"]
