"""The daemon's part of `epikv bench attention` and of `epikv bench context`, shortly."""

from typing import Any

import pytest
from click import ClickException
from epikv import harness
from epikv.options import Kv
from epikv_lab.bench import attention, context, reference
from epikv_lab.bench.context import MIB

WHERE: dict[str, Any] = {"server": None, "metrics": None, "binary": None}
SHAPE = {**context.SHAPE, "layers": 2}


@pytest.mark.nightly
def test_every_arm_is_timed_while_it_evicts() -> None:
    rounds = attention._daemon({**SHAPE, "vocab": 512}, 256, 1, WHERE)
    assert [list(taken) for taken in rounds] == [list(attention.ARMS)]
    for time in rounds[0].values():
        assert 0 < time.cpu < 2 * time.wall


def test_every_way_of_transformers_is_timed() -> None:
    shape = {**SHAPE, "hidden": 64, "ffn": 128, "vocab": 512}
    found = attention._transformers(shape, (32,), 2, 1)
    assert list(found) == [
        "transformers, decode behind 32 tokens",
        "transformers, prefill of 32 tokens",
    ]
    for rounds in found.values():
        assert [list(taken) for taken in rounds] == [list(reference.WAYS)]
        assert all(time.wall > 0 for time in rounds[0].values())


def test_a_policy_that_does_not_evict_is_not_timed() -> None:
    model = harness.random_model("context", **SHAPE)
    with (
        harness.serving(lambda: model, ["--threads=1"], **WHERE) as served,
        pytest.raises(ClickException, match="random has not evicted"),
    ):
        attention._window(served, Kv("random", 4096, protect_prompt=False), 256, 0)


def test_a_daemon_grows_by_what_its_sequences_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "POLICIES", ("full", "h2o"))
    shape = {**SHAPE, "kv_heads": 8, "head_dim": 64}  # K and V outgrow the noise of a heap
    found = dict(context._daemons(shape, 64 * MIB, (1024, 4096), WHERE))
    kv = 2 * 2 * 8 * 64 * 2  # bytes of a token: layers, K and V, KV heads, width, bfloat16
    for name, longest in found.items():
        more = (longest.measured[4096] - longest.measured[1024]) / 3072
        assert 0.8 * kv < more < 2.5 * kv, name
    assert "no attention" in found["full"].told and "by rows" in found["h2o"].told
    assert found["h2o"].tokens < found["full"].tokens
    assert found["full"].confirmed == pytest.approx(1, abs=0.3)  # scratch is not reserved
