"""`epikv advise` on the real daemon: what it certifies, and how it goes on. The commands are those of
docs/choosing-a-policy.md."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from epikv.cli import main
from epikv.eval.results import read
from epikv.sample import problem
from epikv.testing import Daemon, find_binary

PROBLEMS = 40


def advise(model: Path, out: Path, *more: str) -> Result:
    command = ["advise", str(model), "--out", str(out), "--binary", str(find_binary())]
    return CliRunner().invoke(main, [*command, "--daemon-flag=threads=1", *more])


@pytest.fixture(scope="module")
def advised(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Of the sample model's problems, of three policies at two budgets."""
    out = tmp_path_factory.mktemp("advise")
    more = ["--task", "sample:programs@6", "--problems", f"{PROBLEMS}", "--max-loss", "0.2"]
    more += ["--policy", "cur", "--policy", "h2o", "--policy", "sliding"]
    more += ["--budget", "150", "--budget", "90"]
    return out, advise(sample_model, out, *more)


def test_the_cheapest_that_is_certified_is_advised(advised: tuple[Path, Result]) -> None:
    out, result = advised
    assert result.exit_code == 0, result.output
    facts = json.loads((out / "advice.json").read_text())
    certified = [link for link in facts["chain"] if link["certified"]]
    least = min(certified, key=lambda link: link["memory"][0])
    assert facts["advised"] == {"policy": least["policy"], "budget": least["budget"]}
    assert all(link["evidence"] >= 20 for link in certified)
    assert {each["policy"] for each in facts["explored"]} == {"cur", "h2o", "sliding"}
    said = f"{least['policy']} at {least['budget']} tokens: certified to lose at most 20% of all problems with 95% confidence"
    assert said in result.output and said in (out / "advice.html").read_text()
    asked = f"--policy {least['policy']} --budget {least['budget']} --param slack=15 --equal-protection --temperature 0"
    assert asked in result.output


def test_losses_are_those_of_the_answers(advised: tuple[Path, Result]) -> None:
    out, _ = advised
    facts = json.loads((out / "advice.json").read_text())
    _, records = read(out)
    solved = {(record.arm, record.budget, record.item): record.solved for record in records}
    for link in facts["chain"]:
        of_arm = [key for key in solved if key[:2] == (link["policy"], str(link["budget"]))]
        losses = [solved["full", "", key[2]] - solved[key] for key in of_arm]
        assert len(losses) == link["problems"] + 10, "10 problems chose"
        assert min(losses) <= (link["mean_loss"] or 0) <= max(losses)


def test_the_experiment_to_run_next_is_one(
    advised: tuple[Path, Result], sample_model: Path, tmp_path: Path
) -> None:
    out, _ = advised
    store = f"--experiment_store={tmp_path / 'store.db'}"
    with Daemon(sample_model, "--threads=1", "--model_name=sample", store) as daemon:
        command = ["experiment", "create", str(out / "experiment.textproto"), "--validate-only"]
        result = CliRunner().invoke(main, [*command, "--server", daemon.grpc])
    assert result.exit_code == 0, result.output


def test_the_same_command_runs_nothing_again(
    advised: tuple[Path, Result], sample_model: Path
) -> None:
    out, _ = advised
    before = (out / "results.jsonl").read_bytes()
    facts = json.loads((out / "advice.json").read_text())
    more = ["--task", "sample:programs@6", "--problems", f"{PROBLEMS}", "--max-loss", "0.2"]
    more += ["--policy", "cur", "--policy", "h2o", "--policy", "sliding"]
    again = advise(sample_model, out, *more, "--minutes", "0")
    assert again.exit_code == 0, again.output
    assert (out / "results.jsonl").read_bytes() == before
    assert json.loads((out / "advice.json").read_text())["chain"] == facts["chain"]


def test_traffic_is_held_against_the_full_cache(sample_model: Path, tmp_path: Path) -> None:
    requests = [{"prompt": problem(i).prompt, "max_tokens": 40} for i in range(24)]
    too_long = {"prompt": problem(0).prompt * 30}
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text("".join(f"{json.dumps(each)}\n" for each in [*requests, too_long]))
    out = tmp_path / "out"
    more = ["--traffic", str(traffic), "--max-loss", "0.3", "--policy", "cur", "--budget", "130"]
    result = advise(sample_model, out, *more)
    assert result.exit_code == 0, result.output
    _, records = read(out)
    full = [record for record in records if record.arm == "full"]
    assert len(full) == 25
    assert all(len(record.token_ids) == record.output_tokens <= 40 for record in full)
    shares = [record.right[0] for record in records if record.arm == "cur"]
    assert len(shares) == 24 and all(0 < share <= 1 for share in shares)
    page = (out / "advice.html").read_text()
    assert "No right answers are known" in page
    [refused] = [record for record in full if record.fault]
    assert all(record.item != refused.item for record in records if record.arm == "cur")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[]", "not a JSON object"),
        ("{", "Expecting property name"),
        ('{"prompt": ""}', "neither `prompt`, a text, nor `messages`"),
        (
            '{"messages": [{"role": "user", "content": []}]}',
            "a message has a role (system, user, assistant) and a content",
        ),
        ('{"prompt": "x", "max_tokens": "9"}', "max_tokens is a number of tokens"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    sample_model: Path, tmp_path: Path, line: str, told: str
) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text(f'{{"prompt": "x"}}\n\n{line}\n')
    result = advise(sample_model, tmp_path / "out", "--traffic", str(traffic))
    assert result.exit_code == 1 and f"{traffic}:3: {told}" in result.output


def test_too_few_problems_say_so(sample_model: Path, tmp_path: Path) -> None:
    more = ["--task", "sample:programs@6", "--problems", "12", "--policy", "cur", "--budget", "150"]
    result = advise(sample_model, tmp_path / "out", *more)
    assert result.exit_code == 1
    assert (
        "nothing is certified to lose at most 2% of all problems with 95% confidence"
        in result.output
    )
    assert "9 problems certify, and without a single loss it takes 169" in result.output
    assert not (tmp_path / "out" / "experiment.textproto").exists()


def test_problems_or_traffic_are_needed(sample_model: Path, tmp_path: Path) -> None:
    result = advise(sample_model, tmp_path)
    assert result.exit_code == 2 and "give --task or --traffic" in result.output
