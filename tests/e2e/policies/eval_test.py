"""`epikv eval` on the real daemon: what it finds, and how it ends and goes on."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from epikv import Client, Kv, Output, Sampling, Stop
from epikv.cli import main
from epikv.eval.items import Probe
from epikv.eval.requests import digest, seed
from epikv.eval.results import read
from epikv.eval.tasks import load
from epikv.testing import Daemon, DaemonError

PROBLEMS, ARMS, BUDGETS = 16, 4, 2
TOTAL = PROBLEMS * (1 + (ARMS - 1) * BUDGETS)


def command(server: str, out: Path, *more: str) -> list[str]:
    return [
        *("eval", "--server", server, "--out", str(out), "--task", "sample:programs@6"),
        *("--problems", str(PROBLEMS), "--policy", "h2o:scope=model", "--at-once", "4"),
        *("--budget", "0.5", "--budget", "90", *more),
    ]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    program = ["env", "--default-signal=HUP"]  # which nohup may have had us ignore
    program += [sys.executable, "-c", "from epikv.cli import main; main()", *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(program, stdout=file, stderr=file)


def lines(out: Path) -> list[bytes]:
    file = out / "results.jsonl"
    return file.read_bytes().splitlines() if file.exists() else []


def wait_for(count: int, out: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    while len(lines(out)) < count:
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)


def is_whole(out: Path) -> None:
    """Every completion of the plan is there, once."""
    plan, records = read(out)
    assert len(records) == len(lines(out)) == TOTAL
    arms = [arm["label"] for arm in plan["arms"]]
    assert arms == ["full", "random", "random:frozen=true", "h2o:scope=model"]
    expected = {
        ("sample:programs@6", f"test/{n}", arm, budget, 0)
        for n in range(PROBLEMS)
        for arm in arms
        for budget in ([""] if arm == "full" else ["50%", "90"])
    }
    assert {tuple(record.key) for record in records} == expected
    assert not any(record.fault for record in records)


@pytest.fixture(scope="module")
def uninterrupted(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("eval")
    result = invoke(*command(daemon.grpc, out))
    assert result.exit_code == 0, result.output
    return out


def test_figures_are_the_daemons(uninterrupted: Path, client: Client) -> None:
    is_whole(uninterrupted)
    summary = json.loads((uninterrupted / "summary.json").read_text())
    plan, records = read(uninterrupted)
    items = {item.id: item for item in load("sample:programs@6", "test", PROBLEMS)}
    for record in records:
        trace, prompt = items[record.item].trace_tokens, len(items[record.item].prompt.split())
        assert trace is not None and record.prompt_tokens == prompt
        budget = {"50%": prompt + round(trace / 2), "90": 90}.get(record.budget)
        if budget is not None:
            assert record.budget_tokens == budget
            assert record.peak_tokens <= budget + 16 and record.rounds > 0
    assert all(row["n"] == PROBLEMS for row in summary["rows"])
    assert plan["model"]["weights"] == client.models()[0].weights != ""
    assert (uninterrupted / "report.html").stat().st_size > 10_000


def test_a_completion_can_be_repeated(uninterrupted: Path, client: Client) -> None:
    """By what is written of it: policy, parameters, budget and seed."""
    plan, records = read(uninterrupted)
    items = {item.id: item for item in load("sample:programs@6", "test", PROBLEMS)}
    arms = {arm["label"]: arm for arm in plan["arms"]}
    same = 0
    for record in records[:: len(records) // 12]:
        item, arm = items[record.item], arms[record.arm]
        budget = record.budget_tokens if record.budget else None
        kv = Kv(arm["policy"], budget, arm["params"], equal_protection=True if budget else None)
        again = client.generate_once(
            item.prompt,
            kv=kv,
            sampling=Sampling(seed=seed(record.key)),
            stop=Stop(-(-5 * item.trace_tokens // 4)),
            output=Output(token_ids=True),
        )
        assert again.summary.usage.output_tokens == record.output_tokens
        assert item.judge(again.text) == record.right
        same += digest(again.token_ids) == record.digest
    assert same >= 11  # bits may depend on the batch: this daemon is not deterministic


def test_killed_at_any_moment_it_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    """SIGKILL after a few more lines each time; what was there stays as it was."""
    rng, out, log, kills = random.Random(6), tmp_path / "out", tmp_path / "log", 0
    before: list[bytes] = []
    while len(before) < TOTAL:
        process = start(command(daemon.grpc, out), log)
        target = len(before) + rng.randint(1, TOTAL // 4)
        if target < TOTAL:
            wait_for(target, out, process, log)
            time.sleep(rng.random() / 20)
            process.kill()
            kills += 1
        process.wait()
        after = lines(out)
        assert after[: len(before)] == before  # of these nothing was run again
        before = [line for line in after if line.endswith(b"}")]
    assert kills >= 3 and process.returncode == 0, log.read_text()
    is_whole(out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_keeps_what_there_is(number: signal.Signals, daemon: Daemon, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(command(daemon.grpc, out), log)
    wait_for(5, out, process, log)
    process.send_signal(number)
    assert process.wait(30) == 130, log.read_text()
    said, kept = log.read_text(), lines(out)
    assert f"interrupted; {len(kept)} of {TOTAL} completions are in {out}" in said
    assert "Traceback" not in said and 5 <= len(kept) < TOTAL
    assert invoke("eval", "--out", str(out)).exit_code == 0
    summary = json.loads((out / "summary.json").read_text())
    assert any(row["pending"] and "solved" not in row for row in summary["rows"])
    result = invoke(*command(daemon.grpc, out))
    assert result.exit_code == 0, result.output
    assert lines(out)[: len(kept)] == kept
    is_whole(out)


def test_an_arm_can_be_added(daemon: Daemon, uninterrupted: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    shutil.copytree(uninterrupted, more)
    result = invoke(*command(daemon.grpc, more, "--policy", "sliding"))
    assert result.exit_code == 0, result.output
    assert lines(more)[:TOTAL] == lines(uninterrupted)
    added = [json.loads(line)["arm"] for line in lines(more)[TOTAL:]]
    assert added == ["sliding"] * (PROBLEMS * BUDGETS)


def test_a_daemon_that_dies_is_reported(sample_model: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"

    def leaves(end: Callable[[Daemon], None]) -> None:
        """The daemon, in the midst of a run."""
        with Daemon(sample_model, "--threads=1", "--drain_seconds=0") as daemon:
            process = start(command(daemon.grpc, out), log)
            wait_for(len(lines(out)) + 9, out, process, log)
            end(daemon)
            assert process.wait(60) == 1, log.read_text()
        said = log.read_text()
        assert f"{daemon.grpc} went away: UNAVAILABLE" in said and "Traceback" not in said
        assert f"{len(lines(out))} of {TOTAL} completions are in {out}" in said
        assert not (out / "summary.json").exists()

    with pytest.raises(DaemonError, match="status -9"):
        leaves(Daemon.kill)
    leaves(Daemon.terminate)
    kept = lines(out)
    assert 18 <= len(kept) < TOTAL
    with Daemon(sample_model, "--threads=1") as daemon:
        result = invoke(*command(daemon.grpc, out))
        assert result.exit_code == 0, result.output
    assert lines(out)[: len(kept)] == kept
    is_whole(out)


def test_a_folder_is_of_one_run_and_one_plan(
    daemon: Daemon, uninterrupted: Path, tmp_path: Path
) -> None:
    kept = lines(uninterrupted)
    result = invoke(*command(daemon.grpc, uninterrupted, "--split", "other"))
    assert result.exit_code == 1 and "results of another plan" in result.output
    assert lines(uninterrupted) == kept
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(command(daemon.grpc, out), log)
    wait_for(3, out, process, log)
    process.send_signal(signal.SIGSTOP)
    result = invoke(*command(daemon.grpc, out))
    process.kill()
    process.wait()
    assert result.exit_code == 1 and "another evaluation is running" in result.output


def test_refusals_are_told_and_not_averaged(daemon: Daemon, tmp_path: Path) -> None:
    """A budget below prompt + 16 is refused by policies that cannot rank a prompt."""
    more = ("--budget", "40", "--policy", "epikv_flat", "--policy", "sliding:slack=-1")
    result = invoke(*command(daemon.grpc, tmp_path, *more))
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = {(row["arm"], row["budget"]): row for row in summary["rows"]}
    refused = rows["epikv_flat", "40"]
    assert refused["refused"] == PROBLEMS and "solved" not in refused
    assert "INVALID_ARGUMENT (KV_BUDGET)" in refused["fault"]
    assert rows["sliding:slack=-1", "50%"]["refused"] == PROBLEMS
    assert rows["random", "40"]["n"] == rows["epikv_flat", "50%"]["n"] == PROBLEMS
    assert f"refused, {PROBLEMS} times: sample:programs@6, epikv_flat at 40:" in result.output


def test_what_cannot_be_run_is_told_before_it_runs(daemon: Daemon, tmp_path: Path) -> None:
    for more, says in (
        (("--seeds", "2"), "--seeds needs a --temperature"),
        (("--policy", "nothing"), "no policy is called nothing"),
        (("--task", "nothing"), "no task is called nothing"),
        (("--task", "file:nowhere.jsonl"), "nowhere.jsonl"),
        (("--task", "sample:programs@6"), "two tasks have one name"),
        (("--model", __file__), "give --server or --model"),
        (("--daemons", "2"), "--daemons needs --model or --model-dir, and neither --server"),
        (("--model-name", "nothing"), "NOT_FOUND"),
    ):
        result = invoke(*command(daemon.grpc, tmp_path / "out", *more))
        assert result.exit_code in (1, 2) and says in result.output, result.output
        assert not (tmp_path / "out").exists()
    result = invoke("eval", "--out", str(tmp_path))
    assert result.exit_code == 1 and "holds no evaluation" in result.output


def test_probes_are_scored_as_the_daemon_scores(
    daemon: Daemon, client: Client, tmp_path: Path
) -> None:
    """The sample model knows none of the words; what counts is that the very answer is judged."""
    tasks = ("--task", "needle@60", "--task", "recall@6")
    result = invoke(
        *("eval", "--server", daemon.grpc, "--out", str(tmp_path), *tasks, "--problems", "3"),
        *("--budget", "0.5", "--policy", "sliding", "--slack", "0"),
    )
    assert result.exit_code == 0, result.output
    _, records = read(tmp_path)
    assert len(records) == 2 * 3 * 4
    for record in records:
        task = {"n": "needle@60", "r": "recall@6"}[record.task[0]]
        probe = next(p for p in load(task, "test", 3) if p.id == record.item)
        assert isinstance(probe, Probe)
        ids = client.tokenize(probe.prompt + "".join(probe.parts))
        prompt = len(client.tokenize(probe.prompt))
        assert record.prompt_tokens == prompt and record.output_tokens == len(ids) - prompt
        assert len(record.right) == len(probe.parts) // 2 and record.finish == ""
        if record.budget:
            assert record.budget_tokens == prompt + round((len(ids) - prompt) / 2)
            assert record.rounds > 0 and record.peak_tokens <= record.budget_tokens + 1
        if record.arm != "sliding":
            continue
        kv = Kv("sliding", record.budget_tokens, {"slack": 0}, equal_protection=True)
        scored = client.score(ids[:prompt], ids[prompt:], kv=kv)
        at, right = prompt, []
        for number, part in enumerate(probe.parts):  # one token a word here
            begin, at = at, at + len(part.split())
            if number % 2:
                right.append(all(scored.greedy[begin - prompt : at - prompt]))
        assert right == record.right


def test_evaluation_equals_a_plain_loop(tmp_path: Path) -> None:
    """Random weights decide as sharply as need be. `python -m epikv.sample agree` takes more
    problems, and a trained model."""
    import torch
    from epikv.export import export
    from epikv_lab.sample.agree import agree
    from epikv_lab.sample.model import Llama, load, save

    torch.manual_seed(0)
    save(Llama(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "model.pt", dtype="float32", name="random")
    flags = ("--threads=1", "--deterministic=true")
    with Daemon(tmp_path / "model.pt", *flags) as daemon, daemon.client() as client:
        found = agree(client, load(tmp_path / "model"), "alarms", 3, 0.5)
    assert [each.arm.partition(":")[0] for each in found] == [
        *("full", "oracle", "sliding", "h2o", "epikv_flat")
    ]
    for each in found:
        assert each.problems == 3 and not each.different, each
        assert each.evicting == (0 if each.arm == "full" else 3)
