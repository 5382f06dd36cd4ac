"""What an evaluation asks of a daemon, and what it makes of refusals: against a stand-in."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_epikvd
import grpc
import pytest
from click.testing import CliRunner, Result
from epikv.cli import main
from epikv.eval.results import read
from epikv.v1 import errors_pb2, generation_pb2, generation_pb2_grpc, kv_pb2, policy_pb2
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration

PROBLEMS = 4


def evicting(name: str, *params: str) -> policy_pb2.Policy:
    made = [policy_pb2.PolicyParam(name=p, type="int") for p in (*params, "slack")]
    return policy_pb2.Policy(name=name, params=made, slack_tokens=7)


POLICIES = [policy_pb2.Policy(name="full"), evicting("h2o"), evicting("random", "frozen")]


class Solver(generation_pb2_grpc.GenerationServiceServicer):
    """Writes 20 words and the answer to "n+0?", n words more, all of it right under `full` only.

    Under h2o it refuses with `code` and `reason`, the first `times` times, if it has a code.
    """

    def __init__(
        self, code: grpc.StatusCode | None = None, reason: str = "", times: int = 1000, delay=0.0
    ) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self._refusal = code, reason, delay
        self._times = times
        self._lock = threading.Lock()

    def GenerateOnce(self, request, context):
        with self._lock:
            self.requests.append(request)
            refuses = self._refusal[0] and request.kv.policy == "h2o" and self._times > 0
            self._times -= bool(refuses)
        if refuses:
            self._refuse(context)
        number = int(request.text.partition("+")[0])
        length = 20 + number
        answer = number if request.kv.policy == "full" else number + 1
        return generation_pb2.GenerateResult(
            text=f"\\boxed{{{answer}}}",
            token_ids=range(length),
            summary=generation_pb2.Summary(
                finish_reason=generation_pb2.FINISH_REASON_END,
                usage=generation_pb2.Usage(prompt_tokens=10 + number, output_tokens=length),
                kv=kv_pb2.KvUsage(policy=request.kv.policy, budget_tokens=request.kv.max_tokens),
            ),
        )

    def _refuse(self, context: grpc.ServicerContext) -> None:
        code, reason, delay = self._refusal
        details = [errors_pb2.ErrorInfo(reason=reason, domain="epikv")] if reason else []
        if delay:
            details.append(errors_pb2.RetryInfo(retry_delay=Duration(nanos=round(1e9 * delay))))
        packed = [
            any_pb2.Any(
                type_url=f"type.googleapis.com/google.rpc.{detail.DESCRIPTOR.name}",
                value=detail.SerializeToString(),
            )
            for detail in details
        ]
        status = errors_pb2.Status(code=code.value[0], message="not so", details=packed)
        trailer = ("grpc-status-details-bin", status.SerializeToString())
        context.set_trailing_metadata((trailer,))
        context.abort(code, "not so")


@contextmanager
def serving(solver: Solver, weights: str | None = None) -> Iterator[str]:
    with fake_epikvd.serve(
        generation=solver, threads=8, policies=POLICIES, weights=weights
    ) as fake:
        yield fake.address


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    rows = ({"id": n, "prompt": f"{n}+0?", "answer": n} for n in range(PROBLEMS))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def evaluate(address: str, problems: Path, *more: str) -> Result:
    fixed = ("--out", str(problems.parent / "out"), "--policy", "h2o", "--at-once", "4")
    command = ["eval", "--server", address, "--task", f"file:{problems}", *fixed, *more]
    return CliRunner().invoke(main, command)


def test_requests_are_what_the_plan_says(problems: Path) -> None:
    solver, more = Solver(), ("--budget", "25%", "--budget", "64", "--positions", "compact")
    drawn = ("--temperature", "0.6", "--top-p", "0.9", "--seeds", "2", "--max-output-tokens", "99")
    with serving(solver) as address:
        result = evaluate(address, problems, *more, *drawn)
    assert result.exit_code == 0, result.output
    assert len(solver.requests) == 2 * PROBLEMS * (1 + 3 * 2)
    first = 2 * PROBLEMS
    assert all((r.kv.policy == "full") == (n < first) for n, r in enumerate(solver.requests))
    seeds: dict[str, set[int]] = {}
    for request in solver.requests:
        number, kv = int(request.text.partition("+")[0]), request.kv
        seeds.setdefault(request.text, set()).add(request.sampling.seed)
        assert request.model == "fake" and request.stop.max_output_tokens == 99
        assert request.sampling.temperature == pytest.approx(0.6)
        assert request.sampling.top_p == pytest.approx(0.9)
        assert kv.positions == kv_pb2.POSITION_MODE_COMPACT
        if kv.policy == "full":
            assert kv.WhichOneof("budget") is None
            continue
        # Prompt, and a quarter of what `full` wrote.
        assert kv.max_tokens in (64, 10 + number + round((20 + number) / 4))
        assert kv.equal_protection and dict(kv.policy_params)["slack"] == 15
    assert [len(of_problem) for of_problem in seeds.values()] == [2] * PROBLEMS
    assert len(set().union(*seeds.values())) == 2 * PROBLEMS
    rows = json.loads((problems.parent / "out" / "summary.json").read_text())["rows"]
    for row in rows:
        assert row["solved"]["value"] == (row["arm"] == "full") and row["n"] == PROBLEMS
    assert {row["axis"] for row in rows} == {"reasoning"}


def test_published_protection_is_asked_for(problems: Path) -> None:
    solver = Solver()
    with serving(solver) as address:
        result = evaluate(address, problems, "--published-protection", "--slack", "own")
    assert result.exit_code == 0 and "Published protection" in result.output, result.output
    for request in solver.requests:
        if request.kv.policy != "full":
            assert request.kv.HasField("equal_protection") and not request.kv.equal_protection
            assert dict(request.kv.policy_params)["slack"] == 7


def test_other_weights_of_the_name_are_refused(
    problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = type(fake_epikvd.MODEL)()
    model.CopyFrom(fake_epikvd.MODEL)
    monkeypatch.setattr(fake_epikvd, "MODEL", model)
    with serving(Solver()) as address:
        model.weights = "sha256:one"
        assert evaluate(address, problems).exit_code == 0
        model.weights = "sha256:other"
        result = evaluate(address, problems)
        assert result.exit_code == 1
        assert "sha256:one" in result.output and "sha256:other" in result.output
        model.weights = "sha256:one"
        problems.write_text(problems.read_text().replace("3+0?", "03+0?"))
        result = evaluate(address, problems)
        assert result.exit_code == 1 and "digest" in result.output


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "KV_BUDGET", 0),
        (grpc.StatusCode.FAILED_PRECONDITION, "ARTEFACT_MISSING", 0),
        (grpc.StatusCode.INTERNAL, "INTERNAL", 1),  # the policy failed
    ],
)
def test_what_a_policy_refuses_is_written_down(
    problems: Path, code: grpc.StatusCode, reason: str, status: int
) -> None:
    for solver in (Solver(code, reason), Solver(code, reason)):
        with serving(solver) as address:
            result = evaluate(address, problems)
        assert result.exit_code == status, result.output
        assert (
            f"refused, {PROBLEMS} times: file:sums.jsonl, h2o at 50%: {code.name}" in result.output
        )
        ran = 4 * PROBLEMS - PROBLEMS
        assert f": {ran} were measured, {PROBLEMS} were refused" in result.output
        assert "h2o │ refused" in " ".join(result.stdout.split()), "in the table, too"
    assert not solver.requests  # it does not ask again
    faulty = [r for r in read(problems.parent / "out")[1] if r.fault]
    assert {r.arm for r in faulty} == {"h2o"} and len(faulty) == PROBLEMS


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED],
)
def test_what_is_not_the_policys_ends_the_run(problems: Path, code: grpc.StatusCode) -> None:
    """And is not written down: another daemon may do it."""
    out = problems.parent / "out"
    with serving(Solver(code, times=1)) as address:
        result = evaluate(address, problems)
        assert result.exit_code == 1 and f"went away: {code.name}" in result.output
        assert "the same command goes on" in result.output and not (out / "summary.json").exists()
        kept = read(out)[1]
        assert not any(record.fault for record in kept)
        assert PROBLEMS <= len(kept) < 4 * PROBLEMS
        result = evaluate(address, problems)
        assert result.exit_code == 0, result.output
    assert read(out)[1][: len(kept)] == kept and len(read(out)[1]) == 4 * PROBLEMS


def test_a_full_daemon_is_waited_for(problems: Path) -> None:
    solver = Solver(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", times=5, delay=0.02)
    with serving(solver) as address:
        result = evaluate(address, problems)
    assert result.exit_code == 0, result.output
    assert len(solver.requests) == 4 * PROBLEMS + 5


def test_answers_read_in_another_form_are_of_another_plan(problems: Path) -> None:
    """The same problems: the prompts are theirs, whatever is read of an answer."""
    solver, form = Solver(), ("--answer-regex", r"boxed.(\d+)", "--match", "number")
    with serving(solver) as address:
        assert evaluate(address, problems, *form).exit_code == 0
        asked = len(solver.requests)
        for other in ((), (*form[:3], "exact"), ("--answer-after", "{", *form[2:])):
            result = evaluate(address, problems, *other)
            assert result.exit_code == 1 and "results of another plan" in result.output
        assert '"regex": "boxed.(\\\\d+)", "match": "number"' in result.output
        assert evaluate(address, problems, *form).exit_code == 0
    assert len(solver.requests) == asked == 4 * PROBLEMS
    rows = json.loads((problems.parent / "out" / "summary.json").read_text())["rows"]
    assert [row["solved"]["value"] for row in rows] == [row["arm"] == "full" for row in rows]


def test_graded_answers_are_averaged(problems: Path) -> None:
    judge = problems.parent / "near.py"
    judge.write_text("def right(output, answer): return 1 / (1 + abs(int(output) - int(answer)))")
    with serving(Solver()) as address:
        form = ("--answer-after", "boxed{", "--match", f"python:{judge}")
        result = evaluate(address, problems, *form)
        assert result.exit_code == 1 and "invalid literal for int()" in result.output
        assert "Error: problem" in result.output and "Traceback" not in result.output
        form = ("--answer-regex", r"boxed.(\d+)", *form[2:])
        assert evaluate(address, problems, *form, "--out", f"{judge}.out").exit_code == 0
        judge.write_text(judge.read_text() + "\n# changed")
        changed = evaluate(address, problems, *form, "--out", f"{judge}.out")
        assert changed.exit_code == 1 and "digest" in changed.output
    rows = json.loads(Path(f"{judge}.out", "summary.json").read_text())["rows"]
    for row in rows:
        assert row["solved"]["value"] == (1 if row["arm"] == "full" else 0.5)


def test_what_ends_an_answer_in_its_benchmark_ends_it_here(problems: Path) -> None:
    arguments = [["3+0?", {"until": ["Q:", ""], "max_gen_toks": 30}]]
    row = {"doc": {}, "target": "3", "arguments": arguments}
    problems.write_text(json.dumps(row))
    solver = Solver()
    with serving(solver) as address:
        assert evaluate(address, problems).exit_code == 0
    for request in solver.requests:
        assert list(request.stop.stop_strings) == ["Q:"] and request.stop.max_output_tokens == 30


def test_how_files_are_read_says_nothing_of_other_tasks(tmp_path: Path) -> None:
    command = ["eval", "--task", "sample:programs", "--match", "exact", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and "no --task is a file" in result.output


def test_without_full_there_is_no_share_of_a_trace(problems: Path) -> None:
    class NoFull(Solver):
        def GenerateOnce(self, request, context):
            if request.kv.policy == "full" and request.text.startswith("0"):
                self._refuse(context)
            return super().GenerateOnce(request, context)

    solver = NoFull(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH", times=0)
    with serving(solver) as address:
        result = evaluate(address, problems, "--budget", "50%", "--budget", "64")
    assert result.exit_code == 0, result.output
    rows = json.loads((problems.parent / "out" / "summary.json").read_text())["rows"]
    for row in rows:
        no_share = row["arm"] == "full" or row["budget"] == "50%"
        assert row["refused"] == no_share and row["n"] == PROBLEMS - no_share
        if row["arm"] != "full" and row["budget"] == "50%":
            assert row["fault"] == "no reference trace: `full` was refused"


def test_an_answer_without_a_token_is_not_taken_for_right(problems: Path) -> None:
    """The stand-in's tokens are lengths of words, and "It is" + " 12345" are three of them."""
    from epikv.client import Client
    from epikv.eval.items import Probe
    from epikv.eval.plan import Settings
    from epikv.eval.requests import ask
    from epikv.eval.results import Key

    arm = {"policy": "full", "params": {}}
    with fake_epikvd.serve() as fake, Client(fake.address) as client:

        def right(*parts: str) -> list[bool]:
            probe, key = Probe("0", "a b", parts), Key("needle", "0", "full", "", 0)
            return ask(client, "", key, probe, arm, Settings(), None).right

        # Of what is scored it says that the first token is the likeliest, and the second not.
        assert right("", " c") == [True]
        assert right(" c", " d") == [False]
        assert right("", " c d") == [False]
        with pytest.raises(ValueError, match="no token of its own"):
            right(" c", "")


def test_daemons_of_other_weights_are_not_taken_together(problems: Path) -> None:
    with serving(Solver()) as first:
        with serving(Solver(), weights="sha256:other") as second:
            result = evaluate(first, problems, "--server", second)
            assert result.exit_code == 2
            assert f"{first} and {second} serve other models: weights" in result.output
        result = evaluate(first, problems, "--server", first)
        assert result.exit_code == 2 and "given twice" in result.output
