"""Observers, which hear what happens in a run: progress, records, watches; none calls another."""
