"""Integrations, one module for each framework; each is an extra and imported by its name."""
