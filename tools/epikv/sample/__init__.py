"""The sample model: a small reasoning model on which eviction policies differ.

`problem(seed, family)` makes its problems; `python -m epikv.sample` trains, calibrates and simulates it.
"""

from epikv.sample.families import FAMILIES, problem
from epikv.sample.problem import Problem, Role, Token

__all__ = ["FAMILIES", "Problem", "Role", "Token", "problem"]
