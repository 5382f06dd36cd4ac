"""Throws random requests at one daemon and holds every answer to what epikv promises.

    python tests/soak/soak.py [MINUTES] [--seed N]
    python tests/soak/soak.py --seed N --case M  # that request alone

Waves of concurrent clients; after each, what the daemon still holds, and some of the wave's
requests once more, alone. Two models, in float32 and bfloat16, are served. An experiment whose arms
are alike takes in all requests and is kept in SQLite. Meanwhile an operator swaps models, loads
others beside them, drains and resumes. Ends by SIGTERM amid a last wave. Exit status 1: something
did not hold.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import watch
from calls import Wrong
from cases import Behaviour
from epikv import harness, processes
from epikv.testing import Daemon, DaemonError
from facts import tally
from faults import EVICT_NOTHING
from google.protobuf.json_format import MessageToJson
from load import Failure, Load
from operators import Operator

sys.path.append(str(Path(__file__).resolve().parents[1] / "fixtures" / "python"))
from definitions import define

SAMPLES = Path(__file__).resolve().parents[2] / "tools" / "sample_model"
CHUNK = 64  # prefill tokens between rounds
# Outboxes that fill at once.
FLAGS = [
    "--threads=1",
    "--deterministic=true",
    f"--prefill_chunk_tokens={CHUNK}",
    "--max_step_tokens=64",
    "--max_running_requests=8",
    "--max_queued_requests=12",
    "--outbox_messages=16",
    "--outbox_bytes=4096",
    "--stream_stall_seconds=2",
    "--drain_seconds=3",
]
KERNELS = ("batch", "flash", "matmul")
# Of a pool that the longest requests do not fit and few fit together, by --kv_dtype.
POOL_BYTES = {"model": 3_000_000, "int8": 900_000}
WAVE_SECONDS = 45.0
DRAIN_SECONDS = 2.0
MEANINGFUL_MINUTES = 10.0  # so long a run has to have met everything, and has all its memory
SLOPE_MINUTES = 30.0  # so long a run's slope has an interval that means something
LOG_LINES = 15
# All requests take part, and nothing of them changes.
ALIKE = """
name: "alike" traffic_permille: 1000
arms { name: "a" weight_permille: 500 control: true }
arms { name: "b" weight_permille: 500 }
metrics { name: "right" kind: KIND_PROPORTION }
primary_metric: "right"
"""


def run(load: Load, minutes: float) -> None:
    """Raises Wrong, or leaves failures behind."""
    end = time.monotonic() + 60 * minutes
    waves = max(2, math.ceil(60 * minutes / WAVE_SECONDS))
    load.rest()
    while len(load.rests) < 3 or time.monotonic() < end:
        load.wave(60 * minutes / waves)
        if load.failures:
            return
        load.rest()
        load.replay()
    load.drain(DRAIN_SECONDS)


def summarize(load: Load, drawn: str) -> None:
    print("\nrequests by outcome")
    for outcome, count in load.outcomes.most_common():
        print(f"  {outcome:40} {count:7}")
    print("\npolicy         accepted  ended well  scored  replayed  entries evicted")
    for name, did in load.of_policy.items():
        print(
            f"{name:14} {did['accepted']:8} {did['ended well']:11} {did['scored']:7}"
            f" {did['replayed']:9} {evicted(load, name):16.0f}"
        )
    first, last = load.rests[0], load.rests[-1]
    print(
        f"\nrows moved {load.page.value('epikv_kv_rows_moved_total'):.0f};"
        f" threads {first.threads} to {last.threads}; open files {first.files} to {last.files}\n"
        f"RSS {first.rss_kib / 1024:.1f} to {last.rss_kib / 1024:.1f} MiB;"
        f" after the first third {watch.growth_kib(load.rests) / 1024:+.1f} MiB,"
        f" slope {watch.slope(load.rests) or 'of too few waves'}"
    )
    print(f"meanwhile {', '.join(f'{what} {n}' for what, n in load.deeds.items())}")
    print(f"\nfor the record of docs/testing.md\n{record(load, drawn)}")


def record(load: Load, drawn: str) -> str:
    """A row: when, what was drawn, minutes, requests, which of them were malformed or given up, an operator's deeds, the
    slope."""
    did = load.behaviours
    given_up = did.total() - did["malformed"] - did[Behaviour.READ] - did[Behaviour.SLOW]
    cells = (
        f"{date.today():%Y-%m-%d}",
        drawn,
        f"{load.rests[-1].seconds / 60:.0f}",
        f"{load.outcomes.total():,}",
        f"{did['malformed']:,}",
        f"{given_up:,}",
        f"{load.deeds.total()}",
        f"{watch.slope(load.rests) or 'too short'}",
    )
    return f"| {' | '.join(cells)} |"


def evicted(load: Load, policy: str) -> float:
    return load.page.total("epikv_kv_entries_evicted_total", policy=policy)


def check_run(load: Load, most_growth_mib: float, minutes: float) -> None:
    """Raises Wrong if memory grew, or if a long run has left something out."""
    if minutes < MEANINGFUL_MINUTES:
        return
    growth = watch.growth_kib(load.rests) / 1024
    if growth > most_growth_mib:
        raise Wrong(f"RSS grew by {growth:.1f} MiB, may grow by {most_growth_mib:g}")
    slope = watch.slope(load.rests)
    if minutes >= SLOPE_MINUTES and slope and slope.low > 0:
        raise Wrong(f"RSS grows by {slope}")
    if len(load.deeds) < 3:
        raise Wrong(f"this run shows nothing of some deeds of an operator: {dict(load.deeds)}")
    if not load.page.value("epikv_kv_rows_moved_total"):
        raise Wrong("no rows were moved: this run shows nothing of that")
    for name, did in load.of_policy.items():
        if not all((did["ended well"], did["scored"], did["replayed"])):
            raise Wrong(f"this run shows nothing of policy '{name}': {dict(did)}")
        if name not in EVICT_NOTHING and not evicted(load, name):
            raise Wrong(f"policy '{name}' evicted nothing")


def tell(failures: list[Failure], seed: int, log: str) -> None:
    for failure in failures[:3]:
        print(f"\nFAILED: {failure.what}")
        if (case := failure.case) is None:
            continue
        print(
            f"seed {seed}, request {case.number}; alone: soak.py --seed {seed} --case {case.number}"
        )
        print(f"{case.method}, {case.behaviour}: {case.events} events, {case.seconds:.3f} s")
        print(MessageToJson(case.request, preserving_proto_field_name=True, indent=None))
        if case.faults:
            print(f"as it was sent: {case.wire.hex()}")
    print(f"\nseed {seed}; the daemon's last words:")
    print(*log.splitlines()[-LOG_LINES:], sep="\n")


def sample_model(dtype: str = "float32") -> Path:
    """Exported as the quickstart does it, once."""
    from epikv.export import export

    directory = SAMPLES / (SAMPLES / "SHIPPED").read_text().strip()
    path = harness.cached(directory.name, {"dtype": dtype}, list(directory.glob("*.*")))
    if not path.exists():
        export(directory, path, dtype=dtype, name=directory.name)
    return path


@processes.ending_in_order()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", type=float, nargs="?", default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument(
        "--growth-mib",
        type=float,
        default=32.0,
        help="of RSS, at most, in a run of 10 minutes or more",
    )
    parser.add_argument("--case", type=int, help="this request of the seed, alone")
    parser.add_argument("--binary", type=Path, help="default: as epikv.testing finds it")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    kernel, kv_dtype = draw.choice(KERNELS), draw.choice(list(POOL_BYTES))
    if kv_dtype == "int8":
        kernel = "batch"  # no other reads it
    print(
        f"seed {arguments.seed}, {arguments.clients} clients, decode kernel {kernel},"
        f" KV cache {kv_dtype}",
        flush=True,
    )
    models = {"wide": sample_model(), "narrow": sample_model("bfloat16")}
    flags = [
        *FLAGS,
        f"--decode_kernel={kernel}",
        f"--kv_dtype={kv_dtype}",
        f"--kv_pool_bytes={POOL_BYTES[kv_dtype]}",
        "--model_name=wide",
        "--metrics_max_series=200000",  # three models at times, all policies, two arms
        f'--models=path: "{models["narrow"]}" name: "narrow"',
    ]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Daemon(
                models["wide"],
                *flags,
                f"--experiment_store={folder}/experiments.db",
                binary=arguments.binary,
            ) as daemon,
        ):
            with daemon.client() as client:
                client.create_experiment(define(ALIKE))
                client.start_experiment("alike")
            operator = Operator(daemon, models, arguments.seed)
            load = Load(daemon, arguments.seed, arguments.clients, CHUNK, operator, spare_files=2)
            try:
                if arguments.case is not None:
                    outcome = load.alone(load.case(arguments.case))
                    print(f"{tally(outcome)}, {outcome.summary}")
                else:
                    run(load, arguments.minutes)
                    summarize(load, f"{arguments.seed}: {kernel}, {kv_dtype}")
                    if not load.failures:
                        check_run(load, arguments.growth_mib, arguments.minutes)
            except Wrong as error:
                load.failures.append(Failure(None, str(error)))
            if load.failures:
                tell(load.failures, arguments.seed, daemon.log)
    except DaemonError as error:
        print(f"\nFAILED: {error}")
        return 1
    print("\nFAILED" if load.failures else "\nall held")
    return 1 if load.failures else 0


if __name__ == "__main__":
    sys.exit(main())
