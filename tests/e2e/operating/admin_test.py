"""The operator's side of a running daemon, through `epikv admin`."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from socket import create_server

import grpc
import pytest
from admin_calls import admin_of
from credentials import new_token, replace
from epikv import Accepted, Client, Delta, Event, Output, RpcError, Stop, Stream, Summary
from epikv.export import random_model
from epikv.sample import problem
from epikv.scrape import fetch, scrape
from epikv.testing import PACED, Daemon
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import eventually

TASK = problem(9)
HealthStatus = health_pb2.HealthCheckResponse.ServingStatus


def test_drain_and_resume(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        admin = admin_of(daemon)
        assert admin("status")["state"] == "STATE_SERVING"
        stream = client.generate(TASK.prompt, stop=Stop(400))
        assert isinstance(next(stream), Accepted)
        assert admin("drain")["state"] == "STATE_DRAINING"
        with pytest.raises(RpcError) as refused:
            client.generate_once(TASK.prompt)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert isinstance(list(stream)[-1], Summary), "what runs goes on"
        assert admin("resume")["state"] == "STATE_SERVING"
        client.generate_once(TASK.prompt, stop=Stop(2))


def test_what_does_not_outlive_the_daemon_is_told(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon:
        admin_of(daemon)("config", "max_queued_requests=64", "log_level=debug")
        assert (
            'max_queued_requests: 64, log_level: "debug"; this holds until the daemon ends'
            in daemon.log
        )


def test_a_loaded_model_is_told_not_to_outlive_the_daemon(sample_model: Path) -> None:
    """One of the configuration is not, nor is one that could not be loaded."""
    told = "was loaded over the port for operators; it is served until the daemon ends"
    with Daemon(sample_model, "--threads=1") as daemon:
        admin = admin_of(daemon)
        admin("load-model", str(sample_model), "--name=sample", status=1)
        assert told not in daemon.log
        admin("load-model", str(sample_model), "--name=b", "--kv-pool-bytes=33554432")
        [line] = [line for line in daemon.log.splitlines() if told in line]
        assert f"{sample_model} {told}: name it in the configuration to keep it" in line


def health(address: str, service: str) -> str:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return HealthStatus.Name(health_pb2_grpc.HealthStub(channel).Check(request).status)


@contextlib.contextmanager
def watched(address: str, *services: str) -> Iterator[dict[str, list[str]]]:
    """All that Watch answers about each, from before the port is open."""
    said: dict[str, list[str]] = {service: [] for service in services}
    eager = [(f"grpc.{which}_reconnect_backoff_ms", 10) for which in ("initial", "min", "max")]

    def watch(stub: health_pb2_grpc.HealthStub, service: str) -> None:
        request = health_pb2.HealthCheckRequest(service=service)
        with contextlib.suppress(grpc.RpcError):  # the channel is closed
            for reply in stub.Watch(request, wait_for_ready=True):
                said[service].append(HealthStatus.Name(reply.status))

    with ThreadPoolExecutor(len(said)) as pool, grpc.insecure_channel(address, eager) as channel:
        for service in said:
            pool.submit(watch, health_pb2_grpc.HealthStub(channel), service)
        yield said


def test_health_is_told_to_who_watches(sample_model: Path) -> None:
    """Of a service, of a model that is there from the start, and of one that comes and goes."""
    up, down, unknown = "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"
    names = ("epikv.v1.GenerationService", "models/sample", "models/b")
    with create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pool = "--kv-pool-bytes=33554432"
    more = [
        f"--models=path: '{sample_model}' name: '{i}' kv_pool_bytes: 33554432" for i in range(3)
    ]
    flags = (f"--listen={address}", "--threads=1", "--kv_pool_bytes=33554432", *more)
    with watched(address, *names) as said, Daemon(sample_model, *flags) as daemon:
        admin = admin_of(daemon)

        def expect(*states: str) -> None:
            eventually(lambda: [said[name][-1:] for name in names] == [[s] for s in states])

        expect(up, up, unknown)
        admin("load-model", str(sample_model), "--name=b", pool)
        expect(up, up, up)
        admin("unload-model", "b")
        expect(up, up, down)
        assert health(daemon.admin, "epikv.v1.AdminService") == up
        admin("drain")
        expect(down, down, down)
        assert health(daemon.admin, "epikv.v1.AdminService") == down
        assert health(daemon.admin, "liveness") == up, "it can be asked to resume"
        admin("resume")
        expect(up, up, down)
        assert health(daemon.admin, "epikv.v1.AdminService") == up
        with pytest.raises(grpc.RpcError) as caught:
            health(daemon.grpc, "epikv.v1.AdminService")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND, "it is on the other port"
        changes = [[state for state, _ in groupby(said[name])] for name in names]
    life = [down, up, down, up]
    assert changes == [life, [unknown, *life], [unknown, up, down]]


def test_requests_say_what_they_do(sample_model: Path) -> None:
    flags = ("--threads=1", "--max_running_requests=1")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        admin = admin_of(daemon)
        with client.generate(TASK.prompt, request_id="runs", stop=Stop(900)) as first:
            next(first), next(first)
            with client.generate(TASK.prompt, request_id="waits") as second:
                next(second)
                runs, waits = admin("requests")["requests"]
                assert (runs["request_id"], runs["state"]) == ("runs", "STATE_DECODE")
                assert int(runs["kv_reserved_bytes"]) >= int(runs["kv_used_bytes"]) > 0
                assert (waits["request_id"], waits["waits_for"]) == ("waits", "WAITS_FOR_PLACE")
                (load,) = admin("load")["models"]
                assert load["running_requests"] == 1
                assert load["prompt_tokens_per_second"] > 0 < load["output_tokens_per_second"]
                dump = admin("dump")
                assert len(dump["requests"]) == 2 and "epikv_kv_bytes" in dump["metrics"]


def test_a_model_is_swapped_under_load(sample_model: Path) -> None:
    """Streams come all the time while the model is replaced three times: none is dropped."""
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        admin = admin_of(daemon)
        swapped = threading.Event()
        texts: list[str] = []
        errors: list[RpcError] = []

        def ask() -> None:
            while not swapped.is_set():
                try:
                    texts.append(client.generate_once(TASK.prompt, stop=Stop(60)).text)
                except RpcError as error:
                    errors.append(error)

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        flags = ("--name=sample", "--kv-pool-bytes=67108864", "--replace")
        for _ in range(3):
            assert admin("load-model", str(sample_model), *flags)["name"] == "sample"
        swapped.set()
        for asker in askers:
            asker.join()
        assert not errors and len(set(texts)) == 1 and len(texts) >= 12


PROMPT = [5] * 40
# More than what lies in the buffers before a client that does not read.
LONG, MUCH = Stop(700, ignore_eos=True), Output(token_ids=True, top_logprobs=20)


def tokens_of(events: list[Event]) -> list[int]:
    assert isinstance(events[-1], Summary), events[-1]
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def test_streams_outlive_swaps(sample_model: Path, tmp_path: Path) -> None:
    """Some are read while a swap goes on, most only after the last one: all say to the end what
    the model says that was in service when they began."""
    other = tmp_path / "other.pt"
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 1024,
    }
    random_model(config, other, check=False)
    settings = [
        "--threads=1",
        "--deterministic=true",
        "--kv_pool_bytes=67108864",
        "--outbox_messages=8",
        "--outbox_bytes=1024",
        "--stream_stall_seconds=600",
        f"--models=path: '{other}' name: 'other' kv_pool_bytes: 33554432",
    ]
    with (
        Daemon(sample_model, *settings) as daemon,
        Client(daemon.grpc, PACED) as client,
        ThreadPoolExecutor(64) as readers,
    ):
        admin = admin_of(daemon)

        def begin(count: int) -> list[Stream]:
            streams = [
                client.generate(PROMPT, model="sample", stop=LONG, output=MUCH)
                for _ in range(count)
            ]
            assert all(isinstance(next(stream), Accepted) for stream in streams)
            return streams

        alone = {
            path: client.generate_once(PROMPT, model=name, stop=LONG, output=MUCH).token_ids
            for path, name in ((sample_model, "sample"), (other, "other"))
        }
        assert alone[sample_model] != alone[other]
        heard, held = [], []
        versions = [sample_model, other, sample_model, other]
        for number, version in enumerate(versions):
            if number > 0:
                flags = ("--name=sample", "--kv-pool-bytes=67108864", "--replace")
                admin("load-model", str(version), *flags)
            heard += [(version, readers.submit(list, stream)) for stream in begin(3)]
            held += [(version, stream) for stream in begin(8)]
        live = [model.get("live_requests", 0) for model in admin("status")["models"]]
        assert sum(live) >= len(held), "they wait for their readers"
        heard += [(version, readers.submit(list, stream)) for version, stream in held]
        for version, events in heard:
            assert tokens_of(events.result()) == alone[version]


def test_nothing_is_left_of_models_that_went(sample_model: Path) -> None:
    """Of those that others replaced, no pool and no weights; of the last ones, no series."""
    with Daemon(sample_model, "--threads=1", "--kv_pool_bytes=33554432") as daemon:
        admin = admin_of(daemon)

        def held(name: str) -> tuple[float, float]:
            lines = dict(line.rsplit(" ", 1) for line in fetch(daemon.metrics).splitlines())
            weights = f'epikv_torch_memory_bytes{{model="{name}",kind="weights"}}'
            pool = f'epikv_kv_capacity_bytes{{model="{name}"}}'
            return float(lines.get(pool, 0)), float(lines.get(weights, 0))

        admin("load-model", str(sample_model), "--name=b", "--kv-pool-bytes=33554432")
        pool, weights = held("sample")
        assert (pool, weights) == held("b") and pool == 33554432 and weights > 0

        def expect_one(name: str, pool: int) -> None:
            flags = (f"--name={name}", f"--kv-pool-bytes={pool}", "--replace")
            admin("load-model", str(sample_model), *flags)
            eventually(lambda: held(name) == (pool, weights))

        def expect_none(name: str) -> None:
            admin("unload-model", name)
            eventually(lambda: f'model="{name}"' not in fetch(daemon.metrics))

        for name in ("b", "sample"):
            expect_one(name, 67108864)
            expect_one(name, 100663296)
            expect_none(name)


def test_models_come_and_go(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        admin = admin_of(daemon)
        flags = ("--kv-pool-bytes=67108864",)
        refused = admin("load-model", str(sample_model), *flags, status=1)
        assert "is served" in refused["error"]
        assert "no such file" in admin("load-model", "/none.pt", status=1)["error"].lower()
        admin("load-model", str(sample_model), "--name=b", *flags)
        assert [model.name for model in client.models()] == ["b", "sample"]
        client.generate_once(TASK.prompt, model="b", stop=Stop(2))
        admin("unload-model", "b", "--grace=1")
        assert [model.name for model in client.models()] == ["sample"]
        assert "'b'" in admin("unload-model", "b", status=1)["error"]


def test_settings_change_while_it_runs(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        admin = admin_of(daemon)
        changed = admin("config", "default_max_output_tokens=5", "log_level=warning")
        assert (changed["default_max_output_tokens"], changed["log_level"]) == (5, "warning")
        assert client.generate_once(TASK.prompt).accepted.max_output_tokens == 5
        refused = admin("config", "threads=3", "default_policy=nosuch", status=1)["error"]
        assert "threads" in refused
        assert (
            "unknown policy 'nosuch'" in admin("config", "default_policy=nosuch", status=1)["error"]
        )
        assert "no NAME=VALUE" in admin("config", "threads", status=1)["error"]
        assert admin("config")["default_max_output_tokens"] == 5


def test_log_level_says_which_lines_are_written(
    sample_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is loaded there is information; of tokens that are wrong, a warning."""
    token, line = new_token("olga", "operator")
    monkeypatch.setenv("EPIKV_TOKEN", token)
    tokens = tmp_path / "tokens"
    tokens.write_text(line)
    flags = ("--threads=1", "--kv_pool_bytes=33554432", f"--auth_tokens_file={tokens}")
    with Daemon(sample_model, *flags, token=token) as daemon:
        admin = admin_of(daemon)

        def informs(number: int, level: str) -> bool:
            """Of a load; after a warning of that line of the tokens."""
            admin("config", f"log_level={level}")
            replace(tokens, (number - 1) * "#\n" + "root eve 00\n")
            failures = "epikv_auth_reload_failures_total"
            eventually(lambda: scrape(daemon.metrics).value(failures) == number)
            said = len(daemon.log)
            source = (str(sample_model), "--name=b", "--kv-pool-bytes=33554432")
            admin("load-model", *source, "--replace")
            return "] warming up\n" in daemon.log[said:]

        levels = ("info", "warning", "error", "info")
        informed = [informs(number, level) for number, level in enumerate(levels, start=1)]
        assert informed == [True, False, False, True]
        eventually(lambda: "line 4: the role" in daemon.log)
        warned = [f"'{tokens}': line {number}: the role" in daemon.log for number in range(1, 5)]
        assert warned == [True, True, False, True]
