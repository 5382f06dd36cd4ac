"""Of every test."""

import signal

# A job in the background ignores Ctrl-C, and so would what tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
