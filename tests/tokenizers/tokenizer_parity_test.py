"""The C++ tokenizer gives what the `tokenizers` library gives: a sample of what soak.sh compares."""

from pathlib import Path

import parity
import pytest
from configurations import CONFIGURATIONS
from epikv.testing import find_binary

STRINGS = 1500  # for each algorithm


@pytest.fixture(scope="module")
def lines() -> Path:
    """tests/run.sh builds it next to the daemon."""
    return find_binary().parents[1] / "tests" / "tokenizer_lines"


@pytest.mark.parametrize("algorithm", CONFIGURATIONS)
def test_ids_and_text_are_the_reference_s(lines: Path, algorithm: str) -> None:
    total = parity.Counts()
    for name, counts in parity.run(lines, algorithm, STRINGS, split_share=0.2):
        assert counts.ids > 0 and counts.splits > 0, name
        total += counts
    assert total.strings >= STRINGS
    assert total.invalid > 0, "some of it is no UTF-8"
    assert total.round_trips > 0, "some of it comes back as it was"
