"""Answers of the differential fuzzer are those of transformers, and the comparison can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from epikv.testing import find_binary

FOLDER = Path(__file__).resolve().parents[2] / "laws" / "differential"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("differential") / "answers.jsonl"
    fuzzer = find_binary().parents[1] / "tests" / "differential"
    subprocess.run([fuzzer, "--trials", "60", "--seed", "1", "--answers", path], check=True)
    return path


def compare(answers: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "against_transformers.py"), str(answers)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_answers_are_those_of_transformers(answers: Path) -> None:
    compared = compare(answers)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert any(json.loads(line)["evictions"] for line in answers.read_text().splitlines())


def test_answers_whose_evictions_are_not_told_are_found(answers: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled.jsonl"
    with spoiled.open("w") as file:
        for line in answers.read_text().splitlines():
            file.write(json.dumps({**json.loads(line), "evictions": []}) + "\n")
    compared = compare(spoiled)
    assert compared.returncode == 1, compared.stdout + compared.stderr
    assert "a log-probability differs" in compared.stdout
