"""Files of benchmarks: how their lines become problems, and that these are judged as there."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from epikv.eval.files import Reading, read, template
from epikv.eval.forms import form
from epikv.eval.items import Choices, Item, Question, score, solved
from epikv.eval.plan import named
from epikv.eval.requests import likeliest

GOLDEN = Path(__file__).parents[2] / "golden"
MEASURES = json.loads((GOLDEN / "answer_measures.json").read_text())
LONG = {"input": "Who?", "context": "A {input} text.", "answers": ["Ann"], "dataset": "qasper"}
MMLU = {"question": "2+2? ", "choices": ["3", "4"], "answer": 1, "subject": "some_sums"}
NUMBER = Reading(form=form(match="number"))


def written(path: Path, *rows: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def one(path: Path, row: object, reading: Reading = Reading()) -> Question:
    (found,) = read(written(path, row), 5, reading)
    return found


def item(path: Path, row: object, reading: Reading = Reading()) -> Item:
    found = one(path, row, reading)
    assert isinstance(found, Item)
    return found


def choices(path: Path, row: object, reading: Reading = Reading()) -> Choices:
    found = one(path, row, reading)
    assert isinstance(found, Choices)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "problems.jsonl"


@pytest.mark.parametrize("case", MEASURES["longbench"], ids=lambda case: case["data_set"])
def test_longbench_is_judged_as_there(file: Path, case: dict[str, Any]) -> None:
    if case["data_set"] in ("gov_report", "samsum"):
        pytest.importorskip("rouge")
    row = {**LONG, "dataset": case["data_set"], "answers": case["answers"]}
    found = item(file, {**row, "all_classes": MEASURES["classes"]})
    assert score(found.judge(case["text"])) == pytest.approx(case["score"], abs=1e-12)


@pytest.mark.parametrize("case", MEASURES["ruler"], ids=lambda case: case["text"][:9])
def test_ruler_is_judged_as_there(tmp_path: Path, case: dict[str, Any]) -> None:
    row = {"index": 3, "input": "Find it.", "outputs": case["outputs"], "length": 9}
    for path, metric in (
        ("niah_multivalue.jsonl", "all"),
        ("qa_1.jsonl", "part"),
        ("vt/validation.jsonl", "all"),
        ("qa_2/validation.jsonl", "part"),
    ):
        right = item(tmp_path / path, row).judge(case["text"])
        assert 100 * sum(right) / len(right) == pytest.approx(case[metric], abs=0.005)
    asked = item(tmp_path / "vt.jsonl", row, Reading(form=form(match="contains")))
    assert 100 * score(asked.judge(case["text"])) == case["part"]


def test_rouge_is_asked_for_where_it_is_needed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(click.ClickException, match=r"pip install .*longbench"):
        one(file, {**LONG, "dataset": "gov_report"})


def test_lm_evals_choices_are_made_as_there() -> None:
    """Of what it wrote with its own accuracies: `golden/make_lm_eval.py`."""
    path = GOLDEN / "lm_eval" / "samples_choices.jsonl"
    samples = {str(s["doc_id"]): s for s in map(json.loads, path.read_text().splitlines())}
    found = read(path, 100)
    assert len(found) == len(samples) == 8
    seen = set()
    for each in found:
        assert isinstance(each, Choices)
        sample = samples[each.id]
        assert each.prompt == f"{sample['doc']['question']}\nAnswer:"
        assert each.continuations == tuple(f" {choice}" for choice in sample["doc"]["choices"])
        logprobs = [float(answers[0][0]) for answers in sample["resps"]]
        acc = likeliest(logprobs) == each.right
        acc_norm = likeliest(logprobs, each.characters) == each.right
        assert (acc, acc_norm) == (sample["acc"], sample["acc_norm"])
        seen.add((acc, acc_norm))
    assert len(seen) >= 3, "the two differ, and both ways"


def test_lm_evals_completions_end_where_there_and_are_read_once() -> None:
    path = GOLDEN / "lm_eval" / "samples_sums.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    strict = {str(s["doc_id"]): s for s in samples if s["filter"] == "strict"}
    found = read(path, 100)
    assert [each.id for each in found] == list(strict) and len(samples) == 2 * len(found)
    for each in found:
        assert isinstance(each, Item)
        assert each.stop_strings == ("Question:", "</s>") and each.most_tokens == 40
        sample = strict[each.id]
        assert each.prompt == sample["arguments"]["gen_args_0"]["arg_0"]
        assert each.judge(sample["resps"][0][0]) == [sample["exact_match"]]


def test_an_older_lm_eval_wrote_lists(file: Path) -> None:
    row = {"doc_id": 7, "doc": {}, "target": 1, "arguments": [["Q:", " no"], ["Q:", " yes"]]}
    found = choices(file, row)
    assert (found.id, found.prompt, found.right) == ("7", "Q:", 1)
    assert found.continuations == (" no", " yes") and found.characters == (2, 3)
    text = {"doc_id": 7, "doc": {}, "target": "Paris", "arguments": [["Q:", {"until": "\n"}]]}
    asked = item(file, text)
    assert asked.stop_strings == ("\n",) and asked.judge(" Paris") == [True]


def test_mmlu_shows_its_choices_and_scores_letters(file: Path) -> None:
    found = choices(file, MMLU)
    assert found.prompt == (
        "The following are multiple choice questions (with answers) about some sums.\n\n"
        "2+2?\nA. 3\nB. 4\nAnswer:"
    )
    assert found.continuations == (" A", " B") and found.characters == (1, 1) and found.right == 1
    file.with_suffix(".csv").write_text('"What, so?",3,"4, or ""so""",B\n\nMore?,x,y,A\n')
    quoted, more = read(file.with_suffix(".csv"), 9)
    assert isinstance(quoted, Choices) and isinstance(more, Choices)
    assert quoted.prompt == 'What, so?\nA. 3\nB. 4, or "so"\nAnswer:' and quoted.right == 1
    assert more.right == 0 and more.id == "3"
    file.with_suffix(".csv").write_text("question,A,B,answer\nMore?,x,y,A\n")
    assert read(file.with_suffix(".csv"), 9) == [
        Choices("2", "More?\nA. x\nB. y\nAnswer:", (" A", " B"), (1, 1), 0)
    ]


def test_choices_behind_a_prompt_are_scored_as_they_stand(file: Path) -> None:
    row = {"prompt": "The sky is", "choices": ["blue", " green"], "answer": "B"}
    found = choices(file, row)
    assert found.continuations == (" blue", " green") and found.right == 1
    assert choices(file, {**row, "prompt": "It is\n"}).continuations == ("blue", " green")
    filled = choices(file, MMLU, Reading("Q: {question}\nA:"))
    assert filled.prompt == "Q: 2+2?\nA:" and filled.continuations == (" 3", " 4")
    assert choices(file, MMLU, Reading(choice_metric="acc_norm")).by_length


def test_choices_are_written_where_it_is_said_how_to_read_them(file: Path) -> None:
    found = item(file, MMLU, Reading(form=form(match="choice")))
    assert found.judge("I say B.") == [True] and found.judge("A, not B, or A") == [False]


def test_templates_are_filled_in_one_pass(file: Path, tmp_path: Path) -> None:
    assert item(file, LONG).prompt == "A {input} text.\n\nWho?\n\n"
    (tmp_path / "prompts.json").write_text('{"qasper": "{context}|{input}|{x}"}')
    by_set = Reading(template(tmp_path / "prompts.json"))
    assert item(file, LONG, by_set).prompt == "A {input} text.|Who?|{x}"
    with pytest.raises(click.ClickException, match=r":1: --template has no prompt called 'trec'"):
        one(file, {**LONG, "dataset": "trec"}, by_set)
    (tmp_path / "prompts.json").write_text("[]")
    with pytest.raises(click.ClickException, match="not a JSON object of texts"):
        template(tmp_path / "prompts.json")


def test_a_box_is_asked_for_where_it_is_read(file: Path) -> None:
    row = {"problem": "1+1?", "answer": "2"}
    assert "boxed" in item(file, row).prompt
    assert "boxed" in item(file, row, Reading(form=form(match="math"))).prompt
    for said in (form(after="Answer:"), form("is (.)"), form(match="number")):
        assert item(file, row, Reading(form=said)).prompt == "1+1?\n\n"


def test_several_answers_of_ones_own_are_each_right(file: Path) -> None:
    found = item(file, {"prompt": "Say it.", "answers": ["a", "1/2"]})
    assert solved(found.judge(r"\boxed{0.5}")) and not solved(found.judge(r"\boxed{b}"))


def test_ruler_asks_with_the_beginning_of_the_answer(file: Path) -> None:
    row = {"index": 3, "input": "Find it.", "outputs": ["7"], "answer_prefix": " It is"}
    assert item(file, row).prompt == "Find it. It is"


def test_longbench_says_how_long_answers_are(file: Path) -> None:
    assert item(file, LONG).most_tokens == 128
    assert item(file, {**LONG, "dataset": "hotpotqa_e"}).most_tokens == 32
    other = {**LONG, "dataset": "vcsum"}
    with pytest.raises(click.ClickException, match=r"no measure of 'vcsum' is known.*--match"):
        one(file, other)
    assert item(file, other, Reading(form=form(match="contains"))).judge("so Ann") == [True]


@pytest.mark.parametrize(
    ("row", "reading", "says"),
    [
        ({**MMLU, "answer": 2}, Reading(), "an index below 2 or a letter to B"),
        ({**MMLU, "answer": "C"}, Reading(), "an index below 2 or a letter to B"),
        ({**MMLU, "answer": True}, Reading(), "an index below 2"),
        ({**MMLU, "choices": ["3"]}, Reading(), "2 to 10 choices, not 1"),
        ({**MMLU, "choices": "34"}, Reading(), "needs a list of texts called choices"),
        ({**LONG, "answers": []}, Reading(), "needs a list of texts called answers"),
        ({**LONG, "context": 5}, Reading(), "needs a text called context"),
        ({"input": "x", "outputs": [None]}, Reading(), "needs a list of texts called outputs"),
        ({"input": "x", "outputs": ["y"]}, Reading(format="own"), "problem, question or prompt"),
        ({"prompt": "x", "answer": "y"}, Reading(format="ruler"), "needs a text called input"),
        ({"prompt": "x", "answer": "y"}, Reading(format="lm-eval"), "as those of `lm_eval"),
        ({"prompt": "x", "answer": "y"}, NUMBER, "the answer 'y' has no number"),
        (
            {"doc": {}, "target": "2", "arguments": [["Q", " a"], ["Q", " b"]]},
            Reading(),
            "the target '2' is not the index of one of 2 choices",
        ),
        (
            {"doc": {}, "target": "0", "arguments": [["P", " a"], ["Q", " a"]]},
            Reading(),
            "behind different contexts",
        ),
        ({"doc": {}, "target": "0", "arguments": [5]}, Reading(), "not pairs of a context"),
    ],
)
def test_a_line_that_is_not_of_its_format_is_named(
    file: Path, row: object, reading: Reading, says: str
) -> None:
    with pytest.raises(click.ClickException, match=rf"problems\.jsonl:1: .*{says}"):
        one(file, row, reading)


def test_a_row_without_choices_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("What?,B\n")
    with pytest.raises(click.ClickException, match=r"short\.csv:1: needs columns"):
        read(tmp_path / "short.csv", 1)


def test_a_plan_tells_apart_what_is_judged_otherwise(file: Path) -> None:
    row = {"prompt": "Say 7.", "answer": "7"}

    def facts(row: object, reading: Reading = Reading()) -> dict[str, Any]:
        return named(f"file:{file}", [one(file, row, reading)], reading).facts()

    exact = Reading(form=form(after="is", match="exact"))
    assert "reading" not in facts(row)
    assert facts(row, exact)["reading"] == {"after": "is", "match": "exact"}
    assert facts(row, exact)["digest"] != facts({**row, "answer": "8"}, exact)["digest"]
    assert facts(MMLU)["digest"] != facts({**MMLU, "answer": 0})["digest"]
    by_length = Reading(choice_metric="acc_norm")
    assert facts(MMLU)["digest"] != facts(MMLU, by_length)["digest"]
    assert facts(LONG)["digest"] != facts({**LONG, "dataset": "trec"})["digest"]
