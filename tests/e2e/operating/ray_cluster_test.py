"""epikvd on a Ray cluster of two nodes: Ray Serve in front of it (docs/ray.md), and `epikv eval --ray`.

One cluster is for all tests, which end Ray Serve before the evaluation.
"""

import hashlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from epikv import Client, Delta, Experiment, Kv, RpcError, Stop, Summary
from epikv.cli import main
from epikv.eval.results import read
from epikv.prefix import HEADER
from epikv.ray.process import Process
from epikv.ray.settings import Settings
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError, Gateway
from epikv.v1 import generation_pb2, generation_pb2_grpc
from openai import OpenAI
from page_blocks import ROOT, blocks
from ray_cluster import GENEROUS_SECONDS, PYTHON, RayCluster, python
from waiting import eventually

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import recorded
from recorded import Ledger, Traffic

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="Ray is not there: tests/nightly.sh and ray_nodes/install.sh put it there",
)
AT_ONCE = 4  # that a daemon runs
FLAGS = ["--deterministic", f"--max_running_requests={AT_ONCE}", "--prefix_cache_share=0"]
LONG = Stop(max_output_tokens=700, ignore_eos=True)
HALF = Kv("cur", budget=300)


def settings(model: Path, *more: str) -> dict[str, Any]:
    return {
        "model": str(model),
        "digest": hashlib.sha256(model.read_bytes()).hexdigest(),
        "flags": [*FLAGS, *more],
        "waiting_per_replica": 2,
        "autoscaling": {
            "min_replicas": 1,
            "max_replicas": 2,
            "upscale_delay_s": 0,
            "look_back_period_s": 1,
        },
        "drain_seconds": 30,
    }


@pytest.fixture(scope="module")
def cluster(sample_model: Path) -> Iterator[RayCluster]:
    with RayCluster(settings(sample_model)) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: RayCluster) -> Iterator[Client]:
    with Client(cluster.grpc) as connected:
        yield connected


@pytest.fixture(scope="module")
def scaled(cluster: RayCluster, client: Client) -> RayCluster:
    """With a second replica, since many waited for the first."""
    assert len(cluster.replicas()) == 1
    with ThreadPoolExecutor(4 * AT_ONCE) as pool:
        ended = threading.Event()

        def ask(_: int) -> None:
            while not ended.is_set():
                client.generate_once(problem(0).prompt, stop=Stop(max_output_tokens=300))

        asking = [pool.submit(ask, index) for index in range(4 * AT_ONCE)]
        try:
            eventually(lambda: cluster.ask("wanted") == 2, GENEROUS_SECONDS)
        finally:
            ended.set()
        for each in asking:
            each.result()
    eventually(lambda: len(cluster.replicas()) == 2, GENEROUS_SECONDS)
    return cluster


@pytest.fixture(scope="module")
def plain(sample_model: Path) -> Iterator[Daemon]:
    with Daemon(sample_model, "--threads=1", *FLAGS) as daemon:
        yield daemon


def answered(stream: Any) -> tuple[str, str, int]:
    """What a stream says."""
    events = list(stream)
    assert isinstance(events[-1], Summary)
    text = "".join(each.text for each in events if isinstance(each, Delta))
    return text, events[-1].finish_reason, events[-1].usage.output_tokens


def outcomes(streams: list[Any]) -> list[str]:
    """Why each has ended; one that failed, by UNAVAILABLE alone."""
    found = []
    for stream in streams:
        try:
            found.append(answered(stream)[1])
        except RpcError as error:
            assert error.code is grpc.StatusCode.UNAVAILABLE, error
            found.append("failed")
    return found


def requests(replica: dict[str, str]) -> float:
    page = scrape(replica["metrics"])
    return page.total("epikv_requests_finished_total")


def open_requests(replica: dict[str, str]) -> float:
    page = scrape(replica["metrics"])
    return sum(page.total(f"epikv_load_{kind}_requests") for kind in ("running", "waiting"))


def replace(cluster: RayCluster, changed: dict[str, Any]) -> None:
    """Both replicas, by two of these settings."""
    before = {each["grpc"] for each in cluster.replicas()}
    cluster.ask(f"change {json.dumps(changed, separators=(',', ':'))}")

    def replaced() -> bool:
        now = {each["grpc"] for each in cluster.replicas()}
        return len(now) == 2 and not now & before

    eventually(replaced, GENEROUS_SECONDS)


def test_a_replica_comes_where_many_wait(scaled: RayCluster) -> None:
    replicas = scaled.replicas()
    assert {each["node"] for each in replicas} == set(scaled.nodes)


def test_answers_are_a_daemons(scaled: RayCluster, client: Client, plain: Daemon) -> None:
    with plain.client() as alone:
        for kv in (Kv(), HALF):
            streams = [each.generate(problem(1).prompt, kv=kv) for each in (client, alone)]
            assert answered(streams[0]) == answered(streams[1])
            whole = [each.generate_once(problem(2).prompt, kv=kv).text for each in (client, alone)]
            assert whole[0] == whole[1]
        scores = [each.score([5, 6, 7], [8, 9]) for each in (client, alone)]
        assert scores[0].logprobs == scores[1].logprobs
        assert client.tokenize("#0 $b") == alone.tokenize("#0 $b")
        assert client.tokenizer_json() == alone.tokenizer_json()


def test_http_answers_are_a_gateways(scaled: RayCluster, plain: Daemon) -> None:
    def ask(url: str) -> list[str]:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
            asked: Any = {"model": "sample", "prompt": problem(3).prompt, "max_tokens": 40}
            whole = openai.completions.create(**asked)
            pieces = openai.completions.create(**asked, stream=True)
            came = [each.choices[0].text for each in pieces]
            assert len(came) > 10  # what lags comes in larger pieces
            return [whole.choices[0].text, "".join(came)]

    with Gateway(plain.grpc) as gateway:
        expected = ask(gateway.url)
    assert ask(scaled.http) == expected


def test_refusals_keep_code_and_details(scaled: RayCluster, client: Client, plain: Daemon) -> None:
    def refused(asked: Client, streams: bool) -> dict[str, Any]:
        with pytest.raises(RpcError) as caught:
            if streams:
                list(asked.generate("x", kv=Kv("none", budget=100)))
            else:
                asked.generate_once("x", kv=Kv("none", budget=100))
        told = vars(caught.value)
        assert len(told.pop("metadata")["trace_id"]) == 32
        return told

    with plain.client() as alone:
        for streams in (True, False):
            assert refused(client, streams) == refused(alone, streams)
            assert refused(client, streams)["field_violations"]


def test_trailers_come_back(scaled: RayCluster) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    metadata = [("traceparent", f"00-{trace}-b7ad6b7169203331-01")]
    request = generation_pb2.GenerateRequest(text=problem(0).prompt)
    request.stop.max_output_tokens = 4
    with grpc.insecure_channel(scaled.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.Generate(request, metadata=metadata)
        list(stream)
        _, once = stub.GenerateOnce.with_call(request, metadata=metadata)
    for call in (stream, once):
        assert trace in dict(call.trailing_metadata())["traceparent"]


def test_what_begins_alike_goes_to_one_replica(scaled: RayCluster, client: Client) -> None:
    replicas = scaled.replicas()
    first = set()
    for index in range(8):
        before = [requests(each) for each in replicas]
        for _ in range(3):
            client.generate_once(problem(index).prompt, stop=Stop(max_output_tokens=2))
        added = [requests(each) - then for each, then in zip(replicas, before, strict=True)]
        assert sorted(added) == [0, 3], index
        first.add(added[0])
    assert first == {0, 3}  # other prefixes, other replicas


@pytest.mark.parametrize("header", [HEADER, "x-session-id"])
def test_by_http_a_header_chooses_the_replica(scaled: RayCluster, header: str) -> None:
    replicas = scaled.replicas()
    with OpenAI(base_url=f"{scaled.http}/v1", api_key="none", max_retries=0) as openai:
        first = set()
        for index in range(8):
            before = [requests(each) for each in replicas]
            for _ in range(3):
                openai.completions.create(
                    model="sample",
                    prompt="#0",
                    max_tokens=1,
                    extra_headers={header: f"conversation {index}"},
                )
            added = [requests(each) - then for each, then in zip(replicas, before, strict=True)]
            assert sorted(added) == [0, 3], index
            first.add(added[0])
    assert first == {0, 3}


def test_a_client_that_leaves_ends_its_request(scaled: RayCluster, client: Client) -> None:
    def cancelled() -> float:
        pages = [scrape(each["metrics"]) for each in scaled.replicas()]
        name = "epikv_requests_finished_total"
        return sum(page.total(name, reason="cancelled") for page in pages)

    before = cancelled()
    with client.generate(problem(0).prompt, stop=LONG) as stream:
        next(stream)
    eventually(lambda: cancelled() == before + 1)
    with OpenAI(base_url=f"{scaled.http}/v1", api_key="none", max_retries=0) as openai:
        asked: Any = {"model": "sample", "prompt": problem(0).prompt, "max_tokens": 700}
        more = {"ignore_eos": True}
        with openai.completions.create(**asked, stream=True, extra_body=more) as pieces:
            next(iter(pieces))
    eventually(lambda: cancelled() == before + 2)


def test_a_request_is_cancelled_by_its_id(scaled: RayCluster, client: Client) -> None:
    for index in range(4):  # on either replica
        with client.generate(problem(index).prompt, stop=LONG, request_id="mine") as stream:
            next(stream)
            client.cancel("mine")
            with pytest.raises(RpcError, match="CANCELLED"):
                list(stream)
    with pytest.raises(RpcError, match="NOT_FOUND"):
        client.cancel("nobody's")


def test_streams_end_in_order_where_a_replica_is_replaced(
    scaled: RayCluster, client: Client, sample_model: Path
) -> None:
    streams = [client.generate(problem(index).prompt, stop=LONG) for index in range(6)]
    for stream in streams:
        next(stream)
    assert all(open_requests(each) for each in scaled.replicas())
    replace(scaled, settings(sample_model, "--max_queued_requests=99"))
    assert [answered(stream)[1] for stream in streams] == ["length"] * 6


def test_of_a_daemon_that_dies_only_its_streams_fail(scaled: RayCluster, client: Client) -> None:
    lost, kept = scaled.replicas()
    streams = [client.generate(problem(index).prompt, stop=LONG) for index in range(2 * AT_ONCE)]
    eventually(lambda: open_requests(lost) + open_requests(kept) == len(streams))
    share = open_requests(kept)
    assert 0 < share < len(streams)
    os.kill(int(lost["pid"]), signal.SIGKILL)
    assert outcomes(streams).count("length") == share
    for index in range(AT_ONCE):
        assert client.generate_once(problem(index).prompt, stop=Stop(max_output_tokens=2)).text
    eventually(lambda: len(scaled.replicas()) == 2, GENEROUS_SECONDS)


def test_of_a_node_that_is_killed_only_its_streams_fail(
    scaled: RayCluster, client: Client, plain: Daemon
) -> None:
    head, worker = scaled.nodes
    by_node = {each["node"]: each for each in scaled.replicas()}
    kept, lost = by_node[head], by_node[worker]
    prompts = [problem(index).prompt for index in range(2 * AT_ONCE)]
    with plain.client() as alone:
        alike = [alone.generate(prompt, stop=LONG) for prompt in prompts]
        expected = [answered(stream) for stream in alike]
    streams = [client.generate(prompt, stop=LONG) for prompt in prompts]
    eventually(lambda: open_requests(lost) + open_requests(kept) == len(streams))
    share = open_requests(kept)
    assert 0 < share < len(streams)
    scaled.ask(f"kill {worker}")
    right = 0
    for stream, whole in zip(streams, expected, strict=True):
        try:
            assert answered(stream) == whole
            right += 1
        except RpcError as error:
            assert error.code is grpc.StatusCode.UNAVAILABLE, error
    assert right == share
    with pytest.raises(OSError):  # the daemon has ended with its node
        scrape(lost["metrics"])

    asked = client.generate_once(prompts[0], stop=LONG)  # there is one, and it takes all
    assert asked.text == expected[0][0]
    scaled.nodes[1] = scaled.ask("add")
    eventually(lambda: len(scaled.replicas()) == 2, GENEROUS_SECONDS)
    assert {each["node"] for each in scaled.replicas()} == set(scaled.nodes)


def test_experiments_are_shared_and_lose_no_outcome(
    scaled: RayCluster, client: Client, sample_model: Path, tmp_path: Path
) -> None:
    """While both replicas are replaced, and when a daemon dies."""
    ledger, numbers = Ledger(), itertools.count()
    with recorded.store("postgres", tmp_path) as store:

        def shared(*more: str) -> dict[str, Any]:
            told = settings(sample_model, f"--experiment_store={store.where}", *more)
            return {**told, "experiment_spool": str(tmp_path / "spools")}

        replace(scaled, shared())
        recorded.begin(client)
        with ExitStack() as stack:
            replicas = [stack.enter_context(Client(each["grpc"])) for each in scaled.replicas()]

            def arms(unit: str) -> set[str]:
                """That each replica gives it."""
                context, stop = Experiment(unit_id=unit), Stop(max_output_tokens=1)
                asked = [
                    each.generate_once([5], experiment=context, stop=stop) for each in replicas
                ]
                return {each.accepted.arm for each in asked if each.accepted}

            eventually(lambda: "none" not in arms("unit-0"))  # who did not start it hears of it
            assert all(len(arms(f"unit-{number}")) == 1 for number in range(6))
        with Traffic(scaled.grpc, ledger, numbers=numbers) as traffic:
            traffic.until_more("written", 20)
            replace(scaled, shared("--max_queued_requests=98"))
            traffic.until_more("written", 20)
            assert not traffic.failures
        with Traffic(scaled.grpc, ledger, numbers=numbers) as traffic:
            traffic.until_more("written", 20)
            os.kill(int(scaled.replicas()[0]["pid"]), signal.SIGKILL)
            time.sleep(0.5)
        eventually(lambda: len(scaled.replicas()) == 2, GENEROUS_SECONDS)
        for each in scaled.replicas():
            recorded.await_empty_spool(each["metrics"])
        died = recorded.tell_again(scaled.grpc, ledger)
        assert len(died) <= AT_ONCE, died
        held = recorded.held(ledger, store)
        held.check(lost_requests=ledger.unheard)
        assert held.outcomes >= len(ledger.acknowledged) >= 60
    replace(scaled, settings(sample_model))


def test_another_digest_is_refused(sample_model: Path) -> None:
    flags = Settings(model=sample_model, digest="0" * 64).daemon_flags()
    with pytest.raises(DaemonError, match="model_digests"):
        Process(flags)


TOTAL = 8 * 4


def page_command(**changed: str) -> list[str]:
    """Of docs/ray.md, without --ray; changed: what its options have instead."""
    [block] = [each for each in blocks(ROOT / "docs/ray.md") if "epikv eval" in each.text]
    program, *words = shlex.split(block.text)
    assert program == "epikv" and words.count("--ray") == 1
    words.remove("--ray")
    for option, value in changed.items():
        words[words.index(f"--{option}") + 1] = value
    return [*words, "--problems", "8"]


def test_an_evaluation_survives_interruption_and_the_loss_of_a_node(
    scaled: RayCluster, sample_model: Path, tmp_path: Path
) -> None:
    one, out, log = (tmp_path / name for name in ("one", "out", "log"))
    alone = page_command(model=str(sample_model), out=str(one))
    by_one = CliRunner().invoke(main, [*alone, "--daemon-flag", "threads=1", "--at-once", "2"])
    assert by_one.exit_code == 0, by_one.output

    scaled.ask("end")
    command = [python(), "-c", "from epikv.cli import main; main()"]
    command += page_command(model=str(sample_model), out=str(out))
    command += ["--at-once", "1", "--ray", scaled.address]

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=scaled.environment)

    def wait_for(count: int, process: subprocess.Popen[bytes]) -> None:
        file = out / "results.jsonl"
        while not file.exists() or file.read_bytes().count(b"\n") < count:
            assert process.poll() is None, log.read_text()
            time.sleep(0.005)

    process = start()
    wait_for(TOTAL // 4, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(GENEROUS_SECONDS) == 130, log.read_text()

    process = start()
    wait_for(TOTAL // 2, process)
    scaled.ask(f"kill {scaled.nodes[1]}")
    assert process.wait(GENEROUS_SECONDS) == 0, log.read_text()
    assert "went away, the others go on" in log.read_text()

    def found(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
        records = read(folder)[1]
        assert len(records) == TOTAL
        return {tuple(each.key): {**asdict(each), "decode_seconds": 0} for each in records}

    assert found(out) == found(one)
    assert (out / "summary.json").read_bytes() == (one / "summary.json").read_bytes()
