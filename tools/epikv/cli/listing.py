"""`epikv policies` and `epikv models`: what a server offers."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.table import Column, Table
from rich.text import Text

from epikv.cli import options, show
from epikv.client import Client
from epikv.messages import DefaultProtection, Model, Policy, PolicyCost, PolicyParam
from epikv.recommended import RECOMMENDED

# They score by the pair of blocks that `epikv calibrate epikv_flat` finds.
_BY_PAIR = ("epikv_flat", "epikv_seg", "segment_hs")


@click.command("policies")
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Every policy, not the recommended alone.")
@options.model
@options.server
@options.as_json
def policies(name: str | None, everything: bool, model: str, server: str, as_json: bool) -> None:
    """List the policies to begin with, all of them, or describe policy NAME and its parameters.

    --json lists all.
    """
    if name and everything:
        raise click.UsageError("give the NAME of one policy, or --all")
    with Client(server) as client:
        found = [client.policy(name, model=model)] if name else client.policies(model=model)
        served = [] if name or as_json else client.models()
    if as_json:
        for policy in found:
            show.json_line("policy", policy)
    elif name:
        _describe(found[0])
    else:
        asked = [each for each in served if model in ("", each.name)]
        _list(found, asked[0] if len(asked) == 1 else None, everything)


def _list(found: Sequence[Policy], model: Model | None, everything: bool) -> None:
    """model: whose calibration counts; None: it is not known which is meant."""
    known = {policy.name: policy for policy in found}
    first = [known[name] for name in RECOMMENDED if name in known]
    shown = found if everything or not first else first
    # A name is there to be copied: it is never cut.
    named = Column("policy\nand its cost, of a step", no_wrap=True)
    table = Table(named, "what it drops\nand what it needs", show_lines=True)
    for policy in shown:
        title = f"{policy.name} *" if policy.evaluation_only else policy.name
        why = f"\n{RECOMMENDED[policy.name]}" if shown is first else ""
        table.add_row(
            Text(title, style="bold").append(f"\n{_level(policy)}", style="not bold"),
            Text(f"{policy.summary}\nneeds {_needs(policy, model)}").append(why, style="italic"),
        )
    show.out.print(table)
    if any(policy.evaluation_only for policy in shown):
        show.out.print("* for evaluation only")
    if shown is first:
        show.out.print(
            "Shares: of problems that small models solved with half of their steps in the\n"
            "cache. Your model may rank policies otherwise: epikv eval measures it."
        )
        show.out.print(f"The other {len(found) - len(first)}: epikv policies --all")
    show.out.print("One, with its parameters: epikv policies NAME")


def _needs(policy: Policy, model: Model | None) -> str:
    """What has to be there before a request can use it, or use it well."""
    if policy.name == "full":
        return "room for every token"
    missing = [param.name for param in policy.params if param.default_value is None]
    needs = []
    if policy.needs_artefact and not policy.has_artefact:
        needs.append(f"epikv calibrate {policy.name}")
    elif missing:
        needs.append(f"values of {', '.join(missing)}")
    elif policy.name in _BY_PAIR and model is not None and model.calibration is None:
        needs.append("epikv calibrate epikv_flat, or it may be worse than chance")
    if policy.prompt_eviction == "refuses":
        needs.append("a prompt within the budget")
    return "; ".join(needs) or "nothing"


def _level(policy: Policy) -> str:
    if policy.cost is None:
        return "none" if policy.name == "full" else "not measured"
    return f"{policy.cost.level}, {100 * policy.cost.share_of_step:.1f} %"


@click.command("models")
@click.argument("name", required=False)
@options.server
@options.as_json
def models(name: str | None, server: str, as_json: bool) -> None:
    """List the served models, or describe model NAME."""
    with Client(server) as client:
        found = [client.model(name)] if name else client.models()
    if as_json:
        for model in found:
            show.json_line("model", model)
        return
    if name:
        _describe_model(found[0])
        return
    table = Table(
        Column("model", no_wrap=True), "weights", "layers", "context", "KV pool", "a budget"
    )
    for model in found:
        table.add_row(
            model.name,
            model.quantization or model.dtype,
            str(model.layers),
            f"{model.context_length} tokens",
            f"{model.kv_capacity_tokens} tokens",
            f"uses {model.default_policy}" if model.default_policy else "needs a policy",
        )
    show.out.print(table)
    show.out.print("More of one: epikv models NAME")


def _describe_model(model: Model) -> None:
    table = Table.grid(padding=(0, 2))
    for field, value in asdict(model).items():
        told = value if isinstance(value, str) else json.dumps(value)
        if field == "default_policy" and told:
            told += " (of a budget without a policy; of neither it is full)"
        table.add_row(field, told)
    show.out.print(table)


def _describe(policy: Policy) -> None:
    show.out.print(f"{policy.name}: {policy.summary}")
    if policy.paper:
        show.out.print(policy.paper)
    facts = Table.grid(padding=(0, 2))
    for fact in _facts(policy):
        facts.add_row(*fact)
    show.out.print(facts)
    if policy.params:
        table = Table("parameter", "type", "default", "allowed", "meaning")
        for param in policy.params:
            table.add_row(
                param.name,
                param.type,
                "" if param.default_value is None else json.dumps(param.default_value),
                _allowed(param),
                param.help,
            )
        show.out.print(table)


def _facts(policy: Policy) -> list[tuple[str, str]]:
    if policy.default_protection is None:
        return [("defaults", "this model has none for a parameter")]
    facts = [
        ("drops by", policy.granularity),
        ("protects", _protection(policy.default_protection)),
        ("slack", f"up to {policy.slack_tokens} tokens over the budget between rounds"),
        ("prompt over the budget", policy.prompt_eviction),
        ("signals", ", ".join(policy.signals) or "none"),
        ("columns", ", ".join(policy.columns) or "none"),
        (
            "beside K and V",
            f"{policy.state_bytes_per_token} bytes a token,"
            f" {policy.state_bytes_per_sequence} a sequence",
        ),
        ("cost", _cost(policy.cost)),
    ]
    if policy.needs_artefact:
        facts.append(("artefact", "loaded" if policy.has_artefact else "needed, and not loaded"))
    for option in policy.incompatible_options:
        facts.append(("refuses", f"{option.field} {option.value}: {option.reason}"))
    return facts


def _protection(kept: DefaultProtection | None) -> str:
    if kept is None:
        return ""
    prompt = {True: "the prompt", False: "", None: "the prompt where prompt + 16 <= budget"}
    recent = "the newest min(128, budget / 4)"
    if kept.recent_tokens is not None:
        recent = f"the newest {kept.recent_tokens}"
    if kept.recent_share is not None:
        recent = f"the newest {kept.recent_share:g} of the budget"
    sinks = f"{kept.sink_tokens} sinks" if kept.sink_tokens else ""
    return ", ".join(part for part in (prompt[kept.protect_prompt], sinks, recent) if part)


def _cost(cost: PolicyCost | None) -> str:
    if cost is None:
        return "not measured"
    return (
        f"{cost.level}: {cost.cpu_us_per_token:g} us of CPU a token, {cost.share_of_step:.1%} of a"
        f" step, at {cost.cached_tokens} cached tokens ({cost.made_with})"
    )


def _allowed(param: PolicyParam) -> str:
    if param.choices:
        return " | ".join(param.choices)
    low, high = ("" if bound is None else f"{bound:g}" for bound in (param.min, param.max))
    return f"{low} .. {high}" if low or high else ""
