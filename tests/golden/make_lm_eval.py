"""Files of samples as lm-eval writes them, with its own accuracies, of a model that is made up.

    pip install lm_eval==0.4.13
    python tests/golden/make_lm_eval.py

lm-eval (MIT) is imported and is no part of this repository. Questions and answers are made here; the
"model" gives a continuation a log-probability by a hash, and writes a number and a box.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker

COMMAND = "python tests/golden/make_lm_eval.py"
HERE = Path(__file__).parent / "lm_eval"
CHOICES = [["red", "blue", "a very dark green", "no colour"], ["one", "two", "three and more"]]


class MadeUp(LM):
    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        return [(-self._draw(*r.args) * len(r.args[1]) ** 0.5, False) for r in requests]

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        return [f"It is {5 + n % 3}.\n#### {5 + n % 3}" for n, _ in enumerate(requests)]

    def _draw(self, context: str, continuation: str) -> float:
        digest = hashlib.sha256(f"{context}|{continuation}".encode()).digest()
        return 1 + digest[0] / 256


def task(name: str, rows: list[dict[str, Any]], folder: Path, **more: Any) -> dict[str, Any]:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"test": str(file)}
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        **more,
    }


def multiple_choice(folder: Path) -> dict[str, Any]:
    rows = [
        {"question": f"Question {n}?", "choices": CHOICES[n % 2], "answer": n % 3} for n in range(8)
    ]
    metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
    return task(
        "choices",
        rows,
        folder,
        output_type="multiple_choice",
        doc_to_text="{{question}}\nAnswer:",
        doc_to_choice="{{choices}}",
        doc_to_target="answer",
        metric_list=metrics,
    )


def generated(folder: Path) -> dict[str, Any]:
    """With two filters, each of which has a line of each problem."""
    rows = [{"question": f"{n} + 5?", "answer": f"{n} and 5 is\n#### {n + 5}"} for n in range(4)]
    filters = [
        {"name": "strict", "filter": [{"function": "regex", "regex_pattern": r"#### (\d+)"}]},
        {"name": "flexible", "filter": [{"function": "regex", "regex_pattern": r"is (\d+)"}]},
    ]
    for each in filters:
        each["filter"].append({"function": "take_first"})
    return task(
        "sums",
        rows,
        folder,
        output_type="generate_until",
        doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["Question:", "</s>"], "do_sample": False, "max_gen_toks": 40},
        metric_list=[{"metric": "exact_match", "regexes_to_ignore": [r"[\s\S]*#### "]}],
        filter_list=filters,
    )


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tasks = [multiple_choice(folder), generated(folder)]
        found = simple_evaluate(
            model=MadeUp(), tasks=tasks, num_fewshot=0, log_samples=True, bootstrap_iters=0
        )
        tracker = EvaluationTracker(output_path=made)
        tracker.general_config_tracker.model_name_sanitized = "made-up"
        tracker.date_id = "now"  # which it takes from the clock
        for name, samples in found["samples"].items():
            tracker.save_results_samples(name, samples)
            (written,) = folder.rglob(f"samples_{name}_*.jsonl")
            (HERE / f"samples_{name}.jsonl").write_text(written.read_text())
        results = {name: found["results"][name] for name in found["samples"]}
    told = {"made with": COMMAND, "lm_eval": "0.4.13", "results": results}
    (HERE / "results.json").write_text(json.dumps(told, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
