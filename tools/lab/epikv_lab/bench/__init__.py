"""Benches of epikvd against stated targets and beside other servers: `epikv bench NAME`.

A bench is a module with a click command named `command`, which is an entry point in
tools/lab/pyproject.toml. It imports what is heavy inside the command, measures, and ends with
`targets.finish`.
"""
