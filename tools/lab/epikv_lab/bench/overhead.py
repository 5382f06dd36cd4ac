"""What eviction and serving cost: taps, observing and evicting as shares of a step's CPU time, all
that is not the forward as a share of the process's, and the time to the first token at idle.

One engine thread decodes at 512 cached tokens, 1 and 16 sequences at once, and evicts at every
step. Rounds go through `full`, every policy, and `full` again, so that what drifts on the machine
meets all of them; the second `full` over the first is the spread of equal runs. A window counts
only if, by the daemon's own counters, nothing but decoding happened in it.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.options import Kv
from epikv.stats import Estimate, bootstrap

from epikv_lab.bench.streams import Running, cancel_all, random_prompt, wait_until
from epikv_lab.bench.targets import Target, finish

SHAPE: harness.Shape = {
    "hidden": 896,
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "ffn": 4864,
    "vocab": 32000,
    "context": 2048,
    "dtype": "bf16",
}
CACHED = 512
PROMPT = CACHED - 16  # the longest that a policy which cannot rank a prompt accepts
BOUNDS = {"epikv_flat": 0.02, "sliding": 0.01, "random": 0.01}
OUTSIDE_BOUND, OUTSIDE_SEQUENCES = 0.05, 16
FIRST_TOKENS = 3  # of each length a round
PROMPTS, FIRST_TOKEN_BOUND = (128, 1024), 1.1  # over the forward of the prompt's steps
WARM = 20  # tokens of each stream before a window: the cache is at its budget by then
EVICTION = ("taps", "observe", "evict")
OUTSIDE = ("schedule", "sample", "deliver", "observe", "evict")


@dataclass(frozen=True)
class Window:
    """Steady decoding between two scrapes. Seconds are CPU time of the engine's thread."""

    policy: str
    sequences: int
    steps: int
    rounds: int  # in which a sequence evicted
    cpu: float
    stages: dict[str, float]
    # All the thread did, between steps too; None where it cannot be known.
    thread_cpu: float | None
    process_cpu: float  # of all threads: the engine's, gRPC's and the exporter's

    @property
    def eviction(self) -> float:
        return sum(self.stages[stage] for stage in EVICTION) / self.cpu

    @property
    def outside(self) -> float:
        return sum(self.stages[stage] for stage in OUTSIDE) / self.cpu

    @property
    def serving(self) -> float:
        """gRPC, scheduling, sampling, streaming and eviction: of the process's CPU time."""
        return 1 - self.stages["forward"] / self.process_cpu

    @property
    def step(self) -> float:
        return self.cpu / self.steps


@dataclass(frozen=True)
class FirstToken:
    """Seconds until the client of an idle daemon had the first token of a prompt, and those of the
    forward in the prompt's steps."""

    prompt: int
    seconds: float
    forward: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.forward


@click.command("overhead")
@click.option("--rounds", default=4, show_default=True, help="Windows of each policy.")
@click.option("--steps", default=24, show_default=True, help="Of a window.")
@click.option("--sequences", type=int, multiple=True, default=(1, 16), show_default=True)
@harness.options
def command(
    rounds: int, steps: int, sequences: tuple[int, ...], json_file: Path | None, **where: Any
) -> None:
    """CPU time of eviction over the whole step's, at 512 cached tokens, and what serving adds to the
    forward. Takes a quarter of an hour: the prompts of 16 sequences are prefilled for every window."""
    targets: list[Target] = []
    windows: list[Window] = []
    spread: dict[str, Estimate] = {}
    flags = ["--threads=1", f"--kv_pool_bytes={1 << 30}"]
    with harness.serving(
        lambda: harness.random_model("overhead", **SHAPE), flags, **where
    ) as served:
        for count in sequences:
            measured = [_round(served, count, steps, number) for number in range(rounds)]
            windows += [window for taken in measured for window in taken]
            spread |= _report(measured, count)
            targets += _targets(measured, count)
        first = [
            _first_token(served, prompt, number)
            for number in range(FIRST_TOKENS * rounds)
            for prompt in PROMPTS
        ]
    for prompt in PROMPTS:
        ratios = bootstrap([each.ratio for each in first if each.prompt == prompt])
        targets.append(Target(f"first_token_over_forward.{prompt}", ratios, FIRST_TOKEN_BOUND))
    details = {
        "shape": SHAPE,
        "cached_tokens": CACHED,
        "windows": [asdict(window) for window in windows],
        "first_tokens": [asdict(each) for each in first],
        "spread": {name: asdict(estimate) for name, estimate in spread.items()},
    }
    finish("overhead", targets, details, json_file)


def _round(served: harness.Served, count: int, steps: int, number: int) -> list[Window]:
    """A window of `full`, of every policy, and of `full` again."""
    order = list(BOUNDS)[:: -1 if number % 2 else 1]
    taken = []
    for policy in ("full", *order, "full"):
        window = _window(served, policy, count, steps)
        harness.say(
            f"{count} sequences, round {number + 1}: {policy:<10} {window.eviction:.3%}"
            f" of {1e3 * window.step:.1f} ms"
        )
        taken.append(window)
    return taken


def _window(served: harness.Served, policy: str, count: int, steps: int) -> Window:
    # The prompt is open to eviction: a policy has all but the recent window to choose from.
    kv, prompt = Kv(policy, CACHED, protect_prompt=False), PROMPT
    if policy == "full":  # at the same length on average: streams start one step after another
        kv, prompt = Kv(policy), CACHED - WARM - steps // 2 - count // 2
    running = [
        Running(served.client, random_prompt(prompt, SHAPE["vocab"], seed), kv, 500, seed)
        for seed in range(count)
    ]
    wait_until(lambda: min(r.tokens for r in running) >= WARM, running, f"{count} streams")
    before, thread_before = served.page(), _busiest_thread(served.pid)
    enough = min(r.tokens for r in running) + steps
    wait_until(lambda: min(r.tokens for r in running) >= enough, running, "a window")
    added, thread_after = served.page() - before, _busiest_thread(served.pid)
    cancel_all(running)
    served.wait_until_idle()

    taken = int(added.value("epikv_step_seconds_count", phase="decode"))
    decoded = added.value("epikv_step_tokens_total", phase="decode")
    if added.value("epikv_step_tokens_total", phase="prefill") or decoded != count * taken:
        raise click.ClickException("not only these streams ran: the daemon has other clients")
    rounds = int(added.value("epikv_kv_eviction_seconds_count", policy=policy))
    if rounds != (0 if policy == "full" else decoded):
        raise click.ClickException(f"{policy} had {rounds} rounds for {decoded} tokens")
    names = ("forward", *dict.fromkeys(EVICTION + OUTSIDE))
    return Window(
        policy=policy,
        sequences=count,
        steps=taken,
        rounds=rounds // count,
        cpu=added.value("epikv_engine_cpu_seconds_total"),
        stages={n: added.value("epikv_step_cpu_seconds_total", stage=n) for n in names},
        thread_cpu=thread_after and thread_before and thread_after - thread_before,
        process_cpu=added.value("process_cpu_seconds_total"),
    )


def _first_token(served: harness.Served, prompt: int, seed: int) -> FirstToken:
    ids = random_prompt(prompt, SHAPE["vocab"], hash((prompt, seed)))
    before, begin = served.page(), time.monotonic()
    stream = Running(served.client, ids, Kv("full"), 1)
    stream.join()
    served.wait_until_idle()
    added = served.page() - before
    if added.value("epikv_step_tokens_total", phase="prefill") != prompt:
        raise click.ClickException("not this prompt alone ran: the daemon has other clients")
    forward = added.value("epikv_step_seconds_total", stage="forward")
    return FirstToken(prompt, stream.arrivals[0] - begin, forward)


def _busiest_thread(pid: int | None) -> float | None:
    """CPU seconds of the process's busiest thread, which is the engine's."""
    if pid is None:
        return None
    stats = [f.read_text().split() for f in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return max(float(stat[0]) for stat in stats) / 1e9


def _steps_of(taken: Sequence[Window], policy: str) -> list[float]:
    return [window.step for window in taken if window.policy == policy]


def _report(rounds: Sequence[Sequence[Window]], count: int) -> dict[str, Estimate]:
    """Prints and returns what has no target: the spread of equal runs, and the whole step."""
    found: dict[str, Estimate] = {}
    pairs = [tuple(_steps_of(taken, "full")) for taken in rounds]
    found[f"full_over_full.x{count}"] = bootstrap([second / first for first, second in pairs])
    found[f"full_eviction.x{count}"] = bootstrap(
        [w.eviction for taken in rounds for w in taken if w.policy == "full"]
    )
    for policy in BOUNDS:
        ratios = [_steps_of(t, policy)[0] * 2 / sum(_steps_of(t, "full")) for t in rounds]
        found[f"{policy}_step_over_full.x{count}"] = bootstrap(ratios)
    shares = [1 - w.stages["forward"] / w.thread_cpu for t in rounds for w in t if w.thread_cpu]
    if shares:
        found[f"thread_outside_forward.x{count}"] = bootstrap(shares)
    forward = median(1e3 * w.stages["forward"] / w.steps for taken in rounds for w in taken)
    click.echo(f"\n{count} sequences, forward of {forward:.1f} ms CPU")
    for name, e in found.items():
        click.echo(f"  {name:<32} {e.value:.4f} [{e.low:.4f}, {e.high:.4f}]")
    click.echo()
    return found


def _targets(rounds: Sequence[Sequence[Window]], count: int) -> list[Target]:
    windows = [window for taken in rounds for window in taken]
    targets = [
        Target(
            f"{policy}.x{count}", bootstrap([w.eviction for w in windows if w.policy == policy]), at
        )
        for policy, at in BOUNDS.items()
    ]
    if count == OUTSIDE_SEQUENCES:
        for policy in ("full", *BOUNDS):
            shares = [w.outside for w in windows if w.policy == policy]
            name = f"outside_forward.{policy}.x{count}"
            targets.append(Target(name, bootstrap(shares), OUTSIDE_BOUND))
        serving = bootstrap([w.serving for w in windows if w.policy == "full"])
        targets.append(Target(f"serving.full.x{count}", serving, OUTSIDE_BOUND))
    return targets
