"""What policies cost on texts that the model never read.

Passages of the test files are forced through, one token a step, and what the model says of each next token is held
against what it says with the whole cache: the divergence of the two (KL), whether the likeliest token is the same, and
the perplexity. Words that were last written far back are counted by themselves: at every budget a window of the newest
tokens has lost them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import partial
from math import exp, log
from pathlib import Path

import numpy as np
from epikv.client import Client
from epikv.errors import InvalidRequest
from epikv.eval.plan import FULL, RANDOM, Arm
from epikv.messages import Policy, ScoreResponse, TopLogprobs
from epikv.options import Kv
from epikv.stats import Estimate, difference, ratio
from tokenizers import Tokenizer

from epikv_lab.stdlib import corpus

PROMPT, FORCED = 32, 992  # tokens of a passage
JUDGED = 512  # of these the last: at their first a budget of a half is full
SHARES = (0.5, 0.35, 0.25, 0.15)  # budgets, of a passage's tokens
FAR = 512  # tokens back, or more
TOP = 20  # likeliest tokens that are told of each place
VARIANTS = ("epikv_probe:aged=true",)  # judged beside the policies themselves
_LEAST = 1e-6  # of the probability of all other tokens: what float32 tells from 0


@dataclass(frozen=True)
class Passage:
    """Tokens of one file. far: places in `forced`, of those that are judged, whose word was last written far back."""

    name: str
    prompt: list[int]
    forced: list[int]
    far: list[int]


@dataclass(frozen=True)
class Cost:
    """What one arm says of one passage beside `full`. All are sums over the places that are judged."""

    passage: str
    arm: str
    budget: int
    places: int
    nats: float  # of the tokens that stand there
    nats_full: float
    kl: float  # of full's distribution from the arm's: a lower bound (`divergence`)
    same: int  # places whose likeliest token is full's
    known: int  # far places whose word is full's likeliest
    kept: int  # of these, that are the arm's likeliest, too
    # Steps, of all that are forced through, that ran a second time, with tokens of a tier.
    doubted_steps: int = 0


def usable(catalog: Iterable[Policy]) -> tuple[str, ...]:
    """Arms of all policies that need no calibration or have it."""
    names = [
        policy.name
        for policy in catalog
        if not policy.evaluation_only and (policy.has_artefact or not policy.needs_artefact)
    ]
    return (*names, *(arm for arm in VARIANTS if arm.partition(":")[0] in names))


def passages(tokenizer: Tokenizer, read: Sequence[corpus.Text], most: int) -> list[Passage]:
    """One of each test file that is long enough, from its middle; the files spread over all."""
    found = []
    for text in read:
        if text.part != "test":
            continue
        ids = tokenizer.encode(text.text).ids
        begin = (len(ids) - PROMPT - FORCED) // 2
        if begin < 0:
            continue
        ids = ids[begin : begin + PROMPT + FORCED]
        judged = range(len(ids) - JUDGED, len(ids))
        far = [i - PROMPT for i in judged if is_far(tokenizer, ids, i)]
        found.append(Passage(text.name, ids[:PROMPT], ids[PROMPT:], far))
    chosen = np.linspace(0, len(found) - 1, min(most, len(found))).astype(int)
    return [found[i] for i in chosen]


def is_far(tokenizer: Tokenizer, ids: Sequence[int], at: int) -> bool:
    """Whether a word at a place stands FAR tokens before or earlier, behind the same token as here, and nowhere since.
    A word is a token of two letters or more."""
    token = tokenizer.decode([ids[at]]).strip()
    if len(token) < 2 or not token.isidentifier():
        return False
    if ids[at] in ids[max(0, at - FAR + 1) : at]:
        return False
    pair = ids[at - 1 : at + 1]
    return any(ids[i - 1 : i + 1] == pair for i in range(1, at - FAR + 1))


def cost(passage: Passage, arm: str, budget: int, said: ScoreResponse, full: ScoreResponse) -> Cost:
    """What an arm said, held against what `full` said of the same passage."""
    places = range(max(0, len(passage.forced) - JUDGED), len(passage.forced))
    likeliest, of_full = ([tops.token_ids[0] for tops in of.top_logprobs] for of in (said, full))
    known = [i for i in passage.far if of_full[i] == passage.forced[i]]
    divergences = (
        divergence(_told(full, i, passage.forced[i]), _told(said, i, passage.forced[i]))
        for i in places
    )
    return Cost(
        passage=passage.name,
        arm=arm,
        budget=budget,
        places=len(places),
        nats=-sum(said.logprobs[i] for i in places),
        nats_full=-sum(full.logprobs[i] for i in places),
        kl=sum(divergences),
        same=sum(likeliest[i] == of_full[i] for i in places),
        known=len(known),
        kept=sum(likeliest[i] == passage.forced[i] for i in known),
        doubted_steps=said.summary.kv.doubted_steps if said.summary and said.summary.kv else 0,
    )


def _told(said: ScoreResponse, place: int, token: int) -> dict[int, float]:
    """Log-probabilities at a place: of the likeliest tokens, and of the one that stands there."""
    tops: TopLogprobs = said.top_logprobs[place]
    return {**dict(zip(tops.token_ids, tops.logprobs, strict=True)), token: said.logprobs[place]}


def divergence(full: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL in nats of tokens that both tell of, and of all others as one: never above the whole one. From log-probabilities
    by token."""
    both = [(full[token], other[token]) for token in full if token in other]
    total = sum(exp(p) * (p - q) for p, q in both)
    rest, rest_other = (max(_LEAST, 1 - sum(exp(pair[i]) for pair in both)) for i in (0, 1))
    return max(0.0, total + rest * (log(rest) - log(rest_other)))


def judge(
    client: Client,
    model: str,
    read: Sequence[Passage],
    arms: Sequence[Arm],
    out: Path,
    at_once: int,
    refused: dict[str, str],
) -> Iterator[Cost]:
    """Runs what `out` does not have, and adds it there, a line each. Yields what is new.

    out: bound by `bind`. refused: gets the arms that the daemon refuses, and why; they are left out.
    """
    have = {(of.passage, of.arm, of.budget) for of in costs(out)}
    with out.open("a") as file, ThreadPoolExecutor(at_once) as threads:
        for passage in read:
            tokens = len(passage.prompt) + len(passage.forced)
            wanted = [
                (arm, budget)
                for arm in arms
                for budget in (round(share * tokens) for share in SHARES)
                if arm.policy != FULL
                and arm.label not in refused
                and (passage.name, arm.label, budget) not in have
            ]
            if not wanted:
                continue
            full = _score(client, model, passage, Kv(FULL))
            held = partial(_held, client, model, passage, full, refused)
            for found in threads.map(held, wanted):
                if found is None:
                    continue
                file.write(json.dumps(asdict(found)) + "\n")
                file.flush()
                yield found


def bind(out: Path, model: str, texts: str, slack: int) -> None:
    """Says in the first line what costs in a file are of. ValueError: it holds others'. model, texts: digests."""
    facts = {
        "model": model,
        "texts": texts,
        "slack": slack,
        "prompt": PROMPT,
        "forced": FORCED,
        "judged": JUDGED,
        "far": FAR,
        "top": TOP,
    }
    line = json.dumps(facts) + "\n"
    have = out.read_text() if out.exists() else ""
    if have and not have.startswith(line):
        raise ValueError(
            f"{out} holds costs of another model, of other texts, or measured in another way"
        )
    whole = [each for each in have.splitlines(keepends=True) if each.endswith("\n")]
    out.write_text("".join(whole) or line)  # a kill may have cut the last one short


def _score(client: Client, model: str, passage: Passage, kv: Kv) -> ScoreResponse:
    """`random` draws anew for each passage: else all of them would lose the same places."""
    seed = int.from_bytes(hashlib.sha256(passage.name.encode()).digest()[:7])
    return client.score(
        passage.prompt, passage.forced, model=model, kv=kv, seed=seed, top_logprobs=TOP
    )


def _held(
    client: Client,
    model: str,
    passage: Passage,
    full: ScoreResponse,
    refused: dict[str, str],
    of: tuple[Arm, int],
) -> Cost | None:
    arm, budget = of
    kv = arm.at(budget)
    try:
        return cost(passage, arm.label, budget, _score(client, model, passage, kv), full)
    except InvalidRequest as error:
        refused[arm.label] = str(error)
        return None


def costs(path: Path) -> list[Cost]:
    """What a file of `judge` holds."""
    return [Cost(**json.loads(line)) for line in path.read_text().splitlines()[1:]]


def table(found: Iterable[Cost]) -> str:
    """A table for each budget, the arm that costs least first, of the passages that all its arms have. Intervals:
    bootstraps over passages; of the difference from `random`, over pairs."""
    by_budget: dict[int, dict[str, dict[str, Cost]]] = {}
    for each in found:
        by_budget.setdefault(each.budget, {}).setdefault(each.arm, {})[each.passage] = each
    lines = []
    twice = any(
        each.doubted_steps
        for of in by_budget.values()
        for arm in of.values()
        for each in arm.values()
    )
    for budget in sorted(by_budget, reverse=True):
        arms = by_budget[budget]
        common = sorted(set.intersection(*(set(of) for of in arms.values())))
        costs_of = {arm: [of[name] for name in common] for arm, of in arms.items()}
        lines += [
            f"**{budget} of {PROMPT + FORCED} tokens ({budget / (PROMPT + FORCED):.0%}), {len(common)} passages**",
            "",
            "| policy | KL, nats a token | less than random's by | perplexity over full's"
            f" | likeliest the same | far words kept |{' steps run twice |' if twice else ''}",
            f"|---|---|---|---|---|---|{'---|' if twice else ''}",
        ]
        if common:
            control = costs_of.get(RANDOM)
            lines += [
                _row(arm, costs_of[arm], control, twice)
                for arm in sorted(costs_of, key=_kl_in(costs_of))
            ]
        lines.append("")
    return "\n".join(lines)


def ranking(found: Iterable[Cost], budget: int) -> dict[str, float]:
    """KL a token at a budget, by arm."""
    by_arm: dict[str, list[Cost]] = {}
    for each in found:
        if each.budget == budget:
            by_arm.setdefault(each.arm, []).append(each)
    return {arm: _kl(of).value for arm, of in by_arm.items()}


def _kl_in(costs_of: Mapping[str, Sequence[Cost]]) -> Callable[[str], float]:
    return lambda arm: _kl(costs_of[arm]).value


def _kl(of: Sequence[Cost]) -> Estimate:
    return ratio([each.kl for each in of], [each.places for each in of])


def _row(arm: str, of: Sequence[Cost], control: Sequence[Cost] | None, twice: bool) -> str:
    places = [each.places for each in of]
    perplexity = ratio([each.nats - each.nats_full for each in of], places)
    words = sum(each.known for each in of)
    cells = [f"`{arm}`", _shown(_kl(of), 3)]
    if control is None or arm == RANDOM:
        cells.append("")
    else:
        cells.append(
            _shown(difference([_mean_kl(c) for c in control], [_mean_kl(c) for c in of]), 3)
        )
    cells.append(_shown(Estimate(*map(exp, astuple(perplexity))), 3))
    cells.append(_shown(ratio([each.same for each in of], places), 3))
    kept = ratio([each.kept for each in of], [each.known for each in of]) if words else None
    cells.append(f"{_shown(kept, 2)}, n = {words}" if kept else "none")
    if twice:
        cells.append(f"{sum(each.doubted_steps for each in of) / (FORCED * len(of)):.1%}")
    return f"| {' | '.join(cells)} |"


def _mean_kl(of: Cost) -> float:
    return of.kl / of.places


def _shown(of: Estimate, digits: int) -> str:
    return f"{of.value:.{digits}f} [{of.low:.{digits}f}, {of.high:.{digits}f}]"
