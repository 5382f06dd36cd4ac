"""Options and arguments that several commands share."""

import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click

from epikv.connection import DEFAULT_SERVER
from epikv.errors import InvalidRequest
from epikv.options import (
    POSITIONS,
    PRIORITIES,
    Experiment,
    Kv,
    Sampling,
    Scheduling,
    Steering,
    parse_budget,
    parse_param,
)

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")

OUTPUT_TOKENS = 256  # most of a completion, where the command does not say; the server's: 1024

server = click.option(
    "--server",
    default=DEFAULT_SERVER,
    envvar="EPIKV_SERVER",
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
)
model = click.option(
    "--model", default="", help="Model name; needed only if several models are served."
)
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
text_file = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)


class Budget(click.ParamType):
    """A number of tokens, or a share of prompt + max output: 0.5, 50%."""

    name = "tokens|share"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | float:
        if not isinstance(value, str):
            return value
        try:
            return parse_budget(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Param(click.ParamType):
    """name=value, the value in JSON or else as it stands."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        if not isinstance(value, str):
            return value
        try:
            return parse_param(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Label(click.ParamType):
    """name=value, both as they stand."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if not isinstance(value, str):
            return value
        name, equals, text = value.partition("=")
        if not name or not equals:
            self.fail(f"'{value}' is not of the form name=value", param, ctx)
        return name, text


class Bias(click.ParamType):
    """id=bias, of a token."""

    name = "id=bias"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, float]:
        if not isinstance(value, str):
            return value
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"'{value}' is not of the form id=bias")


class Span(click.ParamType):
    """begin:end, by token index."""

    name = "begin:end"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if not isinstance(value, str):
            return value
        begin, _, end = value.partition(":")
        try:
            return int(begin), int(end)
        except ValueError:
            self.fail(f"'{value}' is not of the form begin:end")


_KV = (
    click.option("--policy", default="", help="Which tokens to drop; see `epikv policies`."),
    click.option("--budget", type=Budget(), help="Tokens to keep (256), or a share (0.5, 50%)."),
    click.option(
        "--param",
        "params",
        type=Param(),
        multiple=True,
        help="A parameter of the policy; may be given several times.",
    ),
    click.option(
        "--positions",
        type=click.Choice(list(POSITIONS)),
        help="Positions after evictions; default: absolute.",
    ),
    click.option(
        "--protect-prompt/--no-protect-prompt",
        default=None,
        help="Whether the prompt may not be evicted; default: the policy's own.",
    ),
    click.option("--sinks", type=int, help="Protect so many of the first tokens."),
    click.option("--recent", type=int, help="Protect so many of the newest tokens."),
    click.option(
        "--protect",
        "spans",
        type=Span(),
        multiple=True,
        help="Protect tokens BEGIN to END - 1; may be given several times.",
    ),
    click.option(
        "--equal-protection/--no-equal-protection",
        default=None,
        help="Protect by the rule that is the same for every policy.",
    ),
    click.option(
        "--read-tokens",
        type=int,
        default=0,
        help="Cached tokens that a decode step reads of each layer and head; default: all.",
    ),
    click.option(
        "--tier-tokens",
        type=int,
        default=0,
        help="Keep so many evicted tokens in the server's tier below the cache; default: none.",
    ),
    click.option(
        "--tier-fetch",
        type=int,
        default=0,
        help="Of these, so many are attended to by each new token; default: none.",
    ),
    click.option(
        "--tier-doubt",
        type=click.FloatRange(min=0),
        default=0.0,
        metavar="NATS",
        help="Fetch from the tier only where the next token's entropy is above so many nats; such a step runs twice."
        " Default: at each step.",
    ),
    click.option(
        "--tier-bits",
        type=click.Choice(["8", "4"]),
        help="Round them there to so many bits; default: not at all.",
    ),
    click.option(
        "--guard",
        type=int,
        default=0,
        help="Of these, those come back that are among so many which a query asks for; default: none.",
    ),
    click.option(
        "--cache-salt", default="", help="Share cached prefixes only with requests of this salt."
    ),
    click.option(
        "--bypass-prefix-cache",
        is_flag=True,
        help="Compute the whole prompt; leave no cached prefix.",
    ),
)


class KvFields(click.ParamType):
    """Fields of Kv that an evaluation varies."""

    name = "fields"
    KNOWN = ("tier_tokens", "tier_fetch", "tier_doubt", "tier_bits", "guard", "read_tokens")

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, float]:
        if isinstance(value, dict):
            return value
        fields: dict[str, float] = {}
        for text in value.split(","):
            name, _, number = text.partition("=")
            read = _fraction if name == "tier_doubt" else _whole
            found = read(number) if name in self.KNOWN else None
            if found is None:
                self.fail(f"'{text}' is not FIELD=N; fields: {', '.join(self.KNOWN)}", param, ctx)
            fields[name] = found
        return fields


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _fraction(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) and number >= 0 else None


packets = click.option(
    "--packet",
    "packets",
    multiple=True,
    help="A packet's tokens stand before the prompt (`epikv packet create`); may be given several times.",
)


def kv(command: Command) -> Command:
    """Gives a command the options that `take_kv` turns into its Kv."""
    for option in reversed(_KV):
        command = option(command)
    return command


def take_kv(options: dict[str, Any]) -> Kv:
    """The Kv of a command's options, which are taken out of `options`."""
    return Kv(
        policy=options.pop("policy"),
        budget=options.pop("budget"),
        params=dict(options.pop("params")),
        positions=options.pop("positions"),
        protect_prompt=options.pop("protect_prompt"),
        sink_tokens=options.pop("sinks"),
        recent_tokens=options.pop("recent"),
        protected_spans=options.pop("spans"),
        equal_protection=options.pop("equal_protection"),
        read_tokens=options.pop("read_tokens"),
        tier_tokens=options.pop("tier_tokens"),
        tier_fetch=options.pop("tier_fetch"),
        tier_doubt=options.pop("tier_doubt"),
        tier_bits=int(options.pop("tier_bits") or 0),
        guard=options.pop("guard"),
        cache_salt=options.pop("cache_salt"),
        bypass_prefix_cache=options.pop("bypass_prefix_cache"),
    )


_SAMPLING = (
    click.option("--temperature", type=float, help="0: greedy. Default: the model's own, or 0."),
    click.option(
        "--top-p", type=float, help="Draw from the smallest set with this probability; default: 1."
    ),
    click.option("--top-k", type=int, help="Draw from so many likeliest tokens; default: all."),
    click.option(
        "--min-p",
        type=float,
        help="Smallest share of the likeliest token's probability; default: 0.",
    ),
    click.option(
        "--typical-p",
        type=float,
        help="Draw from the most typical set with this probability; default: 1.",
    ),
    click.option(
        "--repetition-penalty", type=float, help="For tokens in prompt or output; default: 1."
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="For each time a token is in the output; default: 0.",
    ),
    click.option(
        "--presence-penalty", type=float, help="Once for each token in the output; default: 0."
    ),
    click.option(
        "--logit-bias",
        type=Bias(),
        multiple=True,
        help="Add BIAS to the logit of token ID; may be given several times.",
    ),
    click.option("--seed", type=int, help="Default: the server draws one."),
    click.option(
        "--steering",
        type=float,
        metavar="COEFFICIENT",
        help="Add the model's steering vector, times this; default: none.",
    ),
)


def sampling(command: Command) -> Command:
    """Gives a command the options that `take_sampling` turns into its Sampling."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def take_sampling(options: dict[str, Any]) -> Sampling:
    """The Sampling of a command's options, which are taken out of `options`."""
    coefficient = options.pop("steering")
    return Sampling(
        steering=None if coefficient is None else Steering(coefficient),
        temperature=options.pop("temperature"),
        top_p=options.pop("top_p"),
        top_k=options.pop("top_k"),
        seed=options.pop("seed"),
        min_p=options.pop("min_p"),
        typical_p=options.pop("typical_p"),
        repetition_penalty=options.pop("repetition_penalty"),
        frequency_penalty=options.pop("frequency_penalty"),
        presence_penalty=options.pop("presence_penalty"),
        logit_bias=dict(options.pop("logit_bias")),
    )


_SCHEDULING = (
    click.option(
        "--priority",
        type=click.Choice(list(PRIORITIES)),
        help="Priority while the request waits; default: normal.",
    ),
    click.option("--tenant", default="", help="Whose request it is; tenants that wait take turns."),
)


def scheduling(command: Command) -> Command:
    """Gives a command the options that `take_scheduling` turns into its Scheduling."""
    for option in reversed(_SCHEDULING):
        command = option(command)
    return command


def take_scheduling(options: dict[str, Any]) -> Scheduling:
    """The Scheduling of a command's options, which are taken out of `options`."""
    return Scheduling(priority=options.pop("priority"), tenant=options.pop("tenant"))


_EXPERIMENT = (
    click.option(
        "--unit",
        "unit_id",
        default="",
        help="Who or what keeps its arm in experiments: a user, a session.",
    ),
    click.option(
        "--covariate",
        type=float,
        help="A number known before the request, for metrics of experiments that name it.",
    ),
    click.option("--opt-out", is_flag=True, help="Take part in no experiment."),
    click.option(
        "--arm",
        "force_arm",
        default="",
        metavar="EXPERIMENT/ARM",
        help="Take this arm, whatever the hash says; the request is left out of every analysis.",
    ),
    click.option(
        "--label",
        "labels",
        type=Label(),
        multiple=True,
        help="Experiments may choose requests by it; may be given several times.",
    ),
)


def experiment(command: Command) -> Command:
    """Gives a command the options that `take_experiment` and `take_labels` read."""
    for option in reversed(_EXPERIMENT):
        command = option(command)
    return command


def take_experiment(options: dict[str, Any]) -> Experiment:
    """The Experiment of a command's options, which are taken out of `options`."""
    return Experiment(
        unit_id=options.pop("unit_id"),
        opt_out=options.pop("opt_out"),
        force_arm=options.pop("force_arm"),
        covariate=options.pop("covariate"),
    )


def take_labels(options: dict[str, Any]) -> dict[str, str]:
    """The labels of a command's options, which are taken out of `options`."""
    return dict(options.pop("labels"))


output_tokens = click.option(
    "--max-output-tokens",
    "-n",
    type=int,
    help=f"Most tokens of an answer. Default: {OUTPUT_TOKENS}; less where the model's context"
    " leaves less.",
)


def within_context(
    run: Callable[[int | None], Result], given: int | None, at_least: int = 0
) -> Result:
    """What `run` returns, which is called with the most output tokens of a request.

    Where --max-output-tokens was not `given`, and the model's context has no room for as many as
    this command line asks for by itself, the server may say how many it leaves.
    """
    try:
        return run(max(OUTPUT_TOKENS, at_least) if given is None else given)
    except InvalidRequest as error:
        if given is not None or error.reason != "CONTEXT_LENGTH":
            raise
    return run(None)


def read_text(file: Path | None) -> str | None:
    """What is in a file, or on standard input; None: there is none."""
    if file is None:
        return None
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is not text in UTF-8: {error}") from None


def read_prompt(text: str | None, file: Path | None, ids: bool) -> str | list[int]:
    """The prompt from the argument, the file, or standard input; `ids`: token ids, by spaces."""
    if text is not None and file is not None:
        raise click.UsageError("give the prompt as an argument or with --file, not both")
    if text is None:
        if file is None and sys.stdin.isatty():
            raise click.UsageError("no prompt: give it as an argument, with --file, or on stdin")
        text = sys.stdin.read() if file is None else read_text(file)
    assert text is not None  # of a file that is named there is a text
    if not ids:
        return text
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        message = f"with --ids a prompt is token ids separated by spaces: {error}"
        raise click.UsageError(message) from error
