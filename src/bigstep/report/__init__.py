"""Records of runs as people read them: terminal tables, one self-contained HTML page, Markdown, CSV and JSON rows."""
