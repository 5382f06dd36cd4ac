"""Of tests of metrics."""

import pytest

# Their assertions that fail show values, as those of a test do.
pytest.register_assert_rewrite("series_scenarios", "series_world")
