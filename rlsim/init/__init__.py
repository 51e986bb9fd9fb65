"""First experiments: a draft with a comment on every line, and the names of things in the catalogue."""
