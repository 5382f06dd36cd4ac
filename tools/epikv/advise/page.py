"""What a study came to, for people: a few lines, one page, and the experiment to run next."""

import base64
import io
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from epikv.advise.risk import problems_without_loss
from epikv.advise.search import Candidate, Link
from epikv.advise.study import Advice
from epikv.eval.plan import Arm, Settings, Task
from epikv.eval.plots import COLOURS, MARKERS, OTHERS
from epikv.experiment.markup import Html, element
from epikv.experiment.page import style
from epikv.messages import Model
from epikv.stats import Estimate, wilson
from epikv.v1 import experiment_pb2

_REPLAYED = (
    "No right answers are known. The full cache answers, greedily; then each policy is asked for the likeliest token at"
    " each place of that answer, behind the answer's own tokens. What is lost is the share of places at which that is"
    " another token. A free answer goes on differently after the first of them, and rounding makes a few as well."
)
PAGE, FACTS, EXPERIMENT = "advice.html", "advice.json", "experiment.textproto"


def lines(arms: Sequence[Arm], settings: Settings, advice: Advice) -> Iterator[str]:
    """The short answer."""
    allowed = f"{_points(advice)} with {_exactly(advice.wish.confidence)} confidence"
    advised = advice.advised
    if not advice.found.in_time:
        yield "time ran out: the same command with more --minutes goes on"
    if advised is None:
        yield f"nothing is certified to lose at most {allowed}: keep the full cache"
        yield from _why_not(advice)
        return
    at = advised.candidate
    yield (
        f"{at.policy} at {at.budget} tokens: certified to lose at most {allowed}"
        f" ({len(advised.losses)} problems; measured {fmean(advised.losses):+.2%})"
    )
    if solved := _solved(advice):
        yield solved
    if saved := advice.memory.get(at):
        yield f"memory: {_percent(saved)} of the full cache's{_below(_arm(arms, at))}"
    if advice.speed is not None:
        yield f"seconds a token, alone: {_percent(advice.speed)} of the full cache's"
    yield f"ask for it: epikv generate {command(arms, settings, at)}"
    if advice.flags:
        told = shlex.join(f"--{flag.removeprefix('--')}" for flag in advice.flags)
        yield f"of a daemon that is started as this one was: epikvd --model=MODEL {told}"


def command(arms: Sequence[Arm], settings: Settings, at: Candidate) -> str:
    """The options of `epikv generate` that ask for what was measured."""
    arm = _arm(arms, at)
    words = ["--policy", arm.policy, "--budget", f"{at.budget}"]
    for name, value in arm.params.items():
        words += ["--param", f"{name}={json.dumps(value)}"]
    for name, value in (arm.kv or {}).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if settings.equal_protection:
        words.append("--equal-protection")
    return shlex.join([*words, "--temperature", "0"])


def experiment(model: Model, arms: Sequence[Arm], settings: Settings, at: Candidate) -> Any:
    """The definition that compares what is advised with the full cache on real traffic."""
    arm = _arm(arms, at)
    kv = arm.at(at.budget, settings.equal_protection)
    made = experiment_pb2.Experiment(
        name="advised",
        hypothesis=f"{arm.policy} at {at.budget} tokens is as good as the full cache.",
        traffic_permille=100,
        primary_metric="right",
    )
    made.arms.add(name="full", weight_permille=500, control=True).kv.policy = "full"
    made.arms.add(name="advised", weight_permille=500).kv.CopyFrom(kv.to_proto())
    made.eligibility.model = model.name
    made.metrics.add(
        name="right",
        kind=experiment_pb2.Metric.Kind.KIND_PROPORTION,
        direction=experiment_pb2.Metric.Direction.DIRECTION_HIGHER_IS_BETTER,
    )
    made.guardrails.add(metric="failed", margin=0.01)
    return made


def write(
    folder: Path,
    model: Model,
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    settings: Settings,
    advice: Advice,
) -> None:
    """The page, the facts as JSON and, where something is advised, the experiment's definition."""
    from epikv.experiment import definition

    told = _facts(advice)
    (folder / EXPERIMENT).unlink(missing_ok=True)  # of what was advised before
    (folder / FACTS).write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    if advice.advised is not None:
        made = experiment(model, arms, settings, advice.advised.candidate)
        definition.write(made, folder / EXPERIMENT)
    (folder / PAGE).write_text(_html(model, tasks, arms, settings, advice), "utf-8")


def _html(
    model: Model, tasks: Sequence[Task], arms: Sequence[Arm], settings: Settings, advice: Advice
) -> str:
    wish, found = advice.wish, advice.found
    title = f"{model.name}: which policy, at which budget"
    names = ", ".join(f"{task.name} ({len(task.items)})" for task in tasks)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(style())),
    )
    rows = [_row(advice, link) for link in found.chain]
    titles = ("budget", "policy", "certified", "lost", "problems", "memory", "lost while choosing")
    body = element(
        "body",
        element("h1", title),
        *(element("p", line) for line in lines(arms, settings, advice)),
        element("h2", "What the certificate says"),
        element(
            "p",
            f"Over problems like these, {names}, each counted once, every row that says yes loses at most"
            f" {_points(advice)} as a mean, with {_exactly(wish.confidence)} confidence for all such rows"
            " together, over all policies and budgets that this study tried, whenever it was stopped. It says"
            " nothing of problems of another kind, and a second study needs problems of its own.",
        ),
        *(() if advice.graded else (element("p", _REPLAYED),)),
        element("h2", "The chain"),
        element(
            "p",
            f"Of {len(found.explored)} policies and budgets, {advice.explored} problems at the most chose one"
            " policy for each budget; what saves no memory was left out. Other problems certify them, from the"
            " largest budget to the smallest; the first that fails ends it.",
            class_="soft",
        ),
        element(
            "div",
            element(
                "table",
                element("thead", element("tr", *(element("th", each) for each in titles))),
                element("tbody", *rows),
            ),
            class_="wide",
        ),
        _picture(advice),
        *_next(advice),
        element(
            "p",
            f"{_left_out(advice)}It took {advice.seconds / 60:.1f} minutes.",
            class_="soft",
        ),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _row(advice: Advice, link: Link) -> Html:
    memory = advice.memory.get(link.candidate)
    cells = (
        str(link.candidate.budget),
        link.candidate.policy,
        "yes" if link.certified else "no",
        f"{fmean(link.losses):+.2%}" if link.losses else "-",
        str(len(link.losses)),
        "-" if memory is None else _percent(memory),
        f"{fmean(link.explored):+.2%} of {len(link.explored)}",
    )
    return element("tr", *(element("td", cell) for cell in cells))


def _next(advice: Advice) -> Iterator[Html]:
    yield element("h2", "What to do next")
    if advice.advised is None:
        for line in _why_not(advice):
            yield element("p", line)
        return
    yield element(
        "p",
        "Compare it with the full cache on the requests of your users, who know best what an answer is worth:"
        f" epikv experiment create {EXPERIMENT}, which lies beside this page.",
    )


def _why_not(advice: Advice) -> Iterator[str]:
    wish, chain = advice.wish, advice.found.chain
    least = problems_without_loss(wish.most_loss, wish.confidence)
    there = advice.problems - advice.explored
    if advice.shows_nothing:
        yield f"{_solved(advice)}: too little for a loss of {_points(advice)} to mean anything"
    elif there < least:
        yield (
            f"{there} problems certify, and without a single loss it takes {least}: give more --problems or"
            " tasks, with another --out, or allow a larger --max-loss"
        )
    elif chain:
        first = next(link for link in chain if not link.certified)
        at = f"{first.candidate.policy} at {first.candidate.budget} tokens"
        lost = "nothing yet"
        if first.losses:
            lost = f"{fmean(first.losses):+.2%} of {len(first.losses)} problems"
        if first.hopeless:
            advised = "try larger budgets, with another --out, or allow a larger --max-loss"
        elif advice.found.in_time:
            advised = "more problems may certify it, with another --out"
        else:
            advised = "more minutes may certify it"
        yield f"{at}, the safest of what was found, lost {lost}: {advised}"
    elif advice.found.in_time:
        yield (
            "on the problems that choose, every budget lost far more than that, or saved no memory: try other"
            " budgets, with another --out"
        )


def _solved(advice: Advice) -> str:
    if not advice.graded or not advice.full:
        return ""
    share = wilson(sum(advice.full), len(advice.full))
    return (
        f"the full cache solves {share.value:.1%} [{share.low:.1%}, {share.high:.1%}] of"
        f" {len(advice.full)} problems"
    )


def _left_out(advice: Advice) -> str:
    if not advice.unanswered:
        return ""
    return f"{advice.unanswered} problems were left out: the full cache itself was refused, or failed. "


def _points(advice: Advice) -> str:
    """What may be lost; not rounded, for it is what was certified."""
    most = _exactly(advice.wish.most_loss)
    return f"{most} of all problems" if advice.graded else f"{most} of the answers' tokens"


def _exactly(share: float) -> str:
    return f"{100 * share:g}%"


def _picture(advice: Advice) -> Html:
    """Mean losses over budgets: of what was explored in grey, the chain's in colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    found = advice.found
    chosen = list(dict.fromkeys(link.candidate.policy for link in found.chain))
    looks: dict[str, dict[str, Any]] = {
        policy: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, policy in enumerate(chosen)
    }
    for policy in sorted({candidate.policy for candidate in found.explored}):
        points = sorted(
            (candidate.budget, fmean(losses))
            for candidate, losses in found.explored.items()
            if candidate.policy == policy
        )
        axis.plot(*zip(*points, strict=True), **OTHERS)
    largest = advice.wish.most_loss
    for link in found.chain:
        losses = link.losses or list(link.explored)
        mean = fmean(losses)
        largest = max(largest, mean)
        deviation = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / len(losses))
        axis.errorbar(
            link.candidate.budget,
            mean,
            yerr=1.96 * deviation / math.sqrt(len(losses)),
            linestyle="",
            markerfacecolor=None if link.certified else "white",
            label=link.candidate.policy,
            **looks[link.candidate.policy],
        )
    axis.axhline(advice.wish.most_loss, color="black", linestyle="--", linewidth=0.8)
    # Of the others, some lose nearly all: what is decided here would be a line at the bottom.
    axis.set_ylim(top=min(axis.get_ylim()[1], 3 * largest))
    axis.set_xlabel("budget in tokens; filled: certified; dashed: what may be lost; grey: others")
    axis.set_ylabel("mean loss a problem")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if handles:
        axis.legend(handles.values(), handles.keys())
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    data = base64.b64encode(content.getvalue()).decode()
    return element(
        "p", Html(f'<img alt="losses" style="max-width:100%" src="data:image/png;base64,{data}">')
    )


def _facts(advice: Advice) -> dict[str, Any]:
    """As JSON."""

    def of(candidate: Candidate) -> dict[str, Any]:
        return {"policy": candidate.policy, "budget": candidate.budget}

    def estimate(of: Estimate | None) -> list[float] | None:
        return None if of is None else [of.value, of.low, of.high]

    advised, wish = advice.advised, advice.wish
    return {
        "max_loss": wish.most_loss,
        "confidence": wish.confidence,
        "advised": None if advised is None else of(advised.candidate),
        "chain": [
            {
                **of(link.candidate),
                "certified": link.certified,
                "problems": len(link.losses),
                "mean_loss": fmean(link.losses) if link.losses else None,
                "evidence": math.exp(min(link.evidence, 700.0)),
                "memory": estimate(advice.memory.get(link.candidate)),
            }
            for link in advice.found.chain
        ],
        "explored": [
            {**of(candidate), "problems": len(losses), "mean_loss": fmean(losses)}
            for candidate, losses in sorted(advice.found.explored.items(), reverse=True)
        ],
        "speed": estimate(advice.speed),
        "cached_tokens": advice.cached,
        "in_time": advice.found.in_time,
        "seconds": advice.seconds,
    }


def _below(arm: Arm) -> str:
    tokens = (arm.kv or {}).get("tier_tokens", 0)
    return f" in the KV pool, and a tier of {tokens} tokens below it" if tokens else ""


def _arm(arms: Sequence[Arm], at: Candidate) -> Arm:
    return next(arm for arm in arms if arm.label == at.policy)


def _percent(of: Estimate) -> str:
    return f"{of.value:.0%} [{of.low:.0%}, {of.high:.0%}]"
