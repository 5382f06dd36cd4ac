"""Two replicas behind HAProxy and behind Envoy, as deploy/ has them, with one PostgreSQL for their experiments."""

import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from envoy_proxy import Envoy
from epikv import Client, Delta, Experiment, RpcError, Stop, Summary, patiently
from epikv.testing import Daemon
from epikv.v1 import experiment_pb2, model_pb2, model_pb2_grpc
from google.protobuf import text_format
from postgres import Postgres

ROOT = Path(__file__).parents[3]
PROMPT = [5] * 20
GENEROUS_SECONDS = 60

DEFINITION = """
traffic_permille: 1000
arms { name: "full" weight_permille: 500 control: true kv { policy: "full" } }
arms { name: "lean" weight_permille: 500 kv { policy: "sliding" max_tokens: 64 } }
metrics { name: "right" kind: KIND_PROPORTION }
primary_metric: "right"
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


class Replica:
    """A daemon that comes back at the same ports."""

    def __init__(self, model: Path, store: str, spool: Path) -> None:
        (self.port,) = free_ports(1)
        self._arguments = (
            "--threads=1",
            f"--listen=127.0.0.1:{self.port}",
            f"--experiment_store={store}",
            f"--experiment_spool={spool}",
        )
        self._model = model
        self.start()

    def start(self) -> None:
        self.daemon = Daemon(self._model, *self._arguments).__enter__()
        self.client = Client(self.daemon.grpc)


class Site:
    def __init__(self, model: Path, folder: Path, postgres: Postgres, stack: ExitStack) -> None:
        self.replicas = [Replica(model, postgres.url, folder / f"spool-{n}") for n in "ab"]
        stack.callback(lambda: [replica.daemon.kill() for replica in self.replicas])
        self.haproxy = self._start_haproxy(folder, stack)
        envoy = stack.enter_context(
            Envoy(folder / "envoy", [replica.daemon.grpc for replica in self.replicas])
        )
        self.balancers = {"haproxy": self.haproxy, "envoy": envoy.address}
        self.client = Client(self.haproxy)
        envoy.await_serving(Client(envoy.address))
        deadline = time.monotonic() + GENEROUS_SECONDS
        while True:
            try:
                self.client.models()
                break
            except RpcError:
                assert time.monotonic() < deadline, (folder / "haproxy.log").read_text()
                time.sleep(0.1)

    def _start_haproxy(self, folder: Path, stack: ExitStack) -> str:
        """Its address."""
        (port,) = free_ports(1)
        config = (ROOT / "deploy" / "haproxy" / "haproxy.cfg").read_text()
        first, second = (replica.port for replica in self.replicas)
        ports = {"50050": port, "50051": first, "50061": second}
        config = re.sub(
            r"\b50\d{3}$|\b50050\b", lambda m: str(ports[m[0]]), config, flags=re.MULTILINE
        )
        (folder / "haproxy.cfg").write_text(config)
        log = stack.enter_context((folder / "haproxy.log").open("wb"))
        haproxy = subprocess.Popen(
            ["haproxy", "-f", str(folder / "haproxy.cfg")], stdout=log, stderr=log
        )
        stack.callback(haproxy.wait)
        stack.callback(haproxy.kill)
        return f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def site(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        postgres = stack.enter_context(Postgres())
        yield Site(sample_model, tmp_path_factory.mktemp("site"), postgres, stack)


def begin(site: Site, name: str) -> None:
    definition = text_format.Parse(DEFINITION, experiment_pb2.Experiment())
    definition.name = name
    site.client.create_experiment(definition)
    site.client.start_experiment(name)
    for replica in site.replicas:  # who did not start it hears of it within a second
        deadline = time.monotonic() + GENEROUS_SECONDS
        while ask(replica.client, "probe")[1] == "none":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def ask(client: Client, unit: str, tokens: int = 60) -> tuple[str, str]:
    """Its id and its arm."""
    result = client.generate_once(
        PROMPT,
        stop=Stop(tokens, min_output_tokens=tokens, ignore_eos=True),
        experiment=Experiment(unit_id=unit),
    )
    assert result.accepted is not None
    return result.accepted.request_id, result.accepted.arm


def test_a_unit_has_one_arm_and_outcomes_find_it(site: Site) -> None:
    begin(site, "shared")
    try:
        first, second = (replica.client for replica in site.replicas)
        balanced = [Client(address) for address in site.balancers.values()]
        arms = set()
        for number in range(12):
            request, arm = ask(first, f"user-{number}")
            assert ask(second, f"user-{number}")[1] == arm
            assert all(ask(each, f"user-{number}")[1] == arm for each in balanced)
            second.record_outcome(request, "right", float(number % 2))
            arms.add(arm)
        assert arms == {"shared/full", "shared/lean"}
        reports = [client.experiment_report("shared") for client in (first, second)]
        for report in reports:
            assert sum(arm.observations for arm in report.metrics[0].all.arms) == 12
    finally:
        site.client.stop_experiment("shared", reason="done")


def test_headers_that_would_end_a_shared_connection_go_no_further(site: Site) -> None:
    """Clients share the proxy's connections to replicas, which end one with 8 KiB of headers."""
    with site.client.generate(PROMPT, stop=Stop(600, ignore_eos=True)) as stream:
        events = iter(stream)
        next(events)
        with grpc.insecure_channel(site.haproxy) as channel:
            models = model_pb2_grpc.ModelServiceStub(channel)
            for _ in range(10):
                with pytest.raises(grpc.RpcError, match="431"):
                    models.ListModels(
                        model_pb2.ListModelsRequest(), metadata=[("x-padding", "v" * 10_000)]
                    )
                with pytest.raises(grpc.RpcError, match="431"):
                    channel.unary_unary("/" + "p" * 10_000)(b"")
        assert isinstance(list(events)[-1], Summary)


def test_a_rolling_restart_drops_no_stream(site: Site) -> None:
    """Streams go on through the balancers while both replicas are replaced, one after the other."""
    over = threading.Event()

    def stream(balancer: str) -> int:
        """Streams that ended well."""
        done = 0
        with Client(site.balancers[balancer]) as client:
            while not over.is_set():
                # A replica may begin to drain between two looks of the balancer.
                patiently(lambda: consume(client), attempts=20)
                done += 1
        return done

    def consume(client: Client) -> None:
        tokens = 0
        with client.generate(
            PROMPT, stop=Stop(200, min_output_tokens=200, ignore_eos=True)
        ) as events:
            for event in events:
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, balancer) for balancer in [*site.balancers] * 2]
        try:
            for replica in site.replicas:
                time.sleep(1)
                assert replica.daemon.stop() == 0
                replica.start()
                await_seen(site)
        finally:
            over.set()
        assert all(stream.result() > 0 for stream in streams)


def await_seen(site: Site) -> None:
    """Until the balancers use every replica again."""
    for address in site.balancers.values():
        await_used(site, address)


def await_used(site: Site, address: str) -> None:
    deadline = time.monotonic() + GENEROUS_SECONDS
    while True:
        before = [handled(replica) for replica in site.replicas]
        with Client(address) as client:
            for _ in range(8):
                client.models()
        if all(handled(r) > b for r, b in zip(site.replicas, before, strict=True)):
            return
        assert time.monotonic() < deadline
        time.sleep(0.2)


def handled(replica: Replica) -> float:
    with urllib.request.urlopen(f"http://{replica.daemon.metrics}/metrics") as answer:
        page = answer.read().decode()
    found = re.search(r"epikv_grpc_requests_total{[^}]*ListModels[^}]*} (\S+)", page)
    return float(found[1]) if found else 0


def test_a_killed_replica_loses_its_own_streams_alone(site: Site) -> None:
    begin(site, "killed")
    try:
        dying, other = site.replicas
        request, arm = ask(dying.client, "user-1")
        assert arm.startswith("killed/")
        # Its facts are on their way to the store for some milliseconds after its end.
        other.client.record_outcome(request, "right", 0.0, key="before")
        stop = Stop(1000, min_output_tokens=1000, ignore_eos=True)
        events = [iter(replica.client.generate(PROMPT, stop=stop)) for replica in (dying, other)]
        for stream in events:
            next(stream)
        dying.daemon.kill()
        with pytest.raises(RpcError) as lost:
            list(events[0])
        assert lost.value.code is grpc.StatusCode.UNAVAILABLE
        assert len(list(events[1])) > 0
        # What had ended is known, and new calls go to who is left.
        other.client.record_outcome(request, "right", 1.0, key="after")
        for address in site.balancers.values():
            client = Client(address)
            for number in range(6):
                patiently(lambda c=client, n=number: ask(c, f"user-{n}"), attempts=20)
        report = other.client.experiment_report("killed")
        assert sum(arm.observations for arm in report.metrics[0].all.arms) == 2
        dying.start()
        await_seen(site)
    finally:
        site.client.stop_experiment("killed", reason="done")
