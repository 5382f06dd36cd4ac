"""`epikv calibrate epicache`: who sees whom, how alike keys are, and what comes out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate import epicache
from epikv.calibrate.epicache import Blocks, CalibrationError, Settings
from epikv.cli import main
from epikv.export import Manifest, export, load, random_model
from epikv.export.parity import load_reference
from epikv.export.synthetic import write_directory
from tiny_model import TINY
from torch import Tensor

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "epicache.json").read_text())
Model = tuple[torch.jit.ScriptModule, Manifest]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "model.pt"
    random_model(TINY, made, seed=5, check=False)
    return made


@pytest.fixture
def model(path: Path) -> Model:
    """Whose attention moves the residual stream: as made, it does next to nothing."""
    module, manifest, _ = load(path)
    louder(dict(module.named_parameters()))
    return module, manifest


def louder(weights: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            if "o_proj" in name:
                weight.mul_(100)


def ids(count: int, seed: int = 1) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(61, (count,), generator=draw).tolist()
    return found


@pytest.mark.parametrize("case", GOLDEN["masks"], ids=lambda case: f"block-{case['block']}")
def test_sees_what_the_authors_let_see(case: dict[str, Any]) -> None:
    blocks = Blocks(case["block"], case["sinks"], case["overlap"])
    tokens = case["tokens"]
    wanted = torch.tensor([[seen == "1" for seen in row] for row in case["mask"]])
    assert torch.equal(blocks.seen(tokens, tokens), wanted)
    # In chunks of 2.
    for end in range(2, tokens + 1, 2):
        assert torch.equal(blocks.seen(2, end), wanted[end - 2 : end, :end])


@pytest.mark.parametrize("case", GOLDEN["profiles"], ids=lambda case: f"window-{case['window']}")
def test_keys_are_as_alike_as_the_authors_find_them(case: dict[str, Any]) -> None:
    shape = (3, GOLDEN["kv_heads"], case["tokens"], GOLDEN["width"])
    full, limited = (
        torch.tensor(case[name]).view(shape).transpose(1, 2) for name in ("full", "limited")
    )
    for layer, wanted in enumerate(case["similarities"]):
        found = epicache.similarity(full[layer], limited[layer], case["window"])
        assert found == pytest.approx(wanted, abs=2e-6)


@torch.no_grad()
def test_keys_are_those_of_transformers_with_such_a_mask(tmp_path: Path, model: Model) -> None:
    """In every layer, so that differences grow; over more than one chunk."""
    write_directory(TINY, tmp_path, seed=5)
    reference = load_reference(tmp_path, "float32")
    louder(dict(reference.named_parameters()))
    module, manifest = model
    text, blocks = ids(epicache.CHUNK + 40), Blocks(block=20, sinks=3, overlap=7)

    def masked(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
        seen = blocks.seen(len(text), len(text))
        named["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        return arguments, named

    def of_reference() -> list[Tensor]:
        cache = reference(torch.tensor([text]), use_cache=True).past_key_values
        return [layer.keys[0].transpose(0, 1) for layer in cache.layers]

    full = of_reference()
    for block in reference.model.layers:
        block.self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    limited = of_reference()
    for wanted, seen in ((full, None), (limited, blocks)):
        for layer, found in enumerate(epicache.keys(module, manifest, text, seen)):
            torch.testing.assert_close(found, wanted[layer], atol=1e-4, rtol=1e-3)

    settings = Settings(block=20, sinks=3, overlap=0.35, window=10)
    assert settings.blocks() == blocks
    found = epicache.measure(module, manifest, [text], settings)[0].tolist()
    wanted = [
        epicache.similarity(*both, settings.window) for both in zip(full, limited, strict=True)
    ]
    assert found == pytest.approx(wanted, abs=1e-4)
    # The first layer's keys are made of words alone.
    assert found[0] == pytest.approx(1, abs=1e-9)
    assert found[1] < 0.99
    assert found[2] < 0.99


def test_blocks_as_long_as_the_text_change_nothing(model: Model) -> None:
    settings = Settings(block=100, sinks=3, overlap=0.5, window=25)
    assert epicache.measure(*model, [ids(100)], settings).tolist() == [pytest.approx([1] * 3)]
    with pytest.raises(CalibrationError, match="blocks of 100 tokens hide any of it; .* has 100"):
        epicache.beyond_blocks([ids(100), ids(30)], settings)


def test_each_text_counts_as_much(model: Model) -> None:
    texts = [ids(90, seed=2), ids(40, seed=3)]
    settings = Settings(block=10, sinks=1, overlap=0.5, window=5)
    done: list[int] = []
    found = epicache.measure(*model, texts, settings, done.append)
    assert done == [1, 2]
    assert found.shape == (2, 3)
    assert (found[:, 1:] < 1).all()
    mean = ((found[0] + found[1]) / 2).tolist()
    assert epicache.thousandths(found) == [round(1000 * of_layer) for of_layer in mean]


def test_what_is_not_told_follows_from_the_shortest_text() -> None:
    def settings(*lengths: int, **told: Any) -> dict[str, Any]:
        return asdict(epicache.settings_of([ids(length) for length in lengths], **told))

    assert settings(16384, 20000) == {"block": 4096, "sinks": 128, "overlap": 0.5, "window": 100}
    assert settings(90000)["block"] == 4096
    assert settings(400, 259) == {"block": 64, "sinks": 2, "overlap": 0.5, "window": 16}
    assert settings(5) == {"block": 1, "sinks": 0, "overlap": 0.5, "window": 1}
    told = {"block": 30, "sinks": 0, "overlap": 1.0, "window": 7}
    assert settings(100, **told) == told
    with pytest.raises(CalibrationError, match="fewer than 4 tokens"):
        settings(100, 3)


def test_texts_that_are_seen_whole_are_left_out() -> None:
    texts = [ids(length) for length in (20, 41, 21, 0, 80)]
    half = epicache.beyond_blocks(texts, Settings(block=20, sinks=1, overlap=0.5, window=5))
    assert [len(text) for text in half] == [41, 21, 80]
    # With all of the block before, the third block is the first that misses some.
    whole = epicache.beyond_blocks(texts, Settings(block=20, sinks=1, overlap=1, window=5))
    assert [len(text) for text in whole] == [41, 80]


def calibrate(path: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["calibrate", "epicache", str(path), "-o", str(out), *more])


def write_text(folder: Path, count: int) -> str:
    file = folder / f"{count}.txt"
    file.write_text(" ".join(f"w{i}" for i in ids(count)))
    return str(file)


def test_writes_the_policys_parameter(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "artefacts" / "epicache.json"
    texts = ["--text", write_text(tmp_path, 90), "--text", write_text(tmp_path, 80)]
    result = calibrate(path, out, *texts, "--sinks", "1")
    assert result.exit_code == 0, result.output
    artefact = json.loads(out.read_text())
    manifest = load(path)[1]
    # What policies/artefact.h reads.
    assert (artefact["format"], artefact["policy"]) == ("epikv.artefact/1", "epicache")
    assert artefact["model"] == {"name": manifest.name, "weights": manifest.weights}
    assert "data" not in artefact
    assert "arrays" not in artefact
    assert list(artefact["params"]) == ["similarities"]
    similarities = artefact["params"]["similarities"]
    assert len(similarities) == len(manifest.layers)
    assert all(isinstance(one, int) for one in similarities)
    assert similarities[0] == 1000
    del artefact["made_with"]["epikv"]
    assert artefact["made_with"] == {
        "texts": 2, "tokens": 170, "block": 20, "sinks": 1, "overlap": 0.5, "window": 5
    }  # fmt: skip
    assert "similarity by layer: 1.000, " in result.output
    assert "2 texts in blocks of 20 tokens" in result.output


def test_refuses_texts_that_say_nothing(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert "give --text or --task" in calibrate(path, out).output
    text = ["--text", write_text(tmp_path, 90)]
    long = calibrate(path, out, *text, "--block", "90")
    assert long.exit_code == 1
    assert "no text is so long that blocks of 90 tokens hide any of it" in long.output
    short = calibrate(path, out, *text, "--length", "3")
    assert short.exit_code == 1
    assert "fewer than 4 tokens" in short.output
    assert not out.exists()


def test_layers_of_the_sample_model_differ(tmp_path: Path) -> None:
    samples = ROOT / "tools" / "sample_model"
    shipped = samples / (samples / "SHIPPED").read_text().strip()
    export(shipped, tmp_path / "model.pt", dtype="float32", name="sample", check=False)
    out = tmp_path / "out.json"
    few = ["--task", "sample:programs", "--problems", "2", "--block", "64"]
    result = calibrate(tmp_path / "model.pt", out, *few)
    assert result.exit_code == 0, result.output
    artefact = json.loads(out.read_text())
    assert artefact["made_with"]["texts"] == 2
    similarities = artefact["params"]["similarities"]
    assert similarities[0] == 1000
    assert all(-1000 <= one < 1000 for one in similarities[1:])
