"""`epikv bench peers` without its peers: figures, ratios, rounds, and what runners speak."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from epikv.stats import Estimate
from epikv_lab.bench.peers import (
    agree,
    cells,
    checkpoint,
    convert,
    curves,
    engines,
    results,
    rounds,
    venvs,
)
from epikv_lab.bench.peers.agree import Agreement
from epikv_lab.bench.peers.cells import Cell, parse
from epikv_lab.bench.peers.engines import FULL, Arm
from epikv_lab.bench.peers.process import Job, Reply, Runner
from epikv_lab.bench.peers.rounds import Loaded, Results, Sample
from epikv_lab.bench.peers.venvs import Refused, run

TINY = checkpoint.Shape(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, vocabulary=300)


def cell(name: str) -> Cell:
    (found,) = parse(name)
    return found


def reply(*times: list[float], peak: int = 0) -> Reply:
    return Reply([[1] * len(each) for each in times], [*times], peak)


def test_groups_and_names_are_cells_without_repetition() -> None:
    assert [c.name for c in parse("decode1,prefill1024,decode1")] == ["decode1", "prefill1024"]
    assert [c.streams for c in parse("concurrency")] == [1, 2, 4, 8, 16, 32, 64]
    for name in ("decode64", "16x64", "streams", "decode", "prefill0", "best"):
        with pytest.raises(ValueError, match=name):
            parse(name)


def test_a_context_is_the_mean_of_the_tokens_that_are_measured() -> None:
    for c in parse("context"):
        assert c.prompt + c.new / 2 == int(c.name.removeprefix("decode"))


def test_figures_are_of_the_tokens_and_seconds_of_their_cell() -> None:
    decode = [0.5 + 0.01 * n for n in range(128)]
    assert cell("decode1").figure(reply(decode)) == pytest.approx(100)
    assert cell("prefill1024").figure(reply([0.5])) == 2048
    assert cell("streams2").figure(reply(decode, [2 * at for at in decode])) == pytest.approx(
        2 * 128 / (2 * decode[-1])
    )
    slow = [0.1 * n for n in range(3968)]
    last = [slow[-1] + 0.05 * n for n in range(1, 129)]
    assert cell("generated4096").figure(reply([*slow, *last])) == pytest.approx(20)
    assert cell("memory").figure(reply([1.0], peak=7)) == 7


def test_streams_count_only_while_all_decode() -> None:
    together = cell("16x2048").figure(reply([1.0, 2, 3, 4], [2.0, 3, 4, 5, 6]))
    assert together == pytest.approx(4 / 2)  # 3 and 4 of both
    with pytest.raises(ValueError, match="never"):
        cell("16x2048").figure(reply([1.0, 2], [3.0, 4]))


def test_jobs_of_a_round_are_repeatable_and_of_two_rounds_differ() -> None:
    one, same, other = (cell("streams2").job(300, seed, FULL) for seed in (0, 0, 1))
    assert one == same and one.prompts[0] != one.prompts[1]
    assert not any(prompt in other.prompts for prompt in one.prompts)


def nothing(place: object) -> Runner:
    raise Refused("there is none")


def arm(name: str, kind: str, precision: str = "bf16", **more: object) -> Arm:
    return Arm(name, kind, precision, nothing, **more)


ARMS = [
    arm("epikv bf16", "ours"),
    arm("OpenVINO GenAI bf16", "peer"),
    arm("transformers bf16", "peer"),
    arm("transformers fp32", "peer", "fp32"),
    arm("memory read bf16", "memory"),
    arm("our linears alone bf16", "linears"),
    arm("oneDNN's linears alone bf16", "linears"),
]


def sampled(**rates: list[float]) -> Results:
    """Of streams16 at two threads; names by their first letters."""
    names = {each.name.split()[0].lower() + each.precision: each.name for each in ARMS}
    return Results(
        [
            Sample(number, 2, "streams16", names[name], rate)
            for name, taken in rates.items()
            for number, rate in enumerate(taken)
        ]
    )


def test_ratios_are_of_the_same_round() -> None:
    found = sampled(epikvbf16=[10, 40, 20], openvinobf16=[5, 20, 10])
    ours, other = (("streams16", ARMS[n].name) for n in (0, 1))
    assert results.paired(found, 2, ours, other) == Estimate(2, 2, 2)
    assert results.paired(found, 1, ours, other) is None
    found.samples = found.samples[2:]  # only the last round has both
    assert results.paired(found, 2, ours, other).value == 2


def test_the_best_peer_is_the_fastest_at_that_precision_or_the_smallest() -> None:
    found = sampled(openvinobf16=[9], transformersbf16=[5], transformersfp32=[99], memorybf16=[50])
    assert results.best_peer(found, 2, "streams16", ARMS, "bf16") == "OpenVINO GenAI bf16"
    assert results.best_peer(found, 2, "streams16", ARMS, "int8") is None
    found.samples = [Sample(0, 2, "memory", each.name, n) for n, each in enumerate(ARMS)]
    assert results.best_peer(found, 2, "memory", ARMS[2:] + ARMS[:2], "bf16") == ARMS[1].name


def test_a_table_tells_what_was_measured_and_why_the_rest_was_not() -> None:
    found = sampled(epikvbf16=[10, 30, 20], openvinobf16=[5, 15, 10])
    found.refused[2, "streams16", "transformers bf16"] = "it ended with SIGFPE"
    table = results.table(found, parse("streams16"), ARMS, [2])
    assert "**streams16, 2 threads**" in table
    assert "| epikv bf16 | 20 | 10 .. 30 | 3 |  |" in table
    assert "| OpenVINO GenAI bf16 | 10 | 5 .. 15 | 3 | 2.00 [2.00, 2.00] |" in table
    assert "| transformers bf16 | refused: it ended with SIGFPE |" in table
    assert "| memory read bf16 | not measured |" in table


def test_curves_are_drawn_where_there_is_more_than_one_point(tmp_path: Path) -> None:
    chosen = parse("streams4,streams16,decode512")
    found = Results(
        [Sample(n, 2, c.name, a.name, 10 + n) for n in range(3) for c in chosen for a in ARMS]
    )
    assert curves.draw(tmp_path / "new", found, chosen, ARMS, 2) == [
        tmp_path / "new/concurrency-2.png"
    ]
    assert (tmp_path / "new/concurrency-2.png").read_bytes().startswith(b"\x89PNG")


def judged(found: Results, shape: str) -> dict[str, bool]:
    return {t.metric: t.ok for t in results.targets(found, shape, ARMS, [2])}


def test_targets_are_those_of_the_shape_and_of_what_was_measured() -> None:
    found = sampled(epikvbf16=[10, 10], openvinobf16=[8, 8], transformersbf16=[5, 5])
    metric = "streams16_over(OpenVINO GenAI bf16, 2 threads)"
    assert judged(found, "small") == {metric: True}
    assert judged(found, "0.5b") == {metric: False}  # 1.25, of 1.7
    bounds = {"ourbf16": [11, 11], "onednn'sbf16": [10, 10]}
    metric = "streams16_over(our linears alone bf16, 2 threads)"
    assert judged(sampled(epikvbf16=[10, 10], **bounds), "0.5b") == {metric: True}  # .91, of .85
    wrong = {"transformers fp32": Agreement(384, 1, 0.5), "epikv bf16": Agreement(384, 9, 0.5)}
    assert judged(Results(agreed=wrong), "small") == {"wrong_tokens(transformers fp32)": False}


def test_limits_are_of_bounds_that_were_measured_beside() -> None:
    own = [arm("epikv bf16, sliding 512", "ours", budget=512)]
    bounds = [arm("memory read bf16, 512 tokens", "memory", budget=512)]
    rates = {"epikv bf16": 5, own[0].name: 6, "memory read bf16": 7, bounds[0].name: 12}
    found = sampled(epikvbf16=[10], openvinobf16=[5], ourbf16=[12])
    found.samples += [Sample(0, 2, "16x2048", name, rate) for name, rate in rates.items()]
    linears = "our linears alone bf16"
    of_budget = "16x2048(epikv bf16, sliding 512)_over_16x2048(epikv bf16, 2 threads)"
    assert list(results.limits(found, "0.5b", ARMS + own + bounds, [2])) == [
        f"streams16_over(OpenVINO GenAI bf16, 2 threads): {linears} allows 2.4 [2.4, 2.4]",
        f"{of_budget}: memory read bf16, 512 tokens allows 2.4 [2.4, 2.4]",
    ]
    assert list(results.limits(found, "0.5b", ARMS + own + bounds, [1])) == []
    found.samples.append(Sample(0, 2, "16x2048", linears, 8))  # lower than memory's
    allowed = list(results.limits(found, "0.5b", ARMS + own + bounds, [2]))
    assert f"{of_budget}: {linears} allows 1.6 [1.6, 1.6]" in allowed


def test_memory_is_held_against_what_is_to_be_resident_and_the_smallest_peer() -> None:
    peaks = {"epikv bf16": 110, "OpenVINO GenAI bf16": 300, "transformers bf16": 105}
    found = Results([Sample(0, 2, "memory", name, peak) for name, peak in peaks.items()])
    found.held[2, "epikv bf16"] = 100
    assert judged(found, "0.5b") == {
        "memory(epikv bf16, 2 threads)_over_held": True,
        "memory(epikv bf16, 2 threads)_over(transformers bf16)": False,
    }
    # Nothing can be said of a peer that was measured in other rounds alone.
    found.samples[:] = [s for s in found.samples if s.arm == "epikv bf16"]
    found.samples.append(Sample(1, 2, "memory", "transformers bf16", 105))
    assert list(judged(found, "0.5b")) == ["memory(epikv bf16, 2 threads)_over_held"]


def test_budgets_take_part_where_there_is_something_to_evict() -> None:
    everyone = engines.arms()
    of = {name: [a.name for a in everyone if a.takes_part(cell(name))] for name in (
        "decode1", "decode4096", "generated4096", "16x2048", "memory", "prefill4096",
    )}  # fmt: skip
    assert len({each.name for each in everyone}) == len(everyone)
    assert not any(
        "512" in name for cell in ("decode1", "memory", "prefill4096") for name in of[cell]
    )
    assert "epikv bf16, sliding 512" in of["decode4096"]
    assert "OpenVINO GenAI bf16, evicts at 512" in of["decode4096"]
    assert "epikv bf16, epikv_flat 512" not in of["decode4096"]  # it ranks no prompt
    assert "epikv bf16, epikv_flat 512" in of["generated4096"]
    assert not any("bf16" not in name for name in of["16x2048"])
    assert not any("memory read" in name for name in of["memory"] + of["prefill4096"])
    assert "memory read bf16, 512 tokens" in of["16x2048"]
    assert "our linears alone bf16" in of["decode1"] and "our linears alone bf16" in of["16x2048"]
    assert "our linears alone bf16" not in of["decode4096"] + of["generated4096"] + of["memory"]


def test_prompt_lookup_is_measured_beside_the_same_engines_without() -> None:
    found = [arm.name for arm in engines.arms() if arm.takes_part(cell("lookup1"))]
    guessing = [name for name in found if name.endswith(engines.LOOKUP)]
    assert {name.removesuffix(engines.LOOKUP) for name in guessing} == {
        "OpenVINO GenAI bf16", "epikv bf16", "llama.cpp bf16", "transformers bf16",
    }  # fmt: skip
    assert {name.removesuffix(engines.LOOKUP) for name in guessing} < {*found}
    assert not any("memory read" in name or "512" in name for name in found)
    others = [arm for arm in engines.arms() if arm.takes_part(cell("decode1"))]
    assert not any(arm.lookup for arm in others)
    (job,) = (
        cell("lookup1").job(300, 0, arm.kv, arm.lookup)
        for arm in engines.arms()
        if arm.name == "epikv bf16, prompt lookup"
    )
    assert job.lookup and job.new == 512
    assert cell("lookup1").figure(reply([0.5 + 0.01 * n for n in range(512)])) == pytest.approx(100)


# A peer that answers the first token of a prompt, and does what its text says at special ones.
PEER = """
import os, signal, sys, time
sys.path.insert(0, {runners!r})
from serve import Streams, serve
def load(config):
    print("a banner on stdout")
    if config["broken"]:
        raise ValueError("no\\nmodel")
    def run(prompts, new):
        if prompts[0][0] == 7:
            raise ValueError("too long")
        if prompts[0][0] == 8:
            print("divided by zero", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGFPE)
        if prompts[0][0] == 9:
            time.sleep(60)
        streams = Streams(len(prompts))
        for step in range(new - (prompts[0][0] == 6)):
            for stream, ids in enumerate(prompts):
                streams.add(stream, ids[0])
        return streams
    return run, {{"threads": config["threads"]}}
serve(load)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    program, made = tmp_path / "peer.py", []
    program.write_text(PEER.format(runners=str(convert.RUNNERS)))

    def make(broken: bool = False) -> Runner:
        made.append(Runner([sys.executable, str(program)], {"broken": broken}, 3))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def test_a_runner_tells_settings_tokens_and_times(peer: Callable[..., Runner]) -> None:
    runner = peer()
    assert runner.settings["threads"] == 3
    assert runner.settings["OMP_NUM_THREADS"] == "3"
    assert runner.settings["GOMP_SPINCOUNT"] == "10000"
    found = runner.run(Job([[4, 5], [3]], 3), 60)
    assert found.tokens == [[4, 4, 4], [3, 3, 3]]
    assert all(0 < a <= b <= c for a, b, c in found.times)
    assert found.peak > 1 << 20 and runner.cpu() > 0


def test_a_runner_that_refuses_a_job_goes_on(peer: Callable[..., Runner]) -> None:
    runner = peer()
    with pytest.raises(Refused, match="ValueError: too long"):
        runner.run(Job([[7]], 3), 60)
    with pytest.raises(Refused, match=r"it generated \[2\] tokens, not 3"):
        runner.run(Job([[6]], 3), 60)
    assert runner.run(Job([[1]], 1), 60).tokens == [[1]]


def test_a_runner_that_dies_or_hangs_says_how(peer: Callable[..., Runner]) -> None:
    with pytest.raises(Refused, match="ValueError: no model"):
        peer(broken=True)
    dead = peer()
    for _ in range(2):  # and it stays dead
        with pytest.raises(Refused, match="it ended with SIGFPE: divided by zero"):
            dead.run(Job([[8]], 1), 60)
    with pytest.raises(Refused, match=r"no answer within 0\.2 s"):
        peer().run(Job([[9]], 1), 0.2)


def test_engines_are_held_to_a_lesser_processor_by_their_own_means(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(engines, "Runner", lambda *each: given.append(each))
    monkeypatch.setattr(venvs, "python", lambda *_: Path(sys.executable))
    monkeypatch.setattr(venvs, "llama", lambda cpu: tmp_path / f"llama-{cpu}")
    monkeypatch.setattr(convert, "gguf", lambda *_: Path("model.gguf"))
    place = engines.Place(TINY, tmp_path, 1, 1000, cpu="avx2")
    arms = {arm.name: arm for arm in engines.arms()}
    arms["llama.cpp bf16"].start(place)
    *_, environment = given[-1]
    assert environment["LLAMA_CPP_LIB_PATH"].startswith(str(tmp_path / "llama-avx2"))
    assert environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    with pytest.raises(Refused, match="holds it to less"):
        arms["ONNX Runtime GenAI int8"].start(place)


def test_what_fails_to_install_is_told_by_its_last_line() -> None:
    with pytest.raises(Refused, match="^pip: no such version$"):
        run([sys.executable, "-c", "print('a\\nno such version\\n'); raise SystemExit(1)"], "pip")
    with pytest.raises(Refused, match="cmake: .*No such file"):
        run(["/nowhere/cmake"], "cmake")


class FakeEngine:
    """Answers each job at 100 tokens/s a stream, or, but for the warm-up, refuses it."""

    def __init__(self, log: list[str], name: str, fails: bool) -> None:
        self.settings = {"fake": True}
        self._log, self._name, self._fails = log, name, fails
        log.append(f"{name} loads")

    def run(self, job: Job, limit: float) -> Reply:
        if self._fails and job.new == 128:
            raise Refused("it fell over")
        if job.new == 128:
            self._log.append(self._name)
        times = [[0.01 * (n + 1) for n in range(job.new)] for _ in job.prompts]
        return Reply([[1] * job.new for _ in job.prompts], times, 1)

    def cpu(self) -> float:
        return 0.0

    def close(self) -> None:
        self._log.append(f"{self._name} ends")


@pytest.fixture
def place(tmp_path: Path) -> engines.Place:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return engines.Place(TINY, tmp_path, 1, 1000)


def faked(log: list[str], *names: str, fails: str = "") -> list[Arm]:
    def starter(name: str) -> Callable[[object], FakeEngine]:
        return lambda place: FakeEngine(log, name, name == fails)

    return [Arm(name, "peer", "bf16", starter(name)) for name in names]


def test_each_round_measures_each_engine_once_and_loads_none_again(place: engines.Place) -> None:
    log: list[str] = []
    loaded = Loaded(place, Results())
    rounds.measure(loaded, parse("decode1"), faked(log, "a", "b", "c"), 8, 60)
    loaded.close()
    measured = [entry for entry in log if len(entry) == 1]
    orders = ["".join(measured[n : n + 3]) for n in range(0, 24, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders) and len(set(orders)) > 1
    assert sum(entry.endswith("loads") for entry in log) == 3
    assert sum(entry.endswith("ends") for entry in log) == 3
    assert [sample.value for sample in loaded.results.samples] == [pytest.approx(100)] * 24


def test_one_that_fails_is_told_and_the_others_go_on(place: engines.Place) -> None:
    log: list[str] = []
    loaded = Loaded(place, Results())
    arms = [*faked(log, "a", "b", fails="b"), arm("c", "peer")]
    rounds.measure(loaded, parse("decode1,decode512"), arms, 2, 60)
    loaded.close()
    assert {sample.arm for sample in loaded.results.samples} == {"a"}
    assert loaded.results.refused == {
        (1, name, who): why
        for name in ("decode1", "decode512")
        for who, why in (("b", "it fell over"), ("c", "there is none"))
    }


def test_where_memory_is_short_the_engine_used_longest_ago_ends(
    place: engines.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    a, b, c = faked(log, "a", "b", "c")
    loaded = Loaded(place, Results())
    job = loaded.job(cell("decode1"), 0, FULL)
    for each in (a, b, a):
        loaded.run(each, job, 60)
    free = iter([0, 1 << 40])
    monkeypatch.setattr(rounds, "_available", lambda: next(free))
    loaded.run(c, job, 60)
    assert log == ["a loads", "a", "b loads", "b", "a", "b ends", "c loads", "c"]
    loaded.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    checkpoint.write(TINY, path, context=512)
    return path


def generated(directory: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
    )
    return out[:, ids.shape[1] :].tolist()


def test_a_checkpoint_is_qwen2_whose_greedy_tokens_neither_repeat_nor_end(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    matrices = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed" not in name
    )
    assert model.config.model_type == "qwen2" and matrices == TINY.matrix_weights
    assert model.model.layers[0].self_attn.q_proj.bias.abs().min() > 0
    assert model.lm_head.weight[checkpoint.END_ID].abs().max() == 0
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == TINY.vocabulary and tokenizer.eos_token_id == checkpoint.END_ID
    text = "banana, bréve 汉字\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    (tokens,) = generated(directory, cell("decode1").job(300, 0, FULL).prompts, 96)
    assert len(tokens) == 96 and len(set(tokens)) > 32


def test_a_checkpoint_exports(directory: Path, tmp_path: Path) -> None:
    from epikv.export import export

    report = export(directory, tmp_path / "model.pt", dtype="float32")
    assert report.passed()


def test_tokens_that_transformers_would_not_choose_are_wrong(directory: Path) -> None:
    prompts = agree.CELL.job(TINY.vocabulary, 0, FULL).prompts
    tokens = generated(directory, prompts, 64)
    bent = [tokens[0][:-1] + [checkpoint.END_ID], *tokens[1:]]
    silent = [[-1] * 64] * 4
    replies = {
        name: Reply(each, [], 0)
        for name, each in (("right", tokens), ("bent", bent), ("silent", silent))
    }
    found = agree.agreements(directory, prompts, replies)
    assert found["right"].wrong == 0 and found["right"].tokens == 4 * 64
    assert found["bent"].wrong == 1 and found["bent"].worst > agree.TIE
    assert "silent" not in found


def test_bytes_of_a_token_are_those_of_the_shape() -> None:
    assert checkpoint.SHAPES["0.5b"].kv_bytes(2) == 24 * 2 * 2 * 64 * 2
    assert cells.GROUPS["context"][-1] == "decode16384"
    assert max(c.prompt + c.new for c in parse("context")) <= checkpoint.CONTEXT
