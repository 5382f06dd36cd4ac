"""What an operator does while clients ask: swaps models, loads others beside them, drains and resumes."""

import random
import threading
import time
from collections import Counter
from pathlib import Path

from epikv import Admin
from epikv.testing import Daemon

GUEST = "guest"
LEAST_PAUSE, MOST_PAUSE = 2.0, 8.0  # seconds between two deeds


class Operator:
    """One deed after the other, from `begin` to `end`, at moments that the seed draws."""

    def __init__(self, daemon: Daemon, models: dict[str, Path], seed: int) -> None:
        self._daemon, self._models = daemon, models
        self._draw = random.Random(f"{seed}/operator")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._drained_until = float("-inf")  # by the steady clock
        self._error: Exception | None = None
        self.did: Counter[str] = Counter()

    def begin(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def end(self) -> Exception | None:
        """Once nothing is loading or draining any more. What went wrong."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        return self._error

    def drained_since(self, moment: float) -> bool:
        return self._drained_until >= moment

    def _work(self) -> None:
        deeds = (self._swap, self._take_a_guest, self._drain)
        try:
            with Admin(self._daemon.admin) as admin:
                while not self._stop.wait(self._draw.uniform(LEAST_PAUSE, MOST_PAUSE)):
                    deed = self._draw.choice(deeds)
                    deed(admin)
                    self.did[deed.__name__.strip("_")] += 1
        except Exception as error:  # a thread would end in silence
            self._error = error

    def _swap(self, admin: Admin) -> None:
        name = self._draw.choice(list(self._models))
        admin.load_model(self._models[name], name=name, replace=True)

    def _take_a_guest(self, admin: Admin) -> None:
        path = self._draw.choice(list(self._models.values()))
        admin.load_model(path, name=GUEST, kv_pool_bytes=1 << 20)
        self._stop.wait(self._draw.uniform(0, 1))
        admin.unload_model(GUEST)

    def _drain(self, admin: Admin) -> None:
        self._drained_until = float("inf")
        admin.drain()
        self._stop.wait(self._draw.uniform(0.05, 1))
        admin.resume()
        self._drained_until = time.monotonic()
