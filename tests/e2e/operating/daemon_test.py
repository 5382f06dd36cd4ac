"""The daemon's life: what keeps it from starting, what operators see, and how it ends."""

import os
import signal
import socket
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import broken_models
import grpc
import pytest
import torch
from epikv import Accepted, Client, Kv, Output, RpcError, Stop, Summary
from epikv.export import random_model
from epikv.sample import problem
from epikv.scrape import fetch, scrape
from epikv.testing import PACED, Daemon, DaemonError
from epikv.v1 import admin_pb2, admin_pb2_grpc
from epikv.v1.config_pb2 import ModelSource
from epikv.v1.generation_pb2 import GenerateRequest
from failed_start import PORTS, start
from grpc_health.v1 import health_pb2, health_pb2_grpc
from metrics_page import parse

TASK = problem(9)


def load_request(path: Path, name: str) -> admin_pb2.LoadModelRequest:
    return admin_pb2.LoadModelRequest(source=ModelSource(path=str(path), name=name))


def health_of(daemon: Daemon, service: str) -> str:
    with grpc.insecure_channel(daemon.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        status = health_pb2_grpc.HealthStub(channel).Check(request).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    broken_models.write(folder)
    return folder


@pytest.mark.parametrize("name", ["missing_attention", "no_manifest", "truncated", "empty"])
def test_broken_models_are_refused(broken: Path, name: str) -> None:
    status, log = start(f"--model={broken / name}.pt")
    assert status == 1
    assert name in log.splitlines()[-1], log


def test_corrupt_and_truncated_models_are_refused(sample_model: Path, tmp_path: Path) -> None:
    whole = bytearray(sample_model.read_bytes())
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole[: len(whole) // 2])
    whole[len(whole) // 2] ^= 0x10  # in the middle of the weights
    flipped = tmp_path / "flipped.pt"
    flipped.write_bytes(whole)
    for path in (cut, flipped, tmp_path / "absent.pt"):
        status, log = start(f"--model={path}")
        assert status == 1 and str(path) in log, log


def test_flags_and_ports_are_checked_before_the_model(tmp_path: Path) -> None:
    model = f"--model={tmp_path / 'never read.pt'}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in (f"--{port}={address}" for port in PORTS):
            status, log = start(model, flag)
            assert status == 1 and address in log, log
    status, log = start(model, "--max_running_requests=some")
    assert status == 1 and "max_running_requests" in log


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(sample_model: Path) -> None:
    status, log = start(f"--model={sample_model}", "--device=cuda")
    assert status == 1 and "--device=cuda needs a" in log and "--device=cpu" in log, log


def test_health_and_reflection(daemon: Daemon) -> None:
    with grpc.insecure_channel(daemon.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "epikv.v1.GenerationService", "models/sample"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        list_services = b"\x3a\x00"  # field 7, an empty string
        listed = next(channel.stream_stream(method)(iter([list_services]), timeout=10))
    for name in ("GenerationService", "TokenizationService", "ModelService", "PolicyService"):
        assert f"epikv.v1.{name}".encode() in listed


def test_ports_answer_while_the_model_is_loaded(sample_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    seen: list[int] = []
    refused: list[grpc.RpcError] = []

    def watch() -> None:
        eager = [(f"grpc.{which}_reconnect_backoff_ms", 10) for which in ("initial", "min", "max")]
        with grpc.insecure_channel(address, eager) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="")
            for reply in stub.Watch(request, wait_for_ready=True, timeout=60):
                seen.append(reply.status)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                generate = channel.unary_unary("/epikv.v1.GenerationService/GenerateOnce")
                with pytest.raises(grpc.RpcError) as error:
                    generate(GenerateRequest(text=TASK.prompt).SerializeToString(), timeout=10)
                refused.append(error.value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    more = [
        f"--models=path: '{sample_model}' name: '{i}' kv_pool_bytes: 33554432" for i in range(9)
    ]
    with Daemon(sample_model, f"--listen={address}", "--threads=1", *more):
        watcher.join(60)
    assert seen == [
        health_pb2.HealthCheckResponse.NOT_SERVING,
        health_pb2.HealthCheckResponse.SERVING,
    ]
    assert [error.code() for error in refused] == [grpc.StatusCode.UNAVAILABLE]
    assert "loading its models" in refused[0].details()


def test_a_failed_start_ends_although_somebody_watches(sample_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    seen: list[int] = []

    def watch() -> None:
        eager = [(f"grpc.{which}_reconnect_backoff_ms", 10) for which in ("initial", "min", "max")]
        with grpc.insecure_channel(address, eager) as channel, pytest.raises(grpc.RpcError):
            request = health_pb2.HealthCheckRequest(service="")
            stub = health_pb2_grpc.HealthStub(channel)
            seen.extend(r.status for r in stub.Watch(request, wait_for_ready=True, timeout=60))

    watcher = threading.Thread(target=watch)
    watcher.start()
    more = [
        f"--models=path: '{sample_model}' name: '{i}' kv_pool_bytes: 33554432" for i in range(9)
    ]
    missing = "--models=path: '/none.pt'"
    status, log = start(f"--model={sample_model}", f"--listen={address}", *more, missing)
    watcher.join()
    assert status == 1 and "/none.pt" in log.splitlines()[-1], log
    assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING]


def test_several_models_have_an_engine_each(sample_model: Path) -> None:
    more = f"--models=path: '{sample_model}' name: 'b' kv_pool_bytes: 33554432"
    with Daemon(sample_model, "--threads=1", more) as daemon, daemon.client() as client:
        assert [model.name for model in client.models()] == ["b", "sample"]
        results = {}

        def ask(model: str) -> None:
            results[model] = client.generate_once(TASK.prompt, model=model, stop=Stop(100))

        askers = [threading.Thread(target=ask, args=(model,)) for model in ("b", "sample")]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert results["b"].text == results["sample"].text
        with urllib.request.urlopen(f"http://{daemon.metrics}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        assert 'epikv_kv_capacity_bytes{model="b"} 33554432\n' in page
        for model in ("b", "sample"):
            labels = f'model="{model}",arm="none",kind="output",policy="full"'
            assert f"epikv_tokens_total{{{labels}}} 100\n" in page
        with pytest.raises(RpcError, match="'b', 'sample'"):
            client.generate_once(TASK.prompt)
    status, log = start(f"--model={sample_model}", f"--models=path: '{sample_model}'")
    assert status == 1 and "'sample' is served already" in log


def step_seconds(daemon: Daemon) -> dict[str, float]:
    """Wall time that the engine of each model has spent in steps."""
    seconds: dict[str, float] = {}
    for labels, value in parse(fetch(daemon.metrics))["epikv_step_seconds_total"].values.items():
        has = dict(labels)
        if has["stage"] not in ("attention", "taps"):  # which lie inside `forward`
            seconds[has["model"]] = seconds.get(has["model"], 0) + value
    return seconds


@pytest.mark.parametrize(
    ("threads", "of_each", "least", "most"),
    [pytest.param(0, 0, 0.6, 1.1, id="turns"), pytest.param(2, 1, 1.2, 2.5, id="beside")],
)
def test_engines_share_one_budget_of_cores(
    sample_model: Path, threads: int, of_each: int, least: float, most: float
) -> None:
    """Where a step takes all cores, two busy engines are in steps for as long together as one would
    be alone; where there is room for both, for nearly twice as long. (Measured, it may seem more: a step counts as it
    ends.)"""
    names = ("b", "c")
    source = f"path: '{sample_model}' kv_pool_bytes: 134217728 threads: {of_each}"
    more = [f"--models={source} name: '{name}'" for name in names]
    flags = (f"--threads={threads}", "--kv_pool_bytes=33554432", "--prefix_cache_share=0")
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(sample_model, *flags, *more))
        client = stack.enter_context(daemon.client())
        long, silent = Stop(900, ignore_eos=True), Output(text=False)
        for name in names * 32:
            stack.enter_context(client.generate([5] * 40, model=name, stop=long, output=silent))
        deadline = time.monotonic() + 60
        while not all(step_seconds(daemon)[name] for name in names):
            assert time.monotonic() < deadline
        begin, before = time.monotonic(), step_seconds(daemon)
        spent = dict.fromkeys(names, 0.0)
        while min(spent.values()) < 2:  # long beside a step, which counts as it ends
            after = step_seconds(daemon)
            spent = {name: after[name] - before[name] for name in names}
            assert time.monotonic() < deadline
        share = sum(spent.values()) / (time.monotonic() - begin)
        running = parse(fetch(daemon.metrics))["epikv_requests_running"].values
        assert sum(running.values()) == 64, "they were not busy throughout"
    assert least < share < most
    assert min(spent.values()) > 0.3 * sum(spent.values())


def test_metrics_tell_what_happened(daemon: Daemon, client: Client) -> None:
    before = scrape(daemon.metrics)
    result = client.generate_once(TASK.prompt, kv=Kv("sliding", 300), stop=Stop(200))
    with pytest.raises(RpcError):
        client.generate_once("")
    deadline = time.monotonic() + 5
    while (after := scrape(daemon.metrics)).total("epikv_requests_running") > 0:
        assert time.monotonic() < deadline
    added = after - before
    labels = {"policy": "sliding", "arm": "none"}
    assert added.value("epikv_requests_finished_total", reason="length", **labels) == 1
    assert added.value("epikv_tokens_total", kind="output", **labels) == 200
    evicted = added.value("epikv_kv_tokens_evicted_total", phase="decode", **labels)
    assert evicted == result.summary.kv.evicted_tokens > 0
    assert added.value("epikv_requests_rejected_total", reason="invalid_request") == 1
    states = ("used", "reserved", "cached_prefix", "free")
    held = [after.value("epikv_kv_bytes", state=state) for state in states]
    assert held[:2] == [0, 0] and sum(held) == after.value("epikv_kv_capacity_bytes")


def test_metrics_answer_while_a_step_runs(daemon: Daemon, client: Client) -> None:
    with client.generate(TASK.prompt, stop=Stop(800), output=Output(text=False)) as stream:
        next(stream)
        begin = time.monotonic()
        assert scrape(daemon.metrics).total("epikv_requests_running") >= 0
        assert time.monotonic() - begin < 2


def test_sigterm_lets_streams_finish(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        streams = [client.generate(TASK.prompt, kv=Kv("full")) for _ in range(4)]
        for stream in streams:
            assert isinstance(next(stream), Accepted)
            next(stream)  # a first token
        daemon.terminate()
        texts = [list(stream) for stream in streams]
        assert all(isinstance(events[-1], Summary) for events in texts)
        assert daemon.stop() == 0
        with pytest.raises(RpcError) as caught:
            client.generate_once("x", timeout=5)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_sigterm_waits_no_longer_than_it_may(sample_model: Path) -> None:
    """A stream that would go on is ended with a status; so is one that comes too late."""
    with Daemon(sample_model, "--threads=1", "--drain_seconds=0.3") as daemon:
        with daemon.client() as client:
            codes: list[grpc.StatusCode] = []

            def run() -> None:
                try:
                    list(client.generate(TASK.prompt, kv=Kv("full")))
                except RpcError as error:
                    codes.append(error.code)

            threads = [threading.Thread(target=run) for _ in range(64)]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            begin = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - begin < 5
            for thread in threads:
                thread.join()
    assert codes and set(codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_sigterm_under_load_finishes_what_fits_and_tells_the_rest(sample_model: Path) -> None:
    """Health first; then new requests are refused; short streams end well, long ones are told why
    they do not."""
    short, long = Stop(max_output_tokens=40), Stop(max_output_tokens=1150, ignore_eos=True)
    flags = ("--threads=1", "--max_running_requests=64", "--drain_seconds=6")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        streams = {stop: [] for stop in (short, long)}
        for stop, count in ((long, 48), (short, 16), (long, 352)):  # the last of them wait
            for _ in range(count):
                stream = client.generate(TASK.prompt, stop=stop)
                assert isinstance(next(stream), Accepted)
                streams[stop].append(stream)
        with grpc.insecure_channel(daemon.grpc) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            daemon.terminate()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            refused = None
            while refused is None:  # in the moment between the two
                try:
                    client.generate_once("x", stop=Stop(max_output_tokens=1))
                except RpcError as error:
                    refused = error
            assert_drained(refused)
        for stream in streams[short]:
            assert isinstance(list(stream)[-1], Summary)
        for stream in streams[long]:
            with pytest.raises(RpcError) as caught:
                list(stream)
            assert_drained(caught.value)
        assert daemon.stop() == 0


def test_sigterm_waits_for_balancers_to_turn_away(sample_model: Path) -> None:
    """Who has not looked at health yet is told to come again, by a port that is still there."""
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        stream = client.generate(TASK.prompt, stop=Stop(300, min_output_tokens=300))
        for _ in range(2):
            next(stream)
        daemon.terminate()
        list(stream)
        end = time.monotonic() + 3  # the streams have ended: nothing else keeps the port open
        while time.monotonic() < end:
            with pytest.raises(RpcError) as refused:
                client.generate_once("x", stop=Stop(max_output_tokens=1))
            assert_drained(refused.value)
            time.sleep(0.1)
        begin = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - begin < 5


def assert_drained(error: RpcError) -> None:
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING"), str(error)
    assert error.retry_delay is not None and error.retry_delay > 0


def test_a_second_signal_ends_at_once(sample_model: Path) -> None:
    flags = ("--threads=1", "--drain_seconds=600", "--stream_stall_seconds=600")
    endless = Stop(max_output_tokens=900, ignore_eos=True)
    with (
        pytest.raises(DaemonError, match="status 143"),
        Daemon(sample_model, *flags, "--outbox_messages=8") as daemon,
        Client(daemon.grpc, PACED) as client,
        client.generate(
            TASK.prompt, kv=Kv("epikv_flat", 130), stop=endless, output=Output(kv_trace=True)
        ) as held,
    ):
        next(held)
        daemon.terminate()
        while "stopping" not in daemon.log:
            time.sleep(0.01)
        os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.stop() == 128 + signal.SIGTERM


def test_ever_new_shapes_leave_nothing_behind(tmp_path: Path) -> None:
    """Each length of a prompt is a shape of its own to oneDNN, which keeps kernels by shape."""
    config = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    }
    random_model(config, tmp_path / "model.pt", "bfloat16", check=False)
    with Daemon(tmp_path / "model.pt", "--threads=1", "--prefix_cache_share=0") as daemon:
        with daemon.client() as client:

            def resident_after(lengths: range) -> float:
                for length in lengths:
                    client.generate_once([1] * length, stop=Stop(max_output_tokens=1))
                return scrape(daemon.metrics).value("process_resident_memory_bytes")

            before = resident_after(range(1, 64))
            after = resident_after(range(64, 256))
    assert after - before < 16 << 20


def test_what_cannot_be_served_is_told_before_anything_is_loaded(
    sample_model: Path, tmp_path: Path
) -> None:
    status, log = start(f"--model={sample_model}", "--default_policy=nosuch")
    assert status == 1 and "unknown policy 'nosuch'" in log and "loading the model" not in log
    status, log = start(f"--model={tmp_path}")
    assert status == 1 and "`epikv serve` takes a Hugging Face directory" in log


def test_files_that_would_never_end_are_refused(sample_model: Path, tmp_path: Path) -> None:
    """A pipe, which nobody writes to: neither the start nor a load waits for it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for flags in ([f"--model={pipe}"], [f"--model={sample_model}", f"--auth_tokens_file={pipe}"]):
        status, log = start(*flags)
        assert status == 1 and "is not a regular file" in log
    with Daemon(sample_model, "--threads=1") as daemon, grpc.insecure_channel(daemon.admin) as port:
        admin = admin_pb2_grpc.AdminServiceStub(port)
        with pytest.raises(grpc.RpcError) as refused:
            admin.LoadModel(load_request(pipe, "b"), timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert daemon.stop() == 0


def test_sigterm_does_not_wait_for_a_model(sample_model: Path) -> None:
    """Loading cannot be cancelled; who waits for it is told, and the process ends."""
    with Daemon(sample_model, "--threads=1", "--drain_seconds=0") as daemon:
        with grpc.insecure_channel(daemon.admin) as port:
            admin = admin_pb2_grpc.AdminServiceStub(port)
            load = admin.LoadModel.future(load_request(sample_model, "b"), timeout=30)
            loading = admin_pb2.ModelStatus.STATE_LOADING
            while True:
                models = admin.GetServerStatus(admin_pb2.GetServerStatusRequest()).models
                if loading in [model.state for model in models]:
                    break
            begin = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - begin < 5
            assert load.code() is grpc.StatusCode.UNAVAILABLE
            assert "was not loaded" in load.details()


def test_pools_of_several_models_share_the_memory(sample_model: Path) -> None:
    """Each takes its share of what the others leave, whether they have touched theirs or not."""
    others = [f"--models=path: '{sample_model}' name: '{name}'" for name in "bc"]
    with Daemon(sample_model, "--threads=1", "--model_name=a", *others) as daemon:
        with daemon.client() as client:
            tokens = {model.name: model.kv_capacity_tokens for model in client.models()}
        assert tokens["a"] > 1.6 * tokens["b"] > 1.6 * 1.6 * tokens["c"] > 0
        with grpc.insecure_channel(daemon.admin) as port:
            admin = admin_pb2_grpc.AdminServiceStub(port)
            request = load_request(sample_model, "d")
            request.source.kv_pool_bytes = 1 << 60
            with pytest.raises(grpc.RpcError) as refused:
                admin.LoadModel(request, timeout=30)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert str(1 << 60) in refused.value.details()


def test_without_a_model_it_is_not_healthy(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1", "--model_name=a") as daemon:
        with grpc.insecure_channel(daemon.admin) as port:
            admin = admin_pb2_grpc.AdminServiceStub(port)
            admin.UnloadModel(admin_pb2.UnloadModelRequest(name="a"))
            assert health_of(daemon, "") == health_of(daemon, "models/a") == "NOT_SERVING"
            assert health_of(daemon, "liveness") == "SERVING"
            admin.LoadModel(load_request(sample_model, "b"), timeout=30)
            assert health_of(daemon, "") == health_of(daemon, "models/b") == "SERVING"


def test_lines_that_a_full_disk_takes_are_missed(sample_model: Path) -> None:
    flags = ("--threads=1", "--access_log=/dev/full")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        for _ in range(3):
            client.models()
            time.sleep(0.05)
        assert daemon.stop() == 0
        assert daemon.log.count("--access_log cannot be written") == 1
