"""Short runs of tests/soak/ends.py and readers.py hold, and see what does not."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import ends
import readers
import watch
from calls import Wrong
from crowd import Way


@pytest.mark.parametrize("model", ["sample", "tiny"])
def test_ends_of_every_state_and_way_leave_nothing(sample_model: Path, model: str) -> None:
    path = sample_model if model == "sample" else ends.tiny_model()
    counts = ends.soak(path, 900, 5)
    for state in ends.STATES:
        assert sum(counts[state, way] for way in Way) >= 50
    for way in Way:
        assert sum(counts[state, way] for state in ends.STATES) >= 50


def test_an_end_that_no_client_wanted_is_seen() -> None:
    with pytest.raises(Wrong, match=r"stalled/.* ended with RESOURCE_EXHAUSTED \(slow_reader\)"):
        ends.soak(ends.tiny_model(), 100, 5, "--stream_stall_seconds=0.2")


@pytest.mark.parametrize(("kib", "mib"), [(0.0, 0.0), (0.1, 7.8)])
def test_a_leak_is_a_line(kib: float, mib: float) -> None:
    """A tenth of a KiB lost with each request, under noise of 2 MiB and a warm-up of 50."""
    rests = [
        (n, watch.Held(0.0, int(50 * 1024 * min(1, n / 8000) + kib * n + n % 7 * 300), 20, 10))
        for n in range(0, 100_001, 500)
    ]
    assert ends.growth_mib(rests) == pytest.approx(mib, abs=0.3)
    assert ends.growth_mib(rests[:20]) is None


def test_streams_go_on_beside_readers_that_stall(sample_model: Path) -> None:
    """How fast, a busy machine cannot tell: that is `soak.sh readers`."""
    [pair] = readers.ratios(sample_model, pairs=1, readers=12, seed=5)
    assert pair.gap > 0 and pair.cpu > 0
