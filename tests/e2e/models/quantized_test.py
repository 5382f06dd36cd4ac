"""Models with linears of integers, served: what the daemon computes is what their file says."""

from pathlib import Path

import pytest
import torch
from epikv import Delta, Kv, Output, Stop
from epikv.export import export, load
from epikv.export.operators import KvCache, forward
from epikv.sample import problem
from epikv.testing import Daemon

SAMPLES = Path(__file__).parents[3] / "tools" / "sample_model"
PROMPT = problem(9).prompt


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_daemon_computes_what_the_file_says(
    tmp_path: Path, quantization: str, dtype: str
) -> None:
    """Prompts in chunks, then a token at a time, with other rows beside them."""
    path = tmp_path / "model.pt"
    shipped = SAMPLES / (SAMPLES / "SHIPPED").read_text().strip()
    export(shipped, path, dtype=dtype, quantization=quantization, check=False)
    module, manifest, _ = load(path)
    flags = ("--threads=1", "--prefill_chunk_tokens=16")
    with Daemon(path, *flags) as daemon, daemon.client() as client:
        [model] = client.models()
        assert (model.dtype, model.quantization) == (dtype, quantization)
        token_ids = client.tokenize(PROMPT)
        output = Output(token_ids=True, logprobs=True)
        stop = Stop(max_output_tokens=32, ignore_eos=True)
        streams = [client.generate(PROMPT, kv=Kv("full"), output=output, stop=stop) for _ in "abc"]
        results = [[event for event in stream if isinstance(event, Delta)] for stream in streams]
    for deltas in results:
        made = [token for delta in deltas for token in delta.token_ids]
        said = torch.tensor([value for delta in deltas for value in delta.logprobs])
        text = [*token_ids, *made]
        logits = forward(module, manifest, [(KvCache.empty(manifest), text)])
        ours = logits.log_softmax(-1)[len(token_ids) - 1 : -1].gather(
            1, torch.tensor(made)[:, None]
        )
        assert len(made) == 32
        error = (said - ours[:, 0]).abs().max()
        assert error < (2e-3 if dtype == "float32" else 0.15), error
