"""A profile of some steps: a trace, and a table against bytes and FLOPs."""
