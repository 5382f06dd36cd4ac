"""Steering and a real daemon: who asks for it is steered, told so, and nobody else is."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from definitions import define
from epikv import Client, Experiment, Kv, Output, RpcError, Sampling, Steering, Stop
from epikv.calibrate import artefacts
from epikv.cli import main
from epikv.eval import results
from epikv.export.archive import read_manifest
from epikv.export.manifest import Manifest
from epikv.testing import Daemon, DaemonError
from safetensors.torch import load_file, save_file

LAYER = 1


def write(directory: Path, manifest: Manifest, width: int) -> Path:
    """A vector that is added at every token."""
    path = directory / "steering.json"
    artefacts.write(
        path,
        "steering",
        manifest,
        data={"layer": LAYER, "at": list(range(manifest.vocab_size)), "ends": [], "marks": []},
        arrays={"vector": torch.linspace(-1, 1, width)},
        made_with={"test": "steering"},
    )
    return path


@pytest.fixture(scope="module")
def manifest(sample_model: Path) -> Manifest:
    return read_manifest(sample_model)


def test_who_asks_is_steered_and_told_so(
    sample_model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    write(tmp_path, manifest, manifest.hidden_size)
    output = Output(token_ids=True, logprobs=True)

    with Daemon(sample_model, f"--artefact_dir={tmp_path}") as daemon, daemon.client() as client:

        def said(steering: Steering | None, kv: Kv | None = None) -> tuple[list[float], Sampling]:
            result = client.generate_once(
                [5] * 40,
                kv=kv or Kv(),
                sampling=Sampling(temperature=0, steering=steering),
                stop=Stop(60, ignore_eos=True),
                output=output,
            )
            assert result.accepted.sampling is not None
            return result.logprobs, result.accepted.sampling

        plain, accepted = said(None)
        assert accepted.steering is None
        for kv in (Kv(), Kv("sliding", 48), Kv("h2o", 48)):
            steered, accepted = said(Steering(2), kv)
            assert accepted.steering == Steering(2, pytest.approx(0.02))
            assert steered != said(None, kv)[0]
            assert said(Steering(0, 0), kv)[0] == said(None, kv)[0]
        assert said(None)[0] == plain


def test_what_is_steered_keeps_to_its_constraint(
    sample_model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    """And what is told ahead of a prompt that is evicted is no part of either."""
    write(tmp_path, manifest, manifest.hidden_size)
    with Daemon(sample_model, f"--artefact_dir={tmp_path}") as daemon, daemon.client() as client:

        def said(steering: Steering | None, kv: Kv) -> tuple[str, list[float]]:
            result = client.generate_once(
                [5] * 90,
                kv=kv,
                sampling=Sampling(temperature=0, regex="( ?[0-9])+ ?", steering=steering),
                stop=Stop(40),
                output=Output(logprobs=True),
            )
            assert re.fullmatch("( ?[0-9])* ?", result.text), result.text
            return result.text, result.logprobs

        for kv in (
            Kv(),
            Kv("laq", 48),
            Kv("kvzip", 48),
            Kv("snapkv", 48, {"queries": "lookahead"}),
        ):
            steered = said(Steering(3), kv)
            assert steered != said(None, kv)
            assert steered == said(Steering(3), kv)


def refusal(client: Client, steering: Steering) -> RpcError:
    with pytest.raises(RpcError) as caught:
        client.generate_once([5] * 4, sampling=Sampling(steering=steering), stop=Stop(4))
    return caught.value


def test_without_a_vector_nobody_is_steered(client: Client) -> None:
    error = refusal(client, Steering())
    assert (error.code.name, error.reason) == ("FAILED_PRECONDITION", "ARTEFACT_MISSING")
    assert [violation.field for violation in error.field_violations] == ["sampling.steering"]


ARMS = """
name: "turns"
traffic_permille: 1000
primary_metric: "output_tokens"
arms { name: "plain" weight_permille: 500 control: true }
arms { name: "steered" weight_permille: 500 steering { coefficient: 2 } }
"""


def test_an_arm_steers(sample_model: Path, manifest: Manifest, tmp_path: Path) -> None:
    """The request itself says nothing of it, and what it says is replaced."""
    write(tmp_path, manifest, manifest.hidden_size)
    flags = (f"--artefact_dir={tmp_path}", f"--experiment_store={tmp_path / 'store.db'}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:

        def said(arm: str, steering: Steering | None) -> tuple[list[int], Steering | None]:
            result = client.generate_once(
                [5] * 40,
                sampling=Sampling(temperature=0, steering=steering),
                stop=Stop(30, ignore_eos=True),
                output=Output(token_ids=True),
                experiment=Experiment(force_arm=arm) if arm else Experiment(),
            )
            assert result.accepted.sampling is not None
            return result.token_ids, result.accepted.sampling.steering

        plain, _ = said("", None)
        steered, told = said("", Steering(2))
        assert steered != plain
        client.create_experiment(define(ARMS))
        client.start_experiment("turns")
        assert said("turns/plain", None) == (plain, None)
        assert said("turns/plain", Steering(2)) == (steered, told)
        assert said("turns/steered", None) == (steered, told)
        assert said("turns/steered", Steering(-9, 4)) == (steered, told)


def test_an_evaluation_steers(sample_model: Path, manifest: Manifest, tmp_path: Path) -> None:
    write(tmp_path, manifest, manifest.hidden_size)
    out = tmp_path / "out"
    command = ["eval", "--problems=2", "--policy=sliding", "--steering=0", "--steering=50"]
    with Daemon(sample_model, f"--artefact_dir={tmp_path}") as daemon:
        command += [f"--server={daemon.grpc}", f"--out={out}"]
        made = CliRunner().invoke(main, [*command, "--task=sample:programs@6"])
        assert made.exit_code == 0, made.output
        refused = CliRunner().invoke(main, [*command, "--task=recall@4"])
        assert refused.exit_code == 2 and "nothing to steer" in refused.output
    _, records = results.read(out)
    said = {(record.item, record.arm): record.digest for record in records}
    for (item, arm), digest in said.items():
        if arm in ("full", "sliding"):
            assert said[item, f"{arm} steered 50"] != digest
        if arm == "full":
            assert said[item, "full steered 0"] == digest, "no sentence counts, so nothing is added"


def test_an_arm_cannot_steer_without_a_vector(sample_model: Path, tmp_path: Path) -> None:
    with (
        Daemon(sample_model, f"--experiment_store={tmp_path / 'store.db'}") as daemon,
        daemon.client() as client,
        pytest.raises(RpcError, match="steering vector") as caught,
    ):
        client.create_experiment(define(ARMS))
    fields = [violation.field for violation in caught.value.field_violations]
    assert fields == ["experiment.arms[1].steering"]


def test_what_is_out_of_range_is_refused(
    sample_model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    write(tmp_path, manifest, manifest.hidden_size)
    with Daemon(sample_model, f"--artefact_dir={tmp_path}") as daemon, daemon.client() as client:
        for steering, field in (
            (Steering(math.nan), "coefficient"),
            (Steering(-100.5), "coefficient"),
            (Steering(1, 101), "growth"),
        ):
            error = refusal(client, steering)
            assert error.code.name == "INVALID_ARGUMENT"
            fields = [violation.field for violation in error.field_violations]
            assert fields == [f"sampling.steering.{field}"]


def test_a_vector_that_cannot_be_loaded_stops_the_start(
    sample_model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    def said() -> str:
        with (
            pytest.raises(DaemonError) as caught,
            Daemon(sample_model, f"--artefact_dir={tmp_path}"),
        ):
            pass
        return str(caught.value)

    path = write(tmp_path, manifest, manifest.hidden_size + 1)
    assert f"steering.json: data: arrays must hold 'vector' [{manifest.hidden_size}]" in said()

    write(tmp_path, manifest, manifest.hidden_size)
    beside = path.with_suffix(".safetensors")
    vector = load_file(beside)["vector"].clone()
    vector[3] = math.inf
    save_file({"vector": vector}, beside, {"policy": "steering", "weights": str(manifest.weights)})
    assert "vector: number 3 is not finite" in said()

    write(tmp_path, manifest, manifest.hidden_size)
    artefact = json.loads(path.read_text())
    artefact["data"]["layer"] = 99
    path.write_text(json.dumps(artefact))
    assert "steering.json: data: layer must be a block of the model" in said()
    artefact["model"]["weights"] = "sha256:00"
    path.write_text(json.dumps(artefact))
    assert "steering.json: made for another model" in said()
