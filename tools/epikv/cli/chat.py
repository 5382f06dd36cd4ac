"""`epikv chat`"""

import sys
from functools import partial
from typing import Any
from uuid import uuid4

import click

from epikv.cli import options, show
from epikv.client import Client
from epikv.errors import RpcError
from epikv.messages import Accepted, Delta, Summary
from epikv.options import Chat, Session, Stop

HELP = "/clear forgets the conversation, /exit or the end of input leaves, Ctrl-C ends an answer"


@click.command("chat")
@click.option("--system", default="", help="What the model is told before the conversation.")
@click.option(
    "--thinking/--no-thinking", default=None, help="Of a model that can be told; see epikv models."
)
@click.option(
    "--session-budget",
    type=int,
    help="Keep so many tokens of what was said, as episodes; default: all of it.",
)
@options.kv
@options.output_tokens
@options.sampling
@options.scheduling
@options.experiment
@options.model
@options.server
def command(
    system: str,
    thinking: bool | None,
    session_budget: int | None,
    max_output_tokens: int | None,
    server: str,
    **given: Any,
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
        "session": Session(uuid4().hex, session_budget) if session_budget else None,
        **given,
    }
    begin = [{"role": "system", "content": system}] if system else []
    talks = sys.stdin.isatty()
    if talks:
        import readline  # noqa: F401  # gives input() history and editing

    messages = list(begin)
    with Client(server) as client:
        _check(client, given["model"], bool(begin))
        if talks:
            show.err.print(HELP)
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
                answer = options.within_context(
                    partial(
                        _answer,
                        client,
                        Chat(asked, thinking, special_tokens_in_contents=True),
                        arguments,
                    ),
                    max_output_tokens,
                )
            except RpcError as error:
                if not talks:
                    raise
                show.err.print(f"{error}", style="red")  # the message is as if never sent
                if messages != begin:
                    show.err.print("/clear begins another conversation")
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


def _check(client: Client, name: str, system: bool) -> None:
    """Before anything is typed: whether the model takes conversations. Raises ClickException."""
    served = [client.model(name)] if name else client.models()
    if len(served) != 1:
        names = ", ".join(model.name for model in served) or "none"
        raise click.UsageError(f"say which model with --model; served: {names}")
    model = served[0]
    if model.chat is None:
        return  # of a server that does not say
    if model.chat.refusal:
        raise click.ClickException(
            f"{model.name} takes no conversations: {model.chat.refusal};"
            " epikv generate sends it plain text"
        )
    if system and model.chat.system_refusal:
        raise click.ClickException(f"{model.name} takes no --system: {model.chat.system_refusal}")


def _answer(
    client: Client, chat: Chat, arguments: dict[str, Any], max_output_tokens: int | None
) -> str:
    """Prints the answer as it comes. One that Ctrl-C ended is what came of it."""
    text, slack = "", 0
    stop = Stop(max_output_tokens=max_output_tokens)
    with client.generate(chat, stop=stop, **arguments) as stream:
        try:
            for event in stream:
                match event:
                    case Accepted():
                        slack = show.slack(event)
                    case Delta():
                        text += event.text
                        show.out.print(event.text, end="")
                    case Summary():
                        show.out.print()
                        show.err.print(_facts(event, slack), style="dim")
        except KeyboardInterrupt:
            show.out.print()
    return text


def _facts(summary: Summary, slack: int) -> str:
    return "; ".join(f"{name}: {value}" for name, value in show.facts(summary, slack))
