"""Which of several replicas what begins alike goes to, without Ray."""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping


def ranked(prefix: str, names: Iterable[str]) -> list[str]:
    """The same for everyone who asks. Where one goes or comes, no other prefix moves (rendezvous hashing)."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{prefix} {name}".encode()).digest())


def most_open(loads: Collection[int], factor: float) -> int:
    """Open requests with which a replica gets one more, of replicas with these."""
    return max(1, math.ceil(factor * (sum(loads) + 1) / len(loads)) - 1)


def chosen(prefix: str, loads: Mapping[str, int], factor: float) -> str:
    """The first of the prefix's replicas that gets one more. loads: open requests by replica, of one at least."""
    most = most_open(loads.values(), factor)  # the least loaded has no more
    return next(name for name in ranked(prefix, loads) if loads[name] <= most)
