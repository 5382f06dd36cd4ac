"""What policies cost on real text: the measures, and that nothing is run twice."""

from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from epikv.errors import RpcError
from epikv.eval.plan import FULL, Arm
from epikv.messages import ScoreResponse, TopLogprobs
from epikv.options import Kv
from epikv_lab.stdlib import corpus, judge
from grpc import StatusCode

ARMS = [Arm(name, name, {}, 0) for name in (FULL, "random", "knorm")]


def tops(probabilities: dict[int, float]) -> TopLogprobs:
    ranked = sorted(probabilities, key=lambda token: -probabilities[token])
    return TopLogprobs(ranked, [log(probabilities[token]) for token in ranked])


def said(*places: dict[int, float], stands: int = 1) -> ScoreResponse:
    """Of a continuation of `stands`."""
    ids = [stands] * len(places)
    logprobs = [log(place.get(stands, 1e-3)) for place in places]
    told = [tops(place) for place in places]
    return ScoreResponse(None, ids, logprobs, [], [], [], None, told)


def test_a_divergence_is_none_of_the_same_and_never_above_the_whole_one() -> None:
    dice = np.random.default_rng(0)
    some = False
    for _ in range(50):
        p, q = dice.dirichlet(np.ones(40), 2)
        whole = float(np.sum(p * np.log(p / q)))
        told = [{int(t): log(x[t]) for t in np.argsort(-x)[: judge.TOP]} for x in (p, q)]
        assert judge.divergence(told[0], told[0]) == 0
        found = judge.divergence(told[0], told[1])
        some |= found > 0.1
        assert found <= whole + 1e-9
    assert some
    two = {0: log(0.9), 1: log(0.1)}, {0: log(0.5), 1: log(0.5)}
    assert judge.divergence(*two) == pytest.approx(0.9 * log(1.8) + 0.1 * log(0.2), abs=1e-5)


def test_a_token_that_an_arm_no_longer_tells_of_counts_in_full() -> None:
    passage = judge.Passage("a", [0], [1], far=[])
    full, other = said({1: 0.9, 2: 0.1}), said({2: 0.7, 3: 0.299})  # which gives it a thousandth
    found = judge.cost(passage, "random", 8, other, full)
    assert found.kl == pytest.approx(0.9 * log(900) + 0.1 * log(1 / 7), abs=1e-2)


def test_a_word_is_far_that_stands_behind_the_same_token_long_before_and_not_since() -> None:
    tokenizer = corpus.make_tokenizer(
        [corpus.Text(f"{i}.py", f"def shelf{i}(book):\n    return book\n") for i in range(200)]
    )
    before, word = tokenizer.encode("def book").ids
    (filler,) = tokenizer.encode("\n").ids
    assert tokenizer.decode([word]).strip() == "book"

    def far(since: list[int], gap: int) -> bool:
        ids = [filler, before, word, *since, *[filler] * (gap - len(since) - 2), before, word]
        assert ids.index(word) == len(ids) - 1 - gap
        return judge.is_far(tokenizer, ids, len(ids) - 1)

    assert far([], judge.FAR) and not far([], judge.FAR - 1)
    assert not far([filler, word], judge.FAR + 1), "it stands nearer behind another token"
    assert not judge.is_far(
        tokenizer, [filler, word, *[filler] * judge.FAR, before, word], judge.FAR + 3
    )
    assert not judge.is_far(tokenizer, [filler] * 2000, 1999), "no word"


def test_a_cost_counts_what_full_knew() -> None:
    passage = judge.Passage("a", [0], [1, 1, 1], far=[0, 1])
    full = said({1: 0.8, 2: 0.2}, {2: 0.6, 1: 0.4}, {1: 0.7, 2: 0.3})
    other = said({2: 0.9, 1: 0.1}, {1: 0.9, 2: 0.1}, {1: 0.7, 2: 0.3})
    found = judge.cost(passage, "random", 8, other, full)
    assert (found.places, found.same, found.known, found.kept) == (3, 1, 1, 0)
    assert found.nats == pytest.approx(-log(0.1) - log(0.9) - log(0.7))
    assert found.nats_full == pytest.approx(-log(0.8) - log(0.4) - log(0.7))
    assert found.kl > 1


class Client:
    """Knows all under `full`; under others, the less the smaller the budget."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.seeds: set[int] = set()

    def score(
        self, prompt: list[int], forced: list[int], *, kv: Kv, seed: int, **_: Any
    ) -> ScoreResponse:
        self.asked.append((kv.policy, kv.budget))
        self.seeds.add(seed)
        assert kv.policy == FULL or kv.equal_protection
        lost = 0.0 if kv.policy == FULL else 0.5 - 0.4 * int(kv.budget or 0) / 1024
        sure = 0.9 - lost * (1.0 if kv.policy == "knorm" else 1.2)
        return said(*[{1: sure, 2: 1 - sure}] * len(forced))


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Client, int], list[judge.Cost]]:
    passages = [judge.Passage(str(i), [0] * 1022, [1, 1], far=[1]) for i in range(3)]

    def ran(client: Any, count: int) -> list[judge.Cost]:
        out = tmp_path / "costs.jsonl"
        judge.bind(out, "weights", "texts", slack=0)
        return list(judge.judge(client, "m", passages[:count], ARMS, out, 2, {}))

    return ran


def test_nothing_is_run_twice(run: Callable[[Client, int], list[judge.Cost]]) -> None:
    pairs = (len(ARMS) - 1) * len(judge.SHARES)
    assert len(run(first := Client(), 2)) == 2 * pairs
    assert first.asked.count((FULL, None)) == 2
    assert len(first.seeds) == 2, "random draws anew for each passage"
    again = run(second := Client(), 3)
    assert len(again) == pairs and {of.passage for of in again} == {"2"}
    assert second.asked.count((FULL, None)) == 1
    assert run(third := Client(), 3) == [] and third.asked == []


def test_arms_that_are_refused_are_left_out(tmp_path: Path) -> None:
    class Refuses(Client):
        def score(
            self, prompt: list[int], forced: list[int], *, kv: Kv, seed: int, **more: Any
        ) -> ScoreResponse:
            if kv.policy == "knorm":
                self.asked.append((kv.policy, kv.budget))
                raise RpcError(StatusCode.INVALID_ARGUMENT, "no knorm here")
            return super().score(prompt, forced, kv=kv, seed=seed, **more)

    out, refused, client = tmp_path / "costs.jsonl", dict[str, str](), Refuses()
    judge.bind(out, "weights", "texts", slack=0)
    passages = [judge.Passage(str(i), [0] * 1022, [1, 1], far=[]) for i in range(3)]
    asked: Any = client
    found = list(judge.judge(asked, "m", passages, ARMS, out, 2, refused))
    assert {of.arm for of in found} == {"random"} and len(found) == 3 * len(judge.SHARES)
    assert list(refused) == ["knorm"] and "no knorm here" in refused["knorm"]
    assert sum(policy == "knorm" for policy, _ in client.asked) == len(judge.SHARES)
    assert "| none |" in judge.table(found)


def test_costs_of_another_model_are_not_mixed_in_and_a_cut_line_is_run_again(
    run: Callable[[Client, int], list[judge.Cost]], tmp_path: Path
) -> None:
    whole = run(Client(), 2)
    out = tmp_path / "costs.jsonl"
    with pytest.raises(ValueError, match="of another model"):
        judge.bind(out, "others", "texts", slack=0)
    out.write_text(out.read_text()[:-5])
    assert run(Client(), 2) == whole[-1:]
    assert judge.costs(out) == whole


def test_a_table_has_who_costs_least_first(
    run: Callable[[Client, int], list[judge.Cost]], tmp_path: Path
) -> None:
    run(Client(), 3)
    found = judge.costs(tmp_path / "costs.jsonl")
    found += [
        replace(each, arm="best", kl=0.0, nats=each.nats_full)
        for each in found
        if each.arm == "knorm" and each.passage != "2"
    ]
    half = judge.table(found).split("**512 of 1024 tokens (50%), 2 passages**\n\n")[1]
    rows = [row.split(" | ") for row in half.split("\n\n")[0].splitlines()[2:]]
    kl, more = (0.9 * log(0.9 / sure) + 0.1 * log(0.1 / (1 - sure)) for sure in (0.6, 0.54))
    assert [row[0] for row in rows] == ["| `best`", "| `knorm`", "| `random`"]
    assert [row[1].split()[0] for row in rows] == ["0.000", f"{kl:.3f}", f"{more:.3f}"]
    assert [row[2].split()[:1] for row in rows] == [[f"{more:.3f}"], [f"{more - kl:.3f}"], []]
    assert [row[3].split()[0] for row in rows] == ["1.000", "1.500", "1.667"]
    assert all("n = 2" in row[5] for row in rows)
    ranked = judge.ranking(found, 512)
    assert ranked["best"] == 0 and ranked["knorm"] == pytest.approx(kl, abs=1e-6)
    assert judge.ranking(found, 154)["random"] > ranked["random"] > ranked["knorm"]


def test_steps_that_ran_twice_have_a_column_where_there_are_some() -> None:
    plain = judge.Cost("a", "random", 8, 4, 4.0, 3.0, 1.0, 3, 0, 0)
    twice = replace(
        plain, arm="random tier_doubt=1.0", kl=0.5, doubted_steps=round(judge.FORCED / 8)
    )
    assert "steps run twice" not in judge.table([plain])
    lines = [line for line in judge.table([plain, twice]).splitlines() if line.startswith("|")]
    assert lines[0].endswith("| steps run twice |") and lines[1].count("---|") == 7
    assert lines[2].startswith("| `random tier_doubt=1.0`") and lines[2].endswith("| 12.5% |")
    assert lines[3].endswith("| 0.0% |")
