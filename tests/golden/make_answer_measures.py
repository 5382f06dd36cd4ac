"""Scores of texts by LongBench's and RULER's own code, as data.

    git clone https://github.com/THUDM/LongBench && git -C LongBench checkout 2e00731f8d0bff23dc4325161044d0ed8af94c1e
    git clone https://github.com/NVIDIA/RULER && git -C RULER checkout c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a
    pip install rouge==1.0.1 fuzzywuzzy==0.18.0 jieba==0.42.1
    python tests/golden/make_answer_measures.py LongBench RULER

Both (MIT, Apache-2.0) are imported and are no part of this repository; the texts are made here.
"""

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

COMMAND = "python tests/golden/make_answer_measures.py LongBench RULER"
OUT = Path(__file__).parent / "answer_measures.json"
FIRST_LINES = ("trec", "triviaqa", "samsum", "lsht")  # as its eval.py has them
WORDS = "the a cat dog sat on big mat. Paris, London in 1999 an of red".split()
CLASSES = ["Number", "City", "Country", "Other location", "Other number", "Date"]
SEEDS = 12  # texts that are drawn, beside those that are written here

WRITTEN: dict[str, list[tuple[str, list[str]]]] = {
    "qasper": [
        ("The Big Dog!", ["a big dog"]),
        ("", ["dog"]),
        ("dog dog dog", ["dog", "dog dog"]),
        ("unanswerable", ["Unanswerable."]),
        ("it's", ["its"]),
    ],
    "triviaqa": [("\n\nParis\nQuestion: and London?", ["Paris", "City of Paris"])],
    "gov_report": [
        ("The report says. It says so twice. It says so.", ["It says so twice. The end."]),
        ("", ["The report."]),
        ("...", ["The report."]),
        ("same words", ["same words"]),
    ],
    "samsum": [("Ann is ill.\nBob is not.", ["Ann is ill. Bob is well."])],
    "trec": [
        ("Type: City", ["City"]),
        ("Number or City", ["City"]),
        ("Other number", ["Other number"]),
        ("Date\nNumber", ["Number"]),
        ("nothing of it", ["Date"]),
        ("city", ["City"]),
    ],
    "passage_count": [("17", ["17"]), ("17 or 18", ["17"]), ("none", ["3"]), ("1 17 17", ["17"])],
    "passage_retrieval_en": [
        ("Paragraph 12", ["Paragraph 12"]),
        ("12, not 13", ["Paragraph 12"]),
        ("Paragraph 1", ["Paragraph 12"]),
    ],
    "passage_retrieval_zh": [("段落12", ["段落12"]), ("12", ["段落12"]), ("二", ["段落2"])],
    "lcc": [
        ("    return x + 1\n    more", ["    return x + 1"]),
        ("\n# a comment\n```\nreturn x", ["return x + 1"]),
        ("// nothing else", ["return x"]),
        ("", ["return x"]),
        ("total += rows[i].size", ["total += row.size"]),
    ],
}
RULER = [
    ("The numbers are 12, 345 and 6.", ["12", "345"]),
    ("The number is 12.", ["12", "345"]),
    ("ALPHA beta", ["alpha", "gamma", "Beta"]),
    ("", ["alpha"]),
    ("Amsterdam", ["amsterdam", "Rotterdam"]),
]


def drawn(data_set: str, seed: int) -> tuple[str, list[str]]:
    """A text and answers that share some words."""
    draw = random.Random(f"{data_set}/{seed}")

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    return words(20), [words(12) for _ in range(draw.randint(1, 3))]


def longbench(folder: Path) -> list[dict[str, Any]]:
    sys.path.insert(0, str(folder / "LongBench"))
    measures = runpy.run_path(str(folder / "LongBench" / "eval.py"))["dataset2metric"]
    cases = []
    for data_set, written in WRITTEN.items():
        by_words = data_set in ("qasper", "triviaqa", "gov_report", "samsum", "lcc")
        more = [drawn(data_set, seed) for seed in range(SEEDS if by_words else 0)]
        for text, answers in [*written, *more]:
            line = text
            if data_set in FIRST_LINES:
                line = text.lstrip("\n").split("\n")[0]
            scores = [measures[data_set](line, a, all_classes=CLASSES) for a in answers]
            case = {"data_set": data_set, "text": text, "answers": answers}
            cases.append({**case, "score": max([0.0, *scores])})
    return cases


def ruler(folder: Path) -> list[dict[str, Any]]:
    measures = runpy.run_path(str(folder / "scripts/eval/synthetic/constants.py"))
    return [
        {
            "text": text,
            "outputs": outputs,
            "all": measures["string_match_all"]([text], [outputs]),
            "part": measures["string_match_part"]([text], [outputs]),
        }
        for text, outputs in RULER
    ]


def main() -> None:
    of_longbench, of_ruler = map(Path, sys.argv[1:])
    told = {
        "made with": COMMAND,
        "classes": CLASSES,
        "longbench": longbench(of_longbench),
        "ruler": ruler(of_ruler),
    }
    OUT.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
