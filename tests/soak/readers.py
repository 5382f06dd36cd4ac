"""What readers that stall cost those beside them.

    python tests/soak/readers.py [--pairs N] [--readers N] [--seed N]

Streams that are read go on all the while. Phases alternate: beside them nobody, or readers whose
outboxes are full. Of each pair of neighbouring phases, the ratio of the median times between two
messages; the requirement is on the median of the ratios. Exit status 1: it is not met.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import grpc
from calls import OWN, Wrong
from crowd import Crowd, Plan, Way
from epikv import processes
from epikv.options import Kv, Output, Stop
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError
from epikv.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from soak import sample_model

STREAMS = 4
PHASE_SECONDS = 1.0
SETTLE_SECONDS = 60.0
MOST_RATIO = 1.05
BUDGET, PROMPT, CONTEXT = 128, 64, 1024  # tokens
POLICIES = ("epikv_flat", "sliding", "h2o", "random")
FLAGS = [
    "--threads=1",
    "--kv_pool_bytes=400000000",
    "--outbox_messages=8",
    "--stream_stall_seconds=600",
    "--drain_seconds=600",
    "--log_level=warning",
]


class Phase(NamedTuple):
    """Seconds."""

    gap: float  # median between two messages of a stream
    cpu: float  # of the engine's thread, a step


class Neighbours:
    """Streams that are read at once, each begun anew where it ends."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon, self._seed = daemon, seed
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._gaps: list[float] = []
        self._threads = [
            threading.Thread(target=self._stream, args=(number,)) for number in range(STREAMS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for thread in self._threads:
            thread.join()

    def measure(self) -> Phase:
        """Of the next PHASE_SECONDS."""
        before = scrape(self._daemon.metrics)
        with self._lock:
            self._gaps.clear()
        time.sleep(PHASE_SECONDS)
        with self._lock:
            gaps = list(self._gaps)
        added = scrape(self._daemon.metrics) - before
        if len(gaps) < 100:
            raise Wrong(f"{len(gaps)} messages in a phase: the streams beside do not go on")
        steps = added.total("epikv_step_batch_sequences_count")
        return Phase(statistics.median(gaps), added.total("epikv_engine_cpu_seconds_total") / steps)

    def _stream(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        with grpc.insecure_channel(self._daemon.grpc, OWN) as channel:
            method = channel.unary_stream("/epikv.v1.GenerationService/Generate")
            while not self._leaving.is_set():
                policy = POLICIES[number % len(POLICIES)]
                call = method(request(policy, rng, traced=False).SerializeToString())
                before = None  # the first token waits for the prompt
                for _ in call:
                    now = time.perf_counter()
                    if before is not None:
                        with self._lock:
                            self._gaps.append(now - before)
                    before = now
                    if self._leaving.is_set():
                        call.cancel()
                        break


def request(policy: str, rng: random.Random, *, traced: bool) -> generation_pb2.GenerateRequest:
    """`traced`: its messages cannot join, so that its outbox is full soon."""
    asked = generation_pb2.GenerateRequest(
        request_id=f"{rng.getrandbits(64):x}",
        stop=Stop(max_output_tokens=CONTEXT - PROMPT, ignore_eos=True).to_proto(),
        output=Output(kv_trace=traced).to_proto(),
        kv=Kv(policy, BUDGET, equal_protection=True).to_proto(),
    )
    asked.token_ids.ids.extend(rng.randrange(5, 100) for _ in range(PROMPT))
    return asked


@contextmanager
def stalled_readers(daemon: Daemon, count: int, rng: random.Random) -> Iterator[None]:
    """All of them have full outboxes before the block begins, and are gone after it."""
    with grpc.insecure_channel(daemon.admin) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)

        def active(wanted: Callable[[admin_pb2.ActiveRequest], bool]) -> int:
            answer = admin.ListActiveRequests(admin_pb2.ListActiveRequestsRequest())
            return sum(wanted(r) for r in answer.requests if r.request_id in requests)

        requests = {}
        for number in range(count):
            asked = request(POLICIES[number % len(POLICIES)], rng, traced=True)
            requests[asked.request_id] = asked.SerializeToString()
        crowd = Crowd(daemon.grpc, Plan(requests, "accepted", Way.CANCEL, paced=True))
        crowd.ready()
        stalls = admin_pb2.ActiveRequest.WAITS_FOR_READER
        until(lambda: active(lambda r: r.waits_for == stalls) == count, "they do not all stall")
        yield
        if (left := active(lambda r: r.waits_for == stalls)) != count:
            raise Wrong(f"{left} of {count} readers stall at the end of their phase")
        crowd.leave()
        crowd.codes()
        until(lambda: active(lambda r: True) == 0, "readers that have left are still there")


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise Wrong(f"after {SETTLE_SECONDS:.0f} s {otherwise}")
        time.sleep(0.01)


def ratios(
    model: Path, *, pairs: int, readers: int, seed: int, binary: Path | None = None
) -> list[Phase]:
    """With readers that stall over without them, of each pair of phases; which of the two comes
    first alternates."""
    rng = random.Random(seed)
    found = []
    with (
        Daemon(model, *FLAGS, binary=binary) as daemon,
        Neighbours(daemon, seed) as neighbours,
    ):

        def beside() -> Phase:
            with stalled_readers(daemon, readers, rng):
                return neighbours.measure()

        alone = neighbours.measure
        alone()  # warms up
        for pair in range(pairs):
            if pair % 2:
                loaded, quiet = beside(), alone()
            else:
                quiet, loaded = alone(), beside()
            found.append(Phase(loaded.gap / quiet.gap, loaded.cpu / quiet.cpu))
            print(
                f"pair {pair + 1}: {1e3 * quiet.gap:.3f} ms alone, {1e3 * loaded.gap:.3f} ms beside"
                f" {readers} readers that stall: {found[-1].gap:.3f};"
                f" engine CPU a step {found[-1].cpu:.3f}",
                flush=True,
            )
        if daemon.log:
            raise Wrong(f"the daemon's log: {daemon.log}")
    return found


def interval(found: list[float], seed: int) -> tuple[float, float]:
    """95 %, of the median, by bootstrap."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(found, k=len(found))) for _ in range(2000))
    return medians[50], medians[-51]


@processes.ending_in_order()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--binary", type=Path, help="default: as epikv.testing finds it")
    arguments = parser.parse_args()
    try:
        found = ratios(
            sample_model(),
            pairs=arguments.pairs,
            readers=arguments.readers,
            seed=arguments.seed,
            binary=arguments.binary,
        )
    except (Wrong, DaemonError) as error:
        print(f"\nFAILED: {error}")
        return 1
    gaps = [pair.gap for pair in found]
    ratio = statistics.median(gaps)
    for what, several in (("time between messages", gaps), ("CPU a step", [p.cpu for p in found])):
        low, high = interval(several, arguments.seed)
        print(
            f"{what}: median of {len(several)} ratios {statistics.median(several):.3f}"
            f" [{low:.3f}, {high:.3f}]"
        )
    print(f"target of the first: < {MOST_RATIO}")
    if ratio >= MOST_RATIO:
        print("FAILED")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
