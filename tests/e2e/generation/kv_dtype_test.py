"""K and V cached as int8, through the real daemon: what it tells of itself, and what it answers."""

from pathlib import Path

import pytest
from epikv import Client, GenerateResult, Kv, Model, Output, Stop
from epikv.sample import problem
from epikv.testing import Daemon, DaemonError

FLAGS = ("--threads=1", "--deterministic=true", "--kv_pool_bytes=16000000")
SCALE = 4  # bytes


def solved(client: Client, kv: Kv, index: int) -> GenerateResult:
    return client.generate_once(
        problem(index).prompt,
        kv=kv,
        stop=Stop(max_output_tokens=200),
        output=Output(token_ids=True, kept=True),
    )


def rows(model: Model) -> int:
    """Of K, or of V, of a token."""
    return model.layers * model.kv_heads


def test_the_model_service_says_what_kv_is_made_of_and_the_pool_holds_more(
    sample_model: Path,
) -> None:
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        wide = client.models()[0]
        full = solved(client, Kv(), 3)
    with Daemon(sample_model, *FLAGS, "--kv_dtype=int8") as daemon, daemon.client() as client:
        model = client.models()[0]
        narrow = solved(client, Kv(), 3)
        assert f"tokens of {model.kv_bytes_per_token} bytes, int8" in daemon.log
    assert (wide.dtype, wide.kv_dtype, model.dtype, model.kv_dtype) == (
        "float32",
        "float32",
        "float32",
        "int8",
    )
    width = wide.kv_bytes_per_token // (2 * 4 * rows(wide))
    assert model.kv_bytes_per_token == 2 * rows(model) * (width + SCALE)
    assert model.kv_capacity_tokens == 16_000_000 // model.kv_bytes_per_token
    assert model.kv_capacity_tokens > 3 * wide.kv_capacity_tokens
    # Of as many tokens, to the byte: the rows alone differ.
    tokens = (
        full.accepted.prompt_tokens + full.accepted.max_output_tokens - 1
    )  # the last is not cached
    assert full.accepted.kv.reserved_bytes - narrow.accepted.kv.reserved_bytes == tokens * (
        wide.kv_bytes_per_token - model.kv_bytes_per_token
    )
    assert narrow.text == full.text  # a problem that it solves


@pytest.mark.parametrize("policy", ["epikv_flat", "h2o", "random", "snapkv"])
def test_a_budget_that_holds_everything_gives_what_full_gives(
    sample_model: Path, policy: str
) -> None:
    with Daemon(sample_model, *FLAGS, "--kv_dtype=int8") as daemon, daemon.client() as client:
        for index in range(3):
            full = solved(client, Kv(), index)
            budgeted = solved(client, Kv(policy, 1000), index)
            assert budgeted.token_ids == full.token_ids
            assert budgeted.summary.kv.evicted_entries == 0
        evicting = solved(client, Kv(policy, 0.6), 0)
        assert evicting.summary.kv.evicted_entries > 0


def test_what_kv_cannot_be_made_of_or_read_by_is_refused(
    sample_model: Path,
) -> None:
    with (
        pytest.raises(DaemonError, match="--kv_dtype must be model or int8"),
        Daemon(sample_model, *FLAGS, "--kv_dtype=int4"),
    ):
        pass
    with (
        pytest.raises(DaemonError, match="decode_kernel 'flash' is not available .*: auto, batch"),
        Daemon(sample_model, *FLAGS, "--kv_dtype=int8", "--decode_kernel=flash"),
    ):
        pass
