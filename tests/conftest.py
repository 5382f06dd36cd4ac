"""Of every test."""

import signal
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures" / "python"
sys.path.insert(0, str(FIXTURES))
# An assertion of theirs that fails shows its values, as one of a test does.
pytest.register_assert_rewrite(*(path.stem for path in FIXTURES.glob("*.py")))

# A job in the background ignores Ctrl-C, and so would what tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
