"""`epikv generate`"""

from pathlib import Path
from typing import Any

import click

from epikv.cli import options, show
from epikv.client import Client, Stream
from epikv.messages import Accepted, Delta, EvictionEvent, Summary
from epikv.options import Output, Sampling, Stop

KINDS = {Accepted: "accepted", Delta: "delta", EvictionEvent: "eviction", Summary: "summary"}


@click.command("generate")
@click.argument("prompt", required=False)
@click.option("--file", type=options.text_file, help="Read the prompt from here; - is stdin.")
@click.option("--ids", is_flag=True, help="The prompt is token ids, separated by spaces.")
@options.kv
@click.option("--max-output-tokens", "-n", type=int)
@click.option("--temperature", type=float, help="Default: 0, greedy.")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int)
@click.option("--stop", "stop_strings", multiple=True, help="End when the text contains this.")
@click.option("--stop-id", "stop_token_ids", type=int, multiple=True)
@click.option("--include-stop", is_flag=True)
@click.option("--logprobs", is_flag=True, help="With --json.")
@click.option("--token-ids", is_flag=True, help="With --json.")
@click.option("--signals", is_flag=True, help="Residual steps of each token, with --json.")
@click.option("--trace", is_flag=True, help="Every eviction, with --json.")
@click.option("--kept", is_flag=True, help="Which tokens are held at the end, with --json.")
@options.scheduling
@click.option("--timeout", type=float, help="Seconds.")
@click.option("--request-id", default="")
@options.model
@options.server
@options.as_json
def command(
    prompt: str | None, file: Path | None, ids: bool, server: str, as_json: bool, **given: Any
) -> None:
    """Stream a completion of PROMPT (or --file, or stdin); facts about it go to stderr."""
    arguments = {
        "kv": options.take_kv(given),
        "scheduling": options.take_scheduling(given),
        "sampling": Sampling(
            temperature=given.pop("temperature"),
            top_p=given.pop("top_p"),
            top_k=given.pop("top_k"),
            seed=given.pop("seed"),
        ),
        "stop": Stop(
            max_output_tokens=given.pop("max_output_tokens"),
            stop_strings=given.pop("stop_strings"),
            stop_token_ids=given.pop("stop_token_ids"),
            include_stop=given.pop("include_stop"),
        ),
        "output": Output(
            token_ids=given.pop("token_ids"),
            logprobs=given.pop("logprobs"),
            kv_trace=given.pop("trace"),
            residual_steps=given.pop("signals"),
            kept=given.pop("kept"),
        ),
    }
    text = options.read_prompt(prompt, file, ids)
    with Client(server) as client, client.generate(text, **arguments, **given) as stream:
        (_print_json if as_json else _print_text)(stream)


def _print_json(stream: Stream) -> None:
    for event in stream:
        show.json_line(KINDS[type(event)], event)


def _print_text(stream: Stream) -> None:
    for event in stream:
        match event:
            case Delta():
                show.out.print(event.text, end="")
            case Summary():
                show.out.print()
                show.summary(event)
