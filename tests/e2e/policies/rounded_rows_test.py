"""thinkv_tbe with `bits`: who asks has rounded rows, is told what they would take, and nobody else
meets them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from epikv import Client, GenerateResult, Kv, Output, RpcError, Sampling, Stop
from epikv.export.archive import read_manifest
from epikv.testing import Daemon

PROMPT, GROUP = [5] * 40, 16
WHATEVER = {"layers": [0], "theta1": 0.0, "theta2": 1.0}  # every thought is reasoning


def generate(
    client: Client, bits: int, prompt: list[int], tokens: int, budget: int = 1000
) -> GenerateResult:
    params = WHATEVER | ({"bits": [bits] * 3} if bits else {})
    return client.generate_once(
        prompt,
        kv=Kv("thinkv_tbe", budget, params),
        sampling=Sampling(temperature=0),
        stop=Stop(tokens, ignore_eos=True),
        output=Output(token_ids=True, logprobs=True),
    )


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_fewer_bits_are_heard_and_counted(sample_model: Path, kv_dtype: str) -> None:
    manifest = read_manifest(sample_model)
    flags = ("--threads=1", "--deterministic=true", f"--kv_dtype={kv_dtype}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        plain = generate(client, 0, PROMPT, 80)
        assert plain.summary.kv.packed_bytes == 0
        lanes = len(manifest.layers) * manifest.num_kv_heads
        width = manifest.layers[0].key_width
        held = len(PROMPT) + 79  # the last token is never cached
        whole = client.models()[0].kv_bytes_per_token
        for bits in (8, 4, 2):
            rounded = generate(client, bits, PROMPT, 80)
            # Decoded token 32 is the first to see a group that was rounded.
            assert rounded.logprobs[: 2 * GROUP + 1] == plain.logprobs[: 2 * GROUP + 1]
            assert rounded.logprobs[2 * GROUP + 1] != plain.logprobs[2 * GROUP + 1]
            kv = rounded.summary.kv
            assert (kv.final_tokens, kv.evicted_tokens) == (held, 0)
            groups = 79 // GROUP - 1
            # A scale of 16 bits for each channel of K, and for every 16 of each V.
            scales = width + GROUP * -(-width // GROUP)
            packed = lanes * (2 * width * GROUP * bits + 16 * scales) / 8
            packed = min(packed, whole * GROUP)
            assert kv.packed_bytes == whole * (held - GROUP * groups) + packed * groups
            assert kv.peak_bytes >= whole * held, "the cache itself is no smaller"


def test_a_budget_for_all_is_large_enough(client: Client) -> None:
    """However short the request and whatever is protected: nothing is dropped."""
    params = WHATEVER | {"bits": [4, 4, 2]}
    for prompt, tokens, kv in (
        (100, 8, Kv("thinkv_tbe", 108, params)),
        (100, 8, Kv("thinkv_tbe", "100%", params, recent_tokens=500)),
        (5, 60, Kv("thinkv_tbe", 1000, params, equal_protection=True)),
    ):
        result = client.generate_once([5] * prompt, kv=kv, stop=Stop(tokens, ignore_eos=True))
        assert result.summary.kv.evicted_tokens == 0
        assert result.summary.kv.final_tokens == prompt + tokens - 1
        assert (result.summary.kv.packed_bytes > 0) == (tokens > 32)


def test_neighbours_keep_their_bits(sample_model: Path) -> None:
    flags = ("--threads=1", "--deterministic=true")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:

        def said(bits: int) -> list[float]:
            return generate(client, bits, PROMPT, 120, budget=80).logprobs

        alone = {bits: said(bits) for bits in (0, 8, 4, 2)}
        assert len({tuple(logprobs) for logprobs in alone.values()}) == 4
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(said, [*alone, *alone]))
        assert together == [*alone.values(), *alone.values()]


def test_what_was_rounded_is_no_prefix_for_others(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        first = generate(client, 2, PROMPT, 160)
        again = PROMPT + first.token_ids
        cached = client.generate_once(
            again, sampling=Sampling(temperature=0), stop=Stop(8), output=Output(logprobs=True)
        )
        assert cached.summary.usage.cached_prompt_tokens <= len(PROMPT)
        fresh = client.generate_once(
            again,
            kv=Kv(bypass_prefix_cache=True),
            sampling=Sampling(temperature=0),
            stop=Stop(8),
            output=Output(logprobs=True),
        )
        assert cached.logprobs == fresh.logprobs


def test_bits_that_are_none_are_refused(client: Client) -> None:
    for bits in ([4], [4, 4, 3], [16, 4, 2]):
        with pytest.raises(RpcError) as caught:
            client.generate_once(
                PROMPT, kv=Kv("thinkv_tbe", 60, WHATEVER | {"bits": bits}), stop=Stop(4)
            )
        assert caught.value.code.name == "INVALID_ARGUMENT"
        assert "bits" in str(caught.value)
