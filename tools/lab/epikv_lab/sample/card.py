"""The generated parts of the model card, of the tournament's page and of the README.

Everything is made anew from what each seed's folder holds: tournament.jsonl, pair.jsonl and
lengths.jsonl (epikv_lab.sample.measure), need.json, calibration.json and log.jsonl; of real text,
what tools/lab/text holds.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from epikv.cli.eval_models import SHIPPED
from epikv.eval.items import Axis
from epikv.eval.plan import FROZEN, FULL, ORACLE, RANDOM
from epikv.eval.tasks import axis
from epikv.sample.families import FAMILIES
from epikv.sample.need import load as load_needs
from epikv.stats import difference, sign_test, wilson

from epikv_lab.sample import claims, epikv_claims, overview, reproduction
from epikv_lab.sample.candidates import FILE as CANDIDATES
from epikv_lab.sample.measure import AGED, GATES, MODELS, calibrated, folders, scores_of
from epikv_lab.sample.scores import NOT_RUN, Score, budgets_of, solved, table_row
from epikv_lab.stdlib import page as real_text

FIRST = (FULL, ORACLE, RANDOM, FROZEN)  # rows that others are read against
PROBE = "epikv_probe"
FORECAST = "epikv_forecast"
# What the calibrated pair is held against, axis by axis.
OTHERS = ("h2o", "snapkv", "triattention", "random_attention", PROBE, ORACLE, RANDOM, FROZEN)
PICTURE = "![Problems solved against budget](../tools/sample_model/tournament.png)"
CURVE_TOKENS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8)  # millions


def pages() -> dict[Path, str]:
    """Each page that has generated parts, with these as they should be."""
    parts = {
        "tournament": _tournament,
        "tournament-cells": _cells,
        "accuracy": _accuracy,
        "lengths": _lengths,
        "needs": _needs,
        "gates": _gates,
        "pairs": _pairs,
        "axes": _axes,
        "candidates": _candidates,
        "judged": lambda: _compared("pair", PROBE),
        "aged-shares": lambda: _shares("aged"),
        "aged": lambda: _compared("aged", AGED[0]),
        "forecast": lambda: _compared("aged", FORECAST),
        "curves": _curves,
        **reproduction.parts(),
        **claims.parts(),
        **epikv_claims.parts(),
        **overview.parts(),
        **real_text.parts(),
    }
    names = ("README.md", "TOURNAMENT.md", "CANDIDATES.md")
    pages = MODELS.parents[1] / "docs"
    files = [pages / "what-policies-keep.md", *(MODELS / name for name in names)]
    files += [reproduction.PAGE, claims.PAGE, real_text.PAGE]
    return {file: _filled(file.read_text(), parts) for file in files}


def write() -> None:
    """The pages, and the tournament's picture."""
    from epikv_lab.sample.picture import draw

    for file, text in pages().items():
        file.write_text(text)
    every = [score for found in scores_of("tournament").values() for score in found]
    if every:
        draw(MODELS / "tournament.png", every, len(scores_of("tournament")))


def _filled(page: str, parts: dict[str, Callable[[], str]]) -> str:
    for name, make in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if begin in page:
            before, rest = page.split(begin)
            page = before + begin + "\n" + make() + "\n\n" + end + rest.split(end)[1]
    return page


def _tournament() -> str:
    """A row an arm, best first; of each budget what was solved on either axis, over all seeds."""
    by_seed = scores_of("tournament")
    all_scores = [score for found in by_seed.values() for score in found]
    if not all_scores:
        return NOT_RUN
    budgets = budgets_of(all_scores)
    axes = (Axis.REASONING, Axis.RECALL)
    of = {a: [s for s in all_scores if axis(s.task) == a] for a in axes}
    counts = [len(solved(of[a], RANDOM, budgets[0])) for a in axes]
    rows = []
    for arm in dict.fromkeys(score.arm for score in all_scores):
        shares = [_share(solved(of[a], arm, budget)) for a in axes for budget in budgets]
        told = [share for share in shares if share is not None]
        order = FIRST.index(arm) if arm in FIRST else len(FIRST)
        rows.append((order, -fmean(told) if told else 0.0, arm, shares))
    heads = [f"{a} {budget}" for a in axes for budget in budgets]
    lines = [table_row("policy", *heads), table_row(*["---"] * (len(heads) + 1))]
    lines += [
        table_row(_name(arm, all_scores), *map(_plain, shares)) for *_, arm, shares in sorted(rows)
    ]
    seeds_told = ", ".join(by_seed)
    lines += [
        "",
        f"Problems a cell: {axes[0]} {counts[0]}, {axes[1]} {counts[1]} ({seeds_told}); a share's 95 %"
        f" interval is at most ±{_widest(counts[0]):.2f} and ±{_widest(counts[1]):.2f} wide.",
        "",
        PICTURE,
    ]
    return "\n".join(lines)


def _cells() -> str:
    """Every cell with its interval, by seed and family."""
    parts = []
    for seed, found in scores_of("tournament").items():
        budgets = budgets_of(found)
        for task in dict.fromkeys(score.task for score in found):
            mine = [score for score in found if score.task == task]
            arms = dict.fromkeys(score.arm for score in mine)
            count = len(solved(mine, RANDOM, budgets[0]))
            rows = [
                table_row(_name(arm, mine), *(_interval(solved(mine, arm, b)) for b in budgets))
                for arm in arms
            ]
            heading = f"### {seed}, {task}, n = {count}\n"
            rule = table_row(*["---"] * (len(budgets) + 1))
            parts.append("\n".join([heading, table_row("policy", *budgets), rule, *rows]))
    faults = {
        s.arm: s.fault for found in scores_of("tournament").values() for s in found if s.fault
    }
    parts += [f"Not run: `{arm}`: {fault}" for arm, fault in faults.items()]
    return "\n\n".join(parts) or NOT_RUN


def _accuracy() -> str:
    """Under the full cache, on every problem that an evaluation ran at the tested length."""
    lines = [
        table_row("family", *(seed.name for seed in folders())),
        table_row(*["---"] * (len(folders()) + 1)),
    ]
    every = [scores_of(name) for name in ("tournament", "pair")]
    for family in FAMILIES:
        cells = []
        for seed in folders():
            found = [score for of in every for score in of.get(seed.name, ())]
            hits = solved([s for s in found if s.task == f"sample:{family}"], FULL, "")
            cells.append(f"{_interval(hits)}, n = {len(hits)}" if hits else "not run")
        lines.append(table_row(family, *cells))
    return "\n".join(lines)


def _lengths() -> str:
    """By lines of the trace, also such as training never saw."""
    found = scores_of("lengths")
    if not found:
        return NOT_RUN
    budget = budgets_of(next(iter(found.values())))[0]
    heads = [f"{seed}: {what}" for seed in found for what in (FULL, ORACLE, RANDOM)]
    lines = [table_row("family", "lines", *heads), table_row(*["---"] * (len(heads) + 2))]
    for task in dict.fromkeys(score.task for mine in found.values() for score in mine):
        name, _, length = task.removeprefix("sample:").partition("@")
        family = FAMILIES[name]
        new = int(length) not in family.lengths(max(family.trained))
        cells = [
            _plain(_share(solved([s for s in mine if s.task == task], arm, budget)))
            for mine in found.values()
            for arm in (FULL, ORACLE, RANDOM)
        ]
        lines.append(table_row(name, f"{length} (held out)" if new else length, *cells))
    counts = {len(score.hits) for mine in found.values() for score in mine if score.hits}
    told = ", ".join(map(str, sorted(counts)))
    return "\n".join([*lines, "", f"Problems a cell: {told}; {ORACLE} and {RANDOM} at {budget}."])


def _needs() -> str:
    lines = [
        table_row(
            "seed", "family", "needed roles", "accuracy without each", "with nothing else old"
        ),
        table_row(*["---"] * 5),
    ]
    for seed in folders():
        for family, need in load_needs(seed).items():
            roles = sorted(need.roles)
            without = ", ".join(f"{role} {need.without[role]:.2f}" for role in roles)
            alone = need.only["+".join(roles) or "nothing"]
            lines.append(
                table_row(
                    seed.name,
                    family,
                    ", ".join(roles) or "none",
                    without,
                    f"{alone:.3f} of {need.full:.3f}",
                )
            )
    return "\n".join(lines)


def _gates() -> str:
    """What is lost on texts held out: by the gates, and by the same numbers at other tokens."""
    lines = [
        table_row("seed", "policy", "leaves", "divergence", "of the same, shuffled"),
        table_row(*["---"] * 5),
    ]
    for seed in folders():
        for policy in GATES:
            file = seed / SHIPPED / f"{policy}.json"
            if not file.exists():
                continue
            made = json.loads(file.read_text())["made_with"]
            if "explained" in made:
                told = ["all", f"explains {fmean(made['explained']):.2f} of the variance", ""]
            else:
                of = made["held_out"]
                left = of["trained"].get("remembered", 1 - of["trained"].get("gone", 0))
                ways = (f"{of[way]['divergence']:.3f}" for way in ("trained", "shuffled"))
                told = [f"{left:.0%}", *ways]
            lines.append(table_row(seed.name, f"`{policy}`", *told))
    return "\n".join(lines)


def _pairs() -> str:
    """The chosen pair against what it is compared with, on the same problems."""
    parts = []
    for seed, found in scores_of("pair").items():
        calibration = json.loads((MODELS / seed / "calibration.json").read_text())
        chosen = calibrated(MODELS / seed)
        told = f"chosen: `{chosen[0]}`" if chosen else f"no pair: {calibration['refusal']}"
        for group, mine in (
            ("all families", found),
            *((t, [s for s in found if s.task == t]) for t in dict.fromkeys(s.task for s in found)),
        ):
            budgets = budgets_of(found)
            count = len(solved(mine, RANDOM, budgets[0]))
            lines = [f"### {seed}, {group}, n = {count}", ""]
            lines += [f"{told}\n"] if mine is found else []
            heads = [text for budget in budgets for text in (budget, f"{budget}: less `random`")]
            lines += [table_row("policy", *heads), table_row(*["---"] * (len(heads) + 1))]
            for arm in dict.fromkeys(score.arm for score in found):
                cells = [
                    cell
                    for b in budgets
                    for cell in (
                        _interval(solved(mine, arm, b)),
                        _gain(solved(mine, arm, b), solved(mine, RANDOM, b))
                        if arm != RANDOM
                        else "",
                    )
                ]
                lines.append(table_row(_name(arm, mine), *cells))
            parts.append("\n".join(lines))
    return "\n\n".join(parts) or NOT_RUN


def _axes() -> str:
    """The calibrated pair of each seed beside the others, by axis: solved at each budget."""
    by_seed = scores_of("pair")
    if not by_seed:
        return NOT_RUN
    chosen = {seed: (calibrated(MODELS / seed) or [""])[0] for seed in by_seed}
    axes = (Axis.REASONING, Axis.RECALL)
    heads = [f"{seed} {a}" for seed in by_seed for a in axes]
    lines = [table_row("policy", *heads), table_row(*["---"] * (len(heads) + 1))]
    counts: dict[Axis, int] = {}
    for arm in (None, *OTHERS):
        cells = []
        for seed, found in by_seed.items():
            for a in axes:
                mine = [score for score in found if axis(score.task) == a]
                shares = [_share(solved(mine, arm or chosen[seed], b)) for b in budgets_of(mine)]
                counts[a] = len(solved(mine, RANDOM, budgets_of(mine)[0]))
                cells.append(" / ".join(map(_plain, shares)))
        lines.append(table_row(f"`{arm}`" if arm else "`epikv_flat`, calibrated", *cells))
    budgets = " / ".join(budgets_of(next(iter(by_seed.values()))))
    told = ", ".join(f"{a} {count}" for a, count in counts.items())
    return "\n".join([*lines, "", f"Solved at {budgets} of the trace; problems a cell: {told}."])


def _candidates() -> str:
    """By simulation: solved on either axis, over all seeds."""
    files = [file for seed in folders() if (file := seed / CANDIDATES).exists()]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if not rows:
        return NOT_RUN
    fractions = sorted({row["fraction"] for row in rows}, reverse=True)
    axes = (Axis.REASONING, Axis.RECALL)
    heads = [f"{a} {fraction:.0%}" for a in axes for fraction in fractions]
    lines = [table_row("candidate", *heads), table_row(*["---"] * (len(heads) + 1))]
    counts: dict[Axis, int] = {}
    for candidate in dict.fromkeys(row["candidate"] for row in rows):
        cells = []
        for a in axes:
            for fraction in fractions:
                mine = [
                    row
                    for row in rows
                    if row["candidate"] == candidate
                    and row["fraction"] == fraction
                    and axis(f"sample:{row['family']}") == a
                ]
                counts[a] = max(counts.get(a, 0), sum(row["problems"] for row in mine))
                cells.append(f"{fmean(row['solved'] for row in mine):.2f}")
        lines.append(table_row(candidate, *cells))
    told = ", ".join(f"{a} {count}" for a, count in counts.items())
    return "\n".join(
        [*lines, "", f"Problems a cell: {told} ({', '.join(file.parent.name for file in files)})."]
    )


def _pooled(by_seed: Mapping[str, Sequence[Score]]) -> list[Score]:
    """Those of arms that every seed has."""
    everywhere = [{score.arm for score in found} for found in by_seed.values()]
    return [
        score
        for found in by_seed.values()
        for score in found
        if all(score.arm in arms for arms in everywhere)
    ]


def _shares(evaluation: str) -> str:
    """What each arm solves, all seeds together, by axis."""
    pooled = _pooled(scores_of(evaluation))
    if not pooled:
        return NOT_RUN
    budgets = budgets_of(pooled)
    of = {a: [s for s in pooled if axis(s.task) == a] for a in (Axis.REASONING, Axis.RECALL)}
    counts = ", ".join(f"{a} {len(solved(of[a], RANDOM, budgets[0]))}" for a in of)
    heads = [f"{a} {budget}" for a in of for budget in budgets]
    lines = [table_row("policy", *heads), table_row(*["---"] * (len(heads) + 1))]
    for arm in dict.fromkeys(score.arm for score in pooled):
        cells = [_interval(solved(of[a], arm, b)) for a in of for b in budgets]
        lines.append(table_row(_name(arm, pooled), *cells))
    return "\n".join([f"Problems a cell: {counts}.", "", *lines])


def _compared(evaluation: str, ours: str) -> str:
    """What an arm solves more than each other, on the same problems, by axis and over both."""
    axes = (None, Axis.REASONING, Axis.RECALL)
    by_seed = scores_of(evaluation)
    parts = []
    together = {f"{len(by_seed)} seeds together": _pooled(by_seed)} if len(by_seed) > 1 else {}
    for seed, found in {**together, **by_seed}.items():
        if not found:
            continue
        budgets = budgets_of(found)
        of = {a: [s for s in found if a is None or axis(s.task) == a] for a in axes}
        counts = ", ".join(f"{a or 'all'} {len(solved(of[a], RANDOM, budgets[0]))}" for a in axes)
        heads = [f"{a or 'all'} {budget}" for a in axes for budget in budgets]
        lines = [f"### {seed}: {counts}\n", table_row(f"`{ours}` less", *heads)]
        lines.append(table_row(*["---"] * (len(heads) + 1)))
        for arm in dict.fromkeys(score.arm for score in found):
            if arm == ours:
                continue
            cells = [
                _difference(solved(of[a], ours, b), solved(of[a], arm, b))
                for a in axes
                for b in budgets
            ]
            lines.append(table_row(_name(arm, found), *cells))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or NOT_RUN


def _curves() -> str:
    """Share of right tokens under teacher forcing by tokens of training, at the lengths so far."""
    logs = {
        seed.name: [json.loads(line) for line in (seed / "log.jsonl").read_text().splitlines()]
        for seed in folders()
    }
    heads = [f"{seed}: {family}" for seed in logs for family in FAMILIES]
    lines = [table_row("tokens", *heads), table_row(*["---"] * (len(heads) + 1))]
    for millions in CURVE_TOKENS:
        cells = []
        for log in logs.values():
            reviews = [r for r in log if r["stage"] == "problem" and r["tokens"] <= millions * 1e6]
            for family in FAMILIES:
                mine = [r for r in reviews if f"{family}/answer" in r]
                far = any(r["tokens"] > (millions - 0.1) * 1e6 for r in log)
                cells.append(
                    f"{mine[-1]['lines'][family]}: {mine[-1][f'{family}/answer']:.3f}"
                    if mine and far
                    else ""
                )
        lines.append(table_row(f"{millions:g}M", *cells))
    recalled = [
        f"{seed} after {max(r['tokens'] for r in log if r['stage'] == 'recall') / 1e6:.2f}M"
        for seed, log in logs.items()
    ]
    return "\n".join([*lines, "", f"The first stage ended: {', '.join(recalled)}."])


def _name(arm: str, found: Sequence[Score]) -> str:
    mark = " (uncalibrated)" if any(s.uncalibrated for s in found if s.arm == arm) else ""
    return f"`{arm}`{mark}"


def _share(hits: Sequence[int]) -> float | None:
    return fmean(hits) if hits else None


def _plain(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _widest(count: int) -> float:
    half = wilson(count // 2, count)
    return (half.high - half.low) / 2


def _interval(hits: Sequence[int]) -> str:
    if not hits:
        return "not run"
    share = wilson(sum(hits), len(hits))
    return f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"


def _gain(ours: Sequence[int], theirs: Sequence[int]) -> str:
    if not ours:
        return ""
    return f"{_difference(ours, theirs)}, p {sign_test(ours, theirs):.1g}"


def _difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    gain = difference(ours, theirs)
    return f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
