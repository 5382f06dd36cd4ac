"""What it costs to read attention: decoding under policies that read none and under those that do.

Two comparators, each paired within rounds. In the daemon, one sequence decodes at its budget under
each policy in turn, over whole rounds of eviction: policies that read attention get the newest
query's row from a side computation, and the kernel is the same for all. In Hugging Face
transformers, with the same shape, a decode step behind a cache of so many tokens, and a prefill, in
the ways in which the EpiKV authors' code runs their methods (`epikv_lab.bench.reference`). Their step
also gathers the kept rows anew, for every method alike; that is left out, and would bring their
ratios nearer to 1.

Everything has one thread. Each figure is a ratio of times, above 1 where the other is slower; the
second is of CPU time, which other programs on the machine disturb less. The order of a round is
turned round in the next.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from epikv import harness
from epikv.options import Kv
from epikv.stats import bootstrap

from epikv_lab.bench.streams import Running, random_prompt, wait_until
from epikv_lab.bench.targets import finish

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from epikv_lab.bench.reference import Way

Samples = dict[str, "Time"]  # a round's, by arm

SHAPE: harness.Shape = {
    "hidden": 512,
    "layers": 16,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 1536,
    "vocab": 4096,
    "context": 8192,
    "dtype": "bf16",
}
# Their 2.8x is epikv_lag_kv against raas. The second epikv_flat tells how equal equal runs are.
ARMS: dict[str, dict[str, Any]] = {
    "epikv_flat": {},
    "epikv_flat again": {},
    "epikv_lag_kv": {},
    "random": {},
    "raas": {},
    "h2o": {},
    "h2o:scope=model": {"scope": "model"},
    "tova": {},
    "snapkv": {},
    "rkv_epikv": {},
    "full": {},
}
BELOW = 16  # tokens by which a prompt is shorter than the budget: some policies cannot rank one
WINDOW = 128  # steps; in as many each policy evicts a whole number of times
# The step a window begins with: the cache is full, whatever a policy's slack, and no round is near.
FIRST = BELOW + WINDOW + WINDOW // 4
ROOM = 8  # windows for which a stream goes on, so that it is not at its end when one is read
TRIES = 3  # of a window: on a busy machine who reads it may come too late
WARM = 4  # steps, of transformers


@dataclass(frozen=True)
class Time:
    """Seconds of one step or prefill."""

    wall: float
    cpu: float


@click.command("attention")
@click.option("--rounds", default=7, show_default=True)
@click.option("--budget", default=1024, show_default=True, help="Of the daemon's sequences.")
@click.option(
    "--cached", "lengths", type=int, multiple=True, default=(1024, 4096), show_default=True,
    help="Tokens that transformers decodes behind, and prefills.",
)  # fmt: skip
@click.option("--steps", default=16, show_default=True, help="That transformers decodes a round.")
@click.option("--layers", default=SHAPE["layers"], show_default=True, help="Of the model.")
@harness.options
def command(
    rounds: int,
    budget: int,
    lengths: tuple[int, ...],
    steps: int,
    layers: int,
    json_file: Path | None,
    **where: Any,
) -> None:
    """Speed of policies that read no attention over those that do, here and in transformers."""
    if where["server"] is not None:
        raise click.UsageError("it compares one shape in two programs: leave --server out")
    shape: harness.Shape = {**SHAPE, "layers": layers}
    load = [os.getloadavg()[0]]
    samples = {f"epikvd, decode at a budget of {budget}": _daemon(shape, budget, rounds, where)}
    load.append(os.getloadavg()[0])
    samples |= _transformers(shape, lengths, steps, rounds)
    load.append(os.getloadavg()[0])

    figures = {place: told(taken) for place, taken in samples.items()}
    click.echo(f"\n{table(figures)}\n")
    details = {
        "shape": shape,
        "rounds": rounds,
        "load_average": load,
        "figures": figures,
        "samples": {
            place: [{arm: asdict(t) for arm, t in taken.items()} for taken in of]
            for place, of in samples.items()
        },
    }
    finish("attention", [], details, json_file, untargeted="it compares with published figures")


def told(rounds: Sequence[Samples]) -> dict[str, dict[str, Any]]:
    """Of each arm the median milliseconds, and its time over the first arm's in the same round."""
    base = next(iter(rounds[0]))
    return {
        arm: {
            "milliseconds": 1e3 * median(taken[arm].wall for taken in rounds),
            "wall": asdict(bootstrap([t[arm].wall / t[base].wall for t in rounds])),
            "cpu": asdict(bootstrap([t[arm].cpu / t[base].cpu for t in rounds])),
        }
        for arm in rounds[0]
    }


def table(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Of `told`, by place, in Markdown."""
    lines = ["| | ms | time over the first's | CPU time over the first's |"]
    lines.append("|---|---|---|---|")
    for place, arms in figures.items():
        lines.append(f"| **{place}** | | | |")
        for arm, found in arms.items():
            wall, cpu = (
                f"{e['value']:.2f} [{e['low']:.2f}, {e['high']:.2f}]"
                for e in (found["wall"], found["cpu"])
            )
            lines.append(f"| `{arm}` | {found['milliseconds']:.1f} | {wall} | {cpu} |")
    return "\n".join(lines)


def _rounds(count: int, arms: Sequence[str], measure: Callable[[str, int], Time]) -> list[Samples]:
    """measure(arm, round) of every arm in every round, whose order is turned round in the next."""
    found = []
    for number in range(count):
        taken = {arm: measure(arm, number) for arm in (arms if number % 2 == 0 else arms[::-1])}
        found.append({arm: taken[arm] for arm in arms})
    return found


def _daemon(
    shape: harness.Shape, budget: int, rounds: int, where: Mapping[str, Any]
) -> list[Samples]:
    flags = ["--threads=1", f"--kv_pool_bytes={1 << 30}"]
    with harness.serving(
        lambda: harness.random_model("attention", **shape), flags, **where
    ) as served:

        def measure(arm: str, number: int) -> Time:
            name = arm.partition(":")[0].partition(" ")[0]
            kv = Kv(name, None if name == "full" else budget, ARMS[arm], protect_prompt=False)
            taken = _first_whole_window(served, kv, budget, number)
            harness.say(f"round {number + 1}: {arm:<18} {1e3 * taken.wall:.2f} ms a token")
            return taken

        measure("full", 0)  # a daemon's first steps are slow
        return _rounds(rounds, list(ARMS), measure)


def _first_whole_window(served: harness.Served, kv: Kv, budget: int, seed: int) -> Time:
    for _ in range(TRIES):
        if (taken := _window(served, kv, budget, seed)) is not None:
            return taken
    raise click.ClickException(f"{TRIES} streams ended before their windows did")


def _window(served: harness.Served, kv: Kv, budget: int, seed: int) -> Time | None:
    """Of a step, over as many as hold whole rounds of eviction. None: the stream ended before."""
    vocabulary = served.client.models()[0].vocab_size
    prompt = random_prompt(budget - BELOW, vocabulary, seed)
    if kv.policy == "full":  # at the same length on average
        prompt = prompt[: budget - FIRST - WINDOW // 2]
    stream = Running(served.client, prompt, kv, FIRST + ROOM * WINDOW, seed)
    wait_until(lambda: stream.tokens >= FIRST, [stream], "a stream")
    before = served.page()
    # By the daemon's count: tokens may reach a busy client many at a time.
    while (added := served.page() - before).value(
        "epikv_step_seconds_count", phase="decode"
    ) < WINDOW:
        stream.check()
        if stream.summary is not None:
            return None
    stream.cancel()
    stream.join()
    served.wait_until_idle()
    if kv.policy != "full" and not added.value("epikv_kv_eviction_seconds_count", policy=kv.policy):
        raise click.ClickException(f"{kv.policy} has not evicted")
    steps = added.value("epikv_step_seconds_count", phase="decode")
    wall = added.value("epikv_step_seconds_sum", phase="decode")
    return Time(wall / steps, added.value("epikv_engine_cpu_seconds_total") / steps)


def _transformers(
    shape: harness.Shape, lengths: Sequence[int], steps: int, rounds: int
) -> dict[str, list[Samples]]:
    import torch

    from epikv_lab.bench import reference

    torch.set_num_threads(1)
    model = reference.load(shape)
    ways = reference.WAYS
    found = {}
    for tokens in lengths:
        for what, measure in (
            ("decode behind", lambda name, _, n=tokens: _decoded(model, ways[name], n, steps)),
            ("prefill of", lambda name, _, n=tokens: _prefilled(model, ways[name], n)),
        ):
            harness.say(f"transformers: {what} {tokens}")
            found[f"transformers, {what} {tokens} tokens"] = _rounds(rounds, list(ways), measure)
    return found


def _decoded(model: "LlamaForCausalLM", way: "Way", cached: int, steps: int) -> Time:
    """Of a step behind so many tokens, its policy's scores included."""
    import torch

    from epikv_lab.bench import reference

    model.set_attn_implementation(way.attention)
    cache = reference.filled(model, cached)
    before: reference.Scores = None
    for step in range(WARM + steps):
        if step == WARM:
            begin = _now()
        out = reference.forward(model, way, torch.tensor([[step]]), cache)
        before = reference.scores(out, before)
        cache.crop(-1)  # the token of this step
    return _since(begin, steps)


def _prefilled(model: "LlamaForCausalLM", way: "Way", tokens: int) -> Time:
    import torch
    from transformers import DynamicCache

    from epikv_lab.bench import reference

    model.set_attn_implementation(way.attention)
    ids = torch.arange(tokens)[None] % model.config.vocab_size
    begin = _now()
    reference.forward(model, way, ids, DynamicCache())
    return _since(begin, 1)


def _now() -> Time:
    return Time(time.monotonic(), time.process_time())


def _since(begin: Time, steps: int) -> Time:
    end = _now()
    return Time((end.wall - begin.wall) / steps, (end.cpu - begin.cpu) / steps)
