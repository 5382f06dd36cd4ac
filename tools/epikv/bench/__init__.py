"""A load of one's own against a daemon, and what came of it: `epikv bench load`."""
