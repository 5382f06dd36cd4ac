"""Final answers: where they stand and when they are equal; problems of files."""

import json
import time
from pathlib import Path

import click
import pytest
from epikv.eval.answers import extract, last_boxed, same
from epikv.eval.files import Reading
from epikv.eval.formats import TEMPLATE
from epikv.eval.items import Item
from epikv.eval.tasks import axis, load

EQUAL = [
    ("1/2", r"\frac12"),
    (r"\dfrac{3}{4}", "0.75"),
    (r"\tfrac{-1}{2}", "-.5"),
    (r"-\frac{1}{2}", "-0.5"),
    ("1,000", "1000"),
    (r"10{,}000", "10000"),
    ("033", "33"),
    ("3.0", "3"),
    ("5.", "5"),
    (r"\$5.50", "5.5"),
    (r"50\%", "50"),
    (r"5\text{ cm}", "5"),
    (r"12\text{ inches}^2", "12"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(C)}", "(C)"),
    ("x = 5", "5"),
    ("2, 3", "3,2"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\left( 1,\, 2 \right)", "(1,2)"),
    (r"\left[2,5\right)", "[2,5)"),
    (r"25^\circ", "25"),
    (r"25^{\circ}", "25"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"6 - 5i", "6-5i"),
    (r"9^{9^{9^{9^9}}}", r"9^{9^{9^{9^9}}}"),
]
DIFFERENT = [
    ("(1,2)", "(2,1)"),
    ("[2,5)", "(2,5)"),
    ("2,3", "2,3,3"),
    ("2,2,3", "2,3,3"),
    ("5", "-5"),
    ("1/2", "1/3"),
    ("1/0", "1/1"),
    ("", "1"),
    ("x+1=2", "2"),
    ("x", "y"),
    ("12", "1 3"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_what_is_the_same_answer(answer: str, truth: str) -> None:
    assert same(answer, truth)
    assert same(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_what_is_another_answer(answer: str, truth: str) -> None:
    assert not same(answer, truth)
    assert not same(truth, answer)


def test_the_last_closed_box_counts() -> None:
    assert extract(r"first \boxed{1}, no: \boxed{\frac{1}{2}} done") == r"\frac{1}{2}"
    assert extract(r"\boxed{7} and then cut off at \boxed{8") == "7"
    assert extract(r"a set \boxed{\{1, 2\}} indeed") == r"\{1, 2\}"
    assert extract(r"}} \fbox {7} {") == "7"
    assert extract(r"\boxed{\boxed{5}}") == "5"
    assert extract(r"so it is 7") is None
    assert extract("8 + 8 = 16\n#### 16\nmore") == "16"
    assert extract("#### 16 or \\boxed{17}") == "17"
    assert not same(extract("nothing"), "nothing")


def test_no_completion_takes_long() -> None:
    began = time.monotonic()
    assert last_boxed("\\boxed{" * 100_000) is None
    assert last_boxed("{" * 100_000 + "}" * 100_000) is None
    assert not same("9" * 100_000, "9" * 100_001)
    assert not same("(" * 50_000 + ")" * 50_000, "(1,2)")
    assert not same("1," * 50_000, "1,2")
    assert not same("{1}" * 10_000 + r"\text{ cm", "(1,2)")
    assert time.monotonic() - began < 5


def lines(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return f"file:{path}"


def items(name: str, count: int = 10, reading: Reading = Reading()) -> list[Item]:
    return list(load(name, "test", count, reading=reading))  # type: ignore[arg-type]


def test_the_usual_files_are_read(tmp_path: Path) -> None:
    math = {"problem": "1+1?", "solution": "...", "answer": "\\frac{4}{2}", "unique_id": "test/1"}
    aime = {"id": 60, "problem": "2+2?", "answer": "004", "year": 2024}
    gsm8k = {"question": "3+3?", "answer": "3 and 3 are <<3+3=6>>6\n#### 6"}
    own = {"prompt": "Say 7.", "answer": 7}
    name = lines(tmp_path / "all.jsonl", math, aime, gsm8k, "", own)
    found = items(name)
    assert [item.id for item in found] == ["test/1", "60", "3", "5"]
    assert found[0].prompt == TEMPLATE.replace("{problem}", "1+1?")
    assert "\\boxed{}" in found[0].prompt
    assert found[3].prompt == "Say 7."
    for item, answer in zip(found, ("2", "4", "6", "7"), strict=True):
        assert item.judge(f"So it is \\boxed{{{answer}}}.") == [True]
        assert item.judge(f"So it is \\boxed{{{answer}1}}.") == [False]
        assert item.judge(f"So it is {answer}.") == [False]
        assert item.trace_tokens is None and item.needed is None
    assert items(name, reading=Reading("Q: {problem} {x}\nA:"))[1].prompt == "Q: 2+2? {x}\nA:"
    assert len(items(name, 2)) == 2
    assert axis(name) == "reasoning"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"problem": "1+1?", "answer"', "not JSON"),
        ("[1]", "not a JSON object"),
        ({"answer": "2"}, "needs a text called problem, question or prompt"),
        ({"problem": "", "answer": "2"}, "needs a text called problem, question or prompt"),
        ({"prompt": 5, "answer": "2"}, "prompt is not a text"),
        ({"problem": "1+1?"}, "needs an answer"),
        ({"problem": "1+1?", "answer": None}, "needs an answer"),
        ({"problem": "1+1?", "answer": True}, "needs an answer"),
        ({"problem": "1+1?", "answer": "2", "id": "a"}, "the id a is that of line 1, too"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, says: str) -> None:
    good = {"id": "a", "problem": "0+0?", "answer": "0"}
    name = lines(tmp_path / "bad.jsonl", good, "", row)
    with pytest.raises(click.ClickException, match=rf"bad\.jsonl:3: .*{says}"):
        items(name)
    assert len(items(name, 1)) == 1  # what is not asked for is not read


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "\xe9", "answer": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name in ("nowhere", "latin", "empty"):
        with pytest.raises(click.ClickException, match=rf"{name}\.jsonl"):
            items(f"file:{tmp_path / name}.jsonl")
