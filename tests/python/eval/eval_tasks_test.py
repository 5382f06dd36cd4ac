"""Tasks by name: families of the sample model and probes."""

import re

import click
import pytest
from epikv.eval.items import Axis, Item, Probe
from epikv.eval.tasks import axis, load
from epikv.sample import FAMILIES, problem


def test_families_are_tasks() -> None:
    for family in FAMILIES:
        found = load(f"sample:{family}", "test", 3)
        assert [item.id for item in found] == ["test/0", "test/1", "test/2"]
        for item in found:
            task = problem(item.id, family)
            assert isinstance(item, Item) and item.needed is None
            assert item.prompt == task.prompt and item.trace_tokens == len(task.trace_tokens)
            assert all(item.judge(task.trace)) and not any(item.judge(""))
    longer = load("sample:ledger@26", "test", 1)[0]
    assert longer.prompt == problem("test/0", "ledger", 26).prompt
    other = load("sample:programs", "select", 1)[0]
    assert other.prompt != load("sample:programs", "test", 1)[0].prompt


def test_a_solved_problem_leaves_the_answer_alone() -> None:
    for family in FAMILIES:
        item = load(f"solved:{family}@9", "test", 1)[0]
        task = problem("test/0", family, 9)
        assert isinstance(item, Item) and item.needed is None
        rest = f"{task.prompt} {task.trace}".removeprefix(item.prompt)
        assert rest.split()[:2] == ["</think>", "answer"]
        assert item.trace_tokens == len(rest.split())
        assert all(item.judge(rest)) and not any(item.judge("</think> answer"))
        assert axis(f"solved:{family}@9") == Axis.RECALL


def test_an_oracle_is_told_indexes_of_prompt_and_trace() -> None:
    pytest.importorskip("torch")
    from epikv_lab.sample.agree import NEED

    item = load("sample:programs", "test", 1, needs={"programs": NEED})[0]
    task = problem("test/0", "programs")
    words = [*item.prompt.split(), *task.trace.split()]
    assert item.needed is not None
    tight, wide = item.needed(200), item.needed(600)
    assert set(wide) < set(tight)  # a larger budget has a larger recent window
    for index in tight:
        assert words[index - 2] == "so" and words[index - 1].startswith("$")
        assert words[index].isdigit()


def test_every_task_has_an_axis() -> None:
    assert axis("sample:programs") == axis("sample:programs@9") == Axis.REASONING
    assert {axis(f"sample:{f}") for f in FAMILIES if f != "programs"} == {Axis.RECALL}
    assert axis("file:math.jsonl") == Axis.REASONING
    assert (axis("needle@500"), axis("recall")) == (Axis.NEEDLE, Axis.RECALL)


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "sample:nothing",
        "solved:nothing",
        "sample:programs@x",
        "needle@x",
        "recall@2",
        "recall@5000",
    ],
)
def test_what_is_no_task_is_refused(name: str) -> None:
    with pytest.raises(click.BadParameter):
        load(name, "test", 1)


def test_a_needle_is_one_fact_at_several_depths() -> None:
    probes = load("needle@600", "test", 5)
    assert probes == load("needle@600", "test", 5)
    depths = []
    for probe in probes:
        assert isinstance(probe, Probe)
        passage, answer = probe.parts
        text, question = passage.split("\n\nQuestion: ")
        code = answer.strip()
        assert re.fullmatch(r" \d{5}", answer) and text.count(code) == 1 and code not in question
        assert 600 <= len(text.split()) < 640
        place = re.search(r"access code of the (\w+ \w+) is", text)
        assert place is not None and f"code of the {place[1]}?" in question
        depths.append(text.index(code) / len(text))
    assert depths == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.04)
    assert len({probe.id for probe in probes}) == 5


def test_recall_asks_for_some_of_many_facts() -> None:
    (probe,) = load("recall@50", "test", 1)
    assert isinstance(probe, Probe)
    passage = probe.parts[0]
    facts = dict(re.findall(r"The ([\w -]+) has number (\d{4})\.", passage))
    assert len(facts) == 50
    text, asked = "", []
    for number, part in enumerate(probe.parts):
        if number % 2:
            thing = text.rpartition("The ")[2].removesuffix(" has number")
            asked.append(thing)
            assert part == f" {facts[thing]}"
        text += part
    assert len(set(asked)) == len(asked) == 4
