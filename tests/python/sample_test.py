"""The sample model: its problems, its files and the simulator that evaluates it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from epikv.sample import Problem, Role, problem
from epikv.sample.calibrate import beats
from epikv.sample.model import Llama, save, tokenizer
from epikv.sample.programs import TOKEN_IDS, VOCABULARY, encode, recall
from epikv.sample.simulate import (
    EpikvFlat,
    Frozen,
    Outcome,
    Recency,
    evict_one,
    judge,
    newest_z,
    run,
)
from epikv.sample.train import Recipe, Run, StuckError

MODELS = Path(__file__).parents[2] / "tools" / "sample_model"
SHIPPED = MODELS / (MODELS / "SHIPPED").read_text().strip()


def _interpret(prompt: str) -> dict[str, int]:
    """The asked variables' values, read from the prompt's words alone."""
    words = prompt.split()
    values: dict[str, int] = {}
    for at in [i for i, word in enumerate(words) if word.startswith("#")]:
        _, target, equals, left, plus, right = words[at : at + 6]
        assert (equals, plus) == ("=", "+")
        terms = (values[o] if o.startswith("$") else int(o) for o in (left, right))
        values[target] = sum(terms) % 10
    asked = words[words.index("ask") + 1 : words.index("<think>")]
    return {variable: values[variable] for variable in asked}


def test_a_seed_names_one_problem() -> None:
    assert problem(7) == problem(7)
    assert len({problem(seed).prompt for seed in range(50)}) == 50
    assert recall(7) == recall(7)


@pytest.mark.parametrize("seed", range(20))
def test_answers_agree_with_the_program(seed: int) -> None:
    task = problem(seed)
    assert task.answers == _interpret(task.prompt)
    assert all(task.correct(task.trace))
    assert len(task.prompt.split()) == 114
    assert 500 <= len(task.trace_tokens) <= 610


def test_answers_are_scored_by_name() -> None:
    task = problem(1)
    pairs = [f"{variable} {value}" for variable, value in reversed(task.answers.items())]
    assert task.correct("</think> answer " + " ".join(pairs) + " <eos>") == [True] * 3
    wrong = pairs[-1][:-1] + str((task.answers[task.asked[0]] + 1) % 10)
    assert task.correct(" ".join(["answer", *pairs[:-1], wrong])) == [False, True, True]
    assert task.correct("no answer was given") == [False] * 3


def test_roles_mark_what_tokens_are() -> None:
    task = problem(3)
    for before, token in pairwise(task.trace_tokens):
        if token.role in (Role.OPERAND, Role.DEFINITION, Role.ANSWER):
            assert before.word == before.variable == token.variable
            assert int(token.word) == task.values[token.variable]
        if token.role is Role.DEFINITION:
            assert before.role is Role.DEFINITION_NAME
    definitions = [t.variable for t in task.trace_tokens if t.role is Role.DEFINITION]
    assert definitions == [line.target for line in task.lines]
    for variable, index in task.last_read().items():
        assert not any(
            t.role in (Role.OPERAND, Role.ANSWER) and t.variable == variable
            for t in task.trace_tokens[index + 1 :]
        )


def test_tokenizer_gives_one_token_a_word() -> None:
    task = problem(5)
    text = f"{task.prompt} {task.trace}"
    encoding = tokenizer().encode(text)
    assert encoding.ids == encode(text)
    assert encoding.tokens == text.split()
    assert tokenizer().decode(encoding.ids, skip_special_tokens=False) == text
    assert len(set(VOCABULARY)) == len(VOCABULARY) == len(TOKEN_IDS)


def test_own_forward_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    save(Llama(), tmp_path)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    from epikv.sample.model import load

    ids = torch.tensor([encode(problem(2).prompt)])
    with torch.inference_mode():
        assert torch.allclose(load(tmp_path)(ids), reference(ids).logits, atol=1e-4)


def test_z_score_of_the_newest_step() -> None:
    steps = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])
    assert newest_z(steps[:1]) == 0
    expected = (5.0 - steps.mean()) / steps.std(unbiased=False)
    assert newest_z(steps) == pytest.approx(float(expected), abs=1e-4)
    assert newest_z(torch.cat([torch.full((40,), 99.0), torch.arange(64.0)])) == pytest.approx(
        31.5 / float(torch.arange(64.0).std(unbiased=False)), abs=1e-4
    )


def test_eviction_keeps_the_prompt_the_recent_and_the_best() -> None:
    prompt, length, budget, recent = 5, 60, 30, 7
    scores = torch.rand(3, length, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(3, prompt + length, dtype=torch.bool)
    limits, protected = torch.full((3,), budget), torch.full((3,), recent)
    for t in range(length):
        evict_one(visible[:, : prompt + t + 1], scores[:, : t + 1], limits, protected)
    for row, kept in zip(scores, visible, strict=True):
        best = row[:-recent].topk(budget - prompt - recent).indices.tolist()
        expected = {*range(prompt), *(prompt + i for i in best)}
        expected |= set(range(prompt + length - recent, prompt + length))
        assert set(kept.nonzero()[:, 0].tolist()) == expected


def test_a_budget_that_fits_changes_nothing() -> None:
    torch.manual_seed(0)
    model, tasks = Llama().eval(), [problem(seed, 3) for seed in range(2)]
    full = run(model, tasks)
    for scorer in (Recency(), EpikvFlat(0, 3, 1), Frozen(torch.zeros(2, 1))):
        assert run(model, tasks, scorer, [1000, 1000]) == full


def test_training_stops_when_recall_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epikv.sample.train.REVIEW_STEPS", 2)
    with pytest.raises(StuckError, match="another seed"):
        Run(Recipe(0, recall_deadline=0), tmp_path, "cpu").train()


def test_a_pair_beats_another_by_more_than_chance() -> None:
    good, poor = Outcome([[True] * 3] * 30), Outcome([[True, False, False]] * 30)
    assert beats(good, poor)
    assert not beats(poor, good)
    assert not beats(good, good)
    assert not beats(good, Outcome([[True] * 3] * 29 + [[False] * 3]))


def test_the_shipped_model_is_calibrated() -> None:
    checkpoint = pytest.importorskip("epikv.export.checkpoint")
    calibration = checkpoint.read(SHIPPED).calibration
    assert calibration.policy == "epikv_flat"
    assert calibration.confirmed
    rows = json.loads((SHIPPED / "results.json").read_text())
    exact = {row["policy"]: row["exact"] for row in rows if row["fraction"] == 0.5}
    assert exact["full"] >= 0.95
    assert exact["epikv_flat"] > exact["random"]


def test_the_card_tells_what_was_measured() -> None:
    from epikv.sample.card import CARD, render

    assert CARD.read_text() == render(CARD.read_text()), "run `python -m epikv.sample card`"


def test_shipped_weights_solve_problems() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    tasks: list[Problem] = [problem(seed) for seed in range(4)]
    ids = torch.tensor([encode(task.prompt) for task in tasks])
    generated = model.generate(ids, max_new_tokens=620, do_sample=False)[:, ids.shape[1] :]
    texts = [" ".join(VOCABULARY[i] for i in row) for row in generated.tolist()]
    assert judge(tasks, texts).exact >= 3
