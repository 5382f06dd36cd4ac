"""The sample model: a small reasoning model on which eviction policies differ.

`problem(seed)` makes its problems; `python -m epikv.sample` trains, calibrates and simulates it.
"""

from epikv.sample.programs import Problem, Role, Token, problem

__all__ = ["Problem", "Role", "Token", "problem"]
