"""Where samples come from: one protocol (`base.Source`), one file a kind, and `given.as_source` for what users have."""
