"""`epikv chat`"""

import sys
from typing import Any

import click

from epikv.cli import options, show
from epikv.client import Client
from epikv.errors import RpcError
from epikv.messages import Delta, Summary
from epikv.options import Chat, Stop

HELP = "/clear forgets the conversation, /exit or the end of input leaves, Ctrl-C ends an answer"


@click.command("chat")
@click.option("--system", default="", help="What the model is told before the conversation.")
@click.option(
    "--thinking/--no-thinking", default=None, help="Of a model that can be told; see epikv models."
)
@options.kv
@click.option("--max-output-tokens", "-n", type=int, help="Of one answer.")
@options.sampling
@options.scheduling
@options.experiment
@options.model
@options.server
def command(
    system: str, thinking: bool | None, max_output_tokens: int | None, server: str, **given: Any
) -> None:
    """Talk to a model: every line of input is a message; facts about answers go to stderr.

    Each turn sends the conversation so far, whose beginning the server still has cached.
    """
    arguments = {
        "kv": options.take_kv(given),
        "sampling": options.take_sampling(given),
        "scheduling": options.take_scheduling(given),
        "experiment": options.take_experiment(given),
        "labels": options.take_labels(given),
        "stop": Stop(max_output_tokens=max_output_tokens),
        **given,
    }
    begin = [{"role": "system", "content": system}] if system else []
    talks = sys.stdin.isatty()
    if talks:
        import readline  # noqa: F401  # gives input() history and editing

        show.err.print(HELP)
    messages = list(begin)
    with Client(server) as client:
        while (line := _read(talks)) is not None:
            if line == "/exit":
                return
            if line == "/clear":
                messages = list(begin)
                continue
            if not line.strip():
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = _answer(client, Chat(asked, thinking), arguments)
            except RpcError as error:
                if not talks:
                    raise
                show.err.print(f"{error}", style="red")  # the message is as if never sent
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _read(talks: bool) -> str | None:
    """The next message; None at the end of input."""
    if not talks:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        show.err.print()
        return None


def _answer(client: Client, chat: Chat, arguments: dict[str, Any]) -> str:
    """Prints the answer as it comes. One that Ctrl-C ended is what came of it."""
    text = ""
    with client.generate(chat, **arguments) as stream:
        try:
            for event in stream:
                match event:
                    case Delta():
                        text += event.text
                        show.out.print(event.text, end="")
                    case Summary():
                        show.out.print()
                        show.err.print(_facts(event), style="dim")
        except KeyboardInterrupt:
            show.out.print()
    return text


def _facts(summary: Summary) -> str:
    return "; ".join(f"{name}: {value}" for name, value in show.facts(summary))
