"""Ways of taking a step, one a file."""
