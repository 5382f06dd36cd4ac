"""Of every test."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: slow, and rarely breaks; run.sh leaves it out")


# A job in the background ignores Ctrl-C, and so would what tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
