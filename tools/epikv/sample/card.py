"""The tables of the model card: every seed's accuracy by policy, and its calibration."""

import json
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[2] / "sample_model"
CARD = MODELS / "README.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def render(card: str) -> str:
    """The card with its tables made anew from results.json and calibration.json of all seeds."""
    before, rest = card.split(BEGIN)
    _, after = rest.split(END)
    seeds = sorted(path for path in MODELS.glob("seed*") if path.is_dir())
    results = {seed.name: json.loads((seed / "results.json").read_text()) for seed in seeds}
    fractions = sorted({row["fraction"] for rows in results.values() for row in rows}, reverse=True)
    parts = [_accuracy(results, fraction) for fraction in fractions]
    parts.append(_calibration(seeds))
    return before + BEGIN + "\n" + "\n\n".join(parts) + "\n\n" + END + after


def _accuracy(results: dict[str, list[dict[str, Any]]], fraction: float) -> str:
    cells = {
        seed: {row["policy"]: row for row in rows if row["fraction"] == fraction}
        for seed, rows in results.items()
    }
    problems = {row["problems"] for rows in cells.values() for row in rows.values()}
    heading = f"{fraction:.0%} of the trace kept, n = {', '.join(map(str, sorted(problems)))}:\n"
    lines = [heading, _row("policy", *cells), _row(*["---"] * (len(cells) + 1))]
    for policy in next(iter(cells.values())):
        lines.append(_row(policy, *(_cell(rows[policy]) for rows in cells.values())))
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    low, high = row["exact_interval"]
    return f"{row['exact']:.3f} [{low:.3f}, {high:.3f}], {row['answer_accuracy']:.3f}"


def _calibration(seeds: list[Path]) -> str:
    lines = [
        "Calibrations:\n",
        _row(
            "seed",
            "needed roles",
            "accuracy without them; with nothing else old",
            "pair, sign",
            "recall",
            "confirmation, n = 100: chosen / inverse / random / needed kept",
            "confirmed",
        ),
        _row(*["---"] * 7),
    ]
    for seed in seeds:
        c = json.loads((seed / "calibration.json").read_text())
        need, runs = c["need"], c["confirmation"]
        roles = need["roles"]
        without = ", ".join(f"{role} {need['without'][role]:.2f}" for role in roles)
        shares = [
            f"{runs[name]['exact']:.2f}"
            for name in ("chosen", "inverse", "random", "needed_tokens_kept")
        ]
        lines.append(
            _row(
                seed.name,
                ", ".join(roles),
                f"{without}; {need['only']['+'.join(roles)]:.3f}",
                f"{c['layers']['a']}, {c['layers']['b']}, {c['sign']:+d}",
                f"{c['recall']:.3f}",
                " / ".join(shares),
                "yes" if c["confirmed"] else "no",
            )
        )
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
