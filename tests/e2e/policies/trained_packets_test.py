"""`epikv calibrate packet` on the sample model, and the daemon with what it trained."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from epikv.calibrate import soft_tokens as calibration
from epikv.calibrate.soft_tokens import SoftTokens, Training
from epikv.cli import main
from epikv.export import load
from epikv.export.archive import read_tokenizer
from epikv.sample import problem
from epikv.testing import Daemon
from safetensors.torch import load_file
from tokenizers import Tokenizer

TRAINING = Training(soft=4, steps=30, batch=2, rate=0.01)
ANSWER = 32


@pytest.fixture(scope="module")
def artefact(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for seconds."""
    out = tmp_path_factory.mktemp("artefacts") / "packet.json"
    options = {
        "--task": "sample:ledger",
        "--problems": 40,
        "--answer": ANSWER,
        "--soft": TRAINING.soft,
        "--steps": TRAINING.steps,
        "--batch": TRAINING.batch,
        "--rate": TRAINING.rate,
        "--work": out.parents[1] / "packet.work",
    }
    given = [str(word) for option in options.items() for word in option]
    result = CliRunner().invoke(
        main, ["calibrate", "packet", str(sample_model), "-o", str(out), *given]
    )
    assert result.exit_code == 0, result.output
    return out


def test_soft_tokens_bring_back_much_of_what_is_lost(artefact: Path) -> None:
    held = json.loads(artefact.read_text())["made_with"]["held_out"]
    lost = {way: held[way]["divergence"] for way in ("trained", "untrained", "none", "unread")}
    assert lost["trained"] < 0.5 * lost["none"]
    assert lost["trained"] < 0.5 * lost["untrained"]
    assert lost["none"] < lost["unread"], "the model reads its documents"
    assert held["trained"]["agreed"] > held["none"]["agreed"]


def test_the_daemon_says_what_was_trained(sample_model: Path, artefact: Path) -> None:
    module, manifest, _ = load(sample_model)
    encoder = Tokenizer.from_str(read_tokenizer(sample_model))
    arrays = load_file(artefact.with_suffix(".safetensors"))
    soft = SoftTokens(manifest, TRAINING)
    soft.load_state_dict(arrays)
    flags = ("--threads=1", "--packet_bytes=100000000", f"--artefact_dir={artefact.parent}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        for seed in range(3):
            parts = calibration.parts_of_prompt(problem(f"packet/{seed}", "ledger").prompt, 4)
            posed = calibration.problem_of([encoder.encode(part).ids for part in parts])
            [posed] = calibration.answered(module, manifest, [posed], ANSWER)
            preamble = client.create_packet(list(posed.preamble)).packet
            for rows in (None, soft):
                packets = [
                    client.create_packet(list(document), soft_tokens=rows is not None).packet
                    for document in posed.documents
                ]
                length = len(posed.documents[0]) + (0 if rows is None else 2 * TRAINING.soft)
                assert packets[0].tokens == length
                scored = client.score(
                    list(posed.question),
                    list(posed.answer),
                    packets=[packet.id for packet in (preamble, *packets)],
                )
                with torch.no_grad():
                    said = calibration.student(module, manifest, posed, rows)
                wanted = said.gather(1, torch.tensor(posed.answer)[:, None])[:, 0]
                assert list(scored.logprobs) == pytest.approx(wanted.tolist(), abs=1e-3)
