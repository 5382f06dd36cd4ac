"""`epikv calibrate trimkv`, `dbtrimkv` and `kvzap`: what is trained on what, and what comes out."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate import dms, gates, kvzap, retention
from epikv.calibrate.gates import CalibrationError, Gates, Training
from epikv.cli import main
from epikv.export import Manifest, load, operators, random_model
from epikv.export.parity import load_reference
from epikv.export.synthetic import write_directory
from safetensors.torch import load_file
from tiny_model import TINY
from torch import Tensor
from torch.nn import functional

TRAINING = Training(depth=2, bias=9.0, width=6, steps=4, warm_up=2)
BUDGET = 8
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
    found: list[int] = torch.randint(
        61, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return found


def texts(count: int = 12) -> list[list[int]]:
    return [ids(30 + number, seed=number) for number in range(count)]


def test_what_forgets_nothing_is_the_model_itself(model: Model) -> None:
    def none(_: int, given: Tensor) -> Tensor:
        return torch.zeros(len(given), model[1].num_kv_heads)

    loss = retention.loss_of(*model, ids(40), BUDGET, False, none)
    assert loss.divergence.item() == pytest.approx(0, abs=1e-6)
    # All is remembered: all of what is beyond the budget.
    assert loss.excess.item() == pytest.approx(1)


def test_attention_forgets_as_it_is_told(path: Path, tmp_path: Path, model: Model) -> None:
    """Against transformers, whose mask is given the decay of one KV head in one layer."""
    write_directory(TINY, tmp_path, seed=5)
    reference = load_reference(tmp_path, "float32")
    module, manifest = model
    count, group = 25, manifest.num_heads // manifest.num_kv_heads
    decay = -torch.rand(count, generator=torch.Generator().manual_seed(3)) / 3

    def log_beta(layer: int, given: Tensor) -> Tensor:
        told = torch.zeros(len(given), manifest.num_kv_heads)
        if layer == 1:
            told[:, 1] = decay
        return told

    text = ids(count)
    loss = retention.loss_of(module, manifest, text, BUDGET, False, log_beta)

    age = (torch.arange(count)[:, None] - torch.arange(count)).clamp_min(0)
    mask = torch.zeros(1, manifest.num_heads, count, count)
    mask[:, group : 2 * group] = age * decay

    def masked(attention: Any, arguments: Any, named: dict[str, Any]) -> Any:
        named["attention_mask"] = named["attention_mask"] + mask
        return arguments, named

    with torch.no_grad():
        teacher = reference(torch.tensor([text])).logits[0].log_softmax(-1)
        hook = reference.model.layers[1].self_attn.register_forward_pre_hook(
            masked, with_kwargs=True
        )
        student = reference(torch.tensor([text])).logits[0].log_softmax(-1)
        hook.remove()
    wanted = functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean()
    assert wanted > 1e-5
    assert loss.divergence.item() == pytest.approx(wanted.item(), rel=1e-2)
    nll = functional.nll_loss(student[:-1], torch.tensor(text[1:])).item()
    assert loss.next_token.item() == pytest.approx(nll, rel=1e-4)


def test_what_later_layers_lose_reaches_the_gates_of_earlier_ones(model: Model) -> None:
    """The divergence alone, against differences."""
    module, manifest = model

    def divergence(bias: Tensor) -> Tensor:
        def log_beta(layer: int, given: Tensor) -> Tensor:
            told = -0.05 * torch.ones(len(given), manifest.num_kv_heads)
            return told - bias if layer == 0 else told

        return retention.loss_of(module, manifest, ids(40), BUDGET, False, log_beta).divergence

    bias = torch.full((manifest.num_kv_heads,), 0.05, requires_grad=True)
    (slope,) = torch.autograd.grad(divergence(bias), bias)
    for head in range(manifest.num_kv_heads):
        aside = torch.zeros_like(slope)
        aside[head] = 0.01
        with torch.no_grad():
            between = (divergence(bias + aside) - divergence(bias - aside)) / 0.02
        assert slope[head].item() == pytest.approx(between.item(), rel=0.05)
        assert abs(slope[head].item()) > 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_the_excess_is_what_is_remembered_beyond_the_budget(model: Model, tied: bool) -> None:
    module, manifest = model
    count, lanes = 20, len(manifest.layers) * manifest.num_kv_heads
    told = [
        -torch.rand(count, manifest.num_kv_heads, generator=torch.Generator().manual_seed(layer))
        / 9
        for layer in range(len(manifest.layers))
    ]
    loss = retention.loss_of(module, manifest, ids(count), 4, tied, lambda layer, _: told[layer])
    shares = []
    for t in range(count):
        left = [
            sum(math.exp((t - i) * lane[i].item()) for i in range(t + 1))
            for of_layer in told
            for lane in of_layer.T
        ]
        if tied:
            shares.append((sum(left) - 4 * lanes) / max(1, (t + 1 - 4) * lanes))
        else:
            shares += [(one - 4) / max(1, t + 1 - 4) for one in left]
    beyond = [share for share in shares if share > 1e-6]
    assert loss.excess.item() == pytest.approx(sum(beyond) / len(beyond), rel=1e-4)


def train(model: Model, training: Training, work: Path, **more: Any) -> Gates:
    policy = "dbtrimkv" if training.tied else "trimkv"
    return retention.train(*model, policy, texts(), training, BUDGET, work, **more)


def test_training_forgets_what_is_beyond_the_budget(model: Model, tmp_path: Path) -> None:
    training = replace(TRAINING, steps=60, rate=0.05, bias=4.0)
    trained = train(model, training, tmp_path / "work")
    found = retention.judge(*model, texts(2), training, BUDGET, trained)
    assert found["none"].divergence == pytest.approx(0, abs=1e-6)
    assert found["none"].remembered == pytest.approx(1)
    assert found["trained"].excess < 0.5 * found["untrained"].excess
    assert found["trained"].remembered < found["untrained"].remembered


class Killed(Exception):
    pass


@pytest.mark.parametrize("policy", ["trimkv", "dbtrimkv"])
def test_what_is_cut_off_goes_on_to_the_same_gates(
    model: Model, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "SAVED_EVERY", 3)
    training = replace(retention.TRAININGS[policy], width=6, steps=8, warm_up=2)

    def kill(done: int) -> None:
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        train(model, training, tmp_path / "work", tell=kill)
    told: list[int] = []
    again = train(model, training, tmp_path / "work", tell=told.append)
    assert told == [3, 4, 5, 6, 7, 8]
    whole = train(model, training, tmp_path / "other")
    for name, array in whole.arrays().items():
        assert torch.equal(again.arrays()[name], array), name


def test_what_was_begun_otherwise_is_refused(model: Model, tmp_path: Path) -> None:
    work = tmp_path / "work"
    train(model, TRAINING, work)
    with pytest.raises(CalibrationError, match="another width, another rate"):
        train(model, replace(TRAINING, width=7, rate=1e-3), work)
    work.write_text("something else")
    with pytest.raises(CalibrationError, match="holds no training"):
        train(model, TRAINING, work)


def test_a_tied_gate_ends_in_one_map(model: Model, tmp_path: Path) -> None:
    training = replace(retention.TRAININGS["dbtrimkv"], width=6, steps=3, warm_up=1, rate=0.01)
    arrays = train(model, training, tmp_path / "work").arrays()
    assert len(arrays) == 6 * len(model[1].layers)
    assert torch.equal(arrays["layers.0.linear3.weight"], arrays["layers.1.linear3.weight"])
    assert not torch.equal(arrays["layers.0.linear2.weight"], arrays["layers.1.linear2.weight"])


def test_dms_lets_go_what_is_said_of_the_token_before(model: Model) -> None:
    """The key that is let go has no part, once it is old; so the rest is a text without it to
    those who come later, but for what its own contemporaries heard of it."""
    module, manifest = model
    text, window, gone = ids(30), 10, 7

    def said(_: int, given: Tensor) -> Tensor:
        told = torch.full((len(given), manifest.num_kv_heads), -1.0)
        told[gone + 1] = 1.0
        return told

    weights: list[Tensor] = []
    attended = operators._weights

    def watched(*arguments: Any) -> Tensor:
        weights.append(attended(*arguments))
        return weights[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_weights", watched)
        figures = next(dms._figures(module, manifest, [text], dms.Goal(window), said))
    assert figures.gone == pytest.approx(1 / 30)
    assert figures.divergence > 0
    of_student = weights[len(manifest.layers) :]
    for of_layer in of_student:
        assert (of_layer[:, gone + window :, gone] == 0).all()
        assert (of_layer[:, gone : gone + window, gone] > 0).all()
        assert (of_layer[:, gone + window :, gone - 1] > 0).all()


def test_dms_learns_to_let_tokens_go(model: Model, tmp_path: Path) -> None:
    training = replace(dms.TRAINING, steps=80, warm_up=2, rate=0.003)
    goal = dms.Goal(window=4, compression=3)
    trained = dms.train(*model, texts(), training, goal, tmp_path / "work")
    found = dms.judge(*model, texts(2), training, goal, trained)
    assert found["none"].gone == 0
    assert found["none"].divergence == pytest.approx(0, abs=1e-6)
    assert 0.4 < found["trained"].gone < 0.95
    # What is written says the same, with the factor and the shift in the map.
    given = torch.randn(5, model[1].hidden_size)
    arrays = dms.arrays(trained)
    said = functional.linear(
        given, arrays["layers.1.linear1.weight"], arrays["layers.1.linear1.bias"]
    )
    torch.testing.assert_close(said, dms.said_by(trained)(1, given), atol=1e-4, rtol=1e-4)


def calibrate(policy: str, path: Path, out: Path, *more: str) -> Result:
    command = ["calibrate", policy, str(path), "-o", str(out), *more]
    return CliRunner().invoke(main, command)


def write_texts(folder: Path, count: int = 12) -> list[str]:
    arguments = []
    for number, text in enumerate(texts(count)):
        file = folder / f"{number}.txt"
        file.write_text(" ".join(f"w{i}" for i in text))
        arguments += ["--text", str(file)]
    return arguments


@pytest.mark.parametrize(("policy", "depth"), [("trimkv", 2), ("dbtrimkv", 3)])
def test_writes_gates_and_what_they_lose(
    path: Path, model: Model, tmp_path: Path, policy: str, depth: int
) -> None:
    out = tmp_path / "artefacts" / f"{policy}.json"
    options = ["--steps", "4", "--width", "6", "--budget", "8", *write_texts(tmp_path)]
    result = calibrate(policy, path, out, *options)
    assert result.exit_code == 0, result.output
    artefact = json.loads(out.read_text())
    assert (artefact["policy"], artefact["arrays"]) == (policy, f"{policy}.safetensors")
    beside = out.with_name(f"{policy}.safetensors")
    assert beside.stat().st_mode == out.stat().st_mode, "the daemon may be somebody else"
    arrays = load_file(beside)
    manifest = model[1]
    for layer in range(len(manifest.layers)):
        assert arrays[f"layers.{layer}.linear1.weight"].shape == (6, manifest.hidden_size)
        assert arrays[f"layers.{layer}.linear{depth}.bias"].shape == (manifest.num_kv_heads,)
    assert len(arrays) == 2 * depth * len(manifest.layers)
    held = artefact["made_with"]["held_out"]
    assert held["texts"] == 2
    assert artefact["made_with"]["texts"] == 10
    assert set(held) == {"texts", "trained", "shuffled", "untrained", "none"}
    assert f"trained    divergence {held['trained']['divergence']:.4f}" in result.output


def test_texts_are_needed(path: Path, tmp_path: Path) -> None:
    assert "give --text or --task" in calibrate("trimkv", path, tmp_path / "o.json").output
    few = calibrate("trimkv", path, tmp_path / "o.json", *write_texts(tmp_path, 3))
    assert few.exit_code == 1
    assert "3 of 3 texts are longer than 1 tokens; 10 or more are needed" in few.output
    short = calibrate("dms", path, tmp_path / "o.json", "--window", "35", *write_texts(tmp_path))
    assert "6 of 12 texts are longer than 35 tokens; 10 or more are needed" in short.output
    none = calibrate("trimkv", path, tmp_path / "o.json", "--task", "file:math.jsonl")
    assert "file:math.jsonl has no solutions to read" in none.output


def test_a_model_of_integers_is_refused(model: Model) -> None:
    gates.check(model[1])
    with pytest.raises(CalibrationError, match="train on the same model without --quantize"):
        gates.check(replace(model[1], quantization="int8"))
    with pytest.raises(CalibrationError, match="export it again"):
        gates.check(replace(model[1], weights=None))


@torch.no_grad()
def test_kvzap_measures_what_transformers_shows(tmp_path: Path, model: Model) -> None:
    write_directory(TINY, tmp_path, seed=5)
    reference = load_reference(tmp_path, "float32")
    module, manifest = model
    text, instruction = ids(20), ids(3, seed=9)
    whole = [*text, *instruction, *text]
    given: list[Tensor] = []
    values: list[Tensor] = []
    for block in reference.model.layers:
        block.input_layernorm.register_forward_hook(lambda _, __, out: given.append(out[0]))
        block.self_attn.v_proj.register_forward_hook(lambda _, __, out: values.append(out[0]))
    attention = reference(torch.tensor([whole]), output_attentions=True).attentions
    group = manifest.num_heads // manifest.num_kv_heads
    size = manifest.layers[0].value_width
    for found, rows in (
        (kvzap.measure(module, manifest, kvzap.Text(text, instruction)), range(23, 43)),
        (kvzap.measure(module, manifest, kvzap.Text(whole, gap=7)), range(43)),
    ):
        repeated = rows.start > 0
        asked = 20 if repeated else 43 - 7
        assert found.given.shape == (len(manifest.layers), asked, manifest.hidden_size)
        for layer in range(len(manifest.layers)):
            torch.testing.assert_close(
                found.given[layer], given[layer][:asked], atol=1e-4, rtol=1e-3
            )
            output = reference.model.layers[layer].self_attn.o_proj.weight
            for head in range(manifest.num_kv_heads):
                value = values[layer][:, head * size : (head + 1) * size]
                for token in range(0, asked, 5):
                    most = max(
                        attention[layer][0, q, row, token].item()
                        * (output[:, q * size : (q + 1) * size] @ value[token]).norm().item()
                        / given[layer][row].norm().item()
                        for q in range(head * group, (head + 1) * group)
                        for row in rows
                        if repeated or row >= token + 7
                    )
                    assert found.worth[layer, token, head].item() == pytest.approx(
                        math.log(most), abs=2e-3
                    )


def samples(noise: float) -> kvzap.Samples:
    draw = torch.Generator().manual_seed(4)
    given = torch.randn(2, 400, 8, generator=draw)
    worth = torch.stack([given[..., 1] - 2 * given[..., 3], given[..., 0].abs()], -1) + 3
    return kvzap.Samples(given, worth + noise * torch.randn(worth.shape, generator=draw))


def test_a_ridge_finds_what_is_linear() -> None:
    fitted, held = samples(0.1), samples(0.0)
    arrays = kvzap.ridge(fitted)
    said = kvzap.said(arrays, held.given)
    torch.testing.assert_close(said[..., 0], held.worth[..., 0], atol=0.1, rtol=0)
    # One head's is; the other's is not.
    assert kvzap.explained(arrays, held) == pytest.approx([0.5, 0.5], abs=0.1)
    x = torch.cat([fitted.given[0], torch.ones(400, 1)], 1).double()
    strength = torch.diag(torch.tensor([1.0] * 8 + [0.0]).double())
    wanted = torch.linalg.solve(x.T @ x + strength, x.T @ fitted.worth[0].double())
    torch.testing.assert_close(arrays["layers.0.linear1.weight"], wanted[:8].T.float())
    torch.testing.assert_close(arrays["layers.0.linear1.bias"], wanted[8].float())


def test_a_network_finds_what_is_not() -> None:
    arrays = kvzap.network(samples(0.0), 16, passes=60, batch=64)
    assert all(share > 0.8 for share in kvzap.explained(arrays, samples(0.0)))
    assert arrays["layers.1.linear2.weight"].shape == (2, 16)


@pytest.mark.parametrize("width", [0, 6])
def test_kvzap_writes_a_gate(path: Path, model: Model, tmp_path: Path, width: int) -> None:
    out = tmp_path / "kvzap.json"
    options = ["--width", str(width), "--instruction", "", "--gap", "5", *write_texts(tmp_path)]
    result = calibrate("kvzap", path, out, *options)
    assert result.exit_code == 0, result.output
    artefact = json.loads(out.read_text())
    layers = len(model[1].layers)
    assert len(artefact["made_with"]["explained"]) == layers
    assert len(load_file(out.with_name("kvzap.safetensors"))) == layers * (2 if width == 0 else 4)
    assert "explained of texts held out" in result.output


def test_dms_writes_a_gate(path: Path, model: Model, tmp_path: Path) -> None:
    out = tmp_path / "dms.json"
    options = ["--steps", "4", "--window", "4", "--compression", "2", *write_texts(tmp_path)]
    result = calibrate("dms", path, out, *options)
    assert result.exit_code == 0, result.output
    artefact = json.loads(out.read_text())
    assert (artefact["made_with"]["window"], artefact["made_with"]["compression"]) == (4, 2)
    assert set(artefact["made_with"]["held_out"]) == {"texts", "trained", "shuffled", "none"}
    assert len(load_file(out.with_name("dms.safetensors"))) == 2 * len(model[1].layers)
