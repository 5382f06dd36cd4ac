"""What guessing ahead (speculation) gains, and what it costs where guesses are wrong.

Random weights say nothing that could be guessed, so how often guesses come true is made: a logit bias leaves
two tokens, one of which is as much likelier as the share asks for. What is measured is then the mechanism: steps
that verify guesses over steps that do not, at the costs of the 0.5B shape. Guesses are looked up in what was said,
or are those of a draft model of a twentieth of the weights, which follows the bias and says the likelier token. Requests
with and without guesses take turns, with the same seeds.

How often guesses come true in text is the sample model's to say: its answers name what its prompts say.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.options import GREEDY, Kv, Output, Sampling, Speculation, Stop
from epikv.sample.families import problem
from epikv.stats import bootstrap

from epikv_lab.bench.overhead import SHAPE
from epikv_lab.bench.targets import Target, finish

FLAGS = ("--threads=1", "--kv_pool_bytes=1073741824")
PROMPT, OUTPUT = 128, 192
SHARES = (0.5, 0.9, 0.98)  # that the likelier token is to have
STREAMS = (1, 16)
GUESSES = 8
DRAFT: harness.Shape = {
    "hidden": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 1024,
    "vocab": SHAPE["vocab"],
    "context": 2048,
    "dtype": "bf16",
}
FASTER, SLOWER = 1.6, 0.98  # of plain decoding: at one stream where guesses come true; wherever


@dataclass(frozen=True)
class Run:
    """Of so many streams at once."""

    tokens_per_second: float
    tokens: int  # that were decoded
    guessed: int
    accepted: int


@click.command("speculation")
@click.option("--rounds", default=5, show_default=True)
@click.option(
    "--source", "sources", multiple=True, type=click.Choice(["ngram", "draft"]),
    default=("ngram", "draft"), show_default=True, help="Of guesses; may be given again.",
)  # fmt: skip
@click.option("--max-tokens", default=GUESSES, show_default=True, help="Guesses in a step.")
@click.option("--sample", type=click.Path(exists=True), help="The sample model, too.")
@harness.options
def command(
    rounds: int,
    sources: tuple[str, ...],
    max_tokens: int,
    sample: str | None,
    json_file: Path | None,
    **where: Any,
) -> None:
    """Tokens a second with guesses over those without, at one stream and at sixteen."""
    load = [os.getloadavg()[0]]
    targets, told = [], {}
    flags: tuple[str, ...] = FLAGS
    if "draft" in sources and not where["server"]:
        flags = (*flags, f"--draft_model={harness.random_model('draft', **DRAFT)}")
    with harness.serving(
        lambda: harness.random_model("speculation", **SHAPE), flags, **where
    ) as served:
        for source, streams, share in product(sources, STREAMS, (None, *SHARES)):
            speculation = Speculation(source, max_tokens)
            name = f"{source}_{streams}_streams_"
            name += "random" if share is None else f"share_{share:g}"
            pairs = _rounds(served, _sampling(share), speculation, streams, rounds)
            ratio = bootstrap(pairs, _ratio)
            told[name] = _told(pairs)
            harness.say(
                f"{name}: {ratio.value:.3f}, {told[name]['tokens_a_step']:.2f} tokens a step"
            )
            certain = streams == 1 and share == SHARES[-1]
            bound = FASTER if certain else SLOWER
            targets.append(Target(f"{name}_over_plain", ratio, bound, at_least=True))
    if sample is not None:
        speculation = Speculation("ngram", max_tokens)
        with harness.serving(lambda: Path(sample), FLAGS, **where) as served:
            for streams in STREAMS:
                pairs = _rounds(served, GREEDY, speculation, streams, 3 * rounds, text=True)
                name = f"ngram_{streams}_streams_sample_model"
                told[name] = _told(pairs)
                ratio = bootstrap(pairs, _ratio)
                harness.say(
                    f"{name}: {ratio.value:.3f}, {told[name]['tokens_a_step']:.2f} tokens a step"
                )
                targets.append(Target(f"{name}_over_plain", ratio, SLOWER, at_least=True))
    load.append(os.getloadavg()[0])
    details = {
        "shape": SHAPE,
        "draft": DRAFT,
        "max_tokens": max_tokens,
        "load_average": load,
        "cases": told,
    }
    finish("speculation", targets, details, json_file)


def _sampling(share: float | None) -> Sampling:
    """None: of all tokens, at random."""
    if share is None:
        return Sampling(temperature=1.0)
    # What the model itself says of the two is little beside this.
    return Sampling(temperature=1.0, logit_bias={7: 90 + math.log(share / (1 - share)), 11: 90})


def _rounds(
    served: harness.Served,
    sampling: Sampling,
    speculation: Speculation,
    streams: int,
    rounds: int,
    text: bool = False,
) -> list[tuple[Run, Run]]:
    """Without guesses, and with."""
    _run(served, sampling, speculation, streams, 0, text)  # it learns what rows cost
    pairs = []
    for number in range(rounds):
        plain = _run(served, sampling, None, streams, number, text)
        guessed = _run(served, sampling, speculation, streams, number, text)
        pairs.append((plain, guessed))
    return pairs


def _run(
    served: harness.Served,
    sampling: Sampling,
    speculation: Speculation | None,
    streams: int,
    seed: int,
    text: bool,
) -> Run:
    """text: the sample model's problems, each to its end."""

    def one(stream: int) -> Any:
        if text:
            prompt: Any = problem(f"speculation/{seed}/{stream}").prompt
        else:
            dice = Random(f"{seed}/{stream}")
            prompt = dice.choices(range(SHAPE["vocab"]), k=PROMPT)
        return served.client.generate_once(
            prompt,
            sampling=replace(sampling, seed=1000 * seed + stream),
            stop=Stop(None if text else OUTPUT, ignore_eos=not text),
            output=Output(text=False),
            kv=Kv(bypass_prefix_cache=True),
            speculation=speculation,
        )

    with ThreadPoolExecutor(streams) as pool:
        results = list(pool.map(one, range(streams)))
    seconds = max(result.summary.timings.decode for result in results)
    usages = [result.summary.usage for result in results]
    tokens = sum(usage.output_tokens - 1 for usage in usages)
    return Run(
        tokens / seconds,
        tokens,
        sum(usage.guessed_tokens for usage in usages),
        sum(usage.accepted_tokens for usage in usages),
    )


def _ratio(pairs: Sequence[tuple[Run, Run]]) -> float:
    return median(guessed.tokens_per_second / plain.tokens_per_second for plain, guessed in pairs)


def _told(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    guessed = sum(run.guessed for _, run in pairs)
    accepted = sum(run.accepted for _, run in pairs)
    return {
        "plain_tokens_per_second": [plain.tokens_per_second for plain, _ in pairs],
        "guessed_tokens_per_second": [run.tokens_per_second for _, run in pairs],
        "guessed": guessed,
        "accepted": accepted,
        "tokens_a_step": sum(run.tokens for _, run in pairs)
        / sum(run.tokens - run.accepted for _, run in pairs),
    }
