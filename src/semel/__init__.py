"""semel: run an operation once per key."""
