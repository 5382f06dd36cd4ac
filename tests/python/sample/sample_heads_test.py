"""The second list of candidates: lanes that keep tokens of their own."""

import math
from pathlib import Path

import pytest
import torch
from epikv.sample import problem
from epikv.sample.families import FAMILIES
from epikv_lab.sample import heads
from epikv_lab.sample.heads import AGES, ByAge, Expected, LaneCache, Log, Product, Token
from epikv_lab.sample.model import HEAD_SIZE, HEADS, KV_HEADS, LAYERS, Cache, Llama, load
from epikv_lab.sample.simulate import run as run_whole
from torch import Tensor

MODELS = Path(__file__).parents[3] / "tools" / "sample_model"


@pytest.fixture(scope="module")
def model() -> Llama:
    return load(MODELS / (MODELS / "SHIPPED").read_text().strip())


class Newest:
    def begin(self, prompt: Tensor, shown: Tensor, capacity: int) -> None:
        self.batch = len(shown)

    def born(self, t: int, token: Token) -> None:
        pass

    def score(self, t: int, cache: LaneCache, prompt: int) -> Tensor:
        return torch.arange(t + 1.0).expand(LAYERS, self.batch, KV_HEADS, -1)


def test_what_keeps_all_writes_what_the_whole_cache_does(model: Llama) -> None:
    """Problems of unlike prompts in one batch."""
    tasks = [problem(f"choose/{n}", family, 6) for family in FAMILIES for n in range(2)]
    assert len({len(task.prompt.split()) for task in tasks}) > 1
    texts = heads.run(model, tasks, Newest(), fraction=10, pooled=False)
    assert texts == [run_whole(model, [task])[0] for task in tasks]


def test_a_round_leaves_each_lane_its_budget_or_all_together() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand(LAYERS, 2, KV_HEADS, 40, generator=draw)
    budgets, recent = torch.tensor([10, 20]), torch.tensor([3, 5])
    for pooled in (False, True):
        kept = torch.ones(LAYERS, 2, KV_HEADS, 40, dtype=torch.bool)
        kept[..., 39 - 1] = False  # gone before
        before = kept.clone()
        heads.evict(kept, scores, budgets, recent, pooled)
        assert not (kept & ~before).any()
        counts = kept.sum(-1)  # [L, B, G]
        if pooled:
            assert counts.sum((0, 2)).tolist() == [10 * LAYERS * KV_HEADS, 20 * LAYERS * KV_HEADS]
            assert len(set(counts[:, 0].flatten().tolist())) > 1
        else:
            assert (counts == budgets[None, :, None]).all()
        for number, window in enumerate(recent.tolist()):
            newest = torch.arange(40) >= 40 - window
            assert (kept[:, number] == before[:, number])[..., newest].all()
            # What went is worth less than what stayed, of each lane.
            for layer in range(LAYERS):
                for head in range(KV_HEADS):
                    stays = kept[layer, number, head] & ~newest
                    goes = before[layer, number, head] & ~kept[layer, number, head]
                    of = scores[layer, number, head]
                    assert not stays.any() or of[stays].min() > of[goes].max()


def test_worth_is_that_of_a_tokens_age() -> None:
    def read(token: Token) -> Tensor:
        return torch.arange(float(len(AGES))).expand(LAYERS, 1, KV_HEADS, -1)

    shown = torch.ones(1, 1, dtype=torch.bool)
    token = Token(torch.zeros(1, 1), torch.zeros(LAYERS, 1, 1), torch.zeros(LAYERS, 1, HEADS, 1))
    plain = Cache.empty(1, 4, torch.device("cpu"))
    cache = LaneCache(plain.keys, plain.values, plain.visible)
    for log in (False, True):
        by_age = ByAge(read)
        scorer = Log(by_age) if log else Product(by_age, by_age)
        scorer.begin(torch.zeros(LAYERS, 1, HEADS, 1, 1), shown, 500)
        for t in range(400):
            by_age.born(t, token)
        found = scorer.score(399, cache, 1)[0, 0, 0]
        for age, place in ((0, 0), (16, 0), (24, math.log2(1.5)), (32, 1), (128, 3), (399, 4)):
            wanted = math.log(max(place, heads.LEAST)) if log else 2 * place
            assert found[399 - age].item() == pytest.approx(wanted, abs=1e-5)


def test_expected_attention_is_that_of_queries_that_were_drawn() -> None:
    """Of normal queries at the next positions, the mean of exp(logit): by drawing many."""
    draw = torch.Generator().manual_seed(3)
    mean = torch.randn(HEAD_SIZE, generator=draw) * 0.5
    spread = torch.randn(HEAD_SIZE, HEAD_SIZE, generator=draw) * 0.1
    keys = torch.randn(LAYERS, 1, KV_HEADS, 12, HEAD_SIZE, generator=draw)
    values = torch.ones_like(keys)
    cache = LaneCache(
        keys,
        values,
        torch.ones(1, 12, dtype=torch.bool),
        by_lane=torch.ones(LAYERS, 1, KV_HEADS, 12, dtype=torch.bool),
    )
    queries = mean + torch.randn(200_000, HEAD_SIZE, generator=draw) @ spread
    # All heads have these; of 3 positions before the generated 9.
    known = heads.moments_of(queries.expand(LAYERS, 1, HEADS, -1, -1), torch.ones(1, len(queries)))
    scorer = Expected(known, frozen=True)
    scorer.begin(torch.zeros(0), torch.ones(1, 3, dtype=torch.bool), 9)
    found = scorer.score(8, cache, 3)[0, 0, 0]
    turned = queries @ heads.mean_rotation(12).T
    logits = turned @ keys[0, 0, 0, 3:].T * HEAD_SIZE**-0.5
    drawn = logits.double().exp().mean(0).log().float()
    constant = math.log(heads.GROUP) + math.log(HEAD_SIZE**0.5)  # of the group, and the values
    torch.testing.assert_close(found, drawn + constant, atol=0.02, rtol=0)
