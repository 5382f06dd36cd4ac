"""`epikv policies` and `epikv models`: what a server offers."""

import json
from dataclasses import asdict

import click
from rich.table import Table

from epikv.cli import options, show
from epikv.client import Client
from epikv.messages import Policy, PolicyParam


@click.command("policies")
@click.argument("name", required=False)
@options.model
@options.server
@options.as_json
def policies(name: str | None, model: str, server: str, as_json: bool) -> None:
    """List the eviction policies, or describe policy NAME and its parameters."""
    with Client(server) as client:
        found = [client.policy(name, model=model)] if name else client.policies(model=model)
    if as_json:
        for policy in found:
            show.json_line("policy", policy)
    elif name:
        _describe(found[0])
    else:
        table = Table("policy", "drops", "prompt over budget", "summary")
        for policy in found:
            title = f"{policy.name} *" if policy.evaluation_only else policy.name
            table.add_row(title, policy.granularity, policy.prompt_eviction, policy.summary)
        show.out.print(table)
        if any(policy.evaluation_only for policy in found):
            show.out.print("* for evaluation only")


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
    for model in found:
        table = Table.grid(padding=(0, 2))
        for field, value in asdict(model).items():
            table.add_row(field, value if isinstance(value, str) else json.dumps(value))
        show.out.print(table)


def _describe(policy: Policy) -> None:
    show.out.print(f"{policy.name}: {policy.summary}")
    if policy.paper:
        show.out.print(policy.paper)
    show.out.print(
        f"drops by {policy.granularity}; protects {policy.sink_tokens} sinks; holds up to"
        f" {policy.slack_tokens} tokens over the budget between rounds; a prompt over the budget:"
        f" {policy.prompt_eviction}; signals: {', '.join(policy.signals) or 'none'}"
    )
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


def _allowed(param: PolicyParam) -> str:
    if param.choices:
        return " | ".join(param.choices)
    low, high = ("" if bound is None else f"{bound:g}" for bound in (param.min, param.max))
    return f"{low} .. {high}" if low or high else ""
