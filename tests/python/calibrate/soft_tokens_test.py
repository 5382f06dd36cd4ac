"""`epikv calibrate packet`: what sees what, what is trained, and what comes out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from epikv.calibrate import gates
from epikv.calibrate import soft_tokens as calibration
from epikv.calibrate.gates import CalibrationError
from epikv.calibrate.soft_tokens import Problem, SoftTokens, Training
from epikv.cli import main
from epikv.export import Manifest, load, random_model
from epikv.export.operators import KvCache, Step, forward, running
from epikv.sample import FAMILIES, problem
from safetensors.torch import load_file
from tiny_model import TINY
from torch import Tensor

TRAINING = Training(soft=3, steps=4, batch=2)
PROBLEM = Problem([2], ((5, 6, 7), (8, 9), (10, 11, 12)), (13, 14), (15, 16, 17))
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
    draw = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(61, (count,), generator=draw)]


@pytest.fixture(scope="module")
def problems(model: Model) -> list[Problem]:
    posed = [
        calibration.problem_of(calibration.parts_of_text(ids(20 + number, number), None, 3, 4))
        for number in range(12)
    ]
    return calibration.answered(*model, posed, 5)


def large(manifest: Manifest) -> SoftTokens:
    """Soft tokens that are easily told from nothing."""
    soft = SoftTokens(manifest, TRAINING)
    with torch.no_grad():
        for rows in soft.parameters():
            rows *= 50
    return soft


def test_a_document_sees_itself_and_the_question_everything() -> None:
    rows = calibration.rows_of(PROBLEM, 3)
    # Of a preamble, three documents with 6 soft tokens each, a question and an answer.
    parts = [0] * 1 + [1] * 9 + [2] * 8 + [3] * 9 + [4] * 4
    assert rows.part.tolist() == parts
    hidden = rows.hidden()
    for row, of_row in enumerate(parts):
        for key, of_key in enumerate(parts[: row + 1]):
            assert hidden[row, key] == (of_row not in (4, of_key)), (row, key)


def test_soft_tokens_stand_around_each_document(model: Model) -> None:
    _, manifest = model
    rows = calibration.rows_of(PROBLEM, 3)
    assert rows.header.tolist() == [[1, 2, 3], [10, 11, 12], [18, 19, 20]]
    assert rows.trailer.tolist() == [[7, 8, 9], [15, 16, 17], [24, 25, 26]]
    soft = SoftTokens(manifest, TRAINING)
    residual = torch.randn(len(rows.ids), manifest.hidden_size)
    put = rows.with_soft(soft)(residual)
    places = [*rows.header.flatten().tolist(), *rows.trailer.flatten().tolist()]
    for place in range(len(rows.ids)):
        if place not in places:
            assert torch.equal(put[place], residual[place])
    for of_document in range(3):
        assert torch.equal(put[rows.header[of_document]], soft.header)
        assert torch.equal(put[rows.trailer[of_document]], soft.trailer)
    assert [rows.ids[place] for place in range(31) if place not in places] == [
        *PROBLEM.plain(),
        *PROBLEM.answer[:-1],
    ]


@pytest.mark.parametrize("with_soft", [False, True])
@torch.no_grad()
def test_one_forward_says_what_caches_side_by_side_do(model: Model, with_soft: bool) -> None:
    """Each document by a forward of its own, at the positions where it will lie; then the question
    over all of their caches."""
    module, manifest = model
    soft = large(manifest) if with_soft else None
    rows = calibration.rows_of(PROBLEM, 3 if with_soft else 0)
    together = KvCache.empty(manifest)
    for part in range(4):
        places = (rows.part == part).nonzero().flatten()

        def put(residual: Tensor, places: Tensor = places) -> Tensor:
            if soft is None:
                return residual
            whole = torch.zeros(len(rows.ids), residual.shape[1]).index_copy(0, places, residual)
            return rows.with_soft(soft)(whole)[places]

        alone = KvCache.empty(manifest)
        with running(Step(manifest, [alone], [len(places)], places, replace=put)):
            module(rows.ids[places], places, torch.arange(len(places)))
        for layer in range(len(manifest.layers)):
            together.keys[layer] = torch.cat([together.keys[layer], alone.keys[layer]])
            together.values[layer] = torch.cat([together.values[layer], alone.values[layer]])
    asked = [*PROBLEM.question, *PROBLEM.answer[:-1]]
    said = forward(module, manifest, [(together, asked)])[-len(PROBLEM.answer) :].log_softmax(-1)
    found = calibration.student(module, manifest, PROBLEM, soft)
    torch.testing.assert_close(found, said, atol=1e-5, rtol=1e-5)
    if with_soft:
        without = calibration.student(module, manifest, PROBLEM, None)
        assert (found - without).abs().max() > 1e-2


def test_one_document_without_anything_around_is_the_model_itself(model: Model) -> None:
    alone = replace(PROBLEM, preamble=[], documents=((5, 6, 7, 8, 9),))
    torch.testing.assert_close(
        calibration.teacher(*model, alone),
        calibration.student(*model, alone, None),
        atol=1e-5,
        rtol=1e-5,
    )


def test_answers_are_what_the_model_says(model: Model, problems: list[Problem]) -> None:
    module, manifest = model
    for one in problems[:3]:
        text = one.plain()
        for token in one.answer:
            logits = forward(module, manifest, [(KvCache.empty(manifest), text)])
            assert int(logits[-1].argmax()) == token
            text.append(token)
    said = problems[0].answer
    ends = replace(manifest, eos_token_ids=[said[1]])
    [cut] = calibration.answered(module, ends, problems[:1], 5)
    assert cut.answer == said[: said.index(said[1]) + 1], "up to what ends it"


def test_the_slope_is_that_of_the_divergence(model: Model) -> None:
    """Against differences, along one direction."""
    module, manifest = model
    soft = large(manifest)
    wanted = calibration.teacher(module, manifest, PROBLEM)

    def loss() -> Tensor:
        return calibration.divergence(
            calibration.student(module, manifest, PROBLEM, soft), wanted
        ).sum()

    for rows in soft.parameters():
        (slope,) = torch.autograd.grad(loss(), rows)
        aside = 1e-2 * slope / slope.norm()
        with torch.no_grad():
            rows += aside
            above = loss()
            rows -= 2 * aside
            below = loss()
            rows += aside
        assert slope.norm().item() == pytest.approx((above - below).item() / 2e-2, rel=0.05)


def test_training_brings_documents_nearer_to_what_is_read_in_turn(
    model: Model, problems: list[Problem], tmp_path: Path
) -> None:
    training = replace(TRAINING, steps=40, batch=4, rate=0.02)
    told: list[int] = []
    trained = calibration.train(*model, problems, training, tmp_path / "work", told.append)
    assert told == list(range(41))
    found = calibration.judge(*model, problems, training, trained)
    assert found["trained"].divergence < 0.8 * found["untrained"].divergence
    assert found["trained"].agreed > found["untrained"].agreed


class Killed(Exception):
    pass


def test_what_is_cut_off_goes_on_to_the_same_rows(
    model: Model, problems: list[Problem], tmp_path: Path
) -> None:
    def kill(done: int) -> None:
        if done == 3:
            raise Killed

    training = replace(TRAINING, rate=0.01)
    with pytest.raises(Killed):
        calibration.train(*model, problems, training, tmp_path / "work", kill)
    told: list[int] = []
    again = calibration.train(*model, problems, training, tmp_path / "work", told.append)
    assert told == [2, 3, 4]
    whole = calibration.train(*model, problems, training, tmp_path / "other")
    for name, rows in whole.arrays().items():
        assert torch.equal(again.arrays()[name], rows), name
    with pytest.raises(CalibrationError, match="another batch"):
        calibration.train(*model, problems, replace(training, batch=3), tmp_path / "work")
    with pytest.raises(CalibrationError, match="another problems"):
        calibration.train(*model, problems[1:], training, tmp_path / "work")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_cut_at_its_lines(family: str) -> None:
    prompt = problem(3, family).prompt
    first, *documents, question = calibration.parts_of_prompt(prompt, 4)
    assert " ".join([first, *documents, question]) == prompt
    assert first.startswith("<bos>") and question.startswith("ask")
    assert [document.split()[0] for document in documents] == ["#0", "#4", "#9", "#13"]
    assert len(calibration.parts_of_prompt(prompt, 18)) == 20
    with pytest.raises(CalibrationError, match="18 lines cannot be 19 documents"):
        calibration.parts_of_prompt(prompt, 19)


def test_a_text_is_cut_into_documents_and_what_is_asked_of_them() -> None:
    assert calibration.parts_of_text(range(10), None, 3, 2) == [
        range(0),
        range(2),
        range(2, 5),
        range(5, 8),
        range(8, 10),
    ]
    first, one, two, question = calibration.parts_of_text([1, 5, 6, 7], 1, 2, 1)
    assert (first, one, two, question) == ([1], [5], [6], [7])
    with pytest.raises(CalibrationError, match="4 tokens are too few for 3 documents"):
        calibration.parts_of_text([1, 5, 6, 7], 1, 3, 1)


def calibrate(path: Path, out: Path, *more: str) -> Result:
    command = ["calibrate", "packet", str(path), "-o", str(out), *more]
    return CliRunner().invoke(main, command)


def write_texts(folder: Path, count: int = 12) -> list[str]:
    arguments = []
    for number in range(count):
        file = folder / f"{number}.txt"
        file.write_text(" ".join(f"w{token}" for token in ids(30 + number, number)))
        arguments += ["--text", str(file)]
    return arguments


def test_writes_rows_and_what_they_lose(path: Path, model: Model, tmp_path: Path) -> None:
    out = tmp_path / "artefacts" / "packet.json"
    options = ["--steps", "2", "--batch", "2", "--soft", "3", "--answer", "4", "--question", "5"]
    result = calibrate(path, out, *options, *write_texts(tmp_path))
    assert result.exit_code == 0, result.output
    artefact = json.loads(out.read_text())
    assert (artefact["policy"], artefact["data"]) == ("packet", {})
    assert artefact["arrays"] == "packet.safetensors"
    arrays = load_file(out.with_name("packet.safetensors"))
    assert {name: rows.shape for name, rows in arrays.items()} == {
        "header": (3, model[1].hidden_size),
        "trailer": (3, model[1].hidden_size),
    }
    made_with = artefact["made_with"]
    assert (made_with["documents"], made_with["problems"]) == (4, 10)
    held = made_with["held_out"]
    assert set(held) == {"problems", "trained", "untrained", "none", "unread"}
    assert f"trained    divergence {held['trained']['divergence']:.4f}" in result.output


def test_problems_are_needed(path: Path, model: Model, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    assert "give --text or --task" in calibrate(path, out).output
    few = calibrate(path, out, "--question", "5", *write_texts(tmp_path, 3))
    assert few.exit_code == 1
    assert "3 problems; 10 or more are needed" in few.output
    short = calibrate(path, out, "--question", "30", *write_texts(tmp_path))
    assert "30 tokens are too few for 4 documents" in short.output
    none = calibrate(path, out, "--task", "file:math.jsonl")
    assert "file:math.jsonl has no documents to read" in none.output
    long = [Problem((), (ids(200),), ids(20))] * gates.HELD_OUT
    with pytest.raises(CalibrationError, match="has 266 tokens, the model reads 256"):
        calibration.check(model[1], long, TRAINING, 40)
