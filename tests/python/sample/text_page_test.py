"""The page about real text: rank correlations."""

import pytest
from epikv_lab.stdlib.page import spearman


def test_ranks_correlate_as_their_order_does() -> None:
    assert spearman((1, 2, 3, 4), (10, 20, 30, 1000)) == pytest.approx(1)
    assert spearman((1, 2, 3, 4), (4, 3, 2, 1)) == pytest.approx(-1)
    # By hand: ranks 0, 1, 2 and 0.5, 0.5, 2.
    assert spearman((1, 2, 3), (5, 5, 7)) == pytest.approx(0.866, abs=1e-3)
    assert spearman((1, 1, 1), (1, 2, 3)) == 0
