"""`epikv calibrate headkv` and `duo_attention`: what counts as looked up, and what comes out."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate import head_profile
from epikv.calibrate.head_profile import CalibrationError
from epikv.cli import main
from epikv.export import Manifest, load, random_model
from epikv.export.operators import KvCache, Step, running
from tiny_model import TINY
from torch import Tensor

Model = tuple[torch.jit.ScriptModule, Manifest]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "model.pt"
    random_model(TINY, made, seed=5, check=False)
    return made


@pytest.fixture
def model(path: Path) -> Model:
    module, manifest, _ = load(path)
    return module, manifest


def test_what_comes_next_counts_where_it_was_said_far_back() -> None:
    text = torch.tensor([7, 8, 7, 9, 7, 8])
    said = head_profile.said_far_back(text, torch.arange(6), gap=2)
    # Behind 3 comes 7, and 0 is far enough; 2 is not. Behind 4 comes 8, as 1 is. Behind 5, nothing.
    assert said.nonzero().tolist() == [[3, 0], [4, 1]]
    assert head_profile.said_far_back(text, torch.arange(6), gap=4).nonzero().tolist() == []


def attention(model: Model, text: list[int]) -> list[Tensor]:
    """Of each layer, in one forward: [heads, tokens, tokens]."""
    module, manifest = model
    found: list[Tensor] = []
    positions = torch.arange(len(text))
    step = Step(manifest, [KvCache.empty(manifest)], [len(text)], positions)
    step.watch = lambda _, weights: found.append(weights)
    with running(step):
        module(torch.tensor(text), positions, torch.zeros(1, dtype=torch.int64))
    return found


def test_scores_are_shares_of_tokens_whose_favourite_is_what_comes_next(
    model: Model,
) -> None:
    """Over more than one forward, and texts of unequal weight."""
    _, manifest = model
    draw = torch.Generator().manual_seed(1)
    texts: list[list[int]] = [
        torch.randint(3, (count,), generator=draw).tolist()
        for count in (head_profile.CHUNK + 30, 40)
    ]
    gap, tokens = 5, 0
    hits = torch.zeros(len(manifest.layers), manifest.num_heads, dtype=torch.double)
    for text in texts:
        rows = attention(model, text)
        for row in range(len(text) - 1):
            far = text[: max(0, row - gap + 1)]
            if text[row + 1] not in far:
                continue
            tokens += 1
            for layer, weights in enumerate(rows):
                for head in range(manifest.num_heads):
                    favourite = int(weights[head, row].argmax())
                    hits[layer, head] += favourite < len(far) and far[favourite] == text[row + 1]
    found = head_profile.measure(*model, texts, gap)
    assert found.tokens == tokens > 50
    group = manifest.num_heads // manifest.num_kv_heads
    wanted = (hits / tokens).unflatten(1, (manifest.num_kv_heads, group)).mean(-1)
    assert wanted.min() < wanted.max()
    torch.testing.assert_close(found.scores, wanted)


def test_texts_that_repeat_nothing_far_back_say_nothing(model: Model) -> None:
    with pytest.raises(CalibrationError, match="repeat no token that is 5 tokens back or more"):
        head_profile.measure(*model, [list(range(20)), [1, 1, 1]], 5)


def calibrate(policy: str, model: Path, text: Path, out: Path, *more: str) -> Result:
    command = [
        "calibrate",
        policy,
        str(model),
        "--text",
        str(text),
        "-o",
        str(out),
        *more,
    ]
    return CliRunner().invoke(main, command)


@pytest.mark.parametrize("policy", ["headkv", "duo_attention"])
def test_writes_what_the_policy_reads(policy: str, path: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("a b c a c b a b b a c a b c c a " * 3)
    done = calibrate(policy, path, text, out, "--gap", "4")
    assert done.exit_code == 0, done.output
    _, manifest, _ = load(path)
    artefact = json.loads(out.read_text())
    assert artefact["policy"] == policy
    assert artefact["model"]["weights"] == manifest.weights
    scores = torch.tensor(artefact["data"]["scores"])
    assert scores.shape == (len(manifest.layers), manifest.num_kv_heads)
    assert scores.min() >= 0
    assert scores.max() > 0
    assert artefact["made_with"]["gap"] == 4


def test_says_why_nothing_is_written(path: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("a b")
    done = calibrate("headkv", path, text, out)
    assert done.exit_code == 1
    assert "repeat no token that is 64 tokens back or more" in done.output
    assert not out.exists()
