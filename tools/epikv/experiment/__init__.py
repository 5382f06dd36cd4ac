"""Experiments from outside: who gets which arm, definitions as files, outcomes."""
