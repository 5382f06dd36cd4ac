"""How right a text is, by the measures of benchmarks: between 0 and 1, against one expected answer.

Those of LongBench are defined in its metrics.py, those of RULER in its eval/synthetic/constants.py.
tests/golden/make_answer_measures.py holds them against both projects' own code.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

import click

from epikv.installing import pip_install

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+")
_MARKS_OF_COMMENTS = ("`", "#", "//")


def f1(text: str, truth: str) -> float:
    """Of the words that both have, in any order, without articles and punctuation."""
    mine, theirs = _words(text), _words(truth)
    common = (Counter(mine) & Counter(theirs)).total()
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


def rouge_l(text: str, truth: str) -> float:
    """ROUGE-L's F, by the package `rouge`, as LongBench takes it. Raises click.ClickException without
    the package."""
    try:
        from rouge import Rouge
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what ROUGE-L needs: {pip_install('longbench')}"
        ) from error
    try:
        found = Rouge(metrics=["rouge-l"]).get_scores(text, truth)
    except (ValueError, RecursionError):  # of an empty text, and of one sentence without an end
        return 0.0
    return float(found[0]["rouge-l"]["f"])


def contains(text: str, truth: str) -> bool:
    """Whether it occurs in the text, whatever the case and the kind of spaces."""
    return _folded(truth) in _folded(text)


def code_similarity(text: str, truth: str) -> float:
    """Of the first line that is no comment, to two digits."""
    lines = text.lstrip("\n").split("\n")
    first = (line for line in lines if not any(mark in line for mark in _MARKS_OF_COMMENTS))
    return round(100 * SequenceMatcher(None, next(first, ""), truth).ratio()) / 100


def number_share(text: str, truth: str) -> float:
    """Of the numbers in a text, those that are the first number in the truth."""
    numbers, wanted = _NUMBER.findall(text), _NUMBER.search(truth)
    if not numbers or wanted is None:
        return 0.0
    return numbers.count(wanted[0]) / len(numbers)


def class_share(text: str, truth: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that a text names, if the true one is among them. Those whose names
    are parts of the true one's do not count."""
    named = [name for name in classes if name in text]
    named = [name for name in named if name == truth or name not in truth]
    return 1 / len(named) if truth in named else 0.0


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _folded(text: str) -> str:
    return " ".join(text.lower().split())
