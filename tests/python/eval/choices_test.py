"""Multiple choice by log-probability: what is asked of a daemon, and what is made of it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_epikvd
import pytest
from click.testing import CliRunner, Result
from epikv.cli import main
from epikv.eval.requests import likeliest
from epikv.eval.results import read
from epikv.v1 import generation_pb2, generation_pb2_grpc, kv_pb2, policy_pb2

# The stand-in's tokens are lengths of words. By the model below the first is the likeliest of all, the
# second by character.
CHOICES = ["dog", "cats do"]
POLICIES = [
    policy_pb2.Policy(
        name=name, params=[policy_pb2.PolicyParam(name=p, type="int") for p in params]
    )
    for name, params in (("full", ()), ("h2o", ("slack",)), ("random", ("slack", "frozen")))
]


class Scorer(generation_pb2_grpc.GenerationServiceServicer):
    """A word's log-probability is its length, below 0; under a policy thrice that of short choices."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.ScoreRequest] = []
        self._lock = threading.Lock()

    def Score(self, request, context):
        with self._lock:
            self.requests.append(request)
        ids = list(request.continuation_ids.ids)  # the prompt's last, and a choice
        forgets = 3 if request.kv.policy != "full" and len(ids) == 2 else 1
        return generation_pb2.ScoreResponse(
            token_ids=ids,
            logprobs=[-forgets * word for word in ids],
            greedy=[False] * len(ids),
            summary=generation_pb2.Summary(
                usage=generation_pb2.Usage(prompt_tokens=3, output_tokens=len(ids)),
                kv=kv_pb2.KvUsage(policy=request.kv.policy, evicted_tokens=len(ids), rounds=1),
            ),
        )


@contextmanager
def serving(scorer: Scorer) -> Iterator[str]:
    with fake_epikvd.serve(generation=scorer, threads=8, policies=POLICIES) as fake:
        yield fake.address


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "animals.jsonl"
    rows = ({"prompt": f"{'x' * n} It is", "choices": CHOICES, "answer": 0} for n in range(1, 4))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def evaluate(address: str, file: Path, *more: str) -> Result:
    fixed = ("--out", str(file.parent / "out"), "--policy", "h2o", "--budget", "64")
    command = ["eval", "--server", address, "--task", f"file:{file}", *fixed, *more]
    return CliRunner().invoke(main, command)


def test_each_choice_is_scored_under_each_arm(file: Path) -> None:
    scorer = Scorer()
    with serving(scorer) as address:
        result = evaluate(address, file)
        again = evaluate(address, file, "--choice-metric", "acc_norm")
    assert result.exit_code == 0, result.output
    assert len(scorer.requests) == 2 * 3 * 4  # choices, problems, arms
    for request in scorer.requests:
        assert len(request.token_ids.ids) == 3  # the stand-in puts one token before a text
        assert list(request.continuation_ids.ids) in ([2, 3], [2, 4, 2])
        assert request.kv.policy == "full" or request.kv.max_tokens == 64
    assert len({request.seed for request in scorer.requests}) == 3, "one for each problem"
    for record in read(file.parent / "out")[1]:
        assert record.choice_logprobs == ([-3, -6] if record.arm == "full" else [-9, -6])
        assert record.right == [record.acc] == [record.arm == "full"] and record.acc_norm is False
        assert (record.prompt_tokens, record.output_tokens, record.evicted_tokens) == (3, 3, 3)
    assert again.exit_code == 1 and "choice_metric" in again.output, "it is another plan"


def test_both_accuracies_are_told_and_one_decides(file: Path) -> None:
    with serving(Scorer()) as address:
        assert evaluate(address, file, "--choice-metric", "acc_norm").exit_code == 0
    summary = json.loads((file.parent / "out" / "summary.json").read_text())
    for row in summary["rows"]:
        assert (row["acc"], row["acc_norm"]) == (row["arm"] == "full", 0)
        assert row["solved"]["value"] == row["answers"] == 0
    assert "acc 1.000, acc_norm 0.000" in (file.parent / "out" / "summary.md").read_text()
    assert (
        'Answers of file:animals.jsonl: choice_metric "acc_norm".'
        in (file.parent / "out" / "summary.md").read_text()
    )


def test_choices_are_not_steered(file: Path) -> None:
    result = evaluate("127.0.0.1:1", file, "--steering", "1")
    assert result.exit_code == 2 and "generates nothing" in result.output


def test_calibration_asks_for_what_is_generated(file: Path) -> None:
    from epikv.calibrate.plan import Plan
    from epikv.eval.files import Reading
    from epikv.eval.forms import form

    name = f"file:{file}"
    with pytest.raises(ValueError, match="choices to score.*give --match choice"):
        Plan((name,), traces=1, trials=1, confirm=1).problems()
    chosen = Reading(form=form(match="choice"))
    plan = Plan((name,), traces=1, trials=1, confirm=1, reading=chosen)
    assert [len(part[0].items) for part in plan.problems()] == [1, 1, 1]
    assert plan.to_json()["reading"] == {"match": "choice"}


def test_the_first_of_the_likeliest_counts() -> None:
    assert likeliest([-2, -1, -1]) == 1
    assert likeliest([-2, -1, -1], [4, 1, 1]) == 0
