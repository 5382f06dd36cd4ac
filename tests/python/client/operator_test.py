"""The operator's side: `Admin` in Python and `epikv admin`, against a stand-in for AdminService."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import grpc
import pytest
from click.testing import CliRunner, Result
from epikv import (
    ActiveRequest,
    Admin,
    Model,
    ModelLoad,
    ModelStatus,
    NotFound,
    ServerStatus,
    messages,
)
from epikv.cli import admin_tables, main
from epikv.v1 import admin_pb2, admin_pb2_grpc, config_pb2, model_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

STARTED = datetime(2026, 11, 1, 9, 30, tzinfo=UTC)
ID = "f417b68aa33b1711c3da5861007f3eef"
KINDS = admin_pb2.ActiveRequest
REQUESTS = [
    KINDS(
        request_id=ID,
        model="sample",
        state=KINDS.STATE_DECODE,
        policy="expected_attention",
        budget_tokens=300,
        prompt_tokens=40,
        cached_tokens=128,
        output_tokens=88,
        max_output_tokens=1200,
        kv_used_bytes=928_000,
        kv_reserved_bytes=1_600_000,
        age=Duration(seconds=2, nanos=250_000_000),
        time_left=Duration(seconds=58),
    ),
    KINDS(
        request_id="waits",
        model="sample",
        state=KINDS.STATE_QUEUED,
        waits_for=KINDS.WAITS_FOR_KV,
        policy="full",
        max_output_tokens=9,
        kv_reserved_bytes=3_000,
        age=Duration(seconds=70),
    ),
]


class Service(admin_pb2_grpc.AdminServiceServicer):
    """Notes what it is asked, and answers as a daemon with one model would."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.state = admin_pb2.ServerStatus.STATE_SERVING
        self.config = config_pb2.ServerConfig(
            listen="0.0.0.0:1", default_policy="", kv_pool_bytes=2**33, log_level="info"
        )

    def _status(self) -> admin_pb2.ServerStatus:
        model = admin_pb2.ModelStatus(
            name="sample", state=admin_pb2.ModelStatus.STATE_SERVING, live_requests=2
        )
        started = Timestamp(seconds=int(STARTED.timestamp()))
        return admin_pb2.ServerStatus(
            state=self.state, version="0.2.0", start_time=started, models=[model]
        )

    def GetServerStatus(self, request, context):
        return self._status()

    def GetLoad(self, request, context):
        load = admin_pb2.ModelLoad(
            model="sample",
            running_requests=1,
            waiting_requests=1,
            kv_used_bytes=19_000_000,
            kv_reserved_bytes=109_000_000,
            kv_capacity_bytes=134_217_728,
            predicted_wait=Duration(nanos=500_000_000),
            prompt_tokens_per_second=223.4,
            output_tokens_per_second=184,
            kv_prefix_bytes=791_000,
        )
        return admin_pb2.GetLoadResponse(models=[load])

    def ListActiveRequests(self, request, context):
        self.asked.append(request)
        found = [each for each in REQUESTS if request.model in ("", each.model)]
        return admin_pb2.ListActiveRequestsResponse(requests=found)

    def Drain(self, request, context):
        self.state = admin_pb2.ServerStatus.STATE_DRAINING
        return self._status()

    def Resume(self, request, context):
        self.state = admin_pb2.ServerStatus.STATE_SERVING
        return self._status()

    def GetConfig(self, request, context):
        return self.config

    def UpdateConfig(self, request, context):
        self.asked.append(request)
        changed = config_pb2.ServerConfig()
        changed.CopyFrom(self.config)
        changed.MergeFrom(request.config)
        return changed

    def LoadModel(self, request, context):
        self.asked.append(request)
        return model_pb2.Model(
            name=request.source.name or "sample",
            dtype="bfloat16",
            layers=6,
            kv_capacity_tokens=9765,
            kv_capacity_bytes=30_000_000,
        )

    def UnloadModel(self, request, context):
        self.asked.append(request)
        if request.name != "sample":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model '{request.name}'")
        return admin_pb2.UnloadModelResponse()

    def FlushPrefixCache(self, request, context):
        self.asked.append(request)
        return admin_pb2.FlushPrefixCacheResponse()

    def DumpState(self, request, context):
        return admin_pb2.DumpStateResponse(
            status=self._status(), requests=REQUESTS, config=self.config, metrics="a 1\n"
        )


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def admin(address: str) -> Iterator[Admin]:
    with Admin(address) as admin:
        yield admin


def test_answers_are_typed(admin: Admin) -> None:
    model = ModelStatus("sample", "serving", 2)
    assert admin.status() == ServerStatus("serving", "0.2.0", STARTED, [model])
    (load,) = admin.load()
    assert isinstance(load, ModelLoad) and load.predicted_wait == 0.5
    first, second = admin.requests()
    assert isinstance(first, ActiveRequest)
    assert (first.state, first.waits_for, first.age, first.time_left) == (
        "decode",
        "unspecified",
        2.25,
        58,
    )
    assert (second.state, second.waits_for, second.time_left) == ("queued", "kv", None)
    assert admin.requests("other") == []
    assert admin.drain().state == "draining"
    assert admin.resume().state == "serving"


def test_settings_are_numbers_and_texts_by_their_names(admin: Admin, service: Service) -> None:
    assert admin.config()["kv_pool_bytes"] == 2**33
    changed = admin.update_config({"max_queued_tokens": 2**40, "log_level": "error"})
    assert (changed["max_queued_tokens"], changed["log_level"]) == (2**40, "error")
    asked = service.asked[-1]
    assert isinstance(asked, admin_pb2.UpdateConfigRequest) and not asked.validate_only
    assert list(asked.update_mask.paths) == ["max_queued_tokens", "log_level"]
    admin.update_config({"drain_seconds": 1}, validate_only=True)
    assert service.asked[-1].validate_only
    for wrong in ({"nosuch": 1}, {"threads": "many"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            admin.update_config(wrong)


def test_models_come_and_go(admin: Admin, service: Service) -> None:
    loaded = admin.load_model("b.pt", name="b", threads=3, replace=True)
    assert isinstance(loaded, Model) and loaded.name == "b"
    asked = service.asked[-1]
    assert (asked.source.path, asked.source.threads, asked.replace) == ("b.pt", 3, True)
    with pytest.raises(ValueError, match="threads cannot be -1"):
        admin.load_model("b.pt", threads=-1)
    admin.unload_model("sample", grace=1.5)
    assert service.asked[-1].grace == Duration(seconds=1, nanos=500_000_000)
    admin.unload_model("sample")
    assert not service.asked[-1].HasField("grace")
    with pytest.raises(NotFound, match="no model 'gone'"):
        admin.unload_model("gone")
    admin.flush_prefix_cache("sample")
    assert service.asked[-1].model == "sample"


def test_a_dump_has_all(admin: Admin) -> None:
    found = admin.dump()
    assert found["metrics"] == "a 1\n" and len(found["requests"]) == 2
    assert found["config"]["kv_pool_bytes"] == 2**33
    assert found["status"]["models"][0]["live_requests"] == 2


def test_a_closed_one_says_so(address: str) -> None:
    admin = Admin(address)
    admin.close()
    with pytest.raises(ValueError, match="closed"):
        admin.status()


def run(address: str, *args: str) -> Result:
    environment = {"COLUMNS": "80", "EPIKV_SERVER": None, "EPIKV_ADMIN_SERVER": None}
    return CliRunner().invoke(main, ["admin", *args, "--server", address], env=environment)


def shown(address: str, *args: str) -> str:
    """A table's words, without its frame. It fits into a terminal."""
    done = run(address, *args)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
    assert "…" not in done.stdout, "something is cut"
    return " ".join(done.stdout.replace("│", " ").split())


def test_people_see_tables(address: str) -> None:
    status = shown(address, "status")
    assert "epikvd 0.2.0: serving since 2026-11-01 09:30:00 UTC" in status
    assert "sample serving 2" in status
    load = shown(address, "load")
    assert "sample 1 1 19.0 MB used 0.5 s 223 in" in load
    assert "109 MB reserved 184 out" in load and "of 134 MB" in load
    assert "sample: 791 kB of cached prefixes" in load
    requests = shown(address, "requests")
    assert f"{ID} decode 88 of 1200 2.2 s" in requests
    assert "expected_attention, 300 tokens 928 kB of 1.6 MB 58 s left" in requests
    assert "waits queued," in requests and "1 min 10 s" in requests
    assert shown(address, "requests", "--model=other") == "no request is live"


def test_it_is_said_what_a_request_waits_for() -> None:
    found = [admin_tables.doing(messages.from_proto(request)) for request in REQUESTS]
    assert found == ["decode", "queued, waits for room in the KV pool"]


def test_a_long_name_is_folded_and_not_cut(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "z" * 100
    monkeypatch.setattr(f"{__name__}.REQUESTS", [KINDS(request_id=name, policy="full")])
    assert run(address, "requests").stdout.count("z") == 100


def test_people_see_settings_and_which_of_them_may_change(address: str) -> None:
    config = shown(address, "config")
    assert "log_level * info" in config and "kv_pool_bytes 8589934592" in config
    assert "default_policy * (empty)" in config
    changed = shown(address, "config", "max_queued_requests=64", "log_level=error")
    assert "max_queued_requests 64" in changed and "log_level error" in changed
    assert "kv_pool_bytes" not in changed and "until the daemon ends" in changed
    assert "nothing was changed" in shown(address, "config", "drain_seconds=9", "--validate-only")


def test_the_settings_that_may_change_are_those_of_the_contract() -> None:
    """As the daemon itself has them."""
    from pathlib import Path

    source = Path(__file__).parents[3] / "server" / "daemon" / "settings.cc"
    text = source.read_text()
    assert all(f'"{name}"' in text for name in admin_tables.CHANGEABLE)
    contract = (source.parents[2] / "proto" / "epikv" / "v1" / "admin.proto").read_text()
    said = contract.partition("// Changes settings of the running daemon:")[2].partition(".\n")[0]
    named = {word.strip() for word in said.replace("//", "").replace("\n", " ").split(",")}
    assert named == set(admin_tables.CHANGEABLE)


def test_people_are_told_what_was_done(address: str) -> None:
    assert "draining, new requests are refused" in shown(address, "drain")
    assert "0.2.0: serving since" in shown(address, "resume")
    loaded = shown(address, "load-model", "m.pt", "--name=b")
    assert loaded == "b serves: bfloat16, 6 layers, a KV pool of 9765 tokens (30.0 MB)"
    assert shown(address, "unload-model", "sample") == "sample is out of service"
    assert shown(address, "flush-prefix-cache") == "the cached prefixes are forgotten"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["status"], {"state": "STATE_SERVING", "version": "0.2.0"}),
        (["drain"], {"state": "STATE_DRAINING"}),
        (["resume"], {"state": "STATE_SERVING"}),
        (["config"], {"kv_pool_bytes": 2**33}),
        (["config", "max_queued_tokens=5"], {"max_queued_tokens": 5, "kv_pool_bytes": 2**33}),
        (["load-model", "m.pt"], {"name": "sample", "kv_capacity_bytes": 30_000_000}),
        (["unload-model", "sample"], {}),
        (["flush-prefix-cache"], {}),
        (["dump"], {"metrics": "a 1\n"}),
    ],
)
def test_programs_get_the_message_as_one_line(
    address: str, command: list[str], told: dict[str, object]
) -> None:
    done = run(address, *command, "--json")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert {name: found[name] for name in told} == told


def test_programs_get_lists_that_are_empty_and_numbers_that_are_numbers(address: str) -> None:
    assert json.loads(run(address, "requests", "--model=x", "--json").stdout) == {"requests": []}
    (load,) = json.loads(run(address, "load", "--json").stdout)["models"]
    assert load["kv_capacity_bytes"] == 134_217_728 and load["running_requests"] == 1


@pytest.mark.parametrize(("options", "lines"), [((), 7), (("--json",), 1)])
def test_watching_shows_it_again_until_ctrl_c(
    address: str, options: tuple[str, ...], lines: int
) -> None:
    words = ["admin", "status", "--server", address, "--watch", "0.1", *options]
    program = [sys.executable, "-c", "from epikv.cli import main; main()", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        seen = [watching.stdout.readline() for _ in range(3 * lines)]
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(30) == 0
    assert sum("0.2.0" in line for line in seen) == 3


def test_a_watch_has_an_interval_of_its_own(address: str) -> None:
    refused = run(address, "status", "--watch", "0")
    assert refused.exit_code == 2 and "0.1" in refused.stderr


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_950, "100 kB")]
    + [(999_400, "999 kB"), (999_600, "1.0 MB"), (2**33, "8.6 GB"), (5 * 10**15, "5000 TB")],
)
def test_bytes_have_three_figures(count: int, told: str) -> None:
    assert admin_tables.size(count) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (59.6, "1 min"), (70, "1 min 10 s"), (3600, "1 h")]
    + [(90061, "1 d 1 h"), (12.3, "12 s")],
)
def test_durations_have_two_units(seconds: float, told: str) -> None:
    assert admin_tables.duration(seconds) == told
