"""How an answer is read from a text and compared, as the options say."""

from pathlib import Path

import click
import pytest
from epikv.eval.forms import LETTERS, AnswerError, AnswerForm, boxed, form, judge, misfit

WROTE = "so $x 3 done. answer $x 1 no wait </think> answer  $x 3   $y 7\n"


def right(asked: AnswerForm, text: str, *answers: str, each: bool = False) -> list[float]:
    measure = asked.measure(boxed)
    assert measure is not None
    return list(judge(asked, measure, answers, each, "p1")(text))


def test_the_line_behind_the_last_words_is_read() -> None:
    assert form(after="answer").read(WROTE) == "$x 3   $y 7"
    assert form(after="Answer:").read("Answer:\n\n  42  \nfor sure") == "42"
    assert form(after="Answer:").read("Answer: 1. Answer:\n ") is None
    assert form(after="Answer:").read("no such words") is None


def test_the_first_group_of_the_last_match_is_read() -> None:
    assert form(r"answer\s+(\$x \d\s+\$y \d)").read(WROTE) == "$x 3   $y 7"
    assert form(r"\$y (\d)|\$z").read("$y 1 then $y 2 then $z") == "2"
    assert form(r"is (?:about )?(\d+)").read("it is about 12, no: it is 13") == "13"
    assert form(r"is (\d+)").read("nothing") is None


def test_where_the_answer_begins() -> None:
    """With the words before it, so that what is generated from there can be read again."""
    assert form(after="answer").begins(WROTE) == WROTE.rindex("answer")
    assert form(r"answer +(\$y 7|\$x 3)").begins(WROTE) == WROTE.rindex("answer")
    assert form(after="nowhere").begins(WROTE) is form(r"(9)").begins(WROTE) is None
    assert form(match="number").begins(WROTE) is None


@pytest.mark.parametrize(
    ("asked", "text", "truth", "is_right"),
    [
        (form(after="answer"), WROTE, "$x 3 $y 7", True),  # math: spaces do not count
        (form(after="answer", match="exact"), WROTE, "$x 3 $y 7", True),
        (form(after="answer", match="exact"), WROTE, "$x 3 $y 8", False),
        (form(after="answer", match="exact"), WROTE, "$X 3 $y 7", False),
        (form(after="answer", match="exact"), "x 1", "x 1", False),  # the words are not there
        (form(match="exact"), " Paris \n", "Paris", True),
        (form(match="math"), r"\boxed{\frac12}", "0.5", True),
        (form(match="math"), "0.5", "0.5", False),  # no box
        (form(after="=", match="math"), r"x = \frac12", "0.5", True),
        (form(match="number"), "2 and 2 makes 4.", "4", True),
        (form(match="number"), "It costs $1,234.50", "1234.5", True),
        (form(match="number"), "from 9 to -.5", "-0.50", True),
        (form(match="number"), "5-3", "-3", False),
        (form(match="number"), "none", "3", False),
        (form(match="number"), "9" * 100_000, "3", False),
        (form(after="Answer:", match="number"), "Answer: 42 of 50", "42", True),
        (form(match="choice"), "A is wrong, so (C).", "C", True),
        (form(match="choice"), "C. I think so, I'm sure", "(C)", True),
        (form(match="choice"), "c", "C", False),
        (form(after="answer is", match="choice"), "The answer is B, not A", "B", True),
        (form(match="choice"), "CAB", "B", False),
        (form(match="contains"), "The capital is\n New  york!", "new York", True),
        (form(after="is", match="contains"), "New York is large", "New York", False),
    ],
)
def test_what_is_right(asked: AnswerForm, text: str, truth: str, is_right: bool) -> None:
    assert right(asked, text, truth) == [is_right]


def test_any_of_several_answers_is_right_unless_all_are_asked_for() -> None:
    found = form(match="contains")
    assert right(found, "red and blue", "green", "blue") == [True]
    assert right(found, "red and blue", "green", "blue", each=True) == [False, True]
    assert right(form(after="x", match="contains"), "red", "green", "blue", each=True) == [0, 0]
    assert right(form(match="f1"), "the big dog", "a cat", "big dog") == [1]


def test_a_function_of_the_users_judges(tmp_path: Path) -> None:
    file = tmp_path / "check.py"
    file.write_text(
        "import math\n"
        "def right(output, answer):\n"
        "    return math.isclose(float(output), float(answer), rel_tol=0.1)\n"
    )
    asked = form(match=f"python:{file}")
    assert right(asked, "3.1", "3") == [True] and right(asked, "4", "3") == [False]
    with pytest.raises(AnswerError, match=r"problem p1: right\(\) of .*check\.py raised ValueErr"):
        right(asked, "three", "3")
    after = form(after="=", match=f"python:{file}")
    assert right(after, "x = 3", "3") == [True]
    assert right(after, "no sign", "3") == [0], "it is not asked where nothing is read"
    facts = after.facts()
    assert facts["match"] == "python:check.py" and facts["after"] == "=", "its folder is not told"
    file.write_text("def right(output, answer): return len(output) / 4\n")
    graded = form(match=f"python:{file}")
    assert graded.facts()["digest"] != facts["digest"]
    assert right(graded, "ab", "") == [0.5]
    with pytest.raises(AnswerError, match="gave 1.25: neither a bool nor 0 to 1"):
        right(graded, "abcde", "")
    file.write_text("def right(output, answer): return 'yes'\n")
    with pytest.raises(AnswerError, match="gave 'yes'"):
        right(form(match=f"python:{file}"), "", "")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def wrong(output, answer): pass", r"has no function right\(output, answer\)"),
        ("right = 5", "has no function right"),
        ("def right(:", "does not run: SyntaxError"),
        ("import nothing_like_it", "does not run: ModuleNotFoundError"),
    ],
)
def test_a_file_without_a_judge_is_refused(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "check.py").write_text(code)
    with pytest.raises(click.BadParameter, match=rf"check\.py {says}"):
        form(match=f"python:{tmp_path}/check.py")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"regex": "(a", "after": None}, "missing \\)"),
        ({"regex": "abc"}, "has no group: put what is the answer in parentheses"),
        ({"regex": "(a)", "after": "b"}, "give one"),
        ({"after": " "}, "words are needed"),
        ({"match": "fuzzy"}, "'fuzzy' is none of math, exact, .*python:FILE"),
        ({"match": "python:/nowhere/check.py"}, "No such file.*check.py"),
    ],
)
def test_what_cannot_be_is_told(given: dict[str, str], says: str) -> None:
    with pytest.raises(click.UsageError, match=says):
        form(**given)


def test_an_answer_that_no_text_can_match_is_told() -> None:
    assert misfit("number", "three") == "the answer 'three' has no number"
    assert misfit("choice", "Paris") == "the answer 'Paris' is no letter from A to J"
    assert misfit("number", "3 m") is misfit("choice", "(B)") is misfit("exact", "x") is None
    assert all(misfit("choice", letter) is None for letter in LETTERS)


def test_what_is_said_is_what_is_told() -> None:
    assert AnswerForm().facts() == form().facts() == {}
    assert form(after="answer", match="exact").facts() == {"after": "answer", "match": "exact"}
