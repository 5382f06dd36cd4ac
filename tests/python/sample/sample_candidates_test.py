"""Candidates for policies, as they are simulated."""

import torch
from epikv_lab.sample.candidates import (
    GAP,
    AttentionFromAfar,
    Distinct,
    Frozen,
    Local,
    Sampled,
    _ridge,
)
from epikv_lab.sample.model import LAYERS, WIDTH
from epikv_lab.sample.simulate import newest_z


def residuals(row: torch.Tensor) -> torch.Tensor:
    """After every block the same: [L, 1, C]."""
    return row.expand(LAYERS, 1, -1).clone()


def scores_of(scorer: Frozen, rows: torch.Tensor) -> torch.Tensor:
    scorer.begin(torch.zeros(LAYERS, 1, WIDTH), len(rows))
    for t, row in enumerate(rows):
        found = scorer.score(t, residuals(row), torch.zeros(1, t + 1))
    return found[0]


def first_channel(h: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return h[3, :, 0]


def test_a_ridge_regression_finds_what_was_planted() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 8, generator=draw)
    planted = torch.tensor([1.0, 0, 0, -2, 0, 0, 0.5, 0])
    found = _ridge(x, x @ planted + 3 + 0.1 * torch.randn(4000, generator=draw))
    assert torch.allclose(found, planted / 1.01, atol=0.02)


def test_attention_counts_from_afar_alone() -> None:
    scorer = AttentionFromAfar()
    scorer.begin(torch.zeros(LAYERS, 1, WIDTH), 200)
    for t in range(200):
        attention = torch.zeros(1, t + 1)
        attention[0, max(0, t - 3)] = 5.0  # near
        if t == 150:
            attention[0, 40] = 0.7
        if t == 150:
            attention[0, 120] = 0.9  # too near
        found = scorer.score(t, torch.zeros(LAYERS, 1, WIDTH), attention)[0]
    assert found[40] == 0.7
    assert found[: 200 - GAP].sum() == found[40]
    assert found[200 - GAP :].isinf().all()


def test_of_tokens_alike_the_newer_stays() -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(6, WIDTH, generator=draw)
    rows[4] = rows[1] * 1.001
    plain = scores_of(Frozen(first_channel), rows)
    found = scores_of(Distinct(first_channel), rows)
    assert torch.equal(plain, rows[:, 0])
    assert found[1] == plain[1] - 10
    assert torch.equal(found[[0, 2, 3, 4, 5]], plain[[0, 2, 3, 4, 5]])


def test_a_score_can_be_local_or_a_weight_of_sampling() -> None:
    draw = torch.Generator().manual_seed(2)
    rows = torch.randn(90, WIDTH, generator=draw)
    local = scores_of(Local(first_channel), rows)
    assert torch.allclose(local[-1], newest_z(rows[:, 0]))
    sampled = scores_of(Sampled(first_channel, 0.5), rows)
    noise = (sampled - rows[:, 0]) / 0.5
    assert noise.std() > 0.8  # Gumbel's is 1.28
    assert torch.equal(sampled, scores_of(Sampled(first_channel, 0.5), rows))
