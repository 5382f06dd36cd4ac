"""`epikv calibrate`: what it measures, what it makes of it, and what it refuses."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import broken_models
import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate.thinkv_tbe import CalibrationError, Modes, choose, measure, modes, sparsity
from epikv.cli import main
from epikv.export import export, load, random_model
from epikv.export.parity import load_reference
from epikv.export.synthetic import word_tokenizer, write_directory
from tiny_model import TINY


def normals(*centres: float, count: int = 2000, deviation: float = 0.04) -> torch.Tensor:
    """As many numbers around each centre, in no order."""
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(len(centres), count, generator=generator) * deviation
    values = (around + torch.tensor(centres)[:, None]).flatten()
    return values[torch.randperm(len(values), generator=generator)]


def test_far_values_are_modes_of_their_own() -> None:
    """Between them the density rounds to zero, or to less than a division takes."""
    for seed in range(16):
        draw = torch.Generator().manual_seed(seed)
        body = 0.2 + 1e-3 * torch.randn(3000, generator=draw)
        far = 0.3 + 0.6 * torch.rand(5, generator=draw)
        found = modes(torch.cat([body, far]))
        for value in (0.2, *far.tolist()):
            assert min(abs(value - at) for at in found.maxima) < 2e-3
        assert all(a < b for a, b in pairwise(found.maxima))


def test_sparsity_is_the_share_below_a_hundredth_of_the_most() -> None:
    # Three keys before, then two rows that are cached themselves; the first does not see the last.
    first = torch.tensor([0.5, 0.00501, 0.00499, 0.4899, 0.0])
    last = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    even = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0], [0.2] * 5])
    heads = torch.stack([torch.stack([first, last]), even])
    assert sparsity(heads).tolist() == pytest.approx([(1 / 4 + 0) / 2, (4 / 5 + 0) / 2])


def test_measures_every_layer_as_transformers_attends(tmp_path: Path) -> None:
    write_directory(TINY, tmp_path / "hf", seed=5)
    random_model(TINY, tmp_path / "model.pt", seed=5, check=False)
    module, manifest, _ = load(tmp_path / "model.pt")
    # Small random weights attend evenly: nothing would be sparse.
    weights = dict(module.named_parameters())
    reference = load_reference(tmp_path / "hf", "float32")
    with torch.no_grad():
        for name, weight in [*weights.items(), *reference.named_parameters()]:
            if "q_proj" in name:
                weight.mul_(300)
    text = torch.randint(61, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    measured = measure(module, manifest, [text, text[:30]], first=20)
    assert measured.shape == (3, 80 + 10)

    with torch.inference_mode():
        attentions = reference(torch.tensor([text]), output_attentions=True).attentions
    for layer, weights_of_layer in enumerate(attentions):
        for step, token in enumerate(range(20, 100)):
            rows = weights_of_layer[0, :, token, : token + 1]
            share = (rows < 0.01 * rows.amax(-1, keepdim=True)).double().mean()
            # A key at the edge may fall on either side.
            assert measured[layer, step].item() == pytest.approx(share.item(), abs=0.02)
    assert measured.max() > 0.3
    torch.testing.assert_close(measured[:, 80:], measured[:, :10])


def test_three_modes_have_two_minima_between_them() -> None:
    found = modes(normals(0.2, 0.5, 0.9))
    assert found.maxima == pytest.approx([0.2, 0.5, 0.9], abs=0.02)
    assert 0.3 < found.minima[0] < 0.4
    assert 0.6 < found.minima[1] < 0.8
    assert found.depth > 0.9


def test_modes_are_counted() -> None:
    assert len(modes(normals(0.5)).maxima) == 1
    assert len(modes(normals(0.2, 0.8)).maxima) == 2
    assert len(modes(normals(0.1, 0.35, 0.6, 0.85)).maxima) == 4
    assert len(modes(torch.full((100,), 0.5)).maxima) == 1
    assert len(modes(normals(0.2, 0.5, 0.9), bandwidth=10).maxima) == 1


def test_empty_stretch_between_modes_is_cut_in_the_middle() -> None:
    found = modes(normals(0.0, 0.5, 1.0, deviation=0.0005), bandwidth=0.05)
    assert found.minima == pytest.approx([0.25, 0.75], abs=0.02)


def three(first: float, second: float, depth: float) -> Modes:
    return Modes([0, 0.5, 1], [first, second], depth)


def test_thresholds_are_averaged_over_the_four_clearest_layers() -> None:
    by_layer = [
        three(0.1, 0.5, 0.9),
        Modes([0.5], [], 1),
        three(0.2, 0.6, 0.8),
        three(0.9, 0.95, 0.1),
        three(0.3, 0.7, 0.7),
        three(0.4, 0.8, 0.6),
        Modes([0, 0.3, 0.6, 1], [0.2, 0.4, 0.8], 1),
    ]
    choice = choose(by_layer)
    assert choice.layers == [0, 2, 4, 5]
    assert (choice.theta1, choice.theta2) == pytest.approx((0.25, 0.65))
    assert choose(by_layer[:2]).layers == [0]


def test_without_three_modes_there_is_no_choice() -> None:
    with pytest.raises(CalibrationError, match="modes by layer: 1, 2"):
        choose([modes(normals(0.5)), modes(normals(0.2, 0.8))])


def write_thinker(path: Path) -> None:
    """A model whose layer 0 sees all keys, those of about half of the words, or those of one word,
    by the newest word; its layer 1 sees all."""
    module = broken_models.Tiny()
    words = torch.arange(broken_models.VOCAB)
    embedding = torch.zeros(broken_models.VOCAB, broken_models.HIDDEN)
    embedding[words % 3 == 1, 0] = 99
    embedding[words % 3 == 2, 1] = 99
    embedding[words % 2 == 1, 2] = 1
    embedding[5, 3] = 1
    module.embed.weight.data = embedding
    for projection in (module.first.q_proj, module.first.k_proj, module.second.q_proj):
        projection.weight.data.zero_()
    for head in (0, broken_models.HEAD_SIZE):
        module.first.q_proj.weight.data[head, 0] = module.first.q_proj.weight.data[head + 1, 1] = 1
    module.first.k_proj.weight.data[0, 2] = module.first.k_proj.weight.data[1, 3] = 1
    manifest = broken_models.manifest()
    still = [replace(manifest.ropes[0], inv_freq=[0.0, 0.0])]
    manifest = replace(
        manifest, name="thinker", weights="sha256:thinker", context_length=2000, ropes=still
    )
    tokenizer = word_tokenizer(broken_models.VOCAB)
    extra = {"manifest.json": manifest.to_json(), "tokenizer.json": tokenizer.to_str()}
    broken_models.save(module, path, extra)


def calibrate(model: Path, text: Path, *more: str) -> Result:
    out = str(text.with_name("out.json"))
    command = ["calibrate", "thinkv_tbe", str(model), "--text", str(text), "-o", out, *more]
    return CliRunner().invoke(main, command)


def write_text(path: Path, vocab_size: int, count: int) -> Path:
    ids = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(2))
    path.write_text(" ".join(f"w{i}" for i in ids.tolist()))
    return path


def test_writes_an_artefact(tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    write_thinker(model)
    text = write_text(tmp_path / "text.txt", broken_models.VOCAB, 700)
    result = calibrate(model, text)
    assert result.exit_code == 0, result.output
    artefact = json.loads((tmp_path / "out.json").read_text())
    params = artefact["params"]
    assert params["layers"] == [0]
    # Of 11 words 5 are odd, and one is w5.
    assert 0.1 < params["theta1"] < 6 / 11 < params["theta2"] < 10 / 11
    assert f"theta1 {params['theta1']:.4f}" in result.output
    assert (artefact["format"], artefact["policy"]) == ("epikv.artefact/1", "thinkv_tbe")
    assert artefact["model"] == {"name": "thinker", "weights": "sha256:thinker"}
    assert artefact["made_with"]["steps"] == 700 - 128
    assert artefact["made_with"]["modes"] == [3, 1]


def test_refuses_a_model_that_does_not_tell_thoughts_apart(tmp_path: Path) -> None:
    random_model(TINY, tmp_path / "model.pt", check=False)
    text = write_text(tmp_path / "text.txt", 61, 100)
    result = calibrate(tmp_path / "model.pt", text, "--skip", "10")
    assert result.exit_code == 1
    assert "no layer's sparsity has three modes" in result.output
    assert not (tmp_path / "out.json").exists()


def test_refuses_texts_that_are_too_short(tmp_path: Path) -> None:
    random_model(TINY, tmp_path / "model.pt", check=False)
    result = calibrate(tmp_path / "model.pt", write_text(tmp_path / "text.txt", 61, 100))
    assert result.exit_code == 1
    assert "no tokens beyond the first 128" in result.output


def test_triattention_is_told_what_queries_are_like_before_rotation(tmp_path: Path) -> None:
    write_directory(TINY, tmp_path / "hf", seed=5)
    random_model(TINY, tmp_path / "model.pt", seed=5, check=False)
    text = write_text(tmp_path / "text.txt", 61, 150)
    out = tmp_path / "out.json"
    command = ["calibrate", "triattention", str(tmp_path / "model.pt"), "--text", str(text)]
    result = CliRunner().invoke(main, [*command, "--length", "100", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "3 layers of 4 heads, over 100 tokens" in result.output
    artefact = json.loads(out.read_text())
    _, manifest, _ = load(tmp_path / "model.pt")
    assert artefact["model"] == {"name": manifest.name, "weights": manifest.weights}

    # The definition, in transformers.
    reference = load_reference(tmp_path / "hf", "float32")
    seen: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, q: seen.append(q[0]))
    ids = torch.randint(61, (150,), generator=torch.Generator().manual_seed(2))[:100]
    with torch.no_grad():
        reference(ids[None])
    for layer, queries in enumerate(seen):
        q = queries.view(100, 4, 8).double()
        pairs = torch.complex(q[..., :4], q[..., 4:])
        data = {name: torch.tensor(n[layer]).double() for name, n in artefact["data"].items()}
        torch.testing.assert_close(data["q_mean_real"], pairs.real.mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(data["q_mean_imag"], pairs.imag.mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(data["q_abs_mean"], pairs.abs().mean(0), atol=1e-5, rtol=1e-4)


def test_one_checkpoint_has_one_digest_in_every_dtype(tmp_path: Path) -> None:
    for name, seed, dtype in (("a", 1, "float32"), ("b", 1, "bfloat16"), ("c", 2, "float32")):
        write_directory(TINY, tmp_path / "hf", "float32", seed)
        export(tmp_path / "hf", tmp_path / name, dtype=dtype, check=False)
    digests = [load(tmp_path / name)[1].weights for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] is not None and digests[0].startswith("sha256:")


def test_an_older_model_file_has_to_be_exported_again(tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    write_thinker(model)
    manifest = broken_models.manifest()
    tokenizer = word_tokenizer(broken_models.VOCAB)
    extra = {"manifest.json": manifest.to_json(), "tokenizer.json": tokenizer.to_str()}
    broken_models.save(broken_models.Tiny(), model, extra)
    text = write_text(tmp_path / "text.txt", broken_models.VOCAB, 20)
    command = ["calibrate", "triattention", str(model), "--text", str(text)]
    result = CliRunner().invoke(main, [*command, "-o", str(tmp_path / "out.json")])
    assert result.exit_code == 1
    assert "export it again" in result.output
