"""What a second look at what was dropped is worth, where the next token is uncertain (KvTier.doubt): tables of the page
of claims, made of claims-doubt.jsonl and claims-needles.jsonl in each seed's folder."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from epikv.eval.plan import FROZEN, FULL, ORACLE
from epikv.sample.families import problem
from epikv.sample.problem import Role
from epikv.stats import difference, wilson

from epikv_lab.sample.measure import DOUBTING, DOUBTS, EVALUATIONS, SLACK, varied
from epikv_lab.sample.scores import NOT_RUN, Score, budgets_of, solved, table_row

DOUBT, NEEDLES = "claims-doubt", "claims-needles"
PERIOD = SLACK + 1  # tokens from one round to the next
QUARTERS = ("first", "second", "third", "last")

Scores = Mapping[str, Sequence[Score]]  # by seed


@dataclass(frozen=True)
class Needle:
    """A fact that is told once, and asked for at the end."""

    quarter: int  # of the trace, in which it is told
    phase: int  # tokens since the last round, from 0


def needles(count: int, split: str, share: float) -> list[Needle]:
    """Of the first so many ledgers, part by part. share: of the trace, which the budget holds beside the prompt."""
    found = []
    for number in range(count):
        task = problem(f"{split}/{number}", "ledger")
        trace = task.trace_tokens
        told = {t.name: at for at, t in enumerate(trace) if t.role == Role.DEFINITION}
        room = round(share * len(trace))
        for name in task.answers:
            at = told[name]
            found.append(Needle(len(QUARTERS) * at // len(trace), (at - room) % PERIOD))
    return found


def doubts(scores: Scores) -> str:
    """What each arm solves, and with a tier that it looks at in doubt; and how often it does."""
    if not scores:
        return NOT_RUN
    pooled = [score for found in scores.values() for score in found]
    [budget] = budgets_of(pooled)
    nats = [f"{variant['tier_doubt']:g}" for variant in DOUBTS]
    titles = [title for n in nats for title in (f"doubt above {n}", "gain", "steps run twice")]
    lines = [table_row("policy", budget, *titles), table_row(*["---"] * (2 + len(titles)))]
    for arm in DOUBTING:
        plain = solved(pooled, arm, budget)
        cells = [_share(plain)]
        for variant in DOUBTS:
            name = varied(arm, variant)
            with_tier = solved(pooled, name, budget)
            gain = difference(with_tier, plain)
            twice = fmean(score.doubted for score in pooled if score.arm == name)
            told = f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"
            cells += [_share(with_tier), told, f"{twice:.1%}"]
        lines.append(table_row(f"`{arm}`", *cells))
    count = len(solved(pooled, DOUBTING[0], budget))
    return "\n".join([*lines, "", f"Problems a cell: {count} ({', '.join(scores)})."])


def found_needles(scores: Scores) -> str:
    """Share of facts that each arm tells, by where in the trace they stand and by their phase."""
    if not scores:
        return NOT_RUN
    from scipy.stats import chi2_contingency

    of = EVALUATIONS[NEEDLES]
    [share] = of.budgets
    facts = needles(of.problems, of.split, share)
    [variant] = of.variants
    arms = [FROZEN, *(arm for each in DOUBTING for arm in (each, varied(each, variant)))]
    titles = [*(f"{quarter} quarter" for quarter in QUARTERS), "worst phase", "best", "p"]
    lines = [table_row("policy", "all", *titles), table_row(*["---"] * (2 + len(titles)))]
    for arm in [FULL, ORACLE, *arms]:
        rights = [
            (fact, int(right))
            for found in scores.values()
            for score in found
            if score.arm == arm
            for fact, right in zip(facts, score.parts, strict=True)
        ]
        quarters, phases = defaultdict(list), defaultdict(list)
        for fact, right in rights:
            quarters[fact.quarter].append(right)
            phases[fact.phase].append(right)
        shares = [fmean(of_phase) for of_phase in phases.values()]
        table = [(sum(hits), len(hits) - sum(hits)) for hits in phases.values()]
        told = {right for _, right in rights}
        p = f"{chi2_contingency(table).pvalue:.2g}" if len(told) > 1 else ""
        lines.append(
            table_row(
                f"`{arm.split()[0]}` in doubt" if " " in arm else f"`{arm}`",
                _share([right for _, right in rights]),
                *(f"{fmean(quarters[quarter]):.2f}" for quarter in range(len(QUARTERS))),
                f"{min(shares):.2f}",
                f"{max(shares):.2f}",
                p,
            )
        )
    note = (
        f"Facts: {len(rights)} ({', '.join(scores)}), of which a quarter of the trace has"
        f" {min(map(len, quarters.values()))} and a phase {min(map(len, phases.values()))} at least."
        f" Doubt: above {variant['tier_doubt']:g}. p: that phases do not matter (chi-square)."
    )
    return "\n".join([*lines, "", note])


def _share(hits: Sequence[int]) -> str:
    share = wilson(sum(hits), len(hits))
    return f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"
