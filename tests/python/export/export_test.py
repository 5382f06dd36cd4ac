"""The exporter: what it writes equals transformers, and what it cannot write it refuses."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from epikv.cli import main
from epikv.export import ExportError, export, exporter, load, random_model
from epikv.export.contract import violations
from epikv.export.decoder import LanguageModel, build
from epikv.export.manifest import FinalNorm, Manifest
from epikv.export.operators import KvCache, Step, forward, running
from epikv.export.parity import load_reference, random_prompts
from epikv.export.quantize import quantize
from epikv.export.synthetic import byte_tokenizer, write_directory
from json_file import edit
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_model import TINY

SHAPES = {
    "mha": {"num_key_value_heads": 4},
    "mqa_wide_heads": {"num_key_value_heads": 1, "head_dim": 24},
    "tied_with_biases": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "rope_linear": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    },
    "rope_dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    },
    "rope_llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 500000.0,
        }
    },
    "rope_yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
        }
    },
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.jit.ScriptModule, Manifest]:
    """The tiny model, exported."""
    out = tmp_path_factory.mktemp("exported") / "model.pt"
    random_model(TINY, out, seed=3, check=False)
    return load(out)[:2]


def reference_logits(directory: Path, text: list[int]) -> torch.Tensor:
    """Of transformers in float32, [len(text), vocabulary]."""
    with torch.inference_mode():
        return load_reference(directory, "float32")(torch.tensor([text])).logits[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    write_directory({**TINY, **shape}, tmp_path / "hf", seed=5)
    export(tmp_path / "hf", tmp_path / "model.pt", check=False)
    module, manifest, _ = load(tmp_path / "model.pt")
    text = random_prompts(61, 256, [40])[0]
    logits = forward(module, manifest, [(KvCache.empty(manifest), text)])
    assert (logits - reference_logits(tmp_path / "hf", text)).abs().max() < 1e-4
    assert logits.dtype == torch.float32


def test_reports_parity_in_float32(directory: Path, tmp_path: Path) -> None:
    report = export(directory, tmp_path / "model.pt")
    assert report.passed() and report.max_error < 1e-4
    assert report.rows == 1 + 7 + 33 + 3 * 8
    assert report.greedy_rows == report.greedy_equal > report.rows / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_dtype_is_as_close_as_transformers_itself(
    directory: Path, tmp_path: Path, dtype: str
) -> None:
    report = export(directory, tmp_path / "model.pt", dtype=dtype)
    module, manifest, _ = load(tmp_path / "model.pt")
    assert report.passed() and 0 < report.error <= report.limit
    assert manifest.dtype == dtype
    assert {w.dtype for w in module.parameters()} == {getattr(torch, dtype)}


WIDE = {**TINY, "hidden_size": 96, "intermediate_size": 160}  # TINY's widths have no groups of 32


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_linears_may_be_integers(tmp_path: Path, quantization: str, tied: bool) -> None:
    write_directory({**WIDE, "tie_word_embeddings": tied}, tmp_path / "hf", seed=3)
    report = export(tmp_path / "hf", tmp_path / "model.pt", quantization=quantization)
    module, manifest, _ = load(tmp_path / "model.pt")
    assert report.passed() and 0 < report.error <= report.limit and report.measure == "rms"
    assert (manifest.dtype, manifest.quantization) == ("float32", quantization)
    kinds = {name: weight.dtype for name, weight in module.named_parameters() if weight.ndim > 1}
    assert kinds.pop("model.embed_tokens.weight") == torch.float32
    assert kinds.pop("lm_head.weight") == torch.int8
    assert set(kinds.values()) == {torch.int8 if quantization == "int8" else torch.uint8}


def test_a_linear_that_no_group_divides_stays_as_it_is(tmp_path: Path) -> None:
    write_directory({**WIDE, "intermediate_size": 136}, tmp_path / "hf", seed=3)
    report = export(tmp_path / "hf", tmp_path / "model.pt", quantization="int8")
    assert report.passed()
    kinds = {name: w.dtype for name, w in load(tmp_path / "model.pt")[0].named_parameters()}
    assert kinds["model.layers.0.mlp.down_proj.weight"] == torch.float32
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.int8


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (8, 32), (4, 32)])
def test_integers_are_the_nearest(bits: int, group: int) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    integers, scale = quantize(weight, bits, group)
    eye = torch.eye(256)
    dense = torch.ops.epikv.quantized_linear(eye, integers, scale).T
    off = (dense - weight).abs().unflatten(1, (-1, group)).amax(-1)
    assert (off <= scale.float() * (0.5 + 127 * 2.0**-9 + 0.01)).all()  # scales are bfloat16
    assert (dense[3] == 0).all()


def test_a_widened_model_computes_in_float32_and_holds_what_it_held(directory: Path) -> None:
    text = torch.tensor(random_prompts(61, 256, [12]))
    narrow = load_reference(directory, "bfloat16")
    wide = load_reference(directory, "float32")
    with torch.inference_mode():
        for weight in wide.parameters():
            weight.copy_(weight.bfloat16())
        torch.testing.assert_close(narrow(text).logits, wide(text).logits, rtol=0, atol=1e-5)
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}


def test_packed_equals_separate_and_chunked_equals_whole(
    exported: tuple[torch.jit.ScriptModule, Manifest],
) -> None:
    module, manifest = exported
    a, b = random_prompts(61, 256, [9, 20])
    alone = [forward(module, manifest, [(KvCache.empty(manifest), t)]) for t in (a, b)]
    caches = [KvCache.empty(manifest), KvCache.empty(manifest)]
    first = forward(module, manifest, [(caches[0], a[:4]), (caches[1], b[:13])])
    second = forward(module, manifest, [(caches[1], b[13:]), (caches[0], a[4:])])
    packed = [torch.cat([first[:4], second[7:]]), torch.cat([first[4:], second[:7]])]
    for got, want in zip(packed, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_logits_are_of_the_rows_asked_for(
    exported: tuple[torch.jit.ScriptModule, Manifest],
) -> None:
    module, manifest = exported
    text = random_prompts(61, 256, [10])[0]
    all_rows = forward(module, manifest, [(KvCache.empty(manifest), text)])
    some = forward(module, manifest, [(KvCache.empty(manifest), text)], last=[9, 2])
    none = forward(module, manifest, [(KvCache.empty(manifest), text)], last=[])
    torch.testing.assert_close(some, all_rows[[9, 2]], rtol=0, atol=1e-5)
    assert none.shape == (0, 61)


def test_block_sees_the_hidden_states_of_transformers(
    directory: Path, exported: tuple[torch.jit.ScriptModule, Manifest]
) -> None:
    module, manifest = exported
    text = torch.tensor(random_prompts(61, 256, [12])[0])
    step = Step(manifest, [KvCache.empty(manifest)], [12], torch.arange(12))
    with running(step):
        module(text, torch.arange(12), torch.tensor([11]))
        expected = load_reference(directory, "float32")(text[None], output_hidden_states=True)
    assert len(step.residuals) == 4 and step.attended == [0, 1, 2]
    for got, want in zip(step.residuals[:3], expected.hidden_states[:3], strict=True):
        torch.testing.assert_close(got, want[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("freeze", [False, True])
def test_graph_keeps_the_contract(
    exported: tuple[torch.jit.ScriptModule, Manifest], freeze: bool
) -> None:
    module = torch.jit.freeze(exported[0]) if freeze else exported[0]
    assert violations(module, 3) == []


def test_manifest_says_what_the_model_is(directory: Path, tmp_path: Path) -> None:
    edit(directory / "config.json", bos_token_id=1, eos_token_id=2)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    export(directory, tmp_path / "model.pt", name="tiny", check=False)
    module, manifest, tokenizer = load(tmp_path / "model.pt")
    assert (manifest.format, manifest.name) == ("epikv.model/1", "tiny")
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (1, [2, 5])
    assert (manifest.num_heads, manifest.num_kv_heads, manifest.context_length) == (4, 2, 256)
    assert len(manifest.ropes[0].inv_freq) == manifest.layers[0].key_width / 2 == 4
    names = dict(module.named_parameters())
    assert all(names[layer.output_projection].shape == (32, 32) for layer in manifest.layers)
    stored = load_file(directory / "model.safetensors")
    assert manifest.final_norm == FinalNorm("model.norm.weight", 1e-6, wide=False, offset=0)
    assert names[manifest.final_norm.weight].equal(stored["model.norm.weight"])
    assert json.loads(tokenizer)["model"]["type"] == "WordLevel"


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (False, True):
        config = {**TINY, "vocab_size": 20000, "tie_word_embeddings": tied}
        random_model(config, tmp_path / "model.pt", check=False)
        sizes.append((tmp_path / "model.pt").stat().st_size)
    assert sizes[0] - sizes[1] > 0.9 * 20000 * 32 * 4


def test_reads_shards(directory: Path, tmp_path: Path) -> None:
    export(directory, tmp_path / "whole.pt", check=False)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    export(directory, tmp_path / "sharded.pt", check=False)
    whole, sharded = (load(tmp_path / f"{name}.pt")[0] for name in ("whole", "sharded"))
    for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_random_weights_may_be_written_in_shards(tmp_path: Path) -> None:
    """The same weights, several files, and an index that transformers reads, too."""
    write_directory(TINY, tmp_path / "whole", seed=3)
    write_directory(TINY, tmp_path / "shards", seed=3, shard_bytes=40000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (load_reference(tmp_path / name, "float32") for name in ("whole", "shards"))
    for a, b in zip(whole.parameters(), shards.parameters(), strict=True):
        assert torch.equal(a, b)
    for name in ("whole", "shards"):
        export(tmp_path / name, tmp_path / f"{name}.pt", name="same", check=False)
    a, b = (load(tmp_path / f"{name}.pt")[1] for name in ("whole", "shards"))
    assert a == b and a.weights is not None


def test_one_shard_is_open_at_a_time(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each weight is read twice, for the digest and for the module, and told as it is read."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"{i % 3}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({n: w for n, w in weights.items() if files[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    opened: list[weakref.ref[Any]] = []

    class Shard:
        def __init__(self, path: Path, framework: str) -> None:
            assert not any(shard() for shard in opened), "another shard is still open"
            opened.append(weakref.ref(self))
            self._file = safe_open(path, framework)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr("epikv.export.weights.safe_open", Shard)
    told: list[tuple[str, int, int]] = []
    export(directory, tmp_path / "m.pt", progress=lambda *now: told.append(now), check=False)
    assert len(opened) > 3
    total = 2 * sum(weight.nbytes for weight in weights.values())
    reading = [now for now in told if now[0] == "reading weights"]
    assert reading[-1] == ("reading weights", total, total)
    assert [done for _, done, _ in reading] == sorted(done for _, done, _ in reading)
    assert told[-1][0] == "running what was written"


def test_the_command_tells_what_it_does_and_how_far_the_model_is_from_transformers(
    directory: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["export", str(directory), str(tmp_path / "model.pt")])
    assert done.exit_code == 0, done.output
    stages = done.stderr.splitlines()
    assert stages[0] == "reading weights" and len(stages) == len(set(stages))
    assert stages[-2:] == ["running it in transformers", "running what was written"]
    assert "max logit error" in done.stdout and "greedy tokens equal on" in done.stdout


def test_one_model_is_held_at_a_time(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[weakref.ref[torch.Tensor]] = []

    def noted(*args: Any) -> LanguageModel:
        module = build(*args)
        weights.extend(weakref.ref(weight) for weight in module.parameters())
        return module

    def loaded(path: Path) -> Any:
        assert weights and not any(weight() is not None for weight in weights)
        return load(path)

    monkeypatch.setattr(exporter, "build", noted)
    monkeypatch.setattr(exporter, "load", loaded)
    assert export(directory, tmp_path / "model.pt") is not None


def test_fused_projections_are_read_in_part(tmp_path: Path) -> None:
    write_directory(TINY, tmp_path / "hf", architecture="Phi3ForCausalLM")
    export(tmp_path / "hf", tmp_path / "model.pt", check=False)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    ours = dict(load(tmp_path / "model.pt")[0].named_parameters())
    for fused, parts in (
        ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
    ):
        apart = [ours[f"model.layers.1.{part}.weight"] for part in parts]
        assert torch.equal(torch.cat(apart), stored[f"model.layers.1.{fused}.weight"])


def test_calibration_travels_in_the_manifest(directory: Path, tmp_path: Path) -> None:
    content = {
        "policy": "epikv_flat",
        "layers": {"a": 1, "b": 0},
        "sign": -1,
        "window": 64,
        "recall": 0.97,
        "confirmed": {"exact": 0.9},
    }
    (directory / "calibration.json").write_text(json.dumps(content))
    export(directory, tmp_path / "model.pt", check=False)
    calibration = load(tmp_path / "model.pt")[1].calibration
    assert (calibration.layer_a, calibration.layer_b, calibration.sign) == (1, 0, -1)
    assert calibration.confirmed and calibration.figures["recall"] == 0.97
    edit(directory / "calibration.json", layers={"a": 2, "b": 0})
    with pytest.raises(ExportError, match=r"layers\.a is 2"):
        export(directory, tmp_path / "model.pt", check=False)


def test_a_calibration_that_refused_is_none(directory: Path, tmp_path: Path) -> None:
    """As `epikv calibrate epikv_flat` reports it, with what running did not confirm or without."""
    for chosen in ({}, {"layers": {"a": 1, "b": 0}, "sign": -1}):
        content = {"policy": "epikv_flat", "window": 64, "confirmed": False, "refusal": "why"}
        (directory / "calibration.json").write_text(json.dumps(content | chosen))
        export(directory, tmp_path / "model.pt", check=False)
        assert load(tmp_path / "model.pt")[1].calibration is None


def test_exports_a_byte_level_tokenizer(directory: Path, tmp_path: Path) -> None:
    write_directory({**TINY, "vocab_size": 300}, tmp_path / "bytes", tokenizer="bytes")
    export(tmp_path / "bytes", tmp_path / "model.pt", check=False)
    tokenizer = byte_tokenizer(300)
    assert json.loads(load(tmp_path / "model.pt")[2]) == json.loads(tokenizer.to_str())
    text = "añ 水"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.encode("ab").ids == [257]


def test_random_model_command_writes_a_reference(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "epikv.export.random", "--hidden", "32", "--layers", "2"]
    command += ["--vocab", "50", "--seed", "7", "--out", str(tmp_path / "m.pt"), "--no-check"]
    command += ["--reference", str(tmp_path / "m.json"), "--reference-ids", "3 1 4"]
    subprocess.run(command, check=True, capture_output=True)
    module, manifest, _ = load(tmp_path / "m.pt")
    (case,) = json.loads((tmp_path / "m.json").read_text())["cases"]
    cache = KvCache.empty(manifest)
    logits = forward(module, manifest, [(cache, case["token_ids"])])
    torch.testing.assert_close(logits, torch.tensor(case["logits"]), rtol=0, atol=1e-4)
    for token, margin in zip(case["greedy"], case["margins"], strict=True):
        assert margin < 1e-3 or int(logits[-1].argmax()) == token
        logits = forward(module, manifest, [(cache, [token])])
