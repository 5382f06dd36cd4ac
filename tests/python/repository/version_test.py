"""One version, in CMakeLists.txt: the package, the image and the changelog tell the same."""

import re
from pathlib import Path

import epikv
import pytest

ROOT = Path(__file__).resolve().parents[3]


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match is not None, f"{file} tells no version"
    return match[1]


VERSION = found(r"^project\(epikv VERSION (\S+)", "CMakeLists.txt")


def test_the_package_has_it() -> None:
    assert epikv.__version__ == VERSION


@pytest.mark.parametrize(
    ("pattern", "file"),
    [
        (r'image\.version="([^"]+)"', "Dockerfile"),
        (r"^## \[([^\]]+)\]", "CHANGELOG.md"),
    ],
)
def test_others_tell_the_same(pattern: str, file: str) -> None:
    assert found(pattern, file) == VERSION
