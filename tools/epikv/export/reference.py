"""`python -m epikv.export.reference`: what a faithful engine must reproduce, for tests in C++."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from epikv.export import parity
from epikv.export.exporter import DTYPES


def write(
    directory: Path, out: Path, dtype: str, prompts: Sequence[Sequence[int]], steps: int
) -> None:
    """Writes what transformers computes in float32, with weights of `dtype`, as JSON.

    {"dtype", "cases": [...]}; each case has the `token_ids` of its prompt, the `logits` at its
    every position [n][vocabulary], the `greedy` continuation of `steps` tokens, end tokens or not,
    and per greedy token the `margins` of the best logit over the second.
    """
    model = parity.load_reference(directory, dtype)
    cases = []
    for prompt in prompts:
        text = parity.extend(model, prompt, steps)
        logits = parity.logits(model, text)
        best = logits[len(prompt) - 1 : len(text) - 1].topk(2).values
        cases.append(
            {
                "token_ids": list(prompt),
                "logits": logits[: len(prompt)].tolist(),
                "greedy": text[len(prompt) :],
                "margins": (best[:, 0] - best[:, 1]).tolist(),
            }
        )
    out.write_text(json.dumps({"dtype": dtype, "cases": cases}))


def prompts_of(ids: Sequence[str], vocab_size: int, longest: int) -> list[list[int]]:
    """The prompts given as "1 2 3", or random ones if none is."""
    if ids:
        return [[int(token) for token in prompt.split()] for prompt in ids]
    return parity.random_prompts(vocab_size, longest, parity.PROMPT_LENGTHS)


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32")
@click.option("--ids", multiple=True, help='A prompt, as "1 2 3". Default: random ones.')
@click.option("--steps", default=16, help="Greedy tokens a prompt.")
def main(directory: Path, out: Path, dtype: str, ids: tuple[str, ...], steps: int) -> None:
    """Write logits and greedy tokens of the model in DIRECTORY to OUT."""
    config = json.loads((directory / "config.json").read_text())
    longest = config["max_position_embeddings"] - steps
    write(directory, out, DTYPES[dtype], prompts_of(ids, config["vocab_size"], longest), steps)


if __name__ == "__main__":
    main()
