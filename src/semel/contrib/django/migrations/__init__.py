"""Migrations of the table of records."""
