"""LongBench's data sets: how answers are judged, and how long they may be.

By its metrics.py, eval.py and config/dataset2maxlen.json. Of the Chinese ones, those whose measure cuts
words by a dictionary are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from epikv.eval.forms import Measure
from epikv.eval.measures import class_share, code_similarity, f1, number_share, rouge_l


@dataclass(frozen=True)
class DataSet:
    """None: not known here."""

    measure: Measure | None = None
    most_tokens: int | None = None
    first_line: bool = False  # whether only the first line of a text is judged
    by_class: bool = False  # whether a class is asked for, of those that a line names

    def measured(self, classes: Sequence[str]) -> Measure | None:
        measure = partial(class_share, classes=classes) if self.by_class else self.measure
        return partial(_first_line, measure) if self.first_line and measure else measure


DATA_SETS = {
    "narrativeqa": DataSet(f1, 128),
    "qasper": DataSet(f1, 128),
    "multifieldqa_en": DataSet(f1, 64),
    "hotpotqa": DataSet(f1, 32),
    "2wikimqa": DataSet(f1, 32),
    "musique": DataSet(f1, 32),
    "gov_report": DataSet(rouge_l, 512),
    "qmsum": DataSet(rouge_l, 512),
    "multi_news": DataSet(rouge_l, 512),
    "trec": DataSet(None, 64, first_line=True, by_class=True),
    "triviaqa": DataSet(f1, 32, first_line=True),
    "samsum": DataSet(rouge_l, 128, first_line=True),
    "lsht": DataSet(None, 64, first_line=True, by_class=True),
    "passage_count": DataSet(number_share, 32),
    "passage_retrieval_en": DataSet(number_share, 32),
    "passage_retrieval_zh": DataSet(number_share, 32),
    "lcc": DataSet(code_similarity, 64),
    "repobench-p": DataSet(code_similarity, 64),
}


def _first_line(measure: Measure, text: str, truth: str) -> float:
    return measure(text.lstrip("\n").split("\n")[0], truth)
