"""`epikv calibrate epikv_flat` on a real daemon and the shipped sample model, in short problems."""

import base64
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from epikv import Client, Kv, Output, Stop
from epikv.calibrate.separation import keepers
from epikv.calibrate.signals import pair_scores, pairs, rolling
from epikv.cli import main
from epikv.export import archive
from epikv.sample import problem
from epikv.testing import Daemon, find_binary

TASK = "sample:programs@8"
QUICK = (
    *("--traces", "24", "--runs", "24", "--try", "6", "--confirm", "30"),
    *("--daemon-flag", "threads=1"),
)


def arguments(model: Path, out: Path) -> list[str]:
    command = ["calibrate", "epikv_flat", str(model), "--task", TASK, *QUICK, "-o", str(out)]
    return [*command, "--binary", str(find_binary())]


def calibrate(model: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(main, [*arguments(model, out), *more])


@pytest.fixture(scope="module")
def uncalibrated(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.pt"
    shutil.copy(sample_model, path)
    archive.replace_manifest(path, replace(archive.read_manifest(path), calibration=None))
    return path


def test_scores_are_those_that_the_daemon_evicts_by(client: Client) -> None:
    """What is left of the generated tokens is what keepers of our scores keep, at every round."""
    task = problem("scores/0")
    params = {"layer_a": 1, "layer_b": 4, "sign": -1, "window": 16}
    prompt = client.tokenize(task.prompt)
    recent = 20
    result = client.generate_once(
        prompt,
        kv=Kv("epikv_flat", len(prompt) + 60, params, recent_tokens=recent),
        stop=Stop(max_output_tokens=300, ignore_eos=True),
        output=Output(residual_steps=True, kv_trace=True),
    )
    steps = np.array([signals.residual_steps for signals in result.signals]).T
    z = rolling(steps[:-1].astype(np.float64), 16)[1]
    scores = -pair_scores(z)[pairs(5).index((1, 4))]
    assert len(result.evictions) > 200
    evicted: set[int] = set()
    for event in result.evictions:
        evicted |= {index for victims in event.victims for index in victims.index}
        old = event.at_token + 1 - len(prompt) - recent  # that the recent window has left
        kept = {*range(old)} - {index - len(prompt) for index in evicted}
        assert kept == {*np.flatnonzero(keepers(scores[None, :old], 40)[0]).tolist()}


@pytest.fixture(scope="module")
def measured(uncalibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, the report of a calibration that left it alone, and what was measured."""
    folder = tmp_path_factory.mktemp("measured")
    shutil.copy(uncalibrated, folder / "model.pt")
    done = calibrate(folder / "model.pt", folder / "report.json", "--dry-run")
    assert done.exit_code == 0, done.output
    assert (folder / "model.pt").read_bytes() == uncalibrated.read_bytes()
    return folder


def test_writes_what_was_confirmed_and_it_serves(measured: Path, tmp_path: Path) -> None:
    work = tmp_path / "report.work"
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    model, out = tmp_path / "model.pt", tmp_path / "report.json"
    done = calibrate(model, out)
    assert done.exit_code == 0, done.output
    for file in work.rglob("*.jsonl"):  # nothing was measured again
        before = measured / "report.work" / file.relative_to(work)
        assert file.read_bytes() == before.read_bytes()
    report = json.loads(out.read_text())
    found = archive.read_manifest(model)
    assert found.weights == archive.read_manifest(measured / "model.pt").weights
    assert found.calibration.confirmed
    params = {
        "layer_a": report["layers"]["a"],
        "layer_b": report["layers"]["b"],
        "sign": report["sign"],
        "window": 64,
    }
    assert params == {name: getattr(found.calibration, name) for name in params}
    arms = report["confirmation"]["0.5"]["arms"]
    assert arms["chosen"]["parts"] > max(arms["random"]["parts"], arms["inverse"]["parts"])

    with Daemon(model, "--threads=1") as daemon, daemon.client() as client:
        result = client.generate_once([5] * 40, kv=Kv("epikv_flat", 80), stop=Stop(60))
        assert not result.summary.kv.uncalibrated
        asked = result.accepted.kv.policy_params
        assert {name: asked[name] for name in params} == params
        assert client.models()[0].default_policy == "epikv_flat"
        other = {"layer_a": params["layer_b"], "layer_b": params["layer_a"]}
        kv = Kv("epikv_flat", 80, other)
        assert client.generate_once([5] * 40, kv=kv, stop=Stop(60)).summary.kv.uncalibrated


def test_writes_nothing_where_nothing_is_found(measured: Path, tmp_path: Path) -> None:
    """Steps that have nothing to do with what is needed."""
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    model, out = tmp_path / "model.pt", tmp_path / "report.json"
    before = model.read_bytes()
    few = calibrate(model, out, "--traces", "4")
    assert few.exit_code == 1
    assert "not calibrated: 4 of 4 traces" in few.output

    traces = tmp_path / "report.work" / "traces.jsonl"
    lines = [json.loads(line) for line in traces.read_text().splitlines()]
    for line in lines:
        if "steps" in line:  # in whichever order the daemon came to them
            draw = np.random.default_rng(line["output"])
            steps = draw.lognormal(size=(line["layers"], len(line["output"]) - 1))
            line["steps"] = base64.b64encode(steps.astype(np.float32).tobytes()).decode()
    traces.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = calibrate(model, out)
    assert result.exit_code == 1
    assert "not calibrated: no pair of layers tells needed tokens from others" in result.output
    assert model.read_bytes() == before
    report = json.loads(out.read_text())
    assert not report["confirmed"] and "layers" not in report


@pytest.mark.nightly
def test_goes_on_after_a_kill(uncalibrated: Path, tmp_path: Path) -> None:
    """Killed and then ended among the runs that label; what was measured is measured once."""
    model, out = tmp_path / "model.pt", tmp_path / "report.json"
    shutil.copy(uncalibrated, model)
    archive.replace_manifest(model, replace(archive.read_manifest(model), weights=None))
    runs = tmp_path / "report.work" / "eviction.jsonl"
    few = ("--traces", "6", "--dry-run")
    with Daemon(model, "--threads=1", "--max_running_requests=64") as daemon:
        more = (*few, "--server", daemon.grpc)
        for lines, number, status in ((60, signal.SIGKILL, -9), (180, signal.SIGTERM, 130)):
            ended, log = end_after(lines, number, runs, [*arguments(model, out), *more])
            assert ended == status, log
            content = runs.read_bytes()
            kept = content[: content.rindex(b"\n") + 1]
            assert len(kept.splitlines()) < 6 * 49 + 1 and not out.exists()
        assert "the same command goes on" in log
        again = calibrate(model, out, *more)
    assert again.exit_code == 1
    assert "not calibrated: 6 of 6 traces" in again.output
    assert runs.read_bytes().startswith(kept)
    keys = [json.loads(line)["key"] for line in runs.read_bytes().splitlines()[1:]]
    assert len(keys) == len({*keys}) == 6 * (1 + 48)  # the whole cache and the runs


def end_after(
    lines: int, number: signal.Signals, file: Path, arguments: list[str]
) -> tuple[int, str]:
    """Sends the signal when the file has so many lines; the exit status, and what was on stderr."""
    command = [sys.executable, "-c", "from epikv.cli import main; main()", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not file.exists() or file.read_bytes().count(b"\n") < lines:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        log = process.communicate(timeout=60)[1]
    return process.returncode, log


@pytest.mark.nightly
def test_labels_by_occlusion_go_with_those_by_eviction(uncalibrated: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    both = ("--label", "eviction", "--label", "occlusion", "--window", "4", "--stride", "4")
    calibrate(uncalibrated, out, *both, "--traces", "6", "--runs", "40")
    found = json.loads(out.read_text())
    agreed = found["agreement"]
    assert found["labels"]["occlusion"]["windows"] > 250
    assert agreed["flipped, with a needed token in it"] > 3 * agreed["flipped, without"]
    reads = found["labels"]["eviction"]["reads of a trace"][TASK]
    # What the shipped model reads are values, where a line defines them.
    assert all(read["text"].split()[-3] == "so" for read in reads)


def test_another_model_is_refused(uncalibrated: Path, tmp_path: Path, daemon: Daemon) -> None:
    model, out = tmp_path / "model.pt", tmp_path / "out.json"
    shutil.copy(uncalibrated, model)
    manifest = archive.read_manifest(model)
    archive.replace_manifest(model, replace(manifest, name="other"))
    result = calibrate(model, out, "--server", daemon.grpc)
    assert result.exit_code == 1
    assert "serves sample, not other" in result.output

    archive.replace_manifest(model, replace(manifest, weights="sha256:0"))
    result = calibrate(model, out, "--server", daemon.grpc)
    assert result.exit_code == 1
    assert f"{daemon.grpc} serves other weights as sample" in result.output


def test_what_was_measured_of_other_weights_is_refused(measured: Path, tmp_path: Path) -> None:
    """As after a fine-tune under the same name."""
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    model = tmp_path / "model.pt"
    archive.replace_manifest(model, replace(archive.read_manifest(model), weights="sha256:0"))
    result = calibrate(model, tmp_path / "report.json")
    assert result.exit_code == 1
    assert "begun with other settings (weights is" in result.output
