"""A checkpoint that exports."""

from pathlib import Path

import pytest
from epikv.export.synthetic import write_directory
from tiny_model import TINY


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Hugging Face directory that exports."""
    write_directory(TINY, tmp_path / "hf", seed=3)
    return tmp_path / "hf"
