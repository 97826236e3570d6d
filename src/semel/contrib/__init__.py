"""What semel brings for frameworks that have a place of their own for it."""
