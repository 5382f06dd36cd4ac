"""An evaluation's summary as tables: Markdown with all there is, and a short one for a terminal."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Column, Table

from epikv.eval.plan import FULL

COLUMNS = (
    "policy", "n", "solved", "answers", "solved - full", "p", "solved - random", "p",
    "solved, of those that evicted", "dropped", "tokens", "of full", "capped", "peak KV",
)  # fmt: skip


def markdown(summary: dict[str, Any]) -> str:
    """How it was made, and a table for each task and budget."""
    plan, rows = summary["plan"], summary["rows"]
    parts = [f"# {plan['model']['name']}\n", *(f"{line}  " for line in made(plan))]
    place = None
    for row in rows:
        if (row["task"], row["budget"]) != place:
            place = row["task"], row["budget"]
            parts += ["", f"## {row['task']}, budget {row['budget']}", "", _cells(COLUMNS)]
            parts.append(_cells(["---"] * len(COLUMNS)))
        parts.append(_cells(cells(row)))
    return "\n".join(parts) + "\n"


def short(summary: dict[str, Any]) -> Iterator[Table]:
    """What fits into a terminal: one for each task and budget, the best arm first."""
    plan = summary["plan"]
    for task in plan["tasks"]:
        for budget in plan["budgets"]:
            rows = [
                row
                for row in summary["rows"]
                if (row["task"], row["budget"]) == (task["name"], budget)
            ]
            rows.sort(key=lambda row: -row["solved"]["value"] if "solved" in row else 1)
            table = Table(
                Column("policy", overflow="fold"),
                Column("solved", no_wrap=True),
                Column("over random", justify="right", no_wrap=True),
                Column("dropped", justify="right", no_wrap=True),
                Column("length", justify="right", no_wrap=True),
                title=f"{task['name']}, budget {budget}, {task['problems']} problems",
                title_justify="left",
            )
            for row in rows:
                table.add_row(*_short(row))
            yield table


def _short(row: dict[str, Any]) -> list[str]:
    if "solved" not in row:
        return [row["arm"], f"{row['pending']} to run" if row["pending"] else "refused"]
    gain, length = row.get("against_random"), row["length"]
    return [
        f"{row['arm']} ({row['n']} of them)" if row["refused"] else row["arm"],
        "{value:.2f} [{low:.2f}, {high:.2f}]".format_map(row["solved"]),
        _beyond_chance(gain) if gain else "",
        f"{row['dropped']:.0%}",
        f"{length['value']:.2f}" if length else "",
    ]


def _beyond_chance(gain: dict[str, float]) -> str:
    return f"{gain['value']:+.2f}" + (" *" if gain["low"] > 0 or gain["high"] < 0 else "  ")


def made(plan: dict[str, Any]) -> list[str]:
    """How the figures were made, in sentences."""
    model = plan["model"]
    kind = model["dtype"]
    kind += f", linears of {model['quantization']}" if "quantization" in model else ""
    kind += f", K and V cached as {model['kv_dtype']}" if "kv_dtype" in model else ""
    draws = (
        f"temperature {plan['temperature']:g}, top-p {plan['top_p']:g}, {plan['seeds']} seeds"
        if plan["temperature"]
        else "greedy"
    )
    tasks = ", ".join(f"{task['name']} ({task['problems']})" for task in plan["tasks"])
    slacks = sorted({arm["slack"] for arm in plan["arms"] if arm["policy"] != FULL})
    return [
        f"Model {model['name']}, {kind}, weights {model['weights'] or 'not told'};"
        f" {draws}; positions {plan['positions']}.",
        f"Problems: {tasks}; split {plan['split']}.",
        *map(_reading, (task for task in plan["tasks"] if "reading" in task)),
        protection(plan) + ".",
        "A budget counts all tokens, the prompt's too; a share is the prompt and that share of the"
        " reference trace.",
        f"Rounds of {' or '.join(str(slack + 1) for slack in slacks)} tokens, by which a cache may"
        " outgrow its budget between them; `random` has a policy's own.",
        "Intervals are 95 %: Wilson's of a share, the bootstrap over problems of a difference; p is"
        " McNemar's, exact, not corrected for the number of comparisons.",
    ]


def _reading(task: dict[str, Any]) -> str:
    """What was said of how a file's answers are read."""
    told = ", ".join(f"{name} {json.dumps(value)}" for name, value in task["reading"].items())
    return f"Answers of {task['name']}: {told}."


def protection(plan: dict[str, Any]) -> str:
    """What no policy could evict: for every plot and page."""
    if plan["equal_protection"]:
        return (
            "Equal protection: the prompt where prompt + 16 <= budget K, 4 sinks and the newest"
            " min(128, K/4) tokens, for every policy"
        )
    return "Published protection: each policy keeps what its authors' does, not the same for all"


def cells(row: dict[str, Any]) -> list[str]:
    """A row's, by COLUMNS."""
    name = f"`{row['arm']}`"
    if "solved" not in row:
        why = f"not run: {row['fault']}" if not row["pending"] else f"{row['pending']} to run"
        return [name, "", why.replace("\n", " "), *[""] * (len(COLUMNS) - 3)]
    if row["uncalibrated"]:
        name += " (uncalibrated)"
    n = f"{row['n']}" + (f" ({row['refused']} refused)" if row["refused"] else "")
    evicting = row["evicting"]
    of_evicting = f"{_share(evicting['solved'])}, n = {evicting['n']}" if evicting["n"] else "none"
    length = row["length"]
    return [
        name,
        n,
        _share(row["solved"]),
        _answers(row),
        *_gain(row["against_full"]),
        *_gain(row.get("against_random")),
        of_evicting,
        f"{row['dropped']:.0%}",
        f"{row['output_tokens']:.0f}",
        "" if length is None else f"{length['value']:.2f}",
        f"{row['cap_hits']:.0%}",
        f"{row['peak_tokens']}, {row['peak_bytes'] / 2**20:.2f} MiB",
    ]


def _answers(row: dict[str, Any]) -> str:
    """Of multiple choices, which have one part, both accuracies instead."""
    if "acc" in row:
        return f"acc {row['acc']:.3f}, acc_norm {row['acc_norm']:.3f}"
    return f"{row['answers']:.3f}"


def _share(share: dict[str, float]) -> str:
    return f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]"


def _gain(gain: dict[str, float] | None) -> tuple[str, str]:
    if gain is None:
        return "", ""
    told = f"{gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
    return told, f"{gain['p']:.2g}"


def _cells(columns: Sequence[str]) -> str:
    return "| " + " | ".join(columns) + " |"
