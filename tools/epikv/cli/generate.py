"""`epikv generate`"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from epikv.cli import options, show
from epikv.client import Client, Stream
from epikv.messages import (
    Accepted,
    Delta,
    EvictionEvent,
    Finished,
    Progress,
    PromptLogprobs,
    Summary,
)
from epikv.options import Output, Session, Speculation, Stop

_IN_JSON = ("logprobs", "top_logprobs", "prompt_logprobs", "token_ids", "signals", "trace", "kept")
KINDS = {
    Accepted: "accepted",
    Progress: "progress",
    PromptLogprobs: "prompt_logprobs",
    Delta: "delta",
    EvictionEvent: "eviction",
    Finished: "finished",
    Summary: "summary",
}


@click.command("generate")
@click.argument("prompt", required=False)
@click.option("--file", type=options.text_file, help="Read the prompt from here; - is stdin.")
@click.option("--ids", is_flag=True, help="The prompt is token ids, separated by spaces.")
@options.kv
@options.output_tokens
@options.sampling
@click.option("--regex", help="What the whole text has to match.")
@click.option("--choice", multiple=True, help="One of these texts.")
@click.option("--json-schema", type=options.text_file, help="A JSON value that this file allows.")
@click.option("--grammar", type=options.text_file, help="Text of this EBNF's `root`.")
@click.option(
    "--completions", "completions", type=int, help="Of the one prompt; needs a temperature."
)
@click.option("--stop", "stop_strings", multiple=True, help="End when the text contains this.")
@click.option("--stop-id", "stop_token_ids", type=int, multiple=True)
@click.option("--include-stop", is_flag=True)
@click.option("--min-output-tokens", type=int, default=0)
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end of sequence.")
@click.option("--logprobs", is_flag=True, help="With --json.")
@click.option("--top-logprobs", type=int, default=0, help="Of the likeliest tokens, with --json.")
@click.option("--prompt-logprobs", is_flag=True, help="With --json.")
@click.option("--token-ids", is_flag=True, help="With --json.")
@click.option("--signals", is_flag=True, help="Residual steps of each token, with --json.")
@click.option("--trace", is_flag=True, help="Every eviction, with --json.")
@click.option("--kept", is_flag=True, help="Which tokens are held at the end, with --json.")
@click.option("--progress", is_flag=True, help="How far a long prompt is cached; on stderr.")
@click.option("--coalesce", type=float, help="Seconds that a delta may wait for others.")
@options.packets
@click.option("--session", "session_id", help="A conversation's name; needs --session-budget.")
@click.option("--session-budget", type=int, help="Tokens of its past that are kept.")
@click.option("--speculate", type=int, help="Guess so many tokens ahead, at most; 0: 8.")
@click.option("--draft", is_flag=True, help="Let the model's draft guess them; alone: up to 8.")
@options.scheduling
@options.experiment
@click.option("--timeout", type=float, help="Seconds.")
@click.option("--request-id", default="")
@options.model
@options.server
@options.as_json
def command(
    prompt: str | None, file: Path | None, ids: bool, server: str, as_json: bool, **given: Any
) -> None:
    """Stream a completion of PROMPT (or --file, or stdin); facts about it go to stderr."""
    for name in () if as_json else _IN_JSON:
        if given[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} shows with --json alone")
    session_id, session_budget = given.pop("session_id"), given.pop("session_budget")
    if (session_id is None) != (session_budget is None):
        raise click.UsageError("--session and --session-budget go together")
    speculate, source = given.pop("speculate"), "draft" if given.pop("draft") else "ngram"
    if speculate is None and source == "draft":
        speculate = 0
    arguments: dict[str, Any] = {
        "session": Session(session_id, session_budget) if session_id is not None else None,
        "speculation": Speculation(source, speculate) if speculate is not None else None,
        "kv": options.take_kv(given),
        "scheduling": options.take_scheduling(given),
        "experiment": options.take_experiment(given),
        "labels": options.take_labels(given),
        "sampling": replace(
            options.take_sampling(given),
            n=given.pop("completions"),
            regex=given.pop("regex"),
            choice=given.pop("choice") or None,
            json_schema=options.read_text(given.pop("json_schema")),
            grammar=options.read_text(given.pop("grammar")),
        ),
        "output": Output(
            token_ids=given.pop("token_ids"),
            logprobs=given.pop("logprobs"),
            kv_trace=given.pop("trace"),
            residual_steps=given.pop("signals"),
            kept=given.pop("kept"),
            top_logprobs=given.pop("top_logprobs"),
            prompt_logprobs=given.pop("prompt_logprobs"),
            progress=given.pop("progress"),
            coalesce=given.pop("coalesce"),
        ),
    }
    stop = Stop(
        stop_strings=given.pop("stop_strings"),
        stop_token_ids=given.pop("stop_token_ids"),
        include_stop=given.pop("include_stop"),
        min_output_tokens=given.pop("min_output_tokens"),
        ignore_eos=given.pop("ignore_eos"),
    )
    most: int | None = given.pop("max_output_tokens")
    text = options.read_prompt(prompt, file, ids)

    def run(tokens: int | None) -> None:
        limited = replace(stop, max_output_tokens=tokens)
        with client.generate(text, stop=limited, **arguments, **given) as stream:
            if as_json:
                _print_json(stream)
            elif _print_text(stream) == "length" and most is None and tokens is not None:
                show.err.print(f"ended at {tokens} tokens: -n asks for more")

    with Client(server) as client:
        options.within_context(run, most, stop.min_output_tokens)


def _print_json(stream: Stream) -> None:
    for event in stream:
        show.json_line(KINDS[type(event)], event)


def _print_text(stream: Stream) -> str:
    """Why it finished. Of several completions, each is printed when it has ended."""
    finish, slack = "", 0
    several = False
    texts: dict[int, str] = {}
    for event in stream:
        match event:
            case Accepted():
                slack = show.slack(event)
                several = event.sampling is not None and (event.sampling.n or 1) > 1
            case Progress():
                show.err.print(
                    f"prompt: {event.prompt_tokens_done} of {event.prompt_tokens} tokens"
                )
            case Delta() if several:
                texts[event.completion] = texts.get(event.completion, "") + event.text
            case Delta():
                show.out.print(event.text, end="")
            case Finished():
                show.err.print(f"completion {event.completion}: {event.finish_reason}")
                show.out.print(texts.pop(event.completion, ""))
            case Summary():
                show.out.print()
                show.summary(event, slack)
                finish = event.finish_reason
    return finish
