"""Whoever hears what happens in a run: progress, records, watches; none is called by another."""
