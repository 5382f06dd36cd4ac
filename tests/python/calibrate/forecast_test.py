"""`epikv calibrate epikv_forecast`: what is read off a text, and what is fitted to it."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate import forecast
from epikv.calibrate.forecast import CalibrationError, Moments, Samples
from epikv.cli import main
from epikv.export import Manifest, load, random_model
from epikv.export.parity import load_reference
from epikv.export.synthetic import write_directory
from safetensors.torch import load_file
from tiny_model import TINY
from torch import Tensor

Model = tuple[torch.jit.ScriptModule, Manifest]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "model.pt"
    random_model(TINY, made, seed=5, check=False)
    return made


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    module, manifest, _ = load(path)
    return module, manifest


def ids(count: int, seed: int = 1) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(61, (count,), generator=draw).tolist()
    return found


@torch.no_grad()
def test_it_reads_what_transformers_shows(tmp_path: Path, model: Model) -> None:
    write_directory(TINY, tmp_path, seed=5)
    reference = load_reference(tmp_path, "float32")
    module, manifest = model
    count = forecast.CHUNK + 20  # two forwards
    text = ids(count)
    given: list[Tensor] = []
    queries: list[Tensor] = []
    for block in reference.model.layers:
        block.input_layernorm.register_forward_hook(lambda _, __, out: given.append(out[0]))
        block.self_attn.q_proj.register_forward_hook(lambda _, __, out: queries.append(out[0]))
    attention = reference(torch.tensor([text]), output_attentions=True).attentions
    moments = Moments.none(manifest)
    found = forecast.measure(module, manifest, text, [1, 30], moments)
    layers, heads = len(manifest.layers), manifest.num_kv_heads
    assert found.worth.shape == (2, layers, count, heads)
    assert found.left.tolist() == list(range(count - 1, -1, -1))
    age = torch.arange(count)[:, None] - torch.arange(count)
    for layer in range(layers):
        torch.testing.assert_close(found.given[layer], given[layer], atol=1e-4, rtol=1e-3)
        by_head = attention[layer][0].unflatten(0, (heads, -1)).amax(1)
        for number, least in enumerate((1, 30)):
            most = by_head.masked_fill(age < least, 0).amax(1).T
            wanted = most.clamp_min(forecast.LEAST).log()
            torch.testing.assert_close(found.worth[number, layer], wanted, atol=2e-3, rtol=0)
    arrays = forecast.queries(moments)
    width = manifest.layers[0].key_width
    for layer in range(layers):
        rows = queries[layer][forecast.OUTLIERS :].unflatten(-1, (-1, width)).transpose(0, 1)
        mean = arrays[f"layers.{layer}.query_mean"]
        torch.testing.assert_close(mean, rows.mean(1), atol=1e-4, rtol=1e-3)
        for head, of_head in enumerate(rows):
            spread = arrays[f"layers.{layer}.query_covariance"][head]
            wanted = torch.cov(of_head.T, correction=0)
            torch.testing.assert_close(spread, wanted, atol=1e-4, rtol=1e-3)


def made_up(texts: int, noise: float) -> list[Samples]:
    """Two layers of four channels and two heads. At the first age a head is worth what the first channels say, at the
    second the opposite; and tokens that have no such future are worth something else."""
    draw = torch.Generator().manual_seed(4)
    found = []
    for _ in range(texts):
        given = torch.randn(2, 60, 4, generator=draw)
        said = torch.stack([given[..., 0] + 2, 3 * given[..., 1] - 1], -1)
        worth = torch.stack([said, -said])
        worth = worth + noise * torch.randn(worth.shape, generator=draw)
        left = torch.arange(59, -1, -1)
        worth[1, :, left < 32] = 99
        found.append(Samples(given, worth, left))
    return found


def test_read_outs_are_of_tokens_that_can_tell() -> None:
    arrays, explained = forecast.fit(made_up(10, 0.0), [16, 32])
    for layer in range(2):
        weight = arrays[f"layers.{layer}.linear1.weight"]  # heads outside, ages inside
        wanted = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 3, 0, 0], [0, -3, 0, 0]])
        torch.testing.assert_close(weight, wanted, atol=0.01, rtol=0)
        bias = arrays[f"layers.{layer}.linear1.bias"]
        torch.testing.assert_close(bias, torch.tensor([2.0, -2, -1, 1]), atol=0.01, rtol=0)
    assert explained == pytest.approx([1, 1], abs=1e-3)


def test_a_head_that_attends_to_nothing_has_no_say() -> None:
    """As behind a layer's window."""
    texts = made_up(10, 1.0)
    _, wanted = forecast.fit(texts, [16, 32])
    nothing = torch.full((2, 2, 60, 1), forecast.LEAST).log()
    blind = [Samples(t.given, torch.cat([t.worth, nothing], -1), t.left) for t in texts]
    arrays, explained = forecast.fit(blind, [16, 32])
    assert explained == pytest.approx(wanted)
    assert not arrays["layers.0.linear1.weight"][4:].any()
    assert arrays["layers.0.linear1.bias"][4:].tolist() == pytest.approx([-6.9078, -6.9078], 1e-4)
    dead = [Samples(t.given, nothing, t.left) for t in texts]
    assert forecast.fit(dead, [16, 32])[1] == [0, 0]


def test_either_half_has_texts_of_every_age() -> None:
    """However many short ones there are beside them."""
    long = made_up(8, 0.0)
    short = [Samples(t.given[:, :20], t.worth[:, :, :20], t.left[40:]) for t in made_up(90, 0.0)]
    _, explained = forecast.fit([*short, *long], [16, 32])
    assert explained == pytest.approx([1, 1], abs=1e-3)


def test_what_is_explained_is_of_texts_that_were_not_fitted() -> None:
    draw = torch.Generator().manual_seed(1)
    nothing = [
        Samples(one.given, torch.randn(one.worth.shape, generator=draw), one.left)
        for one in made_up(4, 0.0)
    ]
    _, explained = forecast.fit(nothing, [16, 32])
    assert all(share < 0.02 for share in explained)
    _, some = forecast.fit(made_up(40, 2.0), [16, 32])
    assert some[0] == pytest.approx((1 / 5 + 9 / 13) / 2, abs=0.05)


def test_ages_are_those_of_which_enough_texts_can_tell() -> None:
    long, short = [0] * 512, [0] * 127
    assert forecast.ages_of([long] * 8 + [short] * 9) == [16, 64, 256]
    assert forecast.ages_of([long] * 7 + [short] * 9) == [16]
    with pytest.raises(CalibrationError, match="8 texts of 32 tokens or more are needed"):
        forecast.ages_of([long] * 7)


def calibrate(path: Path, out: Path, folder: Path, count: int) -> Result:
    command = ["calibrate", "epikv_forecast", str(path), "-o", str(out)]
    for number in range(count):
        text = folder / f"{number}.txt"
        text.write_text(" ".join(f"w{token}" for token in ids(140, seed=number)))
        command += ["--text", str(text)]
    return CliRunner().invoke(main, command)


def test_it_writes_an_artefact(path: Path, model: Model, tmp_path: Path) -> None:
    out = tmp_path / "epikv_forecast.json"
    result = calibrate(path, out, tmp_path, 9)
    assert result.exit_code == 0, result.output
    artefact = json.loads(out.read_text())
    ages = artefact["data"]["ages"]
    assert ages[0] == 16
    assert len(artefact["made_with"]["explained"]) == len(ages)
    assert "by age in tokens: 16: " in result.output
    arrays = load_file(out.with_suffix(".safetensors"))
    manifest = model[1]
    assert len(arrays) == 4 * len(manifest.layers)
    weight = arrays["layers.0.linear1.weight"]
    assert weight.shape == (manifest.num_kv_heads * len(ages), manifest.hidden_size)


def test_texts_are_needed(path: Path, tmp_path: Path) -> None:
    result = calibrate(path, tmp_path / "o.json", tmp_path, 7)
    assert result.exit_code == 1
    assert "8 texts of 32 tokens or more are needed" in result.output
