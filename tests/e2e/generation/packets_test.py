"""Packets, through the real daemon: what is cached once, and what may go wrong with it."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner
from credentials import new_token
from epikv import Client, Kv, NotFound, Output, RpcError, Stop
from epikv.cli import main
from epikv.export import export
from epikv.export.synthetic import byte_tokenizer, write_directory
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError
from tiny_model import TINY
from tokenizers.processors import TemplateProcessing
from told import GENERATION, generate, refusal

FLAGS = ("--threads=1", "--deterministic=true", "--prefill_chunk_tokens=64")
ROOM = "--packet_bytes=200000000"
OUTPUT = Output(token_ids=True, logprobs=True)


@pytest.fixture(scope="module")
def server(sample_model: Path) -> Iterator[Daemon]:
    with Daemon(sample_model, *FLAGS, ROOM) as running:
        yield running


@pytest.fixture
def text(server: Daemon) -> list[int]:
    with server.client() as client:
        return client.tokenize(problem(9).prompt + " " + problem(9).trace)[:200]


def test_text_behind_a_packet_begins_nothing(tmp_path: Path) -> None:
    write_directory({**TINY, "vocab_size": 300}, tmp_path / "model", seed=3, tokenizer="bytes")
    tokenizer = byte_tokenizer(298)
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    begins = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 298)])
    tokenizer.post_processor = begins
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    export(tmp_path / "model", tmp_path / "model.pt", check=False)
    with Daemon(tmp_path / "model.pt", *FLAGS, ROOM) as running, running.client() as client:
        assert client.tokenize("ab")[0] == 298
        first = client.create_packet("a document").packet
        assert first.tokens == 11
        behind = client.generate_once("more", packets=[first.id], stop=Stop(1)).summary.usage
        assert behind.prompt_tokens == 11 + 4
        assert client.create_packet("more", packets=[first.id]).packet.tokens == 15
        assert client.score("more", [5], packets=[first.id]).summary.usage.prompt_tokens == 15


def test_a_packet_stands_for_its_tokens(server: Daemon, text: list[int]) -> None:
    stop = Stop(40, ignore_eos=True)
    with server.client() as client:
        plain = client.generate_once(text, stop=stop, output=OUTPUT)
        made = client.create_packet(text[:150])
        assert made.packet is not None and made.result is not None
        assert (made.packet.tokens, made.packet.kept_tokens) == (150, 150)
        loaded = client.generate_once(
            text[150:], packets=[made.packet.id], stop=stop, output=OUTPUT
        )
        assert (loaded.token_ids, loaded.logprobs) == (plain.token_ids, plain.logprobs)
        usage = loaded.summary.usage
        assert (usage.prompt_tokens, usage.packet_prompt_tokens) == (200, 150)
        assert usage.cached_prompt_tokens == 0
        scored = client.score(
            text[150:], plain.token_ids, packets=[made.packet.id], seed=1, kv=Kv("sliding", 300)
        )
        assert scored.logprobs == plain.logprobs
        assert client.create_packet(text[:150]).packet.id == made.packet.id, "the same again"
        assert [packet.id for packet in client.packets()] == [made.packet.id]
        page = scrape(server.metrics)
        assert page.total("epikv_packets") == 1
        assert page.total("epikv_packet_memory_bytes") == made.packet.bytes
        assert page.total("epikv_packet_prompt_tokens_total") == 300
        client.delete_packet(made.packet.id)
        assert client.packets() == []
        with pytest.raises(NotFound, match="there is no packet"):
            client.generate_once("1", packets=[made.packet.id], stop=Stop(1))
        with pytest.raises(NotFound, match="there is no packet"):
            client.delete_packet(made.packet.id)


def test_the_packet_that_is_missing_is_named(server: Daemon, text: list[int]) -> None:
    with server.client() as client:
        made = client.create_packet(text[:10]).packet
        missing = "sha256:" + 64 * "0"
        request = generate(packets=[made.id, missing, made.id])
        resource = refusal(server.grpc, f"{GENERATION}/GenerateOnce", request).details[
            "ResourceInfo"
        ]
        assert (resource.resource_type, resource.resource_name) == ("packet", missing)
        # Sixty-four, the same one each time; and no more.
        result = client.generate_once("1", packets=[made.id] * 64, stop=Stop(1))
        assert result.summary.usage.packet_prompt_tokens == 64 * 10
        with pytest.raises(RpcError, match="at most 64"):
            client.generate_once("1", packets=[made.id] * 65, stop=Stop(1))
        client.delete_packet(made.id)


def test_what_a_policy_has_left_is_a_packet(server: Daemon, text: list[int]) -> None:
    kv = Kv("snapkv", 64, params={"window": 16})
    with server.client() as client:
        packet = client.create_packet(text, kv=kv).packet
        assert packet is not None
        assert (packet.tokens, packet.kept_tokens) == (200, 64)
        result = client.generate_once(text[-3:], packets=[packet.id], stop=Stop(8))
        assert result.summary.kv.peak_tokens == 64 + 3 + 7
        with pytest.raises(RpcError, match="keeps the same in all of them"):
            client.generate_once("1", packets=[packet.id], kv=Kv("streaming_llm", 64))
        client.delete_packet(packet.id)


def test_the_command_line(server: Daemon) -> None:
    run = CliRunner()
    at = ["--server", server.grpc]
    made = run.invoke(main, ["packet", "create", problem(3).prompt, *at])
    assert made.exit_code == 0, made.output
    packet = made.stdout.strip()
    assert packet.startswith("sha256:")
    listed = run.invoke(main, ["packet", "list", *at])
    assert packet in listed.stdout
    said = run.invoke(main, ["generate", "<think>", "--packet", packet, "-n", "5", *at])
    assert said.exit_code == 0 and "of packets" in said.stderr
    assert run.invoke(main, ["packet", "delete", packet, *at]).exit_code == 0
    gone = run.invoke(main, ["packet", "delete", packet, *at])
    assert gone.exit_code == 1 and "there is no packet" in gone.stderr


def test_a_paused_conversation_goes_on_elsewhere(
    sample_model: Path, text: list[int], tmp_path: Path
) -> None:
    flags = (*FLAGS, ROOM, f"--packet_dir={tmp_path}")
    with ExitStack() as stack:
        here, there = (stack.enter_context(Daemon(sample_model, *flags)) for _ in range(2))
        first, second = (stack.enter_context(each.client()) for each in (here, there))
        whole = first.generate_once(text, stop=Stop(60, ignore_eos=True), output=OUTPUT)
        begun = first.create_packet(text, stop=Stop(20, ignore_eos=True), output=OUTPUT)
        said = begun.result.token_ids
        assert said == whole.token_ids[:20]
        assert begun.packet.tokens == 200 + 19
        [path] = tmp_path.iterdir()
        digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
        assert begun.packet.id == "sha256:" + digest.stdout.split()[0] == f"sha256:{path.stem}"
        rest = second.generate_once(
            said[-1:], packets=[begun.packet.id], stop=Stop(40, ignore_eos=True), output=OUTPUT
        )
        assert rest.token_ids == whole.token_ids[20:]
        assert rest.logprobs == whole.logprobs[20:]
        assert [packet.id for packet in second.packets()] == [begun.packet.id]
        second.delete_packet(begun.packet.id)
        again = first.create_packet(text, stop=Stop(20, ignore_eos=True), output=OUTPUT)
        assert again.packet.id == begun.packet.id
        assert [packet.id for packet in second.packets()] == [begun.packet.id], "it is there again"
        second.delete_packet(begun.packet.id)
        assert first.packets() == [], "it is gone for both"


def test_packets_are_there_after_a_restart(
    sample_model: Path, text: list[int], tmp_path: Path
) -> None:
    """Memory has room for one at a time; what was used last is there."""
    with Daemon(sample_model, *FLAGS, ROOM) as daemon, daemon.client() as client:
        size = client.create_packet(text[:150]).packet.bytes
    flags = (*FLAGS, f"--packet_bytes={2 * size}", f"--packet_dir={tmp_path}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        packets = [client.create_packet([token] + text[:149]).packet for token in range(4, 9)]
        page = scrape(daemon.metrics)
        assert page.total("epikv_packets") == 5
        assert page.total("epikv_packet_memory_bytes") <= 2 * size
        before = [
            client.generate_once(text[:9], packets=[each.id], stop=Stop(5)).text for each in packets
        ]
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        listed = client.packets()
        assert {each.id for each in listed} == {each.id for each in packets}
        assert {each.bytes for each in listed} == {each.bytes for each in packets}
        for said, packet in zip(before, packets, strict=True):
            result = client.generate_once(text[:9], packets=[packet.id], stop=Stop(5))
            assert result.text == said


def test_a_packet_is_its_tenants(sample_model: Path, tmp_path: Path) -> None:
    tokens = {}
    lines = ""
    for name, role in {"ann": "user", "bob": "user", "root": "operator"}.items():
        tokens[name], line = new_token(name, role)
        lines += line
    (tmp_path / "tokens").write_text(lines)
    flags = (*FLAGS, ROOM, f"--auth_tokens_file={tmp_path / 'tokens'}", f"--packet_dir={tmp_path}")
    with Daemon(sample_model, *flags, token=tokens["ann"]) as daemon, ExitStack() as stack:
        ann, bob, root = (
            stack.enter_context(Client(daemon.grpc, token=tokens[name])) for name in tokens
        )
        packet = ann.create_packet("1 2 3 4 5").packet
        for use in (
            lambda: bob.generate_once("1", packets=[packet.id], stop=Stop(1)),
            lambda: bob.delete_packet(packet.id),
            lambda: bob.generate_once("1", packets=["sha256:" + 64 * "0"], stop=Stop(1)),
        ):
            with pytest.raises(NotFound, match="there is no packet"):
                use()
        assert bob.packets() == [] and root.packets() == []
        with pytest.raises(RpcError, match="tenant 'ann' of caller 'bob'"):
            bob.packets(tenant="ann")
        assert [each.id for each in root.packets(tenant="ann")] == [packet.id]
        assert bob.create_packet("1 2 3 4 5").packet.id != packet.id, "whose it is, is in its name"
        root.delete_packet(packet.id, tenant="ann")
        assert ann.packets() == []


def test_there_is_only_so_much_room(sample_model: Path, text: list[int], tmp_path: Path) -> None:
    with Daemon(sample_model, *FLAGS, ROOM) as daemon, daemon.client() as client:
        size = client.create_packet(text).packet.bytes

    def refused(client: Client, match: str) -> None:
        with pytest.raises(RpcError, match=match) as caught:
            client.create_packet([7, *text[1:]])
        assert caught.value.reason == "PACKETS_FULL"
        assert caught.value.retry_delay is not None

    room = f"--packet_bytes={size + size // 2}"
    with Daemon(sample_model, *FLAGS, room) as daemon, daemon.client() as client:
        first = client.create_packet(text).packet
        refused(client, "of packet_bytes")
        assert scrape(daemon.metrics).total("epikv_requests_rejected_total") == 1
        client.delete_packet(first.id)
        client.create_packet([7, *text[1:]])
    more = f"--packet_bytes={4 * size}"
    own = f"--tenant_packet_bytes={size}"
    with Daemon(sample_model, *FLAGS, more, own) as daemon, daemon.client() as client:
        client.create_packet(text)
        refused(client, "that a tenant may have")
    folder = (f"--packet_dir={tmp_path}", f"--packet_dir_bytes={size}")
    with Daemon(sample_model, *FLAGS, more, *folder) as daemon, daemon.client() as client:
        client.create_packet(text)
        refused(client, "packet_dir has")
        assert len(list(tmp_path.iterdir())) == 1
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        for use in (
            lambda: client.create_packet(text),
            client.packets,
            lambda: client.generate_once("1", packets=["sha256:" + 64 * "0"], stop=Stop(1)),
        ):
            with pytest.raises(RpcError, match="keeps no packets") as caught:
                use()
            assert caught.value.reason == "PACKETS_OFF"


def test_a_file_that_is_wrong_serves_nothing(
    sample_model: Path, text: list[int], tmp_path: Path
) -> None:
    flags = (*FLAGS, ROOM, f"--packet_dir={tmp_path}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        packet = client.create_packet(text[:60]).packet
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()

    def use(**more: str) -> None:
        kinds = [f"--{name}={value}" for name, value in more.items()]
        with Daemon(sample_model, *flags, *kinds) as daemon, daemon.client() as client:
            client.generate_once("1 2", packets=[packet.id], stop=Stop(1))

    use()
    wrong = {
        "is damaged": [
            whole[:-1],
            whole[:100],
            b"",
            whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
            whole + b"x",
            b"not a packet" * 1000,
            whole[:8] + b"\xff" * 8 + whole[16:],
        ],
        "another version of epikv": [whole.replace(b"epikvKV1", b"epikvKV2")],
    }
    for message, files in wrong.items():
        for content in files:
            path.write_bytes(content)
            with pytest.raises(RpcError, match=message):
                use()
    path.write_bytes(whole)
    with pytest.raises(RpcError, match="or kv_dtype") as caught:
        use(kv_dtype="int8")
    assert caught.value.reason == "PACKET_MODEL"
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(RpcError):
        use()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={size}", "epikv", str(folder)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told(
    server: Daemon, sample_model: Path, text: list[int], tmp_path: Path
) -> None:
    with server.client() as client:
        packet = client.create_packet(text).packet
        client.delete_packet(packet.id)
    disk = tmp_path / "disk"
    with small_disk(disk, packet.bytes):
        flags = (*FLAGS, ROOM, f"--packet_dir={disk}")
        with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
            kept = client.create_packet(text[:20]).packet
            with pytest.raises(RpcError, match="No space left") as caught:
                client.create_packet(text)
            assert caught.value.reason == "PACKETS_FULL"
            assert [each.id for each in client.packets()] == [kept.id]
            assert len(list(disk.iterdir())) == 1, "nothing is left of it"
            client.generate_once("1", packets=[kept.id], stop=Stop(1))


def test_a_file_that_may_not_grow_is_told(
    sample_model: Path, text: list[int], tmp_path: Path
) -> None:
    """What quotas do, and `ulimit -f`."""
    flags = (*FLAGS, ROOM, f"--packet_dir={tmp_path}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        everything = resource.RLIM_INFINITY
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, everything))
        with pytest.raises(RpcError, match="File too large") as caught:
            client.create_packet(text)
        assert caught.value.reason == "PACKETS_FULL"
        assert client.packets() == [] and not list(tmp_path.iterdir())
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (everything, everything))
        client.create_packet(text)


def test_killed_while_it_writes_it_leaves_whole_files_alone(
    sample_model: Path, text: list[int], tmp_path: Path
) -> None:
    flags = (*FLAGS, ROOM, f"--packet_dir={tmp_path}")
    killed = pytest.raises(DaemonError, match="status -9")
    with killed, Daemon(sample_model, *flags) as daemon:

        def create(first: int) -> None:
            with daemon.client() as client:
                for token in range(first, first + 100):
                    try:
                        client.create_packet([token, *text[:60]])
                    except RpcError:
                        return

        clients = [Thread(target=create, args=(first,)) for first in (10, 110)]
        for client in clients:
            client.start()
        while len(list(tmp_path.glob("*.packet"))) < 5:
            pass
        daemon.kill()
        for client in clients:
            client.join()
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        listed = client.packets()
        assert len(listed) >= 4
        assert len(listed) == len([each for each in tmp_path.iterdir() if each.name[0] != "."])
        for packet in listed:
            client.generate_once("1", packets=[packet.id], stop=Stop(1))
        old = tmp_path / ".0123.packet"
        old.write_bytes(b"half")
        os.utime(old, (0, 0))
    with Daemon(sample_model, *flags):
        assert not old.exists(), "what a writer left an hour ago is swept"
