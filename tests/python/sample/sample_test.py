"""The sample model: its problems, its files and the simulator that evaluates it."""

from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
import torch
from epikv.eval.plan import FROZEN, FULL, ORACLE, RANDOM
from epikv.sample import FAMILIES, Role, problem
from epikv.sample.families import Family
from epikv.sample.vocabulary import NAMES, TOKEN_IDS, VOCABULARY, encode
from epikv.stats import wilson
from epikv_lab.sample import card
from epikv_lab.sample.measure import folders
from epikv_lab.sample.model import Llama, save, tokenizer
from epikv_lab.sample.recall import recall
from epikv_lab.sample.scores import read, solved
from epikv_lab.sample.simulate import (
    EpikvFlat,
    Frozen,
    Recency,
    evict_one,
    newest_z,
    run,
)
from epikv_lab.sample.train import Recipe, Run, StuckError

MODELS = Path(__file__).parents[3] / "tools" / "sample_model"
CHANCE = (RANDOM, FROZEN)
SHIPPED = MODELS / (MODELS / "SHIPPED").read_text().strip()


def _interpret(prompt: str) -> dict[str, int]:
    """The asked names' values, read from the prompt's words alone."""
    words = prompt.split()
    end = words.index("ask")
    steps = [i for i, word in enumerate(words) if word.startswith("#")]
    values: dict[str, int] = {}
    total = int(words[2]) if words[2].isdigit() else 0  # of a program there is none
    for at, after in pairwise([*steps, end]):
        line = words[at + 1 : after]
        if "=" in line:
            target, _, left, _, right = line
            terms = (values[o] if o.startswith("$") else int(o) for o in (left, right))
            values[target] = sum(terms) % 10
        else:
            *labels, number = line
            total = (total + int(number)) % 10
            if labels:
                values[labels[-1]] = total
    return {name: values[name] for name in words[end + 1 : words.index("<think>")]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_names_one_problem(family: str) -> None:
    assert problem(7, family) == problem(7, family)
    assert len({problem(seed, family).prompt for seed in range(50)}) == 50
    assert recall(7) == recall(7)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_agree_with_the_prompt(family: str) -> None:
    for seed in range(20):
        for lines in (None, *FAMILIES[family].held_out):
            task = problem(seed, family, lines)
            assert task.answers == _interpret(task.prompt)
            assert all(task.correct(task.trace))
            assert set(task.answers) <= set(NAMES)
            assert 200 <= len(task.trace_tokens) <= 1000
            assert set(f"{task.prompt} {task.trace}".split()) <= set(VOCABULARY)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_training_does_not_see_the_lengths_held_out(family: Family) -> None:
    most = max(family.trained)
    drawn = {family.draw(str(seed), most).trace.count("done") for seed in range(400)}
    assert drawn == set(family.trained) - set(family.held_out)
    assert family.tested in drawn
    assert any(length > most for length in family.held_out)


def test_families_differ_in_which_totals_are_named() -> None:
    def named(family: str) -> list[int]:
        """Lines with a named total."""
        steps = [t.word for t in problem(3, family).trace_tokens if t.role is Role.STEP]
        made = {
            t.name: i
            for i, t in enumerate(problem(3, family).trace_tokens)
            if t.role is Role.DEFINITION
        }
        starts = [i for i, t in enumerate(problem(3, family).trace_tokens) if t.role is Role.STEP]
        assert len(steps) == 18
        return [sum(start <= at for start in starts) - 1 for at in made.values()]

    assert named("passcode") == [0, 1, 2, 3]
    assert named("ledger") == list(range(18))
    assert len(named("alarms")) in (2, 3, 4)


def test_answers_are_scored_by_name() -> None:
    task = problem(1)
    pairs = [f"{name} {value}" for name, value in reversed(task.answers.items())]
    assert task.correct("</think> answer " + " ".join(pairs) + " <eos>") == [True] * 3
    first = next(iter(task.answers.values()))
    wrong = pairs[-1][:-1] + str((first + 1) % 10)
    assert task.correct(" ".join(["answer", *pairs[:-1], wrong])) == [False, True, True]
    assert task.correct("no answer was given") == [False] * 3


def test_roles_mark_what_tokens_are() -> None:
    task = problem(3)
    for before, token in pairwise(task.trace_tokens):
        if token.role in (Role.OPERAND, Role.DEFINITION, Role.ANSWER):
            assert before.word == before.name == token.name
        if token.role is Role.DEFINITION:
            assert before.role is Role.DEFINITION_NAME
    values = {t.name: t.word for t in task.trace_tokens if t.role is Role.DEFINITION}
    assert len(values) == 18
    for name, index in task.last_read().items():
        reads = [
            (i, t.word)
            for i, t in enumerate(task.trace_tokens)
            if t.role in (Role.OPERAND, Role.ANSWER) and t.name == name
        ]
        assert reads[-1][0] == index
        assert {word for _, word in reads} == {values[name]}


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
    from epikv_lab.sample.model import load

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
    model, tasks = Llama().eval(), [problem(seed, lines=3) for seed in range(2)]
    full = run(model, tasks)
    for scorer in (Recency(), EpikvFlat(0, 3, 1), Frozen(torch.zeros(2, 1))):
        assert run(model, tasks, scorer, [1000, 1000]) == full


def test_training_stops_when_recall_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epikv_lab.sample.train.REVIEW_STEPS", 2)
    with pytest.raises(StuckError, match="another seed"):
        Run(Recipe(0, recall_deadline=0), tmp_path, "cpu").train()


def test_the_shipped_model_is_calibrated() -> None:
    checkpoint = pytest.importorskip("epikv.export.checkpoint")
    calibration = checkpoint.read(SHIPPED).calibration
    assert calibration.policy == "epikv_flat"
    assert calibration.confirmed


@pytest.mark.parametrize("seed", folders(), ids=lambda seed: seed.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_cache_solves_problems(seed: Path, family: str) -> None:
    found = [score for score in read(seed / "pair.jsonl") if score.task == f"sample:{family}"]
    hits = solved(found, FULL, "")
    assert len(hits) >= 100
    assert mean(hits) >= 0.95


@pytest.mark.parametrize("seed", folders(), ids=lambda seed: seed.name)
def test_policies_differ(seed: Path) -> None:
    """At 50 or 35 % the best policy beats random by 20 points, intervals apart, on two families."""
    found = read(seed / "pair.jsonl")
    apart = set()
    for family in FAMILIES:
        mine = [score for score in found if score.task == f"sample:{family}"]
        for budget in ("50%", "35%"):
            random = [wilson(sum(h), len(h)) for arm in CHANCE if (h := solved(mine, arm, budget))]
            best = max(
                (sum(score.hits), len(score.hits))
                for score in mine
                if score.budget == budget and score.arm not in (*CHANCE, ORACLE) and score.hits
            )
            share = wilson(*best)
            if all(share.value >= r.value + 0.2 and share.low > r.high for r in random):
                apart.add(family)
    assert len(apart) >= 2


def test_the_pages_tell_what_was_measured() -> None:
    for file, text in card.pages().items():
        assert file.read_text() == text, "run `python -m epikv.sample card`"


def test_shipped_weights_solve_problems() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    for family in FAMILIES:
        task = problem(3, family)
        ids = torch.tensor([encode(task.prompt)])
        generated = model.generate(ids, max_new_tokens=620, do_sample=False)[0, ids.shape[1] :]
        assert all(task.correct(" ".join(VOCABULARY[i] for i in generated.tolist())))
