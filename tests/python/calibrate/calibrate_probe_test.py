"""`epikv calibrate epikv_probe`: what it measures, what it finds, and nothing in noise."""

import json
from dataclasses import replace
from pathlib import Path

import broken_models
import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate import epikv_probe
from epikv.calibrate.epikv_probe import CalibrationError, Probe, Text
from epikv.cli import main
from epikv.export import load, random_model
from epikv.export.parity import load_reference
from epikv.export.synthetic import word_tokenizer, write_directory
from tiny_model import TINY
from torch import Tensor

GAP = 10


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def test_measures_what_transformers_shows(tmp_path: Path) -> None:
    write_directory(TINY, tmp_path / "hf", seed=5)
    random_model(TINY, tmp_path / "model.pt", seed=5, check=False)
    module, manifest, _ = load(tmp_path / "model.pt")
    ids = torch.randint(61, (100,), generator=torch.Generator().manual_seed(1))  # over a chunk
    residuals, labels = epikv_probe.measure(module, manifest, Text(ids.tolist(), first=20), GAP)

    reference = load_reference(tmp_path / "hf", "float32")
    after: list[Tensor] = []
    for block in reference.model.layers:
        block.register_forward_hook(lambda _, __, out: after.append(out[0].view(100, -1)))
    with torch.inference_mode():
        attention = torch.stack(reference(ids[None], output_attentions=True).attentions)[:, 0]
    expected = torch.stack(after)[:, 20:-GAP]
    expected = expected / expected.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(residuals.float(), expected, atol=1e-4, rtol=1e-3)
    most = [attention[:, :, token + GAP :, token].max().item() for token in range(20, 100 - GAP)]
    assert labels.tolist() == pytest.approx(most, rel=1e-4)


def test_read_outs_by_age_are_regressions_of_what_is_left_of_attention(tmp_path: Path) -> None:
    random_model(TINY, tmp_path / "model.pt", seed=5, check=False)
    module, manifest, _ = load(tmp_path / "model.pt")
    texts = [
        Text(torch.randint(61, (100,), generator=torch.Generator().manual_seed(i)).tolist(), 3)
        for i in range(8)
    ]
    short = [Text([1] * 40), Text([])]  # of too few of these
    found = epikv_probe.by_age(module, manifest, [*short, *texts], layer=1)
    assert [of.age for of in found] == [16, 32]
    assert epikv_probe.by_age(module, manifest, texts[:7], layer=1) == []
    for of in found:
        read = [*texts, *(text for text in short if len(text.ids) >= 2 * of.age)]
        rows, labels = zip(
            *(epikv_probe.measure(module, manifest, text, of.age) for text in read), strict=True
        )
        said = torch.cat(rows, 1)[1] @ torch.tensor(of.weights, dtype=torch.double) + of.bias
        heard = torch.cat(labels)
        assert (said - heard).mean().abs() < 1e-9  # the intercept is that of all texts
        assert torch.cov(torch.stack([said, heard]))[0, 1] > 0
    assert found[0].weights != found[1].weights


def test_a_text_that_ends_before_it_begins_to_count_gives_nothing(tmp_path: Path) -> None:
    random_model(TINY, tmp_path / "model.pt", check=False)
    module, manifest, _ = load(tmp_path / "model.pt")
    residuals, labels = epikv_probe.measure(module, manifest, Text([1] * 30, first=25), GAP)
    assert (residuals.shape[1], len(labels)) == (0, 0)


def test_regression_is_the_ridge_of_all_rows() -> None:
    rows, labels = normal(1, 300, 5, seed=1) + 2, normal(300, seed=2)
    sums = sum(
        epikv_probe.moments(rows[:, a:b], labels[a:b])
        for a, b in ((0, 100), (100, 110), (110, 300))
    )
    fit = epikv_probe.regress(sums, torch.tensor([0.3], dtype=torch.double))[0]
    x, y = rows[0] - rows[0].mean(0), labels - labels.mean()
    strength = 300 * 0.3 * x.var(0, correction=0).mean()
    weights = torch.linalg.solve(x.T @ x + strength * torch.eye(5, dtype=torch.double), x.T @ y)
    torch.testing.assert_close(fit[:-1], weights)
    miss = rows[0] @ fit[:-1] + fit[-1] - labels
    assert miss.mean().abs() < 1e-9
    assert epikv_probe.error(sums, fit[None]).item() == pytest.approx(miss.square().mean().item())


def test_noise_is_shrunk_and_signal_is_not() -> None:
    rows = normal(1, 60, 40, seed=3)
    noise, signal = normal(60, seed=4), rows[0, :, 7]
    found = {}
    for name, labels in (("noise", noise), ("signal", signal)):
        halves = [epikv_probe.moments(rows[:, half::2], labels[half::2]) for half in (0, 1)]
        weights, strengths = epikv_probe.fitted(*halves)
        found[name] = strengths.item()
        assert (rows @ weights[..., None]).std(correction=0).item() == pytest.approx(1)
    assert found["noise"] > 100 * found["signal"]


def test_recall_counts_the_best_tenth_in_the_better_half() -> None:
    labels = torch.tensor([0.0] * 18 + [0.9, 0.8])
    perfect, half = labels.clone(), labels.clone()
    half[19] = -1
    scores = torch.stack([perfect, half, -labels])
    assert epikv_probe.recall(scores, labels).tolist() == [1, 0.5, 0]


LAYERS, HIDDEN, COUNT = 4, 12, 80


def find(monkeypatch: pytest.MonkeyPatch, trial: int, planted: float, texts: int = 16) -> Probe:
    """Of texts whose labels are noise, but for what block 2 says of them along channel 5."""

    def measure(_: object, __: object, text: Text, ___: int) -> tuple[Tensor, Tensor]:
        residuals = normal(LAYERS, COUNT, HIDDEN, seed=1000 * trial + text.ids[0])
        noise = normal(COUNT, seed=1000 * trial + 500 + text.ids[0])
        return residuals, planted * residuals[2, :, 5] + noise

    monkeypatch.setattr(epikv_probe, "measure", measure)
    every = [Text([number] * (COUNT + GAP)) for number in range(texts)]
    return epikv_probe.find(None, None, every, GAP)  # type: ignore[arg-type]


def test_finds_the_block_and_the_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    for trial in range(40):
        probe = find(monkeypatch, trial, planted=0.8)
        assert probe.layer == 2
        assert max(probe.weights) == probe.weights[5] > 0.8
        assert probe.interval[0] <= probe.recall[2] <= probe.interval[1]
        assert probe.recall[2] == max(probe.recall) > 0.6
        assert (probe.texts, probe.tokens) == (16, 16 * COUNT)


@pytest.mark.parametrize("texts", [epikv_probe.LEAST_TEXTS, 24])
def test_finds_nothing_in_noise(monkeypatch: pytest.MonkeyPatch, texts: int) -> None:
    found = 0
    for trial in range(100):
        try:
            find(monkeypatch, trial, planted=0, texts=texts)
            found += 1
        except CalibrationError as error:
            assert "no block's residual foretells attention" in str(error)
    assert found <= 5


def test_needs_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CalibrationError, match="7 of 7 texts .* 8 are needed"):
        find(monkeypatch, 0, planted=1, texts=7)


def write_model(path: Path, looks: float) -> None:
    """A model that looks at w3 and w7 wherever they are, by `looks`; its layer 1 sees all alike."""
    module = broken_models.Tiny()
    embedding = normal(broken_models.VOCAB, broken_models.HIDDEN, seed=9).float()
    embedding[:, 0], embedding[:, 2] = 1, 0
    embedding[[3, 7], 2] = 1
    module.embed.weight.data = embedding
    for layer in (module.first, module.second):
        for projection in (layer.q_proj, layer.k_proj, layer.o_proj):
            projection.weight.data.zero_()
    for head in (0, broken_models.HEAD_SIZE):
        module.first.q_proj.weight.data[head, 0] = looks
    module.first.k_proj.weight.data[0, 2] = 1
    manifest = broken_models.manifest()
    still = [replace(manifest.ropes[0], inv_freq=[0.0, 0.0])]
    manifest = replace(manifest, weights="sha256:00", context_length=2000, ropes=still)
    tokenizer = word_tokenizer(broken_models.VOCAB)
    extra = {"manifest.json": manifest.to_json(), "tokenizer.json": tokenizer.to_str()}
    broken_models.save(module, path, extra)


def calibrate(folder: Path, *more: str) -> Result:
    command = ["calibrate", "epikv_probe", str(folder / "model.pt"), "-o", str(folder / "out.json")]
    for number in range(10):
        ids = torch.randint(11, (150,), generator=torch.Generator().manual_seed(number)).tolist()
        words = [f"w{i}" for i in ids]
        words[20] = "<begin>"  # unknown, and so w0
        text = folder / f"{number}.txt"
        text.write_text(" ".join(words))
        command += ["--text", str(text)]
    return CliRunner().invoke(main, [*command, *more])


def test_writes_an_artefact(tmp_path: Path) -> None:
    write_model(tmp_path / "model.pt", looks=20)
    result = calibrate(tmp_path, "--after", "<begin>", "--gap", "30")
    assert result.exit_code == 0, result.output
    artefact = json.loads((tmp_path / "out.json").read_text())
    assert artefact["policy"] == "epikv_probe"
    assert artefact["model"]["weights"] == "sha256:00"
    data, made_with = artefact["data"], artefact["made_with"]
    assert data["layer"] == 0  # no later block adds anything
    assert max(data["weights"]) == data["weights"][2]
    assert made_with["recall"] == [1, 1]
    assert made_with["interval"] == [1, 1]
    assert (made_with["texts"], made_with["gap"]) == (10, 30)
    assert made_with["tokens"] == 10 * (150 - 21 - 30)
    assert "block 0 finds 1.00" in result.output
    assert [of["age"] for of in data["by_age"]] == [16, 32, 64]
    for of in data["by_age"]:  # wherever they are, w3 and w7 are looked at
        assert max(of["weights"]) == of["weights"][2] > 0


def test_refuses_a_model_that_looks_at_all_alike(tmp_path: Path) -> None:
    write_model(tmp_path / "model.pt", looks=0)
    result = calibrate(tmp_path, "--gap", "30")
    assert result.exit_code == 1
    assert "where chance finds .50; by block: " in result.output
    assert not (tmp_path / "out.json").exists()


def test_refuses_a_text_without_what_precedes_the_thought(tmp_path: Path) -> None:
    write_model(tmp_path / "model.pt", looks=20)
    result = calibrate(tmp_path, "--after", "<think>")
    assert result.exit_code == 1
    assert "0.txt does not hold '<think>'" in result.output
