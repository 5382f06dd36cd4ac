"""The daemon's process and metrics, between the requests."""

import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from calls import Wrong
from epikv.scrape import Page, scrape
from epikv.testing import Daemon
from scipy import stats

QUIET_SECONDS = 30.0  # until all that clients left behind is gone
POLL_SECONDS = 0.1
# gRPC lets idle threads go, and takes new ones, as it likes.
SPARE_THREADS = 8
LEAST_POOL_BYTES = 150 << 20
BLOCKS = 8  # of samples, for the slope's interval
NEVER = ("epikv_kv_budget_overrun_tokens_total", "epikv_policy_errors_total")
BROKEN_CODES = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED", "ABORTED")


@dataclass(frozen=True)
class Held:
    """What the process holds."""

    seconds: float  # since the start
    rss_kib: int
    threads: int
    files: int


def held(daemon: Daemon, seconds: float = 0) -> Held:
    """Memory: resident, less rows of the KV pool, which stay where they were once written, and compiled constraints."""
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    found = Held(
        seconds,
        rss_kib=int(status["VmRSS"].split()[0]) - _pool_kib(daemon.pid),
        threads=int(status["Threads"]),
        files=sum(_open_files(daemon.pid).values()),
    )
    # Afterwards: a scrape takes a connection itself.
    constraints = scrape(daemon.metrics).value("epikv_resident_memory_bytes", kind="constraints")
    return replace(found, rss_kib=found.rss_kib - int(constraints / 1024))


def _pool_kib(pid: int) -> int:
    """Resident, of pools that are so large that their K and V each have a mapping of their own."""
    total, large = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ 0 *$", line):
            large = int(found[2], 16) - int(found[1], 16) >= LEAST_POOL_BYTES
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            large = False
        elif large and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def _open_files(pid: int) -> Counter[str]:
    """What they are, by the names that the kernel has for them."""
    names: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names[re.sub(r"\d{3,}", "N", str(entry.readlink()))] += 1
    return names


def at_rest(daemon: Daemon, seconds: float, baseline: Held | None, spare_files: int = 0) -> Held:
    """Waits until nothing of any request is left. Raises Wrong if that takes too long."""
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        found = held(daemon, seconds)
        page = scrape(daemon.metrics)
        left = _left(page)
        if baseline is not None:
            left += _over(found, baseline, spare_files)
        if not left:
            _check_never(page)
            return found
        if time.monotonic() > deadline:
            files = ", ".join(f"{n} x {name}" for name, n in _open_files(daemon.pid).items())
            raise Wrong(
                f"{QUIET_SECONDS:.0f} s after the last request: {', '.join(left)}; open: {files}"
            )
        time.sleep(POLL_SECONDS)


def _left(page: Page) -> list[str]:
    """What is still held by requests, in words; a cached prefix is held by none."""
    capacity = page.value("epikv_kv_capacity_bytes")
    states = ("used", "reserved", "cached_prefix", "free")
    by_state = {state: page.value("epikv_kv_bytes", state=state) for state in states}
    left = [f"{state} {size:.0f} bytes" for state, size in by_state.items() if size]
    unheld = by_state["free"] + by_state["cached_prefix"]
    whole = 0 < capacity == unheld and not by_state["used"] and not by_state["reserved"]
    running = page.total("epikv_requests_running")
    waiting = page.total("epikv_requests_waiting")
    if running or waiting:
        return [f"{running:.0f} running, {waiting:.0f} waiting"]
    return [] if whole else [*left, f"of a pool of {capacity:.0f}"]


def _over(found: Held, baseline: Held, spare_files: int) -> list[str]:
    over = []
    if found.files > baseline.files + spare_files:
        over.append(f"{found.files} open files, were {baseline.files}")
    if found.threads > baseline.threads + SPARE_THREADS:
        over.append(f"{found.threads} threads, were {baseline.threads}")
    return over


def _check_never(page: Page) -> None:
    for name in NEVER:
        if page.total(name):
            raise Wrong(f"{name} is {page.total(name):g}")
    if errors := page.total("epikv_requests_finished_total", reason="error"):
        raise Wrong(f"{errors:.0f} requests finished by an error")
    for code in BROKEN_CODES:
        if broken := page.total("epikv_grpc_requests_total", code=code):
            raise Wrong(f"{broken:.0f} calls ended with {code}")


def growth_kib(samples: list[Held]) -> int:
    """From the end of the first third to the last."""
    warm = _warm(samples)
    return warm[-1].rss_kib - warm[0].rss_kib


@dataclass(frozen=True)
class Slope:
    """Of resident memory, in KiB a minute, and its interval at 95 %."""

    kib: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.kib:+.0f} KiB a minute ({self.low:+.0f} to {self.high:+.0f})"


def slope(samples: list[Held]) -> Slope | None:
    """After the first third, by least squares over the means of BLOCKS blocks of samples in a row: samples next to each
    other are alike, means of blocks hardly. None: too few samples for so many blocks."""
    rest = _warm(samples)
    if len(rest) < BLOCKS:
        return None
    minutes = [block.mean() for block in np.array_split([s.seconds / 60 for s in rest], BLOCKS)]
    kib = [block.mean() for block in np.array_split([s.rss_kib for s in rest], BLOCKS)]
    fit = stats.linregress(minutes, kib)
    margin = fit.stderr * stats.t.ppf(0.975, BLOCKS - 2)
    return Slope(fit.slope, fit.slope - margin, fit.slope + margin)


def _warm(samples: list[Held]) -> list[Held]:
    """Without those of the first third, in which each policy and arm gets its series, nor the first of all, before
    which nobody asked anything."""
    return samples[max(1, len(samples) // 3) :] or samples
