"""Ends requests by the ten thousand, in every state and in every way, and looks what is left.

    python tests/soak/ends.py [--ends N] [--seed N]

In rounds, against a tiny model and (12 in 100) the shipped one. What state a request was in when it
ended is what the daemon says of it. Exit status 1: something did not hold.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import watch
from calls import Wrong, at_most, same
from crowd import Crowd, Plan, Way
from epikv import harness, processes
from epikv.messages import Model
from epikv.options import Kv, Output, Stop
from epikv.testing import Daemon, DaemonError
from epikv.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from soak import sample_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "fixtures" / "python"))
from relay import Relay

PLACES = 64  # requests that hold KV at once
STATES = ("queued", "prefill", "decode", "stalled")
LEAST_SHARE = 0.1  # of all ends, in each state
REAL_SHARE = 0.12  # of all ends, on the shipped model
OUTBOX_MESSAGES = 8
FLAGS = [
    "--threads=1",
    "--kv_pool_bytes=400000000",
    f"--max_running_requests={PLACES}",
    "--prefill_chunk_tokens=16",
    f"--max_step_tokens={16 * PLACES}",
    f"--outbox_messages={OUTBOX_MESSAGES}",
    # Nothing but the clients ends a request.
    "--stream_stall_seconds=600",
    "--drain_seconds=600",
    "--refuse_infeasible_deadlines=false",
    "--log_level=warning",
]
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 331,
    "max_position_embeddings": 4096,
}
POLICIES = ("epikv_flat", "sliding", "h2o", "random")
SHORT_PROMPT, BUDGET = 16, 64  # tokens
LATER = (3.0, 3.5)  # seconds, of deadlines that stalled readers meet
SOON = (0.03, 0.3)  # of all others
CODES = {
    Way.CANCEL: {"CANCELLED"},
    Way.CANCEL_BY_ID: {"CANCELLED"},
    Way.KILL: {"CANCELLED"},
    Way.DEADLINE: {"DEADLINE_EXCEEDED"},
}
MOST_GROWTH_MIB = 8.0
WARM_ENDS = 8000  # after which memory may not grow
SETTLE_SECONDS = 30.0
KEEPALIVE_SECONDS = 80.0  # after which gRPC gives a silent connection up: 60 + 20
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Ended:
    """What the access log says of a request."""

    code: str
    began: bool  # it held KV
    output: int  # tokens


class Ends:
    """Rounds of crowds against one daemon, and their count."""

    def __init__(self, daemon: Daemon, access_log: Path, model: Model, seed: int) -> None:
        self._daemon, self._log, self._model = daemon, access_log, model
        self._channel = grpc.insecure_channel(daemon.admin)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._random = random.Random(seed)
        self._read = 0  # bytes of the log
        self._logged: dict[str, Ended] = {}  # of what it says, that which was not yet asked for
        # Those whose deadline may have passed on the way: gRPC does not tell the daemon of them.
        self._late: set[str] = set()
        self._numbers = 0
        self._round = 0
        self._begin = time.monotonic()
        self.sent = 0
        self.counts: Counter[tuple[str, str]] = Counter()  # state and way
        self.missed: Counter[str] = Counter()  # what came before they could leave
        self.rests: list[tuple[int, watch.Held]] = []  # ends so far, and what was held then

    def close(self) -> None:
        self._channel.close()

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def lost(self) -> int:
        """Requests that the daemon never heard of."""
        return len(self._late)

    def run(self, ends: int) -> None:
        """Raises Wrong as soon as something does not hold."""
        for _ in range(WARM_UP_ROUNDS):
            self.round()
        self.rests.clear()
        self.rest()
        said = 0.0
        while self.total < ends:
            self.round()
            self.rest()
            if time.monotonic() - said > 30:
                said = time.monotonic()
                self.tell()

    def touch_pool(self) -> None:
        """Memory of the pool becomes the process's when it is first written: all that the rounds
        can ever use is, before RSS is watched."""
        crowd = self._crowd("fill", Way.CANCEL, PLACES)
        crowd.ready()
        self._end([crowd], ready=False)
        self.counts.clear()
        self.missed.clear()

    def round(self) -> None:
        self._round += 1
        ways = list(Way)
        way = ways[self._round % len(ways)]
        self._held_places(way)
        for state in ("prefill", "decode"):
            self._end([self._crowd(state, way, PLACES // len(ways)) for way in ways])

    def rest(self) -> None:
        """Raises Wrong unless everything was given back."""
        baseline = self.rests[0][1] if self.rests else None
        seconds = time.monotonic() - self._begin
        self.rests.append((self.total, watch.at_rest(self._daemon, seconds, baseline)))
        status = self._admin.GetServerStatus(admin_pb2.GetServerStatusRequest())
        same("live requests", [model.live_requests for model in status.models], [0])
        same("the daemon's log", self._daemon.log, "")
        for name in self._late & self._logged.keys():
            self._late.remove(name)
            self._count(name, self._logged.pop(name), frozenset())
        same("ends of requests that were not sent", list(self._logged), [])

    def tell(self) -> None:
        seconds = time.monotonic() - self._begin
        print(
            f"[{seconds:6.1f} s] {self._model.name}: {self.total} ends,"
            f" {self.total / seconds:.0f} a second;"
            f" RSS {self.rests[-1][1].rss_kib / 1024:.1f} MiB",
            flush=True,
        )

    def half_open(self) -> None:
        """The network between them ends without a word: keepalive finds it, in queue and decode."""
        with Relay(self._daemon.grpc) as relay:
            some = PLACES // 4
            decoding = self._crowd("stalled", Way.KILL, some, server=relay.address)
            plug = self._crowd("stalled", Way.CANCEL, PLACES - some)
            for crowd in (decoding, plug):
                crowd.ready()
            self._await("WAITS_FOR_READER", PLACES)
            queued = self._crowd("queued", Way.KILL, some, server=relay.address)
            queued.ready()
            relay.freeze()
            begin = time.monotonic()
            self._until(
                lambda: {r.request_id for r in self._active()} == plug.names,
                lambda: f"half-open connections are still there: {self._active()}",
                KEEPALIVE_SECONDS + SETTLE_SECONDS,
            )
            print(f"half-open connections were found after {time.monotonic() - begin:.0f} s")
            for crowd in (decoding, queued, plug):
                crowd.leave()
                crowd.codes()
        self._read_log()
        self._logged.clear()
        self.rest()

    def _held_places(self, way: Way) -> None:
        """All places are held by readers that stall, and crowds wait behind them."""
        plug = self._crowd("stalled", way, PLACES)
        self._ready(plug)
        stalled = self._await("WAITS_FOR_READER", PLACES, or_ended=True)
        queued = [self._crowd("queued", way, PLACES) for way in Way]
        self._end(queued)
        self._end([plug], ready=False, stalled=stalled)

    def _end(
        self, everyone: list[Crowd], *, ready: bool = True, stalled: frozenset[str] = frozenset()
    ) -> None:
        """Lets them leave when all are where they should be, and counts them."""
        if ready:
            for crowd in everyone:
                self._ready(crowd)
        by_themselves = [crowd for crowd in everyone if crowd.way is Way.DEADLINE]
        others = [crowd for crowd in everyone if crowd.way is not Way.DEADLINE]
        for crowd in others:
            crowd.leave()
        names = {name for crowd in everyone for name in crowd.names} - self._late
        self._until(
            lambda: names <= self._read_log().keys(),
            lambda: f"they go on: {sorted(names - self._logged.keys())}\n{self._active()}",
        )
        for name in names:
            self._count(name, self._logged.pop(name), stalled)
        for crowd in by_themselves:
            crowd.leave()
        for crowd in others + by_themselves:
            if wrong := crowd.codes().keys() - CODES[crowd.way] - {"OK"}:
                raise Wrong(f"clients that left by {crowd.way} were told {wrong}")

    def _ready(self, crowd: Crowd) -> None:
        late = crowd.ready()
        if crowd.way is Way.DEADLINE:
            self._late |= late
        elif late:
            raise Wrong(f"ended before they could leave: {sorted(late)}")

    def _count(self, name: str, ended: Ended, stalled: frozenset[str]) -> None:
        """By what the daemon says of it; its name tells what was meant."""
        meant, way, _ = name.split("/")
        if name in stalled:
            state = "stalled"
        elif ended.output > 0:
            state = "decode"
        elif ended.began:
            state = "prefill"
        else:  # of others than those behind held places nobody knows whether they were admitted
            state = "queued" if meant == "queued" else "unknown"
        if ended.code == "OK" or state == "unknown":
            self.missed[f"{meant}, {way}: {ended.code} {state}"] += 1
            return
        self.counts[state, way] += 1

    def _crowd(self, state: str, way: Way, size: int, server: str = "") -> Crowd:
        requests = dict(self._request(state, way) for _ in range(size))
        until = {"prefill": "progress", "decode": "delta", "fill": "delta"}.get(state, "accepted")
        least, most = LATER if state == "stalled" else SOON
        deadlines = [self._random.uniform(least, most) for _ in range(size)]
        plan = Plan(
            requests,
            until,
            way,
            deadlines if way is Way.DEADLINE else (),
            paced=state == "stalled",
        )
        self.sent += size
        return Crowd(server or self._daemon.grpc, plan)

    def _request(self, state: str, way: Way) -> tuple[str, bytes]:
        """Of random tokens; its id tells what is to become of it."""
        self._numbers += 1
        most = self._model.context_length
        prompts = {"fill": most - 8, "prefill": most * 3 // 4}
        prompt = prompts.get(state, SHORT_PROMPT)
        policy = POLICIES[self._numbers % len(POLICIES)]
        request = generation_pb2.GenerateRequest(
            request_id=f"{state}/{way}/{self._numbers}",
            stop=Stop(max_output_tokens=most - prompt, ignore_eos=True).to_proto(),
            output=Output(kv_trace=True, progress=True).to_proto(),
            kv=None if state in prompts else Kv(policy, BUDGET, equal_protection=True).to_proto(),
        )
        request.token_ids.ids.extend(
            self._random.randrange(self._model.vocab_size) for _ in range(prompt)
        )
        return request.request_id, request.SerializeToString()

    def _active(self) -> list[admin_pb2.ActiveRequest]:
        return list(self._admin.ListActiveRequests(admin_pb2.ListActiveRequestsRequest()).requests)

    def _await(self, waits_for: str, count: int, *, or_ended: bool = False) -> frozenset[str]:
        """The names of so many requests that wait for this. `or_ended`: some may have ended."""
        wanted = admin_pb2.ActiveRequest.WaitsFor.Value(waits_for)
        found: frozenset[str] = frozenset()

        def all_wait() -> bool:
            nonlocal found
            active = self._active()
            found = frozenset(r.request_id for r in active if r.waits_for == wanted)
            return len(found) == (len(active) if or_ended else count)

        self._until(all_wait, lambda: f"not all say {waits_for}: {self._active()}")
        return found

    def _read_log(self) -> dict[str, Ended]:
        """All that have ended and were not yet asked for. Raises Wrong for an end of another kind
        than the client's."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                entry = json.loads(line)
                if entry["method"] == "GenerationService/Generate":
                    self._take(entry)
        return self._logged

    def _take(self, entry: dict[str, Any]) -> None:
        name = entry.get("request_id")
        if name is None and entry["code"] in ("CANCELLED", "DEADLINE_EXCEEDED"):
            return  # it left before its request was read, so nobody knows its name: it is among the late
        ended = Ended(entry["code"], "peak_tokens" in entry, entry.get("output_tokens", 0))
        if name in self._logged:
            raise Wrong(f"{name} ended twice")
        if ended.code not in CODES[Way(name.split("/")[1])] | {"OK"}:
            raise Wrong(f"{name} ended with {ended.code} ({entry.get('finish_reason', '')})")
        self._logged[name] = ended

    @staticmethod
    def _until(
        is_so: Callable[[], bool], otherwise: Callable[[], str], seconds: float = SETTLE_SECONDS
    ) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise Wrong(f"after {seconds:.0f} s {otherwise()}")
            time.sleep(0.01)


def growth_mib(rests: list[tuple[int, watch.Held]]) -> float | None:
    """Of RSS, by a line fitted to what was held after each round against the ends so far. What came
    before WARM_ENDS or in the first fifth is left out: the allocators' arenas fill up. None: the
    run was too short to tell."""
    begin = max(WARM_ENDS, rests[-1][0] // 5)
    rest = [(ends, held.rss_kib) for ends, held in rests if ends >= begin]
    if not rest or rest[-1][0] - rest[0][0] < WARM_ENDS // 2:
        return None
    mean_ends = sum(ends for ends, _ in rest) / len(rest)
    mean_rss = sum(rss for _, rss in rest) / len(rest)
    spread = sum((ends - mean_ends) ** 2 for ends, _ in rest)
    slope = sum((ends - mean_ends) * (rss - mean_rss) for ends, rss in rest) / spread
    return slope * (rest[-1][0] - rest[0][0]) / 1024


def tiny_model() -> Path:
    """Random weights; exported once."""
    from epikv.export import random_model

    path = harness.cached("tiny", TINY, [])
    if not path.exists():
        random_model(TINY, path, name="tiny", check=False)
    return path


def summarize(ends: Ends, seconds: float) -> None:
    first, last = ends.rests[0][1], ends.rests[-1][1]
    print(f"\n{ends.total} ends, {ends.total / seconds:.0f} a second; of {ends.sent} requests")
    print(f"{'':10}" + "".join(f"{way:>14}" for way in Way))
    for state in STATES:
        print(f"{state:10}" + "".join(f"{ends.counts[state, way]:14}" for way in Way))
    if ends.lost:
        print(f"  not counted: {ends.lost:7} whose deadlines passed on the way to the daemon")
    for what, count in ends.missed.most_common(8):
        print(f"  not counted: {count:7} {what}")
    growth = growth_mib(ends.rests)
    told = "too short a run to fit its growth" if growth is None else f"fitted growth {growth:+.2f}"
    print(
        f"RSS {first.rss_kib / 1024:.1f} to {last.rss_kib / 1024:.1f} MiB, {told};"
        f" threads {first.threads} to {last.threads}; open files {first.files} to {last.files}",
        flush=True,
    )


def soak(
    model: Path,
    least: int,
    seed: int,
    *flags: str,
    full: bool = False,
    binary: Path | None = None,
) -> Counter[tuple[str, str]]:
    """So many ends against a daemon of its own. Raises Wrong if something does not hold. `full`:
    looks for half-open connections and for growth of memory as well."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "access.log"
        with Daemon(model, *FLAGS, f"--access_log={log}", *flags, binary=binary) as daemon:
            with daemon.client() as client:
                [served] = client.models()
            begin = time.monotonic()
            ends = Ends(daemon, log, served, seed)
            if full:
                ends.touch_pool()
            ends.run(least)
            summarize(ends, time.monotonic() - begin)
            if full:
                at_most("fitted growth of RSS in MiB", growth_mib(ends.rests) or 0, MOST_GROWTH_MIB)
                ends.half_open()
            ends.close()
    return ends.counts


@processes.ending_in_order()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ends", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--binary", type=Path, help="default: as epikv.testing finds it")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    real = round(REAL_SHARE * arguments.ends)
    counts: Counter[tuple[str, str]] = Counter()
    try:
        for model, least in ((sample_model(), real), (tiny_model(), arguments.ends - real)):
            counts += soak(model, least, arguments.seed, full=True, binary=arguments.binary)
        for state in STATES:
            found = sum(counts[state, way] for way in Way)
            if found < LEAST_SHARE * arguments.ends:
                raise Wrong(f"{found} ends in state '{state}': this run shows too little of it")
    except (Wrong, DaemonError) as error:
        print(f"\nFAILED: {error}")
        return 1
    print(f"\n{counts.total()} ends, all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
