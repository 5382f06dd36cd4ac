"""The longest context that fits a fixed memory above the weights, by what is made of attention.

A prefill in Hugging Face transformers, in the ways in which the EpiKV authors' code runs their
methods (`epikv_lab.bench.reference`): each in a process of its own, at lengths that double until the
memory or the CPU time of one is spent. A curve through these peaks, a parabola where maps are made
and else a line, gives the longest context; where that is near enough, it is run as well, and
`confirmed` is its peak over the memory. Otherwise it is extrapolated, and `residual`, the curve's
largest deviation from a measured peak, says how well it fits.

And `epikvd`, which prefills in chunks and reads attention by rows: a sequence whose whole context
stays cached, as `full` has it, and under policies whose budget is the context. The longest is the
one for which admission reserves the memory; what the process grows by is measured at some lengths,
and a line through these says what it would be there: `confirmed` is that over the memory.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from epikv import harness
from epikv.options import Kv

from epikv_lab.bench.resident import resident
from epikv_lab.bench.streams import Running, random_prompt
from epikv_lab.bench.targets import finish

SHAPE: harness.Shape = {
    "hidden": 256,
    "layers": 16,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 32,
    "ffn": 512,
    "vocab": 1024,
    "context": 1 << 20,
    "dtype": "bf16",
}
QUADRATIC = ("maps", "eager")  # ways that make attention maps
SHORTEST = 256
MIB = 1 << 20
POLICIES = ("full", "epikv_flat", "raas", "h2o", "snapkv")
ATTENTION = ("attention_row", "prompt_attention", "queries")  # signals of policies that read it
DECODED = 160  # tokens that the daemon generates; beyond any policy's slack, so that all evict
BELOW = 16  # tokens by which its prompt is shorter than the budget


@dataclass(frozen=True)
class Curve:
    """Peak bytes by tokens: least squares of relative errors, through (1, n) or (1, n, n^2)."""

    terms: tuple[float, ...]
    residual: float  # largest |curve - measured| / measured

    @classmethod
    def through(cls, points: Mapping[int, float], degree: int) -> "Curve":
        import numpy as np

        tokens, measured = (np.array(each, float) for each in zip(*points.items(), strict=True))
        powers = np.vander(tokens, degree + 1, increasing=True)
        terms = np.linalg.lstsq(powers / measured[:, None], np.ones(len(tokens)), rcond=None)[0]
        residual = float(np.abs(powers @ terms / measured - 1).max())
        return cls(tuple(map(float, terms)), residual)

    def at(self, tokens: float) -> float:
        return sum(term * tokens**power for power, term in enumerate(self.terms))

    def longest(self, memory: float) -> int:
        """Tokens whose peak is `memory`. Raises ValueError where the curve does not reach it."""
        import numpy as np

        first, *rest = self.terms
        roots = np.roots([*reversed(rest), first - memory])
        reached = [root.real for root in roots if abs(root.imag) < 1e-6 and root.real > 0]
        if not reached or rest[-1] <= 0:
            raise ValueError(f"peaks do not grow as they should: {self.terms}")
        return int(min(reached))


@dataclass(frozen=True)
class Longest:
    """The longest context, and what is known of it."""

    told: str
    tokens: int
    measured: dict[int, int]  # peak bytes by tokens
    residual: float
    confirmed: float | None = None  # its peak over the memory


@click.command("context")
@click.option("--memory", "mib", default=2048, show_default=True, help="MiB above the weights.")
@click.option(
    "--seconds", default=60.0, show_default=True, help="Most CPU time expected of one prefill."
)
@click.option(
    "--daemon-length", "lengths", type=int, multiple=True, default=(2048, 4096, 8192),
    show_default=True, help="Contexts at which the daemon's memory is measured.",
)  # fmt: skip
@click.option("--layers", default=SHAPE["layers"], show_default=True, help="Of the model.")
@harness.options
def command(
    mib: int,
    seconds: float,
    lengths: tuple[int, ...],
    layers: int,
    json_file: Path | None,
    **where: Any,
) -> None:
    """The longest context in a fixed memory: all attention maps, one layer's, rows, or none."""
    if where["server"] is not None:
        raise click.UsageError("it measures processes of its own: leave --server out")
    if len(set(lengths)) < 3:
        raise click.UsageError("a line's fit needs three points: give three --daemon-length")
    shape: harness.Shape = {**SHAPE, "layers": layers}
    memory = mib * MIB
    found = dict(_prefills(shape, memory, seconds))
    found |= _daemons(shape, memory, lengths, where)
    click.echo(f"\n{table(found, 'maps')}\n")
    details = {
        "shape": shape,
        "memory_bytes": memory,
        "longest": {name: asdict(longest) for name, longest in found.items()},
    }
    finish("context", [], details, json_file, untargeted="it compares with published figures")


def table(found: Mapping[str, Longest], base: str) -> str:
    """As Markdown."""
    lines = [
        "| | longest context | over the first's | measured up to | curve off by | confirmed |",
        "|---|---|---|---|---|---|",
    ]
    for longest in found.values():
        confirmed = "extrapolated" if longest.confirmed is None else f"{longest.confirmed:.3f}"
        lines.append(
            f"| {longest.told} | {longest.tokens} | {longest.tokens / found[base].tokens:.1f}"
            f" | {max(longest.measured)} | {longest.residual:.1%} | {confirmed} |"
        )
    return "\n".join(lines)


def _prefills(shape: harness.Shape, memory: int, seconds: float) -> Iterator[tuple[str, Longest]]:
    from epikv_lab.bench.reference import WAYS

    for name in ("maps", "eager", "hidden", "sdpa"):
        degree = 2 if name in QUADRATIC else 1
        peaks: dict[int, int] = {}
        tokens, took = SHORTEST, 0.0
        while len(peaks) <= degree + 1 or (
            4 * took <= seconds and max(peaks.values()) <= memory / 4
        ):
            took = _prefill(shape, name, tokens, peaks)
            tokens *= 2
        curve = Curve.through(peaks, degree)
        longest, confirmed = curve.longest(memory), None
        most = max(peaks)
        if took * (longest / most) ** 2 <= seconds:
            _prefill(shape, name, longest, peaks)
            confirmed = peaks[longest] / memory
        told = f"transformers, prefill: {WAYS[name].told}"
        yield name, Longest(told, longest, peaks, curve.residual, confirmed)


def _prefill(shape: harness.Shape, name: str, tokens: int, peaks: dict[int, int]) -> float:
    """Notes its peak. Gives the CPU seconds it took."""
    command = [
        sys.executable,
        "-m",
        "epikv_lab.bench.reference",
        json.dumps(shape),
        name,
        str(tokens),
    ]
    # What is freed goes back at once, so that the process's memory is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    made = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if made.returncode != 0:
        raise click.ClickException(f"{' '.join(command)}\n{made.stderr}")
    found = json.loads(made.stdout)
    peaks[tokens] = found["bytes"]
    harness.say(f"{name} {tokens}: {found['bytes'] / MIB:.0f} MiB in {found['seconds']:.1f} s")
    return found["seconds"]


def _daemons(
    shape: harness.Shape,
    memory: int,
    lengths: Sequence[int],
    where: Mapping[str, Any],
) -> Iterator[tuple[str, Longest]]:
    """Each policy in a daemon of its own: what one has once touched stays resident."""
    model = harness.random_model("context", **shape)
    flags = ["--threads=1", f"--kv_pool_bytes={2 * memory}", "--prefix_cache_share=0"]
    for name in POLICIES:
        with harness.serving(lambda: model, flags, **where) as served:
            reads = set(served.client.policy(name).signals) & set(ATTENTION)
            assert served.pid is not None  # it is our own
            _held(served, name, SHORTEST)
            idle = resident(served.pid)
            reserved: dict[int, float] = {}
            growth: dict[int, int] = {}
            for tokens in sorted(lengths):
                reserved[tokens] = _held(served, name, tokens)
                growth[tokens] = resident(served.pid, peak=True) - idle
                harness.say(f"{name} {tokens}: {growth[tokens] / MIB:.0f} MiB")
        longest, curve = Curve.through(reserved, 1).longest(memory), Curve.through(growth, 1)
        told = f"epikvd, `{name}`, {'attention by rows' if reads else 'no attention'}"
        yield name, Longest(told, longest, growth, curve.residual, curve.at(longest) / memory)


def _held(served: harness.Served, policy: str, tokens: int) -> int:
    """Runs a sequence that holds so many tokens and evicts beyond, but under `full`. Gives the bytes
    that admission reserved for it."""
    kv = Kv(policy, None if policy == "full" else tokens, protect_prompt=False)
    prompt = random_prompt(tokens - BELOW, served.client.models()[0].vocab_size, 0)
    stream = Running(served.client, prompt, kv, BELOW if policy == "full" else DECODED)
    stream.join()
    served.wait_until_idle()
    if policy != "full" and not stream.usage.rounds:
        raise click.ClickException(f"{policy} has not evicted")
    return stream.reserved_bytes
