"""Which replica of a fleet gets a request: at random, in turns, by least connections, or by prefix."""

from array import array
from collections.abc import Callable
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import ceil
from random import Random

from epikv.plan.replica import Call

# Envoy's: slots of the table, and how far beyond its share of the open calls a replica may be.
MAGLEV_SLOTS = 65537
BALANCE = 1.5


class Router:
    """Deals calls to replicas 0, 1 .., and hears when they end."""

    def __init__(self, replicas: int, seed: int) -> None:
        self.replicas = replicas
        self._random = Random(f"routing/{seed}")

    def pick(self, call: Call) -> int:
        raise NotImplementedError

    def ended(self, replica: int) -> None: ...


class AtRandom(Router):
    def pick(self, call: Call) -> int:
        return self._random.randrange(self.replicas)


class RoundRobin(Router):
    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self._last = -1

    def pick(self, call: Call) -> int:
        self._last = (self._last + 1) % self.replicas
        return self._last


class LeastConnections(Router):
    """The replica with the fewest open calls, as HAProxy's leastconn; of several any."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self._open = [0] * replicas
        self._lot = [self._random.random() for _ in range(replicas)]  # drawn with each change
        self._heap = [(0, lot, replica) for replica, lot in enumerate(self._lot)]
        heapify(self._heap)

    def pick(self, call: Call) -> int:
        while True:
            count, lot, replica = heappop(self._heap)
            if lot == self._lot[replica]:
                self._set(replica, count + 1)
                return replica

    def ended(self, replica: int) -> None:
        self._set(replica, self._open[replica] - 1)

    def _set(self, replica: int, count: int) -> None:
        self._open[replica] = count
        lot = self._lot[replica] = self._random.random()
        heappush(self._heap, (count, lot, replica))
        if len(self._heap) > 8 * self.replicas + 64:  # of what is no longer so
            self._heap = [(self._open[r], self._lot[r], r) for r in range(self.replicas)]
            heapify(self._heap)


def digest(*of: object) -> int:
    """The same in every run."""
    return int.from_bytes(blake2b(repr(of).encode(), digest_size=8).digest(), "little")


def maglev(replicas: int, slots: int = MAGLEV_SLOTS) -> "array[int]":
    """Which replica each slot is of: each has its share but for one slot, and where replicas come or go
    few slots change hands. `slots` is a prime and not less than the replicas."""
    starts = [digest("offset", replica) % slots for replica in range(replicas)]
    skips = [digest("skip", replica) % (slots - 1) + 1 for replica in range(replicas)]
    table = array("i", [-1]) * slots
    filled = 0
    while True:
        for replica in range(replicas):
            place, skip = starts[replica], skips[replica]
            while table[place] >= 0:
                place = (place + skip) % slots
            table[place] = replica
            starts[replica] = (place + skip) % slots
            filled += 1
            if filled == slots:
                return table


class ByPrefix(Router):
    """Maglev with bounded load, as deploy/envoy has it: the replica that the prefix's hash names, unless it
    has more than BALANCE times its share of the open calls; then others, in an order that the hash gives.
    Calls without a prefix go in turns."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self._table = maglev(replicas)
        self._salt = seed
        self._open = [0] * replicas
        self._all_open = 0
        self._turn = -1

    def pick(self, call: Call) -> int:
        replica = self._named(call)
        self._open[replica] += 1
        self._all_open += 1
        return replica

    def ended(self, replica: int) -> None:
        self._open[replica] -= 1
        self._all_open -= 1

    def _named(self, call: Call) -> int:
        if call.talk < 0 and call.group < 0:
            self._turn = (self._turn + 1) % self.replicas
            return self._turn
        prefix = ("talk", call.talk) if call.talk >= 0 else ("group", call.group)
        key = digest(self._salt, *prefix)
        named = self._table[key % len(self._table)]
        slots = max(ceil(ceil(BALANCE * (self._all_open + 1)) / self.replicas), 1)
        if self._open[named] <= slots:
            return named
        order = Random(key)
        tried = {named}
        while len(tried) < self.replicas:
            other = order.randrange(self.replicas)
            if other in tried:
                continue
            if self._open[other] <= slots:
                return other
            tried.add(other)
        return min(range(self.replicas), key=self._open.__getitem__)


ROUTINGS: dict[str, Callable[[int, int], Router]] = {
    "random": AtRandom,
    "round-robin": RoundRobin,
    "least-connections": LeastConnections,
    "prefix": ByPrefix,
}
