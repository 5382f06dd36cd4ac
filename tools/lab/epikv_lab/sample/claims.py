"""The generated parts of the page that holds the papers' claims against measurements, below its table.

They are made of tournament.jsonl and claims-*.jsonl in each seed's folder (`epikv_lab.sample.measure`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from epikv.eval.plan import FULL, RANDOM
from epikv.stats import Estimate, difference

from epikv_lab.sample.doubt import DOUBT, NEEDLES, doubts, found_needles
from epikv_lab.sample.measure import (
    ADDED,
    BY_ATTENTION,
    BY_HEAD,
    CHUNK,
    DECORATED,
    DECORATORS,
    EVALUATIONS,
    FAR,
    FETCH,
    GUARD,
    GUARD_OF_ONE,
    GUARDED,
    LOOKAHEAD,
    MODELS,
    PACKED,
    PACKED_ARMS,
    UNIFIED,
    WIDTHS,
    decorated,
    rounded,
    scores_of,
    varied,
    with_lookahead,
)
from epikv_lab.sample.packets import ALONE, RANDOM_ROWS, TRAINED, TURN, UNREAD
from epikv_lab.sample.packets import NAME as PACKETS
from epikv_lab.sample.reproduction import verdict
from epikv_lab.sample.scores import (
    NOT_RUN,
    Score,
    budgets_of,
    share,
    signed,
    solved,
    table_row,
)

PAGE = MODELS.parent / "lab" / "CLAIMS.md"
NEAR = 0.05  # as good as another: at worst so much below it
TOURNAMENT, PROMPT = "tournament", "claims-prompt"
DECORATING, STEERING, WIDTH = "claims-decorators", "claims-steering", "claims-widths"
GUARDING, GUARDING_ONE = "claims-guard", "claims-guard-one"
FETCHING, EPISODIC = "claims-far", "claims-episodes"
LAPROX, ADDING, PACKING = "claims-laprox", "claims-added", "claims-packed"

Scores = dict[str, list[Score]]  # by seed


@dataclass(frozen=True)
class Claim:
    """That one solves more than the other, or as much if `or_equal`, on the same problems."""

    told: str
    theirs: str
    more: str
    less: str
    or_equal: bool = False


_ABOVE = "above every policy that needs no training"
LEARNED = (
    Claim("TRIM-KV: at or above the full cache", "75.8 against 65.5", "trimkv", FULL, True),
    Claim("Make Each Token Count: at or above the full cache", "", "dbtrimkv", FULL, True),
    Claim(
        "TRIM-KV over the best without training (`expected_attention`)",
        _ABOVE,
        "trimkv",
        "expected_attention",
    ),
    Claim("Make Each Token Count over the same", "", "dbtrimkv", "expected_attention"),
    Claim("Make Each Token Count over TRIM-KV", "", "dbtrimkv", "trimkv"),
    Claim("DMS over the same", "", "dms", "expected_attention"),
    Claim("KVzap over the same", "", "kvzap", "expected_attention"),
    Claim("SkipKV over R-KV", "+26.7 % accuracy", "skipkv", "rkv"),
    Claim("OBCache over H2O", "consistently", "obcache", "h2o"),
    Claim("LaProx over SnapKV", "beats scoring by head", "laprox", "snapkv"),
    Claim("InfoKV over SnapKV", "beats scoring by attention alone", "infokv", "snapkv"),
)
PROMPTS = (
    Claim("LAQ over SnapKV", "1 to 4 points", "laq", "snapkv"),
    Claim("LAQ++ over SnapKV", "1 to 4 points", "laq_plus", "snapkv"),
    Claim("LAQ++ over LAQ", "", "laq_plus", "laq"),
    *(
        Claim(f"`{one}` by tokens told ahead over `{one}`", "", with_lookahead(one), one)
        for one in LOOKAHEAD
    ),
    Claim("KVzip over SnapKV", "", f"kvzip:chunk={CHUNK}", "snapkv"),
    Claim("KVzip+ over KVzip", "", f"kvzip_plus:chunk={CHUNK}", f"kvzip:chunk={CHUNK}"),
)
EPISODES = (Claim("EpiCache over SnapKV", "up to +40 % accuracy", "epicache", "snapkv"),)
LAPROXES = (
    Claim("LaProx: as good as the full cache", "at 5 % of it", UNIFIED, FULL, True),
    Claim("LaProx over its scores, a budget for each head", "19 sets", UNIFIED, BY_HEAD),
    Claim("LaProx over SnapKV", "19 sets", UNIFIED, BY_ATTENTION),
)
_ADDITIONS = {
    "obcache": ("OBCache over SnapKV's mean of the same window", "consistently"),
    "obcache:accumulate=true": ("OBCache since birth over H2O", "consistently"),
    "infokv": ("InfoKV over its window's attention alone", "attention alone falls short"),
}
ADDITIONS = tuple(Claim(*_ADDITIONS[more], more=more, less=less) for more, less in ADDED.items())
_THEIRS = {
    "caote": "always improves what it is added to",
    "inertia": "outweighs the choice of a score",
}
DECORATIONS = tuple(
    Claim(f"`{one}` with {of} over `{one}`", _THEIRS.get(of, ""), decorated(one, of), one)
    for of in DECORATORS
    for one in DECORATED
)


def parts() -> dict[str, Callable[[], str]]:
    """What makes each part of the page, by its name."""
    return {
        "learned-claims": lambda: table(scores_of(TOURNAMENT), LEARNED),
        "prompt-claims": lambda: table(scores_of(PROMPT), PROMPTS),
        "prompt-cells": lambda: cells(scores_of(PROMPT)),
        "decorator-claims": lambda: table(scores_of(DECORATING), DECORATIONS),
        "steering-claims": lambda: steering(scores_of(STEERING)),
        "width-claims": lambda: widths(scores_of(WIDTH)),
        "guard-claims": lambda: beneath(
            scores_of(GUARDING), (*GUARDED, RANDOM), GUARD, "25%", "50%"
        ),
        "guard-one-claims": lambda: beneath(
            scores_of(GUARDING_ONE), (*GUARDED, RANDOM), GUARD_OF_ONE, "25%", "50%"
        ),
        "far-claims": lambda: beneath(scores_of(FETCHING), FAR, FETCH, "15%", "25%"),
        "doubt-claims": lambda: doubts(scores_of(DOUBT), scores_of(FETCHING)),
        "needle-claims": lambda: found_needles(scores_of(NEEDLES)),
        "packed-claims": lambda: packed(with_tier()),
        "added-claims": lambda: table(scores_of(ADDING), ADDITIONS),
        "laprox-claims": lambda: table(scores_of(LAPROX), LAPROXES),
        "laprox-cells": lambda: cells(scores_of(LAPROX)),
        "episode-claims": lambda: table(scores_of(EPISODIC), EPISODES),
        "episode-cells": lambda: cells(scores_of(EPISODIC)),
        "packet-claims": lambda: packets(scores_of(PACKETS)),
    }


def table(scores: Scores, claims: Sequence[Claim]) -> str:
    """A row a claim: the gain in problems solved at each budget, all seeds together. The verdict is
    on each seed at each budget."""
    scores = having(scores, claims)
    if not scores:
        return NOT_RUN
    pooled = _pooled(scores)
    budgets = budgets_of(pooled)
    lines = [
        table_row("claim", "theirs", *budgets, "verdict"),
        table_row(*["---"] * (len(budgets) + 3)),
    ]
    for claim in claims:
        told = [signed(gain(claim, pooled, budget)) for budget in budgets]
        judged = judge([claim], scores, budgets)
        lines.append(table_row(claim.told, claim.theirs or "not told so", *told, judged))
    return "\n".join([*lines, "", _count(scores)])


def having(scores: Scores, claims: Sequence[Claim]) -> Scores:
    """Of the seeds on which all arms of these claims have been run."""
    wanted = {arm for claim in claims for arm in (claim.more, claim.less)}
    return {seed: of for seed, of in scores.items() if wanted <= {score.arm for score in of}}


def judge(claims: Sequence[Claim], scores: Scores, budgets: Sequence[str]) -> str:
    """The verdict on claims of one kind, by each seed at each budget."""
    gains = [gain(claim, of, b) for claim in claims for of in scores.values() for b in budgets]
    return as_good(gains) if claims[0].or_equal else verdict(gains)


def as_good(gains: Sequence[Estimate]) -> str:
    """On the claim that none of these is below 0 by more than NEAR."""
    below = sum(gain.high < 0 for gain in gains)
    if below == 0 and all(gain.low >= -NEAR for gain in gains):
        return "holds"
    if below == 0:
        return "cannot be told"
    return f"not in general: {below} of {len(gains)} below"


def cells(scores: Scores) -> str:
    """What every arm solves at each budget, all seeds together."""
    if not scores:
        return NOT_RUN
    budgets = budgets_of(_pooled(scores))
    pooled = _pooled(scores)
    lines = [table_row("policy", *budgets), table_row(*["---"] * (len(budgets) + 1))]
    for arm in dict.fromkeys(score.arm for score in pooled):
        faults = {score.fault for score in pooled if score.arm == arm and score.fault}
        told = [share(solved(pooled, arm, budget)) for budget in budgets]
        lines.append(table_row(f"`{arm}`" + (" (refused in part)" if faults else ""), *told))
    return "\n".join([*lines, "", _count(scores)])


def steering(scores: Scores) -> str:
    """What each arm solves, and how long its outputs are, beside those that are not steered."""
    coefficients = EVALUATIONS[STEERING].steering
    return _beside(
        scores, {arm: [f"{arm} steered {c:g}" for c in coefficients] for arm in (FULL, "skipkv")}
    )


def widths(scores: Scores) -> str:
    """The same, of rows that are rounded, beside the full cache."""
    return _beside(scores, {FULL: [rounded(width) for width in WIDTHS]})


def beneath(
    scores: Scores, arms: Sequence[str], fields: Mapping[str, float], less: str, more: str
) -> str:
    """What each arm solves at the smaller budget with a tier beneath it, beside itself without one,
    there and at the larger budget."""
    if not scores:
        return NOT_RUN
    pooled = _pooled(scores)
    told = ", ".join(f"`{field}` {value}" for field, value in fields.items())
    lines = [
        table_row("policy", less, f"{less} and a tier", "gain", more, f"gain over {more}"),
        table_row(*["---"] * 6),
    ]
    for arm in arms:
        tiered = solved(pooled, varied(arm, fields), less)
        at_less, at_more = solved(pooled, arm, less), solved(pooled, arm, more)
        gains = [signed(difference(tiered, plain)) for plain in (at_less, at_more)]
        row = share(at_less), share(tiered), gains[0], share(at_more), gains[1]
        lines.append(table_row(f"`{arm}`", *row))
    return "\n".join([*lines, "", f"The tier: {told}. {_count(scores)}"])


def with_tier() -> Scores:
    """What lies in the tier as it was cached, and rounded, on the same problems."""
    rounded_too = scores_of(PACKING)
    arms = {varied(arm, fields) for arm in PACKED_ARMS for fields in PACKED}
    return {
        seed: [*found, *(score for score in rounded_too[seed] if score.arm in arms)]
        for seed, found in scores_of(FETCHING).items()
        if seed in rounded_too
    }


def packed(scores: Scores) -> str:
    """What each arm solves at the smaller budget by what a number of the tier takes."""
    if not scores:
        return NOT_RUN
    pooled = _pooled(scores)
    lines = [
        table_row("policy", "15%", "and a tier", "of 8 bits", "gain", "of 4 bits", "gain"),
        table_row(*["---"] * 7),
    ]
    for arm in PACKED_ARMS:
        whole = solved(pooled, varied(arm, FETCH), "15%")
        row = [share(solved(pooled, arm, "15%")), share(whole)]
        for fields in PACKED:
            hits = solved(pooled, varied(arm, fields), "15%")
            row += [share(hits), signed(difference(hits, whole))]
        lines.append(table_row(f"`{arm}`", *row))
    return "\n".join([*lines, "", f"Gains are over the tier as it was cached. {_count(scores)}"])


def tier_bytes(width: int, bits: int) -> int:
    """K and V of a token and head in the tier: numbers, and a float for each row (8 bits) or for each 32
    of its numbers (4 bits); see runtime/kernels/tier_format.h."""
    scales = 1 if bits == 8 else -(-width // 32)
    return 2 * (width * bits // 8 + 4 * scales)


def packets(scores: Scores) -> str:
    """What is solved over documents that are read in each way, by family, and the share of right
    parts."""
    if not scores:
        return NOT_RUN
    pooled = _pooled(scores)
    families = list(dict.fromkeys(score.task for score in pooled))
    lines = [
        table_row("documents", *families, "right parts", "solved over packets alone"),
        table_row(*["---"] * (len(families) + 3)),
    ]
    alone = solved(pooled, ALONE, "")
    for arm in (TURN, TRAINED, RANDOM_ROWS, ALONE, UNREAD):
        of_arm = [score for score in pooled if score.arm == arm]
        shares = [
            share([hit for score in of_arm if score.task == task for hit in score.hits])
            for task in families
        ]
        right = f"{fmean(score.answers for score in of_arm):.2f}"
        more = "" if arm == ALONE else signed(difference(solved(pooled, arm, ""), alone))
        lines.append(table_row(arm, *shares, right, more))
    count = len(alone) // len(families)
    return "\n".join([*lines, "", f"Problems a cell: {count} ({', '.join(scores)})."])


def _beside(scores: Scores, arms: Mapping[str, Sequence[str]]) -> str:
    """arms: by what they are held against."""
    if not scores:
        return NOT_RUN
    budget = budgets_of(_pooled(scores))[0]
    pooled = _pooled(scores)
    lines = [
        table_row("policy", "solved", "gain", "output tokens", "share of tokens"),
        table_row(*["---"] * 5),
    ]
    for base, others in arms.items():
        plain, length = _solved(pooled, base, budget), _length(pooled, base)
        lines.append(table_row(f"`{base}`", share(plain), "", f"{length:.0f}", ""))
        for arm in others:
            hits, tokens = _solved(pooled, arm, budget), _length(pooled, arm)
            more = signed(difference(hits, plain))
            cells = share(hits), more, f"{tokens:.0f}", f"{tokens / length:.2f}"
            lines.append(table_row(f"`{arm}`", *cells))
    return "\n".join([*lines, "", f"Budget {budget}. {_count(scores)}"])


def _solved(found: Sequence[Score], arm: str, budget: str) -> list[int]:
    """A steered `full` has no budget either."""
    return solved(found, arm, "" if arm.startswith(FULL) else budget)


def _length(found: Sequence[Score], arm: str) -> float:
    return fmean(score.tokens for score in found if score.arm == arm)


def gain(claim: Claim, found: Sequence[Score], budget: str) -> Estimate:
    """Of the tasks that both ran: some policies refuse some prompts."""
    ours: list[int] = []
    theirs: list[int] = []
    for task in dict.fromkeys(score.task for score in found):
        mine = [score for score in found if score.task == task]
        more, less = solved(mine, claim.more, budget), solved(mine, claim.less, budget)
        if len(more) == len(less):
            ours += more
            theirs += less
    return difference(ours, theirs)


def _count(scores: Scores) -> str:
    count = len(solved(_pooled(scores), RANDOM, budgets_of(_pooled(scores))[0]))
    return f"Problems a cell: {count} ({', '.join(scores)})."


def _pooled(scores: Scores) -> list[Score]:
    return [score for found in scores.values() for score in found]
