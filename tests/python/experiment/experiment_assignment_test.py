"""Who is dealt which arm: the client's arithmetic is the daemon's."""

import json
import runpy
from collections import Counter
from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest
from dealt_experiment import UNITS, dealt
from epikv.experiment.assignment import NUM_BUCKETS, arm_of, bucket_of, layer_bucket, unit_hash

GOLDEN = Path(__file__).parents[2] / "golden"


def sigmas(observed: int, n: int, share: float) -> float:
    """How far a binomial count is from its mean; one run in a million is beyond five."""
    return abs(observed - n * share) / sqrt(n * share * (1 - share))


def test_the_hash_is_the_daemons() -> None:
    """The figures of UnitHash and BucketOf in experiment_assignment_test.cc."""
    assert unit_hash("lean", 1, "user-7") == 0xFD0225C39384E565
    assert unit_hash("layer/default", 0, "") == 0x3B834A4D195355D2
    assert bucket_of(0) == 0 and bucket_of(2**64 - 1) == NUM_BUCKETS - 1
    assert (bucket_of(2**63 - 1), bucket_of(2**63)) == (NUM_BUCKETS / 2 - 1, NUM_BUCKETS / 2)


def test_the_golden_arms_are_those_of_its_maker() -> None:
    """experiment_assignment_test.cc finds the same."""
    golden = json.loads((GOLDEN / "experiment_assignment.json").read_text())
    assert golden == runpy.run_path(str(GOLDEN / "make_experiment_assignment.py"))["golden"]()


@pytest.mark.parametrize("weights", [(500, 500), (900, 100), (1, 999), (250, 250, 500)])
@pytest.mark.parametrize("version", [1, 2])
def test_each_arm_gets_its_weight(weights: tuple[int, ...], version: int) -> None:
    counts = Counter(arm_of(dealt("w", *weights, bucket_version=version), u) for u in UNITS)
    assert sum(counts.values()) == counts.total() == len(UNITS) and None not in counts
    for i, weight in enumerate(weights):
        assert sigmas(counts[f"arm-{i}"], len(UNITS), weight / 1000) < 5


@pytest.mark.parametrize("cuts", [(300,), (1, 999), (100, 450, 700)])
def test_slices_of_a_layer_share_no_unit(cuts: tuple[int, ...]) -> None:
    edges = (0, *cuts, 1000)
    slices = [
        dealt(f"s{begin}", first_bucket=10 * begin, traffic_permille=end - begin)
        for begin, end in pairwise(edges)
    ]
    takers = Counter()
    for unit in UNITS:
        taking = [e.name for e in slices if arm_of(e, unit) is not None]
        assert len(taking) == 1, unit
        takers.update(taking)
    for e in slices:
        assert sigmas(takers[e.name], len(UNITS), e.traffic_permille / 1000) < 5


def test_arms_follow_from_salt_version_and_layer_alone() -> None:
    arms = [arm_of(dealt("e"), unit) for unit in UNITS]
    assert arms == [arm_of(dealt("other", salt="e", layer="default"), unit) for unit in UNITS]
    for anew in (dealt("f"), dealt("e", bucket_version=2)):
        same = sum(arm == arm_of(anew, unit) for arm, unit in zip(arms, UNITS, strict=True))
        assert sigmas(same, len(UNITS), 0.5) < 5
    places = [layer_bucket("default", unit) == layer_bucket("l", unit) for unit in UNITS]
    assert sum(places) < 20
