"""Of every test.

`@pytest.mark.nightly` is of those that take long and that a change seldom breaks: programs of others, benches at their own
length. They run where EPIKV_NIGHTLY is set (nightly.sh), or by name: `pytest -m nightly FILE`.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures" / "python"
sys.path.insert(0, str(FIXTURES))
# An assertion of theirs that fails shows its values, as one of a test does.
pytest.register_assert_rewrite(*(path.stem for path in FIXTURES.glob("*.py")))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: takes long; run by nightly.sh")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("EPIKV_NIGHTLY") or config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="nightly.sh runs it, and pytest -m nightly"))


# A job in the background ignores Ctrl-C, and so would what tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
