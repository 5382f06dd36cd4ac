"""The generated parts of the page that holds the EpiKV paper's claims against measurements.

They are made of reproduction-*.jsonl in each seed's folder (`epikv_lab.sample.measure`) and of what
`epikv bench attention` and `epikv bench context` write with --json into `BENCHES`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epikv.eval.plan import RANDOM
from epikv.stats import Estimate, bootstrap, difference, wilson

from epikv_lab.bench import attention, context
from epikv_lab.sample.measure import INVERSE, MODELS, PUBLISHED, RKV, calibrated, folders, named
from epikv_lab.sample.scores import NOT_RUN, Score, read, solved, table_row

NAME = "reproduction"
PAGE = MODELS.parent / "lab" / "REPRODUCTION.md"
BENCHES = PAGE.with_name(NAME)

CALIBRATED = "epikv_flat, calibrated"  # the arm of each seed's own pair
BUDGETS = ("50%", "35%")
SPEED, LENGTH = 2.8, 16.0  # times, that the paper claims

# Of what a comparator's time or context is told: name, comparator, ours.
_SPEEDS = (
    ("`raas` over `epikv_lag_kv`, their pair", "raas", "epikv_lag_kv"),
    ("`raas` over `epikv_flat`", "raas", "epikv_flat"),
    ("`h2o` over `epikv_flat`", "h2o", "epikv_flat"),
    ("`h2o:scope=model` over `epikv_flat`", "h2o:scope=model", "epikv_flat"),
    ("`tova` over `epikv_flat`", "tova", "epikv_flat"),
    ("`snapkv` over `epikv_flat`", "snapkv", "epikv_flat"),
    ("`maps` over `hidden`, their pair", "maps", "hidden"),
    ("`eager` over `sdpa`", "eager", "sdpa"),
)
_LENGTHS = (
    (
        "hidden",
        "maps",
        "prefill that returns hidden states over one that returns all maps, their pair",
    ),
    ("hidden", "eager", "the same over maps of one layer at a time"),
    ("sdpa", "eager", "prefill that returns nothing over maps of one layer at a time"),
    (
        "epikv_flat",
        "h2o",
        "`epikvd`: `epikv_flat` over `h2o`, attention of all layers and heads by rows",
    ),
    ("epikv_flat", "raas", "`epikvd`: `epikv_flat` over `raas`, attention by rows"),
)

Place = tuple[str, str]  # protection-positions, and an arm
By = Mapping[str, Mapping[str, Sequence[Score]]]  # seed, protection-positions
Rounds = Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]  # place; arm, wall and cpu


@dataclass(frozen=True)
class Claim:
    """That one solves more than the other, on the same problems."""

    told: str
    theirs: str
    more: Place
    less: Place


_UNTESTED = "not tested"
_EQUAL, _PUBLISHED = "equal-absolute", "published-absolute"


def _above(arm: str, name: str, theirs: str) -> list[Claim]:
    """EpiKV-Flat over a comparator: as they ran both, and with all else equal."""
    return [
        Claim(f"EpiKV-Flat over {name}, {told}", theirs, (setting, ours), (setting, arm))
        for told, setting, ours in (
            ("as they ran it", "published-compact", PUBLISHED),
            ("true positions", _PUBLISHED, PUBLISHED),
            ("equal protection", _EQUAL, PUBLISHED),
            ("equal protection, calibrated", _EQUAL, CALIBRATED),
        )
    ]


CLAIMS = (
    *_above(
        "h2o:scope=model", "H2O", "abstract: 72 and 67 of 100 (67 retracted; then 64 %, n = 50)"
    ),
    *_above("thinkv", "ThinKV", "abstract: 72 and 71 of 100, against a ThinKV of their own"),
    *_above("raas", "RaaS", "repository: RaaS 60 of 100 at K = 2048, EpiKV-Flat not told there"),
    *_above(RKV, "R-KV", "repository: code, no figures"),
    *(
        Claim(f"Over random eviction: {told}", _UNTESTED, (_EQUAL, arm), (_EQUAL, RANDOM))
        for told, arm in (
            ("the published pair", PUBLISHED),
            ("its inverse", INVERSE),
            ("the calibrated pair", CALIBRATED),
        )
    ),
    *(
        Claim(f"Equal protection helps {name}", _UNTESTED, (_EQUAL, arm), (_PUBLISHED, arm))
        for name, arm in (("H2O", "h2o:scope=model"), ("ThinKV", "thinkv"), ("R-KV", RKV))
    ),
    *(
        Claim(f"True positions help {name}", _UNTESTED, (_EQUAL, arm), ("equal-compact", arm))
        for name, arm in (
            ("EpiKV-Flat", PUBLISHED),
            ("EpiKV-Flat, calibrated", CALIBRATED),
            ("H2O", "h2o:scope=model"),
            ("random", RANDOM),
        )
    ),
)


def parts() -> dict[str, Callable[[], str]]:
    """What makes each part of the page, by its name."""
    return {
        "accuracy-claims": lambda: accuracy(_scores(), CLAIMS),
        "settings": lambda: settings(_scores()),
        "system-claims": lambda: system(_samples(), _longest()),
        "attention": lambda: attention.table(_figures()) if _figures() else NOT_RUN,
        "context": lambda: context.table(_longest(), "maps") if _longest() else NOT_RUN,
    }


def accuracy(scores: By, claims: Iterable[Claim]) -> str:
    """A row a claim: the gain in problems solved, of each seed at each budget."""
    if not scores:
        return NOT_RUN
    budgets = " / ".join(BUDGETS)
    lines = [table_row("claim", "theirs", f"ours: gain at {budgets}, of each seed", "verdict")]
    lines.append(table_row(*["---"] * 4))
    for claim in claims:
        found = {seed: _gains(claim, seed, of) for seed, of in scores.items()}
        told = [
            f"{seed} " + (" / ".join(f"{gain.value:+.2f}" for gain in gains) or "has no pair")
            for seed, gains in found.items()
        ]
        gains = [gain for of in found.values() for gain in of]
        lines.append(table_row(claim.told, claim.theirs, ", ".join(told), verdict(gains)))
    return "\n".join(lines)


def verdict(gains: Sequence[Estimate]) -> str:
    """On the claim that all of these are above 0."""
    above = sum(gain.low > 0 for gain in gains)
    below = sum(gain.high < 0 for gain in gains)
    if gains and above == len(gains):
        return "holds"
    if gains and below == len(gains):
        return "the reverse holds"
    if above == below == 0:
        return "cannot be told"
    return f"not in general: {above} of {len(gains)} above, {below} below"


def system(samples: Rounds, longest: Mapping[str, context.Longest]) -> str:
    """The two claims of ratios, with every comparator. Times are CPU times, paired in rounds."""
    if not samples and not longest:
        return NOT_RUN
    lines = [
        table_row("claim", "where and against what", "ours", "verdict"),
        table_row(*["---"] * 4),
    ]
    for place, rounds in samples.items():
        for name, slow, fast in _SPEEDS:
            if slow in rounds[0]:
                ratio = bootstrap([taken[slow]["cpu"] / taken[fast]["cpu"] for taken in rounds])
                told = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
                cells = f"{SPEED} x faster", f"{place}: {name}", told, reached(ratio, SPEED)
                lines.append(table_row(*cells))
    for free, arm, name in _LENGTHS if longest else ():
        ratio = Estimate.exact(longest[free].tokens / longest[arm].tokens)
        cells = f"{LENGTH:g} x longer context", name, f"{ratio.value:.1f}", reached(ratio, LENGTH)
        lines.append(table_row(*cells))
    return "\n".join(lines)


def reached(ratio: Estimate, claimed: float) -> str:
    """On the claim that a ratio is so large."""
    if ratio.low >= claimed:
        return "holds"
    return "does not" if ratio.high < claimed else "cannot be told"


def settings(scores: By) -> str:
    """Of each seed: what every arm solves under each protection, positions and budget."""
    tables = []
    for seed, of in scores.items():
        heads = [f"{setting} {budget}" for setting in of for budget in BUDGETS]
        first = next(iter(of.values()))
        count = len(solved(first, RANDOM, BUDGETS[0]))
        lines = [f"### {seed}, n = {count}", "", table_row("policy", *heads)]
        lines.append(table_row(*["---"] * (len(heads) + 1)))
        for arm in dict.fromkeys(score.arm for score in first):
            cells = [_share(solved(mine, arm, b)) for mine in of.values() for b in BUDGETS]
            lines.append(table_row(f"`{arm}`", *cells))
        faults = {
            f"`{s.arm}`, {name}: {s.fault}" for name, mine in of.items() for s in mine if s.fault
        }
        tables.append(
            "\n".join([*lines, "", *(f"Not run: {fault}" for fault in sorted(faults))]).rstrip()
        )
    return "\n\n".join(tables) or NOT_RUN


def _gains(claim: Claim, seed: str, of: Mapping[str, Sequence[Score]]) -> list[Estimate]:
    """By budget; none of a seed without a pair of its own."""
    arms = []
    for setting, arm in (claim.more, claim.less):
        if arm == CALIBRATED:
            pair = calibrated(MODELS / seed)
            if not pair:
                return []
            arm = pair[0]
        arms.append((of[setting], arm))
    (more, one), (less, other) = arms
    return [difference(solved(more, one, b), solved(less, other, b)) for b in BUDGETS]


def _scores() -> By:
    """Of the seeds on which all settings have been run."""
    names = named(NAME)
    return {
        seed.name: {name.removeprefix(f"{NAME}-"): read(seed / f"{name}.jsonl") for name in names}
        for seed in folders()
        if all((seed / f"{name}.jsonl").exists() for name in names)
    }


def _figures() -> dict[str, Any]:
    found: dict[str, Any] = _bench("attention").get("figures", {})
    return found


def _samples() -> Rounds:
    found: Rounds = _bench("attention").get("samples", {})
    return found


def _bench(name: str) -> dict[str, Any]:
    """What the bench wrote last; nothing before it has."""
    file = BENCHES / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _longest() -> dict[str, context.Longest]:
    return {
        name: context.Longest(**of | {"measured": {int(n): b for n, b in of["measured"].items()}})
        for name, of in _bench("context").get("longest", {}).items()
    }


def _share(hits: Sequence[int]) -> str:
    if not hits:
        return "not run"
    share = wilson(sum(hits), len(hits))
    return f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"
