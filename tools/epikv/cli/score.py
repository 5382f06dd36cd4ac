"""`epikv score`"""

import json
from math import exp
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from epikv.cli import options, show
from epikv.client import Client
from epikv.messages import ScoreResponse


@click.command("score")
@click.argument("texts", nargs=-1, required=True, metavar="[PROMPT] CONTINUATION")
@click.option("--file", type=options.text_file, help="Read the prompt from here; - is stdin.")
@click.option("--ids", is_flag=True, help="Prompt and continuation are token ids.")
@options.kv
@click.option("--chunked", is_flag=True, help="Score in prefill chunks: faster, only under `full`.")
@click.option(
    "--signals", "residual_steps", is_flag=True, help="Show residual steps; needs --json."
)
@click.option("--trace", "kv_trace", is_flag=True, help="Show every eviction; needs --json.")
@click.option("--kept", is_flag=True, help="Show the tokens held at the end; needs --json.")
@click.option(
    "--top-logprobs",
    type=int,
    default=0,
    help="Show so many of the likeliest tokens at each place; needs --json.",
)
@options.packets
@options.scheduling
@click.option("--timeout", type=float, help="Seconds.")
@click.option("--request-id", default="", help="Id of the request; default: the server makes one.")
@options.model
@options.server
@options.as_json
def command(
    texts: tuple[str, ...],
    file: Path | None,
    ids: bool,
    server: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Show how likely CONTINUATION is after PROMPT (or --file, or stdin), evictions included."""
    if len(texts) > 2:
        raise click.UsageError(
            f"give PROMPT and CONTINUATION, in quotes; got {len(texts)} arguments"
        )
    *given_prompt, continuation = texts
    before = options.read_prompt(given_prompt[0] if given_prompt else None, file, ids)
    scored = options.read_prompt(continuation, None, ids)
    kv, scheduling = options.take_kv(given), options.take_scheduling(given)
    with Client(server) as client:
        result = client.score(before, scored, kv=kv, scheduling=scheduling, **given)
        if as_json:
            show.json_line("score", result)
        else:
            # Also special tokens: the one for unknown words is one.
            words = [
                client.detokenize([token], skip_special_tokens=False) for token in result.token_ids
            ]
            _print(result, words)


def _print(result: ScoreResponse, words: list[str]) -> None:
    table = Table("token", "id", "logprob", "likeliest")
    for word, token, logprob, greedy in zip(
        words, result.token_ids, result.logprobs, result.greedy, strict=True
    ):
        table.add_row(json.dumps(word), str(token), f"{logprob:.4f}", "yes" if greedy else "")
    show.out.print(table)
    total = sum(result.logprobs)
    show.out.print(f"sum {total:.4f}, perplexity {exp(-total / len(words)):.4f}")
    if result.summary is not None:
        show.summary(result.summary, show.slack(result.accepted))
