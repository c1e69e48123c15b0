"""Ways of taking a step, one per file."""
