"""What a calibration looks for: its signals and statistics, and what it finds in made-up traces."""

from dataclasses import replace

import numpy as np
import pytest
from epikv.calibrate.choose import _pairs, corrected, intervals, search
from epikv.calibrate.findings import CalibrationError
from epikv.calibrate.separation import (
    Chance,
    Measured,
    aucs,
    by_chance,
    keepers,
    measure,
    turned_aucs,
    turned_recalls,
)
from epikv.calibrate.signals import pair_scores, pairs, rolling
from epikv_lab.calibrate.synthetic import World, rate
from scipy.stats import mannwhitneyu

RNG = np.random.default_rng(0)


# Signals


def test_rolling_statistics_are_causal_and_of_the_population() -> None:
    steps = RNG.lognormal(size=(2, 150))
    mean, z = rolling(steps, 64)
    for t in (1, 5, 63, 64, 149):
        seen = steps[:, max(0, t - 63) : t + 1]
        np.testing.assert_allclose(mean[:, t], seen.mean(1))
        np.testing.assert_allclose(z[:, t], (steps[:, t] - seen.mean(1)) / (seen.std(1) + 1e-6))
    assert (z[:, 0] == 0).all()


def test_equal_steps_tie() -> None:
    mean, z = rolling(np.full((1, 100), 0.1), 8)
    assert (z == 0).all()
    np.testing.assert_allclose(mean, 0.1)


def test_a_pair_is_a_difference_in_single_precision() -> None:
    z = RNG.normal(size=(3, 10))
    scores = pair_scores(z)
    assert pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert scores[1].tolist() == (z[0] - z[2]).astype(np.float32).tolist()


# Statistics


def test_auc_counts_ties_half() -> None:
    values = np.round(RNG.normal(size=(3, 40)), 1)
    needed = RNG.random(40) < 0.3
    for row, auc in zip(values, aucs(values, needed), strict=True):
        u = mannwhitneyu(row[needed], row[~needed]).statistic
        assert auc == pytest.approx(u / (needed.sum() * (~needed).sum()))


def test_turning_labels_is_rolling_them() -> None:
    values, needed = RNG.normal(size=(2, 31)), RNG.random(31) < 0.4
    kept = keepers(values, 12)
    for turn in (0, 1, 7, 30):
        turned = np.roll(needed, turn)
        np.testing.assert_allclose(turned_aucs(values, needed)[:, turn], aucs(values, turned))
        recall = kept[:, turned].mean(1)
        np.testing.assert_allclose(turned_recalls(kept, needed)[:, turn], recall, atol=1e-12)


def test_of_equal_scores_the_newer_is_kept() -> None:
    assert keepers(np.array([[1.0, 0.0, 1.0, 1.0, 0.0]]), 2).tolist() == [
        [False, False, True, True, False]
    ]
    assert keepers(np.array([[1.0, 2.0, 0.0]]), 1).tolist() == [[False, True, False]]


def test_recall_of_both_signs() -> None:
    case = World(traces=1).cases(3)[0]
    measured = measure([case], 64)
    scores = pair_scores(rolling(case.steps, 64)[1])
    for sign, recalls in zip((1, -1), np.split(measured.recall["pair"][0], 2), strict=True):
        kept = np.argsort(sign * scores[4], kind="stable")[-case.keep :]
        assert recalls[4] == pytest.approx(
            np.isin(kept, np.flatnonzero(case.needed)).sum() / case.needed.sum()
        )
    assert measured.share.tolist() == [case.keep / 400]


def test_place_alone_explains_nothing_once_it_is_taken_out() -> None:
    """Steps and needed tokens both grow towards the end, and have nothing else in common."""
    draw = np.random.default_rng(1)
    early = draw.random((20, 300)) < np.linspace(0.1, 0.9, 300)
    cases = [
        replace(
            World().cases(0)[0],
            steps=np.linspace(1, 3, 300) + draw.random((2, 300)),
            needed=needed,
        )
        for needed in early
    ]
    measured = measure(cases, 300)
    assert measured.auc["raw"].mean() > 0.7
    assert measured.auc["z_in_place"].mean() == pytest.approx(0.5, abs=0.02)
    assert measured.auc["z"].mean() > 0.6


def test_the_correction_is_for_the_largest_of_all() -> None:
    """Where one layer's statistic is that of chance, p is at least what one look would give."""
    cases = World(traces=12).cases(5)
    chance = by_chance(cases, 64, 999, 0)
    measured = measure(cases, 64)
    p_layers, p_pairs, threshold = corrected(measured, chance)
    for layer, p in enumerate(p_layers):
        centre = chance.z[:, layer].mean()
        further = np.abs(chance.z[:, layer] - centre) >= abs(
            measured.auc["z"][:, layer].mean() - centre
        )
        assert p >= (1 + further.sum()) / 1000
    assert len(p_pairs) == 2 * len(pairs(7))
    assert 2.5 < threshold < 4.5


def test_what_never_changes_is_no_finding() -> None:
    measured = measure(World(traces=4).cases(0), 64)
    flat = Chance(np.full((99, 7), 0.5), np.full((99, 42), 0.4))
    p_layers, p_pairs, _ = corrected(measured, flat)
    assert min(p_layers.min(), p_pairs.min()) == 1


def test_intervals_cover_the_mean() -> None:
    covered = 0
    for seed in range(200):
        values = np.random.default_rng(seed).normal(0.5, 0.1, size=(30, 1))
        found = intervals(values, seed)[0]
        covered += found.low <= 0.5 <= found.high
    assert 0.88 <= covered / 200 <= 0.98


# What it finds


def test_planted_layers_have_the_auc_that_was_asked_for() -> None:
    world = World(planted=2, sign=-1, traces=200, drift=0)
    z = measure(world.cases(7), 64).auc["z"].mean(0)
    assert z[2] == pytest.approx(0.40, abs=0.01)
    np.testing.assert_allclose(np.delete(z, 2), 0.5, atol=0.01)


def test_finds_a_planted_layer_and_its_sign() -> None:
    assert rate(World(), 100, plant=True) >= 0.95


def test_finds_nothing_where_nothing_is() -> None:
    assert rate(World(), 100, plant=False) >= 0.95


def test_neighbours_of_one_sign_are_a_band() -> None:
    cases = [
        replace(case, steps=case.steps[[0, 3, 3, 3, 4, 5, 6]]) for case in World(planted=3).cases(1)
    ]
    found = search(cases)
    assert [(band.first, band.last, band.sign) for band in found.bands] == [(1, 3, 1)]
    assert found.bands[0].representative == 2  # of equals, the middle one
    assert found.bands[0].weight == pytest.approx(0.10, abs=0.02)
    assert {found.pairs[0].a, found.pairs[0].b} & {1, 2, 3}


def test_pairs_of_one_recall_are_ranked_by_auc() -> None:
    """Of three layers; where one sign keeps nearly all, the other keeps next to nothing."""
    recall = np.tile([0.9, 0.9, 0.9, 0.1, 0.1, 0.1], (8, 1))
    auc = np.tile([0.6, 0.8, 0.7], (8, 1))
    half = Measured(
        {"z": np.full((8, 3), 0.5), "pair": auc}, {"pair": recall}, np.full(8, 0.5), ["x"] * 8
    )
    found = _pairs(half, half, np.full(6, 0.001), 0)
    assert [(pair.a, pair.b, pair.sign) for pair in found] == [
        (0, 2, 1), (1, 2, 1), (0, 1, 1), (0, 1, -1), (1, 2, -1), (0, 2, -1)
    ]  # fmt: skip
    assert [pair.accepted for pair in found] == [True] * 3 + [False] * 3


def test_what_the_other_half_does_not_see_is_rejected() -> None:
    planted, null = World(planted=3, auc=0.65).cases(1), World().cases(2)
    mixed = [pair for both in zip(planted, null, strict=True) for pair in both]
    found = search(mixed)
    assert not found.bands and not found.pairs
    assert [band.representative for band in found.rejected_bands] == [3]
    assert found.rejected_pairs
    assert "on the held-out half" in found.why_nothing()


def test_too_few_traces_are_no_evidence() -> None:
    with pytest.raises(CalibrationError, match="15 of 15 traces.*it takes 16"):
        search(World(planted=0, auc=0.8, traces=15).cases(0))
    rare = [replace(case, needed=np.arange(400) < 9) for case in World().cases(0)]
    with pytest.raises(CalibrationError, match="0 of 24"):
        search(rare)
