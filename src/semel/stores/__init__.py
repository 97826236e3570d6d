"""Stores: where records live. Each keeps the law of `semel.core.judge`, atomically."""
