"""docs/models.md, "Your own model": its commands, and that what is served is the module.

The reference is the module's mathematics written once more, without the operators and without a
cache: whole sequences, torch's own attention.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from epikv import Client, EvictionEvent, Kv, Stop
from epikv.export import ExportError, load, save
from epikv.testing import Daemon
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

ENOUGH = Stop(max_output_tokens=200, ignore_eos=True)
ROOT = Path(__file__).parents[3]
TEXT = "Once upon a time the lazy dog jumps over a quick brown model."

sys.path.append(str(ROOT / "tools" / "examples"))
import own_model  # noqa: E402


def commands() -> list[str]:
    """Of the section's block."""
    _, _, section = (ROOT / "docs" / "models.md").read_text().partition("\n## Your own model\n")
    return [line.partition("#")[0].strip() for line in section.split("```")[1].strip().splitlines()]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, made as the page says."""
    folder = tmp_path_factory.mktemp("own")
    python, script, out = shlex.split(commands()[0])
    assert python == "python"
    subprocess.run([sys.executable, ROOT / script, out], cwd=folder, check=True)
    return folder / out


@pytest.fixture(scope="module")
def daemon(path: Path) -> Iterator[Daemon]:
    assert commands()[1] == f"epikvd --model={path.name} &"
    with Daemon(path) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def served(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


@torch.inference_mode()
def plain(path: Path, ids: Sequence[int], evictions: Sequence[EvictionEvent] = ()) -> Tensor:
    """Log-probabilities of what follows each token but the last, [len(ids) - 1, vocabulary]."""
    weights = dict(load(path)[0].named_parameters())

    def linear(x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return nn.functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"]
        )

    length = len(ids)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for event in evictions:
        for victims in event.victims:
            assert victims.layer is None and victims.head is None
            seen[event.at_token + 1 :, victims.index] = False
    x = weights["wte.weight"][torch.tensor(ids)] + weights["wpe.weight"][:length]
    for layer in range(own_model.LAYERS):
        name = f"blocks.{layer}"
        qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.qkv")
        q, k, v = (
            part.view(length, own_model.HEADS, own_model.WIDTH).transpose(0, 1)
            for part in qkv.chunk(3, dim=-1)
        )
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + linear(attended.transpose(0, 1).flatten(1), f"{name}.out")
        wide = nn.functional.gelu(
            linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.0"), approximate="tanh"
        )
        x = x + linear(wide, f"{name}.mlp.2")
    return linear(norm(x, "ln_f"), "head").log_softmax(-1)[:-1]


def of_tokens(logprobs: Tensor, ids: Sequence[int]) -> Tensor:
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


def test_the_whole_cache_gives_what_the_module_gives(served: Client, path: Path) -> None:
    ids = served.tokenize(TEXT * 4)
    assert 150 < len(ids) < own_model.CONTEXT
    scored = served.score(ids[:9], ids[9:], kv=Kv("full"))
    expected = of_tokens(plain(path, ids), ids)[8:]
    assert (torch.tensor(scored.logprobs) - expected).abs().max() < 1e-4


def test_under_a_budget_it_is_the_module_without_what_was_evicted(
    served: Client, path: Path
) -> None:
    ids = served.tokenize(TEXT * 4)
    scored = served.score(ids[:9], ids[9:], kv=Kv("random", 40), kv_trace=True, seed=1)
    expected = of_tokens(plain(path, ids, scored.evictions), ids)[8:]
    assert sum(len(v.index) for event in scored.evictions for v in event.victims) > 100
    assert (torch.tensor(scored.logprobs) - expected).abs().max() < 1e-4
    whole = of_tokens(plain(path, ids), ids)[8:]
    assert (expected - whole).abs().max() > 1e-2  # eviction shows


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "laprox", "epikv_flat", "keydiff"])
def test_policies_that_look_at_attention_projections_and_residuals_run(
    served: Client, policy: str
) -> None:
    result = served.generate_once(TEXT, kv=Kv(policy, 64), stop=ENOUGH)
    assert result.summary.usage.output_tokens == 200
    assert result.summary.kv.evicted_entries > 0


def test_the_readmes_completion(daemon: Daemon) -> None:
    (generate,) = (command for command in commands() if command.startswith("epikv "))
    arguments = shlex.split(generate)[1:]
    run = [sys.executable, "-c", "from epikv.cli import main; main()", *arguments]
    result = subprocess.run(
        [*run, "--server", daemon.grpc], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "budget 40 tokens (+63 slack)" in result.stderr
    assert int(re.findall(r"evicted +(\d+) tokens", result.stderr)[0]) > 0


class Unused(own_model.Gpt):
    """Calls no attention of the last layer."""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        residual = self.wte(token_ids) + self.wpe(positions)
        for layer, block in enumerate(self.blocks):
            residual = block(residual, layer) if layer < 2 else residual
        residual = torch.ops.epikv.block(residual, 3)
        return self.head(self.ln_f(residual.index_select(0, last))).float()


def test_what_breaks_the_contract_is_not_saved(tmp_path: Path) -> None:
    words = own_model.tokenizer()
    size = words.get_vocab_size()
    out = tmp_path / "own.pt"
    with pytest.raises(ExportError, match=r"epikv::attention\(2\) is called 0 times"):
        save(Unused(size), own_model.manifest(size, 0), words.to_str(), out)
    assert list(tmp_path.iterdir()) == []
