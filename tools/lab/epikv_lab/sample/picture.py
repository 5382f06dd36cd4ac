"""The tournament in one picture: problems solved against budget, over all seeds, by axis."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from epikv.eval.items import Axis
from epikv.eval.plan import FROZEN, RANDOM
from epikv.eval.plots import ANCHORS, COLOURS, FROZEN_RANDOM, OTHERS
from epikv.eval.tasks import axis
from epikv.stats import wilson

from epikv_lab.sample.scores import Score, solved

_ANCHORS = {**ANCHORS, FROZEN: FROZEN_RANDOM}


def draw(file: Path, scores: Sequence[Score], seeds: int) -> None:
    """Each panel an axis; bands are Wilson's 95 % intervals."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    budgets = sorted({s.budget for s in scores if s.budget}, key=_percent)
    arms = list(dict.fromkeys(score.arm for score in scores))
    styles = {arm: _ANCHORS[arm] for arm in arms if arm in _ANCHORS}
    means = {
        arm: fmean(fmean(hits) if (hits := solved(scores, arm, b)) else 0.0 for b in budgets)
        for arm in arms
        if arm not in _ANCHORS
    }
    best = sorted(means, key=lambda arm: -means[arm])
    styles |= {arm: {"color": color} for arm, color in zip(best, COLOURS, strict=False)}

    axes = (Axis.REASONING, Axis.RECALL)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for panel, which in zip(figure.subplots(1, len(axes)), axes, strict=True):
        mine = [score for score in scores if axis(score.task) == which]
        for arm in arms:
            points = [
                (_percent(b), wilson(sum(h), len(h)))
                for b in budgets
                if (h := solved(mine, arm, b))
            ]
            x = [at for at, _ in points]
            style = styles.get(arm, OTHERS)
            panel.plot(x, [share.value for _, share in points], **style)
            if arm in styles:
                panel.fill_between(
                    x,
                    [share.low for _, share in points],
                    [share.high for _, share in points],
                    alpha=0.1,
                    linewidth=0,
                    color=style["color"],
                )
        count = len(solved(mine, RANDOM, budgets[0]))
        panel.set(
            title=f"{which}, n = {count}", xlabel="budget, % of the trace", ylim=(-0.03, 1.03)
        )
    figure.axes[0].set_ylabel("problems solved")
    handles = [Line2D([], [], label=arm, **style) for arm, style in styles.items()]
    handles.append(Line2D([], [], label=f"{len(arms) - len(styles)} others", **OTHERS))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    figure.suptitle(
        f"Sample models, {seeds} seeds. Equal protection:\nprompt, 4 sinks, newest min(128, K/4)"
        " tokens, for every policy",
        fontsize=9,
    )
    figure.savefig(file, dpi=120)


def _percent(budget: str) -> float:
    return float(budget.rstrip("%"))
