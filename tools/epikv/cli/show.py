"""How results look: JSON lines for programs, rich for people."""

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from epikv.messages import Accepted, KvUsage, Summary

out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(highlight=False, markup=False, stderr=True)


def json_line(event: str, message: Any) -> None:
    """Prints one dataclass as one line, its kind first."""
    click.echo(json.dumps({"event": event, **asdict(message)}))


def slack(accepted: Accepted | None) -> int:
    """Tokens that the policy of a request may hold above its budget between two rounds."""
    params = accepted.kv.policy_params if accepted is not None and accepted.kv is not None else {}
    return int((params or {}).get("slack", 0))


def summary(message: Summary, slack: int = 0) -> None:
    """Prints the facts of a finished request to stderr, so that stdout holds its text alone."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts(message, slack):
        table.add_row(name, value)
    err.print(table)


def facts(message: Summary, slack: int = 0) -> list[tuple[str, str]]:
    """What a finished request was like: names and values. slack: as above."""
    stop = message.stop_string if message.stop_token_id is None else message.stop_token_id
    finish = message.finish_reason if stop is None else f"{message.finish_reason}: {stop}"
    facts = [("finish", finish)]
    if message.usage is not None:
        cached = message.usage.cached_prompt_tokens
        packets = message.usage.packet_prompt_tokens
        known = [f"{cached} cached"] * (cached > 0) + [f"{packets} of packets"] * (packets > 0)
        told = f" ({', '.join(known)})" if known else ""
        facts.append(
            (
                "tokens",
                f"{message.usage.prompt_tokens} in{told}, {message.usage.output_tokens} out",
            )
        )
    kv, timings = message.kv, message.timings
    if kv is not None:
        facts += [
            ("policy", f"{kv.policy} (uncalibrated)" if kv.uncalibrated else kv.policy),
            ("cache", f"{_budget(kv, slack)}, peak {kv.peak_tokens}"),
            ("evicted", f"{kv.evicted_tokens} tokens in {kv.rounds} rounds"),
        ]
    if timings is not None and timings.time_to_first_token is not None:
        facts.append(("first token", f"{timings.time_to_first_token * 1e3:.0f} ms"))
    if timings is not None and timings.decode and message.usage is not None:
        # The first output token comes from the prefill.
        facts.append(
            ("speed", f"{(message.usage.output_tokens - 1) / timings.decode:.1f} tokens/s")
        )
    return facts


def _budget(kv: KvUsage, slack: int) -> str:
    if kv.policy == "full":
        return "no budget"
    return f"budget {kv.budget_tokens} tokens" + (f" (+{slack} slack)" if slack else "")
