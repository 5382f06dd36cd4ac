"""`epikv calibrate steering` on the sample model."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate.steering import Words, spans
from epikv.cli import main
from epikv.export import load
from epikv.export.archive import read_tokenizer
from epikv.export.operators import KvCache, Step, running
from epikv.sample import problem
from safetensors.torch import load_file
from tokenizers import Tokenizer


def texts_in(directory: Path, count: int) -> list[str]:
    options = []
    for index in range(count):
        task = problem(f"steering/{index}")
        path = directory / f"{index}.txt"
        path.write_text(f"{task.prompt} {task.trace}")
        options += ["--text", str(path)]
    return options


def calibrate(model: Path, out: Path, *more: str) -> Result:
    command = ["calibrate", "steering", str(model), "-o", str(out), "--sentence-end", ".", *more]
    return CliRunner().invoke(main, command)


def test_it_finds_the_vector_of_a_model(sample_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "steering.json"
    texts = texts_in(tmp_path, 16)
    thought = ("--begin", "<think>", "--end", "</think>")
    result = calibrate(sample_model, out, "--mark", "check", "--layer", "2", *thought, *texts)
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())["data"]
    assert data["layer"] == 2
    assert data["at"] == data["ends"] != data["marks"]
    # As it is by the texts one by one, without the fourth of each four.
    module, manifest, _ = load(sample_model)
    encoder = Tokenizer.from_str(read_tokenizer(sample_model))
    words = Words(data["ends"], data["marks"], data["begin"], data["end"])
    means: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for index in range(16):
        if index % 4 == 3:
            continue
        ids = encoder.encode((tmp_path / f"{index}.txt").read_text()).ids
        positions = torch.arange(len(ids))
        step = Step(manifest, [KvCache.empty(manifest)], [len(ids)], positions)
        with running(step):
            module(torch.tensor(ids), positions, positions[-1:])
        for first, end, marked in spans(ids, words):
            means[marked].append(step.residuals[2][first:end].mean(0))
    expected = torch.stack(means[False]).mean(0) - torch.stack(means[True]).mean(0)
    vector = load_file(out.with_suffix(".safetensors"))["vector"]
    torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--mark", "no such word"), "is 3 tokens"),
        (("--mark", "<think>"), "3 marked sentences in 3 texts"),
        (("--mark", "check", "--layer", "99"), "layer must be a block"),
    ],
)
def test_it_refuses_what_tells_nothing(
    sample_model: Path, tmp_path: Path, more: tuple[str, ...], says: str
) -> None:
    out = tmp_path / "steering.json"
    result = calibrate(sample_model, out, *more, *texts_in(tmp_path, 4))
    assert result.exit_code != 0
    assert says in result.output
    assert not out.exists()
