"""Doors for frameworks, one module each; every one is an extra and is imported by its own name."""
