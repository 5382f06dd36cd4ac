"""Which of several replicas what begins alike goes to, without Ray."""

import hashlib
import math
from collections.abc import Collection, Iterable


def ranked(prefix: str, names: Iterable[str]) -> list[str]:
    """The same for everyone who asks. Where one goes or comes, no other prefix moves (rendezvous hashing)."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{prefix} {name}".encode()).digest())


def most_open(loads: Collection[int], factor: float) -> int:
    """Open requests with which a replica gets one more, of replicas with these."""
    return max(1, math.ceil(factor * (sum(loads) + 1) / len(loads)) - 1)
