"""Observers that are slipped under torch in the user's program: they write facts and change no result."""
