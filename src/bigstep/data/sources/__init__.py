"""Where samples come from: one interface (`base.Source`), one file per kind, `given.as_source` for users' own data."""
