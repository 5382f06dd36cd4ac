"""Of every test."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))

# A job in the background ignores Ctrl-C, and so would what tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
