"""What one client's long or slow calls may hold: a bound that it hears of, and that others do not feel."""

import sqlite3
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from credentials import new_token
from definitions import LEAN, define
from epikv.scrape import scrape
from epikv.testing import Daemon
from epikv.v1 import (
    experiment_pb2,
    experiment_pb2_grpc,
    model_pb2,
    tokenization_pb2,
    tokenization_pb2_grpc,
)
from raw_http2 import RawHttp2, message_header
from waiting import eventually

GET_TOKENIZER = "/epikv.v1.ModelService/GetTokenizer"
TOKENIZE = "/epikv.v1.TokenizationService/Tokenize"
RESOURCE_EXHAUSTED = "8"
MIB = 1 << 20


@pytest.fixture
def large_tokenizer(sample_model: Path, tmp_path: Path) -> Path:
    """The sample model with a tokenizer that no window holds: JSON may end in spaces."""
    target = tmp_path / "large.pt"
    with zipfile.ZipFile(sample_model) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            padding = b" " * (5 * MIB // 2) if entry.filename.endswith("tokenizer.json") else b""
            new.writestr(entry, old.read(entry) + padding)
    return target


def test_a_tokenizer_that_nobody_reads_is_given_up(large_tokenizer: Path) -> None:
    with Daemon(large_tokenizer, "--threads=1", "--stream_stall_seconds=1") as daemon:
        request = model_pb2.GetTokenizerRequest().SerializeToString()
        with RawHttp2(daemon.grpc) as reader, RawHttp2(daemon.grpc, reads=False) as other:
            streams = {}
            for client in (reader, other):
                streams[client] = client.call(GET_TOKENIZER)
                client.send(streams[client], message_header(len(request)) + request, end=True)
            assert reader.await_status(streams[reader], 10) == "0"
            other.receive(0.1)
            assert streams[other] not in other.statuses

            def given_up() -> bool:
                other.receive(0.05)
                return streams[other] in other.statuses

            eventually(given_up)
            assert not other.closed
        calls = scrape(daemon.metrics)
        name = "epikv_grpc_requests_total"
        assert calls.value(name, method="ModelService/GetTokenizer", code="CANCELLED") == 1
        assert calls.value(name, method="ModelService/GetTokenizer", code="OK") == 1


class Guild:
    """A daemon with two users and an experimenter."""

    def __init__(self, stack: ExitStack, model: Path, folder: Path, *flags: str) -> None:
        roles = {"ann": "user", "bob": "user", "lab": "experimenter"}
        made = {name: new_token(name, role) for name, role in roles.items()}
        (folder / "tokens").write_text("".join(line for _, line in made.values()))
        self._tokens = {name: token for name, (token, _) in made.items()}
        tokens = f"--auth_tokens_file={folder / 'tokens'}"
        self.daemon = stack.enter_context(
            Daemon(model, "--threads=1", tokens, *flags, token=self._tokens["ann"])
        )
        self.channel = stack.enter_context(grpc.insecure_channel(self.daemon.grpc))

    def as_(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._tokens[name]}"),)


def code(future: grpc.Future) -> grpc.StatusCode:
    error = future.exception()
    assert error is None or isinstance(error, grpc.RpcError)
    return grpc.StatusCode.OK if error is None else error.code()


def test_what_one_client_may_leave_to_be_read_is_bounded(
    sample_model: Path, tmp_path: Path
) -> None:
    """40 texts of almost 4 MiB at once are more than 64 MiB; the next client's is taken nevertheless."""
    with ExitStack() as stack:
        guild = Guild(stack, sample_model, tmp_path)
        stub = tokenization_pb2_grpc.TokenizationServiceStub(guild.channel)
        long = tokenization_pb2.TokenizeRequest(text="7 " * (2 * MIB - 1000))
        calls = [stub.Tokenize.future(long, metadata=guild.as_("ann")) for _ in range(40)]
        beside = stub.Tokenize.future(
            tokenization_pb2.TokenizeRequest(text="7 " * (32 << 10)), metadata=guild.as_("bob")
        )
        assert code(beside) is grpc.StatusCode.OK
        refused = [call for call in calls if code(call) is not grpc.StatusCode.OK]
        assert {code(call) for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in refused:
            assert "of your long requests wait to be read" in call.exception().details()
        assert len(calls) - len(refused) >= 64 // 4
        page = scrape(guild.daemon.metrics)
        assert page.value("epikv_requests_rejected_total", reason="queue_full") == len(refused)


def test_answers_that_one_client_leaves_unread_are_bounded(
    sample_model: Path, tmp_path: Path
) -> None:
    """Answers of 2 MiB, of which he reads nothing: 64 MiB of them are held, then he is told. He has a connection's
    first window of each."""
    with ExitStack() as stack:
        guild = Guild(stack, sample_model, tmp_path, "--stream_stall_seconds=600")
        request = tokenization_pb2.TokenizeRequest(text="7 " * (2 * MIB - 1000)).SerializeToString()
        data = message_header(len(request)) + request
        ended: list[str] = []
        with RawHttp2(guild.daemon.grpc, reads=False) as client:
            for _ in range(40):
                stream = client.call(TOKENIZE, *guild.as_("ann"))
                rest = data
                while rest and not client.closed:
                    rest = client.send(stream, rest, end=True)
                    client.receive(0.01)

                def told(stream: int = stream) -> bool:
                    client.receive(0.05)
                    return stream in client.begun or client.closed

                # The thread that reads long requests is nice: beside busy others it has a twentieth of a core.
                eventually(told, seconds=400)
                assert not client.closed
                if stream in client.statuses:
                    ended.append(client.statuses[stream])
            assert ended and set(ended) == {RESOURCE_EXHAUSTED}
            assert len(ended) <= 40 - 64 // 4
            stub = tokenization_pb2_grpc.TokenizationServiceStub(guild.channel)
            large = tokenization_pb2.TokenizeRequest(text="7 " * MIB)
            assert (
                code(stub.Tokenize.future(large, metadata=guild.as_("bob"))) is grpc.StatusCode.OK
            )
        eventually(
            lambda: (
                code(stub.Tokenize.future(large, metadata=guild.as_("ann"))) is grpc.StatusCode.OK
            )
        )


def test_waiting_calls_about_experiments_are_bounded(sample_model: Path, tmp_path: Path) -> None:
    """While another process has the store locked, one call is tried, 16 wait, and more are refused."""
    store = tmp_path / "experiments.db"
    with ExitStack() as stack:
        guild = Guild(stack, sample_model, tmp_path, f"--experiment_store={store}")
        stub = experiment_pb2_grpc.ExperimentServiceStub(guild.channel)
        create = experiment_pb2.CreateExperimentRequest(experiment=define(LEAN))
        stub.CreateExperiment(create, metadata=guild.as_("lab"))
        lock = stack.enter_context(sqlite3.connect(store, isolation_level=None))
        lock.execute("BEGIN EXCLUSIVE")
        start = experiment_pb2.StartExperimentRequest(name="lean")
        calls = [stub.StartExperiment.future(start, metadata=guild.as_("lab")) for _ in range(25)]
        with ThreadPoolExecutor(len(calls)) as pool:
            done = pool.map(code, calls)
            eventually(lambda: sum(call.done() for call in calls) >= 8)
            refused = [call for call in calls if call.done()]
            assert {code(call) for call in refused} <= {
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAVAILABLE,  # the one that was tried
            }
            assert any("16 calls of yours" in call.exception().details() for call in refused)
            lock.execute("ROLLBACK")
            codes = list(done)
        # The first one waits, too, until its thread takes it.
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) in (8, 9)
        # What runs may be started once more.
        assert set(codes) <= {
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.OK,
        }
