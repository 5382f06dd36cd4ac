"""Problems of files on the real daemon: answers in the model's own form, and choices by log-probability."""

import json
import shutil
from dataclasses import replace
from operator import sub
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from epikv import Client, Kv
from epikv.cli import main
from epikv.eval.requests import likeliest, seed
from epikv.eval.results import read
from epikv.export import archive
from epikv.sample import problem
from epikv.testing import Daemon, find_binary

FORM = ("--answer-after", "answer", "--match", "exact")
QUICK = (
    *("--traces", "18", "--runs", "24", "--try", "4", "--confirm", "14"),
    *("--daemon-flag", "threads=1"),
)
NAMES = ("full", "random", "random:frozen=true", "sliding")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def evaluate(daemon: Daemon, task: str, out: Path, *more: str) -> Result:
    run = ("eval", "--server", daemon.grpc, "--task", task, "--out", out, "--policy", "sliding")
    return invoke(*run, *more)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def problems(path: Path, count: int, lines: int) -> Path:
    """Of the sample model, whose completions end with `answer $x 3 $y 7`, as anyone would write them."""
    rows: list[dict[str, object]] = []
    for number in range(count):
        task = problem(f"file/{number}", "programs", lines)
        answer = " ".join(f"{name} {value}" for name, value in task.answers.items())
        rows.append({"id": number, "prompt": task.prompt, "answer": answer})
    return write(path, rows)


def test_answers_in_the_models_own_form_are_judged_as_its_own_task_does(
    daemon: Daemon, tmp_path: Path
) -> None:
    file = problems(tmp_path / "programs.jsonl", 6, 6)
    budget = ("--problems", "6", "--budget", "90", "--max-output-tokens", "300")
    forms = {
        "after": FORM,
        "regex": ("--answer-regex", r"answer((?: \$\w \d)+)"),
        "none": (),
        "python": ("--match", f"python:{tmp_path}/parts.py"),
    }
    (tmp_path / "parts.py").write_text(
        "from epikv.sample.problem import parse_answers\n"
        "def right(output, answer):\n"
        "    wanted = parse_answers('answer ' + answer)\n"
        "    given = parse_answers(output)\n"
        "    return sum(given.get(k) == v for k, v in wanted.items()) / len(wanted)\n"
    )
    found = {}
    for name, form in forms.items():
        result = evaluate(daemon, f"file:{file}", tmp_path / name, *budget, *form)
        assert result.exit_code == 0, result.output
        found[name] = {record.key: record for record in read(tmp_path / name)[1]}
    assert not any(record.solved for record in found["none"].values())
    for key, record in found["after"].items():
        task = problem(f"file/{key.item}", "programs", 6)
        parts = task.correct(record.tail)
        if "answer" not in record.tail.split():  # it went on after its answer
            continue
        assert record.solved == found["regex"][key].solved == all(parts)
        assert found["python"][key].right == [sum(parts) / len(parts)]
    solved = [record.solved for record in found["after"].values()]
    assert any(solved) and not all(solved)


def test_a_model_that_writes_no_box_is_calibrated(sample_model: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model.pt", tmp_path / "report.json"
    shutil.copy(sample_model, model)
    archive.replace_manifest(model, replace(archive.read_manifest(model), calibration=None))
    file = problems(tmp_path / "programs.jsonl", 36, 8)
    run = ("calibrate", "epikv_flat", model, "--task", f"file:{file}", *QUICK, "-o", out)
    run = (*run, "--binary", find_binary())
    done = invoke(*run, *FORM)
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["confirmed"] and report["plan"]["reading"] == {
        "after": "answer",
        "match": "exact",
    }
    assert report["tasks"]["file:programs.jsonl"]["solved"] >= 16
    assert archive.read_manifest(model).calibration.confirmed
    other = invoke(*run, "--answer-after", "answer", "--match", "number")
    assert other.exit_code == 1 and "begun with other settings" in other.output
    assert "reading is {'after': 'answer', 'match': 'exact'} there" in other.output


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Solved problems, of which one value is asked for: a digit of ten."""
    rows: list[dict[str, object]] = []
    for number in range(5):
        task = problem(f"choices/{number}", "programs", 6)
        worked, _, answer = task.trace.partition("answer")
        name, value = answer.split()[:2]
        prompt = f"{task.prompt} {worked}answer {name}"
        choices = [str(digit) for digit in range(10)]
        rows.append({"prompt": prompt, "choices": choices, "answer": int(value)})
    return write(tmp_path / "digits.jsonl", rows)


def test_choices_are_scored_as_the_daemon_scores(
    daemon: Daemon, client: Client, digits: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = evaluate(daemon, f"file:{digits}", out, "--budget", "60", "--slack", "0")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in digits.read_text().splitlines()]
    _, records = read(out)
    assert {record.arm for record in records} == set(NAMES) and len(records) == 4 * len(rows)
    found = {record.key[1:3]: record for record in records}
    for number, row in enumerate(rows, 1):
        full, sliding = found[str(number), "full"], found[str(number), "sliding"]
        assert full.right == [True] and full.acc_norm is True
        assert sliding.budget_tokens == 60 and sliding.evicted_tokens > 0
        assert max(map(abs, map(sub, full.choice_logprobs, sliding.choice_logprobs))) > 1
        *before, last = client.tokenize(row["prompt"])
        kv = Kv("sliding", 60, {"slack": 0}, equal_protection=True)
        for choice, logprob in zip(row["choices"], sliding.choice_logprobs, strict=True):
            whole = client.score(row["prompt"], choice).logprobs
            assert full.choice_logprobs[int(choice)] == pytest.approx(sum(whole), abs=1e-3)
            forced = [last, *client.tokenize(choice)]
            dropped = client.score(before, forced, kv=kv, seed=seed(sliding.key)).logprobs
            assert logprob == pytest.approx(dropped[1], abs=1e-3)
        assert sliding.right == [likeliest(sliding.choice_logprobs) == row["answer"]]
    assert "acc 1.000, acc_norm 1.000" in (out / "summary.md").read_text()


def test_a_load_asks_problems_whose_answers_are_read_so(daemon: Daemon, tmp_path: Path) -> None:
    file = problems(tmp_path / "programs.jsonl", 4, 6)
    load = ("bench", "load", "--server", daemon.grpc, "--concurrency", "2", "--requests", "4")
    more = ("--output", "300", "--warmup", "0", "--json", tmp_path / "load.json")
    result = invoke(*load, *more, "--task", f"file:{file}", "--problems", "4", *FORM)
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "load.json").read_text())
    assert told["settings"]["reading"] == {"after": "answer", "match": "exact"}
    assert told["total"]["judged"] == 4 and told["total"]["right"]["value"] == 1
