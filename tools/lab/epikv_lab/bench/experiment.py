"""What an experiment costs the daemon: CPU time per generated token with one that all requests take
part in, over that without, and the time it takes to deal a request.

One daemon, asked for the same requests again and again: nothing runs, an experiment runs whose arms
set nothing, the same with an outcome recorded of each request, nothing runs again. The second of
those without over the first is the spread of equal runs. A window counts only if, by the daemon's
own counters, all its requests took part or none, and all records are in the store at its end.
"""

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from epikv import harness
from epikv.bench.generator import ClosedLoop, Generator
from epikv.bench.workload import Workload, parse_arm, parse_lengths
from epikv.scrape import Page
from epikv.stats import Estimate, bootstrap
from epikv.v1 import experiment_pb2, generation_pb2
from google.protobuf import text_format

from epikv_lab.bench.overhead import SHAPE
from epikv_lab.bench.programs import measuring_program
from epikv_lab.bench.targets import Target, finish

BOUND = 1.02  # CPU time per token over that without
DEAL_BOUND = 5.0  # microseconds
SETTLE_SECONDS, SETTLE_TRIES = 0.5, 60  # after a window's last request, for its records
METRIC = "worth"
DEFINITION = f"""
hypothesis: "arms that set nothing"
traffic_permille: 1000
arms {{ name: "a" weight_permille: 500 control: true }}
arms {{ name: "b" weight_permille: 500 }}
metrics {{ name: "{METRIC}" kind: KIND_PROPORTION }}
primary_metric: "{METRIC}"
guardrails {{ metric: "failed" margin: 0.1 }}
"""
KINDS = {"without": (0, 0), "experiment": (1, 0), "outcomes": (1, 1)}  # of each: runs, is told
CPU = ("engine", "process")

_TICKS = os.sysconf("SC_CLK_TCK")  # a second


@dataclass(frozen=True)
class Asked(Workload):
    """Requests of a fixed length, whose answers are right or wrong in turn."""

    def request(self, number: int) -> tuple[int, generation_pb2.GenerateRequest]:
        arm, request = super().request(number)
        request.stop.min_output_tokens = request.stop.max_output_tokens
        request.stop.ignore_eos = True
        return arm, request

    def judge(self, number: int, text: str) -> bool:
        return number % 2 == 0


@dataclass(frozen=True)
class Window:
    """The same requests, under one of KINDS. CPU times in seconds."""

    kind: str
    tokens: int
    engine: float  # the engine's thread, in steps
    process: float  # all threads

    def per_token(self, of: str) -> float:
        return getattr(self, of) / self.tokens


@click.command("experiment")
@click.option("--rounds", default=20, show_default=True, help="Of four windows each.")
@click.option("--requests", default=32, show_default=True, help="Of a window.")
@click.option("--concurrency", default=8, show_default=True)
@click.option("--prompt", default=64, show_default=True, help="Tokens of each request.")
@click.option("--output", default=64, show_default=True, help="Tokens of each request.")
@click.option("--policy", default="sliding:96", show_default=True, help="policy[:budget]")
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Default: of random weights, 896 wide, 24 layers.",
)
@harness.options
def command(
    rounds: int,
    requests: int,
    concurrency: int,
    prompt: int,
    output: int,
    policy: str,
    model: Path | None,
    json_file: Path | None,
    **where: Any,
) -> None:
    """CPU time per token with an experiment at 100 % of traffic over that without, and the time
    to deal a request. Takes about twenty minutes on the default model."""
    if where["server"] is not None:
        raise click.UsageError(
            "the CPU time of another's daemon cannot be told: leave out --server"
        )
    arms, lengths = [parse_arm(policy)], (parse_lengths(str(prompt)), parse_lengths(str(output)))
    with tempfile.TemporaryDirectory(prefix="epikv-bench-") as folder:
        flags = ["--threads=1", "--prefix_cache_share=0", f"--kv_pool_bytes={1 << 30}"]
        # Replays take idle time, have a share of their own, and would take it between windows.
        flags += [f"--experiment_store={folder}/experiments.db", "--experiment_shadow_permille=0"]
        flags += ["--metrics_max_series=1000000"]  # of stopped experiments, for ten minutes
        with harness.serving(
            lambda: model or harness.random_model("overhead", **SHAPE), flags, **where
        ) as served:
            vocabulary = served.client.models()[0].vocab_size
            workload = Asked(arms, *lengths, vocabulary, units=requests)
            bench = _Bench(served, workload, requests, concurrency)
            bench.window("without")  # warms up
            windows = [bench.round(number) for number in range(rounds)]
    dealt = _dealt(where["binary"])
    targets = _targets(windows, dealt)
    details = {
        "requests": requests,
        "concurrency": concurrency,
        "prompt": prompt,
        "output": output,
        "policy": policy,
        "model": "" if model is None else model.name,
        "windows": [[asdict(window) for window in taken] for taken in windows],
        "dealt": dealt,
        "spread": {of: asdict(_spread(windows, of)) for of in CPU},
    }
    finish("experiment", targets, details, json_file)


class _Bench:
    def __init__(
        self, served: harness.Served, workload: Workload, requests: int, concurrency: int
    ) -> None:
        self._served, self._workload = served, workload
        self._requests, self._concurrency = requests, concurrency
        self._experiments = 0

    def round(self, number: int) -> list[Window]:
        """Without, with in two ways, and without again; backwards in every second round."""
        order = ["without", "experiment", "outcomes", "without"]
        taken = [self.window(kind) for kind in order[:: -1 if number % 2 else 1]]
        harness.say(
            f"round {number + 1}: "
            + ", ".join(f"{w.kind} {1e6 * w.per_token('process'):.1f} us/token" for w in taken)
        )
        return taken

    def window(self, kind: str) -> Window:
        runs, told = KINDS[kind]
        name = self._start() if runs else ""
        generator = Generator(
            self._served.address, self._workload, outcome=METRIC if told else "", connections=2
        )
        before, process = self._served.page(), _process_seconds(self._served.pid)
        load = generator.run(ClosedLoop(self._concurrency, math.inf, self._requests))
        for _ in range(SETTLE_TRIES):  # one, and one scrape, unless the machine is busy
            time.sleep(SETTLE_SECONDS)
            added = self._served.page() - before
            if _written(added) >= self._requests * (2 * runs + told):
                break
        process = _process_seconds(self._served.pid) - process
        if name:
            self._served.client.stop_experiment(name, reason="measured")
        errors = [sample.error for sample in load.samples if sample.error]
        if errors or len(load.samples) != self._requests:
            raise click.ClickException(f"requests failed: {errors[:3]}")
        part = added.total("epikv_experiment_assignments_total", source="hash")
        for what, found, each in (
            ("requests took part", part, runs),
            (
                "records were written",
                _written(added),
                2 * runs + told,
            ),  # its begin, its end, its outcome
        ):
            if found != self._requests * each:
                raise click.ClickException(
                    f"{kind}: {found:.0f} {what}, not {self._requests * each}"
                )
        return Window(
            kind=kind,
            tokens=sum(sample.tokens for sample in load.samples),
            engine=added.total("epikv_engine_cpu_seconds_total"),
            process=process,
        )

    def _start(self) -> str:
        self._experiments += 1
        definition = text_format.Parse(DEFINITION, experiment_pb2.Experiment())
        definition.name = f"cost-{self._experiments}"
        self._served.client.create_experiment(definition)
        self._served.client.start_experiment(definition.name)
        return definition.name


def _written(page: Page) -> float:
    return page.value("epikv_experiment_records_total", fate="written")


def _process_seconds(pid: int | None) -> float:
    """CPU time of a process, user and system, of all the threads it has had."""
    assert pid is not None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _dealt(binary: Path | None) -> dict[str, list[float]]:
    """Microseconds to deal a request, by how many experiments run; empty outside of a checkout."""
    program = measuring_program("experiment_costs", binary)
    if program is None:
        harness.say(
            "experiment_costs is not there: how long it takes to deal a request is not told"
        )
        return {}
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _ratios(rounds: Sequence[Sequence[Window]], kind: str, of: str) -> list[float]:
    """Over the mean of those without, around them."""
    return [
        next(w.per_token(of) for w in taken if w.kind == kind)
        / fmean(w.per_token(of) for w in taken if w.kind == "without")
        for taken in rounds
    ]


def _spread(rounds: Sequence[Sequence[Window]], of: str) -> Estimate:
    """The last of a round over the first, both without."""
    return bootstrap([taken[-1].per_token(of) / taken[0].per_token(of) for taken in rounds])


def _targets(rounds: Sequence[Sequence[Window]], dealt: dict[str, list[float]]) -> list[Target]:
    click.echo(f"\n{'CPU time per token':<24}" + "".join(f"{of:>22}" for of in CPU))
    for kind in KINDS:
        taken = [[w for w in windows if w.kind == kind] for windows in rounds]
        micros = [bootstrap([1e6 * w.per_token(of) for ws in taken for w in ws]) for of in CPU]
        click.echo(f"{kind + ', us':<24}" + "".join(f"{e.value:22.2f}" for e in micros))
    spreads = [_spread(rounds, of) for of in CPU]
    told = [f"{e.value:.4f} [{e.low:.4f}, {e.high:.4f}]" for e in spreads]
    click.echo(f"{'without, again':<24}" + "".join(f"{text:>26}" for text in told) + "\n")
    targets = [
        Target(f"{kind}.{of}", bootstrap(_ratios(rounds, kind, of)), BOUND)
        for of in CPU
        for kind in KINDS
        if kind != "without"
    ]
    return targets + [
        Target(f"deal.{running.replace(' ', '_')}", bootstrap(samples), DEAL_BOUND)
        for running, samples in dealt.items()
    ]
