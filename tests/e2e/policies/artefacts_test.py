"""Artefacts and a real daemon: loaded at start, or a start that fails and says why."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from epikv import Client, Kv, RpcError, Sampling, Stop
from epikv.eval.items import Item
from epikv.eval.tasks import load
from epikv.testing import Daemon, DaemonError
from safetensors.torch import load_file, save_file


def test_policies_serve_with_what_was_measured(client: Client, artefact_dir: Path) -> None:
    measured = ("duo_attention", "epikv_probe", "headkv", "thinkv_tbe", "triattention")
    trained = ("dbtrimkv", "dms", "epikv_forecast", "kvzap", "trimkv")
    for name in (*measured, *trained):
        policy = client.policy(name)
        assert policy.has_artefact
        kv = Kv(name, 80, params={"slack": 7})
        result = client.score([5] * 40, list(range(20, 120)), kv=kv)
        assert result.summary.kv.rounds > 0, name
        assert not result.summary.kv.uncalibrated
    kv = Kv("epikv_probe", 80, params={"slack": 7, "aged": True})  # its artefact tells of ages, too
    assert client.score([5] * 40, list(range(20, 120)), kv=kv).summary.kv.rounds > 0
    params = json.loads((artefact_dir / "thinkv_tbe.json").read_text())["params"]
    defaults = {p.name: p.default_value for p in client.policy("thinkv_tbe").params}
    assert {name: defaults[name] for name in params} == params


def test_the_gates_that_are_shipped_serve_their_model(
    sample_model: Path, sample_directory: Path
) -> None:
    shipped = sample_directory / "artefacts"
    with (
        Daemon(sample_model, "--threads=1", f"--artefact_dir={shipped}") as daemon,
        daemon.client() as client,
    ):
        problem = next(iter(load("sample:programs@9", "shipped", 1)))
        assert isinstance(problem, Item) and problem.trace_tokens is not None
        for name in ("dbtrimkv", "dms", "epikv_forecast", "kvzap", "trimkv"):
            assert client.policy(name).has_artefact
            result = client.generate_once(
                problem.prompt,
                kv=Kv(name, "60%", {"slack": 15}),
                sampling=Sampling(temperature=0),
                stop=Stop(problem.trace_tokens + 8),
            )
            assert result.summary.kv.rounds > 0, name
            if name.endswith("trimkv") or name == "epikv_forecast":
                assert all(problem.judge(result.text)), f"{name}: {result.text[-80:]}"


def test_without_it_a_request_is_refused(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        assert client.policy("triattention").needs_artefact
        assert not client.policy("triattention").has_artefact
        with pytest.raises(RpcError) as caught:
            client.generate_once([5] * 40, kv=Kv("triattention", 80), stop=Stop(100))
    assert caught.value.code.name == "FAILED_PRECONDITION"
    assert caught.value.reason == "ARTEFACT_MISSING"
    assert [violation.field for violation in caught.value.field_violations] == ["kv.policy"]
    assert "epikv calibrate triattention" in str(caught.value)


def starts_with(model: Path, directory: Path) -> str:
    """What the daemon says when it does not start."""
    with pytest.raises(DaemonError) as caught, Daemon(model, f"--artefact_dir={directory}"):
        pass
    return str(caught.value)


def test_what_cannot_be_loaded_stops_the_start(
    sample_model: Path, artefact_dir: Path, tmp_path: Path
) -> None:
    assert "cannot read" in starts_with(sample_model, tmp_path / "nowhere")
    assert "no *.json" in starts_with(sample_model, tmp_path)
    (tmp_path / "cut.json").write_text((artefact_dir / "triattention.json").read_text()[:100])
    assert "cut.json: not a JSON object" in starts_with(sample_model, tmp_path)
    (tmp_path / "cut.json").unlink()

    shutil.copy(artefact_dir / "triattention.json", tmp_path / "tri.json")
    artefact = json.loads((tmp_path / "tri.json").read_text())
    artefact["model"] = {"name": "other", "weights": "sha256:00"}
    (tmp_path / "tri.json").write_text(json.dumps(artefact))
    assert "tri.json: made for another model, 'other'" in starts_with(sample_model, tmp_path)

    artefact = json.loads((artefact_dir / "triattention.json").read_text())
    artefact["data"]["q_abs_mean"][0].pop()
    (tmp_path / "tri.json").write_text(json.dumps(artefact))
    assert "tri.json: data: q_abs_mean must be" in starts_with(sample_model, tmp_path)


def test_a_gate_that_cannot_be_loaded_stops_the_start(
    sample_model: Path, artefact_dir: Path, tmp_path: Path
) -> None:
    shutil.copy(artefact_dir / "trimkv.json", tmp_path)
    beside = tmp_path / "trimkv.safetensors"
    assert "arrays: cannot read" in starts_with(sample_model, tmp_path)
    whole = (artefact_dir / beside.name).read_bytes()
    beside.write_bytes(whole[:-4])
    assert "trimkv.safetensors: " in starts_with(sample_model, tmp_path)

    arrays = load_file(artefact_dir / beside.name)
    last = arrays["layers.5.linear2.bias"]
    about = json.loads((tmp_path / "trimkv.json").read_text())
    facts = {"policy": "trimkv", "weights": about["model"]["weights"]}
    save_file(arrays | {"layers.5.linear2.bias": torch.full_like(last, torch.nan)}, beside, facts)
    said = starts_with(sample_model, tmp_path)
    assert "layers.5.linear2.bias: number 0 is not finite" in said
    save_file(arrays | {"layers.5.linear2.bias": torch.zeros(3)}, beside, facts)
    assert "layers.5.linear2.bias must be [2], is [3]" in starts_with(sample_model, tmp_path)
    save_file(arrays, beside, facts | {"policy": "dbtrimkv"})
    assert "its policy is 'dbtrimkv', not 'trimkv'" in starts_with(sample_model, tmp_path)
