"""TLS, tokens and the access log of the real daemon, and what is read again while it runs."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import grpc
import pytest
from credentials import authority, new_token, replace, signed
from epikv import Client, Experiment, Kv, Patience, RpcError, Scheduling, Stop, Tls
from epikv.connection import connect
from epikv.scrape import scrape
from epikv.testing import Daemon
from epikv.v1 import (
    experiment_pb2,
    generation_pb2,
    model_pb2,
    packet_pb2,
    policy_pb2,
    tokenization_pb2,
)
from failed_start import start
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import eventually


def serves(address: str, tls: Tls | None) -> bool:
    with Client(address, tls=tls) as client:
        try:
            return bool(client.models())
        except RpcError as error:
            assert error.code is grpc.StatusCode.UNAVAILABLE
            return False


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    for ca in ("ca", "new_ca"):
        authority(folder, ca)
    signed(folder, "server", "ca")
    signed(folder, "new_server", "new_ca")
    signed(folder, "client", "ca")
    signed(folder, "stranger", "new_ca")
    return folder


def of_client(pki: Path, ca: str, name: str | None = None) -> Tls:
    return Tls(pki / f"{ca}.pem", name and pki / f"{name}.pem", name and pki / f"{name}.key")


def test_rotated_certificate_is_taken_into_use(
    sample_model: Path, pki: Path, tmp_path: Path
) -> None:
    """A key that is not the certificate's yet fails new connections and nothing else."""
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    replace(certificate, (pki / "server.pem").read_bytes())
    replace(key, (pki / "server.key").read_bytes())
    flags = (f"--tls_certificate={certificate}", f"--tls_key={key}")
    old, new = of_client(pki, "ca"), of_client(pki, "new_ca")
    with Daemon(sample_model, "--threads=1", *flags, tls=old) as daemon, daemon.client() as before:
        before.models()
        first = expiry(daemon)
        assert 0 < first - time.time() < math.inf
        assert not serves(daemon.grpc, None)
        assert not serves(daemon.grpc, new)
        replace(certificate, (pki / "new_server.pem").read_bytes())
        eventually(lambda: not serves(daemon.grpc, old))
        assert not serves(daemon.grpc, new)
        replace(key, (pki / "new_server.key").read_bytes())
        eventually(lambda: serves(daemon.grpc, new))
        assert not serves(daemon.grpc, old)
        certificate.unlink()
        eventually(lambda: str(certificate) in daemon.log)  # it could not be read
        assert serves(daemon.grpc, new)
        assert first <= expiry(daemon) < math.inf, "what is served, though it is no longer there"
        before.models()  # on its connection of old


def expiry(daemon: Daemon) -> float:
    return scrape(daemon.metrics).value("epikv_tls_certificate_expiry_timestamp_seconds")


def test_clients_need_a_certificate_where_a_ca_is_named(
    sample_model: Path, pki: Path, tmp_path: Path
) -> None:
    trusted = tmp_path / "clients.pem"
    replace(trusted, (pki / "ca.pem").read_bytes())
    flags = (
        f"--tls_certificate={pki / 'server.pem'}",
        f"--tls_key={pki / 'server.key'}",
        f"--tls_client_ca={trusted}",
    )
    known, stranger = of_client(pki, "ca", "client"), of_client(pki, "ca", "stranger")
    with Daemon(sample_model, "--threads=1", *flags, tls=known) as daemon:
        assert serves(daemon.grpc, known)
        assert not serves(daemon.grpc, stranger)
        assert not serves(daemon.grpc, of_client(pki, "ca"))
        replace(trusted, (pki / "new_ca.pem").read_bytes())
        eventually(lambda: serves(daemon.grpc, stranger))
        assert not serves(daemon.grpc, known)


def test_start_is_refused_with_every_file_at_fault(pki: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("user ann hunter2\n")
    status, log = start(
        f"--model={tmp_path / 'never read.pt'}",
        f"--tls_certificate={pki / 'server.pem'}",
        f"--tls_key={pki / 'client.key'}",
        f"--tls_client_ca={tmp_path / 'absent.pem'}",
        f"--auth_tokens_file={tokens}",
        f"--access_log={tmp_path / 'absent' / 'log'}",
    )
    assert status == 1
    for fault in (
        f"--tls_key: '{pki / 'client.key'}' is not the key of '{pki / 'server.pem'}'",
        f"--tls_client_ca: cannot read '{tmp_path / 'absent.pem'}'",
        f"--auth_tokens_file: '{tokens}': line 1: the digest",
        f"--access_log: cannot write '{tmp_path / 'absent' / 'log'}'",
    ):
        assert fault in log, log
    assert "hunter2" not in log


def test_plain_text_beyond_this_machine_is_warned_of(pki: Path, tmp_path: Path) -> None:
    model = f"--model={tmp_path / 'absent.pt'}"
    anyone = "--allow_anonymous"
    tls = (f"--tls_certificate={pki / 'server.pem'}", f"--tls_key={pki / 'server.key'}")
    assert (
        "warning: --listen=0.0.0.0:0 is not encrypted"
        in start(model, anyone, "--listen=0.0.0.0:0")[1]
    )
    assert (
        "warning: --metrics_listen=0.0.0.0:0 asks for no token"
        in start(model, "--metrics_listen=0.0.0.0:0")[1]
    )
    assert "warning" not in start(model, anyone, "--listen=0.0.0.0:0", *tls)[1]
    assert "warning" not in start(model)[1]


def test_a_port_for_other_machines_is_not_for_everybody(pki: Path, tmp_path: Path) -> None:
    """With TLS or without: who reaches it could load a model, which is code."""
    model = f"--model={tmp_path / 'absent.pt'}"
    tls = (f"--tls_certificate={pki / 'server.pem'}", f"--tls_key={pki / 'server.key'}")
    for flag in ("--listen=0.0.0.0:0", "--admin_listen=0.0.0.0:0"):
        for more in ((), tls):
            status, log = start(model, flag, *more)
            assert status == 1
            assert "must be on loopback" in log and "--allow_anonymous" in log


@pytest.fixture
def guarded(sample_model: Path, tmp_path: Path) -> Iterator[tuple[Daemon, Path, str]]:
    """A daemon that asks for tokens; its file of them, and one of a user."""
    token, line = new_token("ann", "user")
    tokens = tmp_path / "tokens"
    tokens.write_text(line)
    flags = (f"--auth_tokens_file={tokens}", f"--access_log={tmp_path / 'access.log'}")
    with Daemon(sample_model, "--threads=1", *flags, token=token) as daemon:
        yield daemon, tokens, token


def refused(daemon: Daemon, token: str) -> bool:
    with Client(daemon.grpc, token=token) as client:
        try:
            client.models()
            return False
        except RpcError as error:
            assert (error.code.name, error.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
            return True


SERVICES = (
    experiment_pb2,
    generation_pb2,
    model_pb2,
    packet_pb2,
    policy_pb2,
    tokenization_pb2,
)


def test_no_method_of_ours_answers_without_a_token(guarded: tuple[Daemon, Path, str]) -> None:
    daemon = guarded[0]
    services = [
        service for module in SERVICES for service in module.DESCRIPTOR.services_by_name.values()
    ]
    with grpc.insecure_channel(daemon.grpc) as channel:
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        listed = next(channel.stream_stream(reflection)(iter([b"\x3a\x00"]), timeout=10))
        for name in listed.split(b"epikv.v1.")[1:]:
            assert any(name.startswith(service.name.encode()) for service in services), name
        for service in services:
            for method in service.methods:
                with pytest.raises(grpc.RpcError) as caught:
                    call = f"/{service.full_name}/{method.name}"
                    list(channel.unary_stream(call)(b"", timeout=10))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, call
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(service="models/sample"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert scrape(daemon.metrics).value("epikv_requests_rejected_total", reason="unauthenticated")


def test_tokens_change_while_the_daemon_runs(guarded: tuple[Daemon, Path, str]) -> None:
    daemon, tokens, ann = guarded
    assert not refused(daemon, ann)
    bob, line = new_token("bob", "operator")
    assert refused(daemon, bob)
    replace(tokens, line)
    eventually(lambda: not refused(daemon, bob))
    assert refused(daemon, ann)
    replace(tokens, "root eve 00\n")
    failures = "epikv_auth_reload_failures_total"
    eventually(lambda: scrape(daemon.metrics).value(failures) == 1)
    assert not refused(daemon, bob)
    assert f"'{tokens}': line 1: the role" in daemon.log
    assert ann not in daemon.log and bob not in daemon.log


def test_access_log_has_a_line_for_every_call(
    guarded: tuple[Daemon, Path, str], tmp_path: Path
) -> None:
    daemon, _, token = guarded
    path = tmp_path / "access.log"

    def lines(of: Path) -> list[dict]:
        return [json.loads(line) for line in of.read_text().splitlines()] if of.exists() else []

    with daemon.client() as client:
        kv = Kv("sliding", 300)
        summary = client.generate_once("7", kv=kv, stop=Stop(400), request_id="r1").summary
        with pytest.raises(RpcError) as caught:
            client.generate_once("", request_id="r2")
        eventually(lambda: len(lines(path)) == 2)
        done, bad = lines(path)
        assert (done["request_id"], done["code"], done["identity"]) == ("r1", "OK", "ann")
        assert (done["policy"], done["budget_tokens"]) == ("sliding", 300)
        assert done["output_tokens"] == summary.usage.output_tokens
        assert done.get("evicted_tokens", 0) == summary.kv.evicted_tokens
        assert done["peak_tokens"] == summary.kv.peak_tokens
        assert (bad["request_id"], bad["reason"]) == ("r2", "INVALID_REQUEST")
        assert bad["trace_id"] == caught.value.metadata["trace_id"]
        path.rename(tmp_path / "access.log.1")
        client.models()
        eventually(lambda: len(lines(path)) == 1)
        os.kill(daemon.pid, 1)  # SIGHUP, as log rotation sends it
        client.models()
        eventually(lambda: len(lines(path)) == 2)
    assert token not in path.read_text() and token not in daemon.log


def test_a_token_is_replaced_while_the_old_one_is_in_use(
    guarded: tuple[Daemon, Path, str],
) -> None:
    daemon, tokens, old = guarded
    new, line = new_token("ann", "user", "--days", "90")
    replace(tokens, tokens.read_text() + line)
    eventually(lambda: not refused(daemon, new))
    assert not refused(daemon, old)
    replace(tokens, line)
    eventually(lambda: refused(daemon, old))
    assert not refused(daemon, new)
    replace(tokens, line.split(" until=")[0] + " until=2020-01-01T00:00:00Z\n")
    eventually(lambda: refused(daemon, new))
    with Client(daemon.grpc, token=new) as client, pytest.raises(RpcError, match="has expired"):
        client.models()


def test_a_certificate_names_who_calls(sample_model: Path, pki: Path, tmp_path: Path) -> None:
    """By one of its names, where the file of tokens has it. Others need a token."""
    for name in ("ann", "eve"):
        signed(pki, name, "ca", f"URI:spiffe://here/{name},DNS:{name}.here")
    token, line = new_token("bob", "operator")
    tokens, log = tmp_path / "tokens", tmp_path / "access.log"
    tokens.write_text(f"user ann san:spiffe://here/ann\n{line}")
    flags = (
        f"--tls_certificate={pki / 'server.pem'}",
        f"--tls_key={pki / 'server.key'}",
        f"--tls_client_ca={pki / 'ca.pem'}",
        f"--auth_tokens_file={tokens}",
        f"--access_log={log}",
    )
    ann, eve = of_client(pki, "ca", "ann"), of_client(pki, "ca", "eve")

    def models(tls: Tls, token: str | None = None) -> str:
        """Who has called."""
        with Client(daemon.grpc, tls=tls, token=token) as client:
            before = len(log.read_text().splitlines())
            client.models()
        eventually(lambda: len(log.read_text().splitlines()) > before)
        return json.loads(log.read_text().splitlines()[-1])["identity"]

    with Daemon(sample_model, "--threads=1", *flags, tls=ann, token=token) as daemon:
        assert models(ann) == "ann"
        assert models(ann, token) == "bob"
        assert models(eve, token) == "bob"
        for tls, shown in ((eve, None), (ann, "wrong")):
            with Client(daemon.grpc, tls=tls, token=shown) as client, pytest.raises(RpcError) as no:
                client.models()
            assert no.value.reason == "UNAUTHENTICATED"


EXPERIMENTS = experiment_pb2.DESCRIPTOR.services_by_name["ExperimentService"]
FOR_USERS = {"RecordOutcome", "BatchRecordOutcomes"}
LEAN = experiment_pb2.Experiment(
    name="lean",
    traffic_permille=1000,
    arms=[
        {"name": "full", "weight_permille": 500, "control": True},
        {"name": "lean", "weight_permille": 500, "kv": {"policy": "sliding", "max_tokens": 300}},
    ],
    metrics=[{"name": "score"}],
    primary_metric="score",
)
AT_ONCE = Patience(busy=0, unknown=0)


@dataclass
class Guild:
    """A daemon with experiments, whose "lean" runs, and those who have tokens for it."""

    daemon: Daemon
    tokens: dict[str, str]
    access_log: Path

    @cached_property
    def clients(self) -> dict[str, Client]:
        return {name: Client(self.daemon.grpc, token=token) for name, token in self.tokens.items()}

    def call(self, name: str, method: str, request: Message) -> bytes:
        """Of ExperimentService."""
        with connect(self.daemon.grpc, token=self.tokens[name]) as channel:
            send = channel.unary_unary(f"/{EXPERIMENTS.full_name}/{method}")
            try:
                return send(request.SerializeToString(), timeout=10)
            except grpc.RpcError as error:
                raise RpcError.from_grpc(error) from None


@pytest.fixture(scope="module")
def guild(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guild]:
    folder = tmp_path_factory.mktemp("guild")
    roles = {"ulf": "user", "ulla": "user", "olga": "operator", "erna": "experimenter"}
    made = {name: new_token(name, role) for name, role in roles.items()}
    (folder / "tokens").write_text("".join(line for _, line in made.values()))
    tokens = {name: token for name, (token, _) in made.items()}
    flags = (
        f"--auth_tokens_file={folder / 'tokens'}",
        f"--access_log={folder / 'access.log'}",
        f"--experiment_store={folder / 'store.db'}",
    )
    with Daemon(sample_model, "--threads=1", *flags, token=tokens["erna"]) as daemon:
        guild = Guild(daemon, tokens, folder / "access.log")
        guild.clients["erna"].create_experiment(LEAN)
        guild.clients["erna"].start_experiment("lean")
        yield guild
        for client in guild.clients.values():
            client.close()


def denied(call: Callable[[], object]) -> str:
    """The role that is needed; empty: another answer."""
    try:
        call()
    except RpcError as error:
        if error.reason == "PERMISSION_DENIED":
            assert error.code is grpc.StatusCode.PERMISSION_DENIED
            return error.metadata["role"]
    return ""


def ask(client: Client, **context: bool | str) -> tuple[str, str]:
    """A request's id and its arm."""
    accepted = client.generate_once("7", experiment=Experiment(**context), stop=Stop(1)).accepted
    assert accepted is not None
    return accepted.request_id, accepted.arm


@pytest.mark.parametrize("name", ["ulf", "olga", "erna"])
def test_experiments_are_the_experimenters(guild: Guild, name: str) -> None:
    """An operator is none of them; outcomes are everybody's."""
    needed = {}
    for method in EXPERIMENTS.methods:
        request = getattr(experiment_pb2, method.input_type.name)()
        needed[method.name] = denied(partial(guild.call, name, method.name, request))
    role = "" if name == "erna" else "experimenter"
    assert needed == {method: "" if method in FOR_USERS else role for method in needed}


def test_outcomes_are_of_ones_own_requests(guild: Guild) -> None:
    """But for an operator, who may speak for any tenant."""
    clients = guild.clients
    request, arm = ask(clients["ulf"])
    assert arm.startswith("lean/")

    def record(name: str, tenant: str = "", key: str = "") -> object:
        return clients[name].record_outcome(
            request, "score", 1, key=key or name, tenant=tenant, patience=AT_ONCE
        )

    record("ulf")
    record("ulf", tenant="ulf", key="named")
    for other in ("ulla", "erna"):
        with pytest.raises(RpcError) as caught:
            record(other)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND, "she has no such request"
        assert denied(partial(record, other, tenant="ulf")) == "operator"
    record("olga", tenant="ulf")
    with pytest.raises(RpcError) as caught:
        record("olga")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND

    outcomes = [{"request_id": request, "metric": "score", "value": 1, "tenant": "ulf"}]
    batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
    for name, reason in (("ulf", ""), ("olga", ""), ("ulla", "PERMISSION_DENIED")):
        answer = guild.call(name, "BatchRecordOutcomes", batch)
        [result] = experiment_pb2.BatchRecordOutcomesResponse.FromString(answer).results
        assert result.reason == reason


def test_an_arm_is_forced_by_an_experimenter_alone(guild: Guild) -> None:
    clients = guild.clients
    for name in ("ulf", "olga"):
        assert denied(partial(ask, clients[name], force_arm="lean/lean")) == "experimenter"
    forced, _ = ask(clients["erna"], force_arm="lean/lean")
    left_out, _ = ask(clients["erna"], opt_out=True)

    def logged() -> dict[str, dict]:
        lines = [json.loads(line) for line in guild.access_log.read_text().splitlines()]
        return {line["request_id"]: line for line in lines if "request_id" in line}

    eventually(lambda: left_out in logged())
    assert logged()[forced]["arm"] == "lean/lean"
    assert "arm" not in logged()[left_out]


def test_without_tokens_everybody_may_experiment(sample_model: Path, tmp_path: Path) -> None:
    flag = f"--experiment_store={tmp_path / 'store.db'}"
    with Daemon(sample_model, "--threads=1", flag) as daemon, daemon.client() as client:
        client.create_experiment(LEAN)
        client.start_experiment("lean")
        request = client.generate_once(
            "7",
            experiment=Experiment(force_arm="lean/full"),
            scheduling=Scheduling(tenant="bob"),
            stop=Stop(1),
        ).accepted
        assert request is not None and request.arm == "lean/full"
        client.record_outcome(request.request_id, "score", 1, tenant="bob")
        client.stop_experiment("lean")


def test_lines_that_a_full_disk_does_not_take_are_counted(sample_model: Path) -> None:
    with (
        Daemon(sample_model, "--threads=1", "--access_log=/dev/full") as daemon,
        daemon.client() as client,
    ):
        client.models()
        dropped = "epikv_access_log_dropped_total"
        eventually(lambda: scrape(daemon.metrics).value(dropped) == 1)


def test_channelz_is_served_on_its_flag_alone(
    sample_model: Path, guarded: tuple[Daemon, Path, str]
) -> None:
    def servers(address: str) -> bytes:
        with grpc.insecure_channel(address) as channel:
            return channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")(b"", timeout=10)

    with pytest.raises(grpc.RpcError) as caught:
        servers(guarded[0].admin)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with Daemon(sample_model, "--threads=1", "--channelz") as daemon:
        assert servers(daemon.admin)
