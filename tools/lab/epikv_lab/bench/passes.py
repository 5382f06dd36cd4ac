"""What scratch passes cost: their time over that of the prompt's prefill.

One request at a time, and each round asks all policies in turn, each with a prompt of its own: what
the prefix cache holds is never asked for again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from epikv import harness
from epikv.options import Kv, Stop
from epikv.stats import bootstrap

from epikv_lab.bench import overhead
from epikv_lab.bench.streams import random_prompt
from epikv_lab.bench.targets import finish

PASSES: dict[str, dict[str, Any]] = {
    "laq": {},
    "laq_plus": {},
    "snapkv": {"queries": "lookahead"},
    "kvzip": {},
    "kvzip_plus": {},
    "epicache": {},
}
NO_TARGET = "a pass is what these policies are made of; the table says what it costs"


@click.command("passes")
@click.option("--prompt", default=900, show_default=True, help="Tokens; half as many are kept.")
@click.option("--rounds", default=5, show_default=True)
@harness.options
def command(prompt: int, rounds: int, json_file: Path | None, **where: Any) -> None:
    """Time of each policy's scratch pass over that of the prefill before it."""
    with harness.serving(
        lambda: harness.random_model("overhead", **overhead.SHAPE), ["--threads=1"], **where
    ) as served:
        _ratio(served, "laq", prompt, seed=-1)  # the first forwards of a daemon are slow
        ratios: dict[str, list[float]] = {name: [] for name in PASSES}
        for number in range(rounds):
            for place, name in enumerate(PASSES):
                seed = number * len(PASSES) + place
                ratios[name].append(_ratio(served, name, prompt, seed))
            harness.say(f"round {number + 1} of {rounds}")
    click.echo(table(ratios))
    details = {"shape": overhead.SHAPE, "prompt": prompt, "pass_over_prefill": ratios}
    finish("passes", [], details, json_file, untargeted=NO_TARGET)


def _ratio(served: harness.Served, name: str, prompt: int, seed: int) -> float:
    vocabulary = served.client.models()[0].vocab_size
    result = served.client.generate_once(
        random_prompt(prompt, vocabulary, seed),
        kv=Kv(name, prompt // 2, params=PASSES[name]),
        stop=Stop(2, ignore_eos=True),
    )
    timings = result.summary.timings if result.summary is not None else None
    if timings is None or not timings.prefill or not timings.scratch_pass:
        raise click.ClickException(f"{name} ran no scratch pass")
    return timings.scratch_pass / timings.prefill


def table(ratios: Mapping[str, Sequence[float]]) -> str:
    lines = ["| policy | its pass over the prefill |", "|---|---|"]
    for name, taken in ratios.items():
        e = bootstrap(taken)
        params = "".join(f", `{key} = {value}`" for key, value in PASSES[name].items())
        lines.append(f"| `{name}`{params} | {e.value:.2f} [{e.low:.2f}, {e.high:.2f}] |")
    return "\n".join(lines)
