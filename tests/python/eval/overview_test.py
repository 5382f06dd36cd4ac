"""The table of the founding documents' claims: its arithmetic, and that every claim has a row, a figure
and a command that there is."""

import pytest
from epikv.eval.plan import FULL, RANDOM
from epikv_lab.bench.policies import SHAPE
from epikv_lab.sample import claims, epikv_claims, overview
from epikv_lab.sample.claims import Claim
from epikv_lab.sample.measure import ADDED, EVALUATIONS, LAGGED, PACKED, PUBLISHED, folders
from epikv_lab.sample.scores import NOT_RUN, Score

MANY, FEW = "1" * 30 + "0" * 10, "1" * 10 + "0" * 30


def scores(arm: str, **solved: str) -> list[Score]:
    return [Score("t", f"{budget[1:]}%", arm, hits) for budget, hits in solved.items()]


def test_the_least_and_the_most_gain_are_told_with_their_budgets() -> None:
    first = [*scores("a", b50=MANY, b35=MANY, b25=FEW), *scores("b", b50=FEW, b35=MANY, b25=MANY)]
    found = overview.compared({"seed6": first, "without b": scores("a")}, Claim("", "", "a", "b"))
    assert found.told.startswith("-0.50 [")
    assert "(25%) to +0.50 [" in found.told and found.told.endswith("(50%); n = 40")
    assert found.verdict == "not in general: 1 of 3 above, 1 below"


def test_of_several_claims_that_with_the_most_gain_is_named() -> None:
    found = [*scores("a", b50=MANY), *scores("b", b50=MANY), *scores("c", b50=FEW)]
    pairs = Claim("", "", "a", "b"), Claim("", "", "a", "c")
    told = overview.compared({"seed6": found}, *pairs, named=True).told
    assert told.startswith("+0.00 [+0.00, +0.00] (b at 50%) to +0.50 [") and "(c at 50%)" in told


def test_what_was_not_run_has_no_verdict() -> None:
    assert overview.compared({}, Claim("", "", "a", "b")) == overview.Found(NOT_RUN, "")


def test_settings_are_tasks_at_each_budget_of_each_seed() -> None:
    better = [*scores("a", b50=MANY, b25=MANY), *scores("b", b50=FEW, b25=MANY)]
    worse = [*scores("a", b50=FEW, b25=MANY), *scores("b", b50=MANY, b25=MANY)]
    claim = Claim("", "", "a", "b")
    found = overview.by_setting(({"seed6": better, "seed7": worse}, claim), ({}, claim))
    assert found.told == "above in 1, below in 1 of 4 settings of 50 problems"
    assert found.verdict == "not in general: 1 of 4 above, 1 below"


def test_bits_of_the_tier_are_told_beside_the_rows_as_they_were_cached() -> None:
    """Rows of 16 or 8 bits are three quarters right, and of 4 bits a quarter."""
    found = [*scores(RANDOM, b15=FEW)]
    for arm in claims.PACKED_ARMS:
        plain = [] if arm == RANDOM else scores(arm, b15=FEW)
        found += [*plain, *scores(claims.varied(arm, claims.FETCH), b15=MANY)]
        for fields, hits in zip(PACKED, (MANY, FEW), strict=True):
            found += scores(claims.varied(arm, fields), b15=hits)
    row = claims.packed({"seed6": found}).splitlines()[2].strip("| ").split(" | ")
    assert row[0] == "`streaming_llm`" and row[1].startswith("0.25 [")
    assert row[3].startswith("0.75 [") and row[4] == "+0.00 [+0.00, +0.00]"
    assert row[5].startswith("0.25 [") and row[6].startswith("-0.50 [")


@pytest.mark.parametrize(
    ("width", "bits", "expected"), [(128, 8, 264), (128, 4, 160), (64, 8, 136), (32, 4, 40)]
)
def test_a_rounded_row_is_its_numbers_and_its_scales(width: int, bits: int, expected: int) -> None:
    assert claims.tier_bytes(width, bits) == expected


def test_state_is_what_is_reserved_beyond_k_and_v() -> None:
    """A policy that asks for nothing has next to none; a number a token is told as its share."""
    assert 4 * SHAPE["layers"] * SHAPE["kv_heads"] * 64 == epikv_claims.TOKEN_BYTES
    costs = epikv_claims.costs()
    assert costs["random"].bytes[1] < 64 and costs["random"].of_cache < 1e-5
    assert costs["epikv_flat"].of_cache < 0.01 < costs["epikv_lag_kv"].of_cache
    told = overview.state("epikv_lag_kv")
    assert f"{costs['epikv_lag_kv'].bytes[1]:,} bytes" in told.told and told.verdict == "does not"


def test_the_calibrated_pair_of_every_seed_has_one_name() -> None:
    for found in epikv_claims.with_pairs().values():
        arms = {score.arm for score in found}
        assert {epikv_claims.TRAINED.more, PUBLISHED, RANDOM} <= arms


def test_a_figure_of_another_page_is_looked_for_there() -> None:
    found = overview.quoted("README.md", "epikvd", told="x", verdict="holds")
    assert found == overview.Found("x", "holds")
    with pytest.raises(ValueError, match="no such figure"):
        overview.quoted("README.md", "no such figure", told="", verdict="")


def test_every_claim_of_the_founding_documents_has_a_row_with_a_figure() -> None:
    assert {row.paper for row in overview.ROWS} == set(overview.PAPERS)
    for row in overview.ROWS:
        found = row.ours()
        assert row.theirs and row.comparator
        assert found.verdict and found.told != NOT_RUN, row.claim
        assert row.command or row.before, row.claim


def test_every_call_of_a_row_is_in_the_block_once() -> None:
    lines = overview.commands().splitlines()
    for row in overview.ROWS:
        name = row.command.partition(" ")[0]
        assert name in ("", "epikv", *overview.FUNCTIONS)
        calls = [line for line in lines if line.startswith(f"{row.command} --out ")]
        assert len(calls) == (name in overview.FUNCTIONS)
    folders_of = [line.rpartition(" --out ")[2] for line in lines if " --out " in line]
    assert len(folders_of) == len(set(folders_of)) > 10


def test_claims_name_arms_that_are_run() -> None:
    for name, told in (
        (claims.ADDING, claims.ADDITIONS),
        (claims.LAPROX, claims.LAPROXES),
        (epikv_claims.LONG, epikv_claims.OF_LAG),
    ):
        run = {FULL, RANDOM, *EVALUATIONS[name].policies(folders()[0])}
        assert {arm for claim in told for arm in (claim.more, claim.less)} <= run
    assert set(ADDED) < {claim.more for claim in claims.ADDITIONS} | {RANDOM}
    assert epikv_claims.LAG in LAGGED
