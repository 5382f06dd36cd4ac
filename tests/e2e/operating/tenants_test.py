"""What tenants whose tokens tell who they are can learn of each other."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from credentials import new_token
from epikv import Client, Kv, RpcError, Stop
from epikv.testing import Daemon

PROMPT = "7 " * 300
ONE = Stop(1, ignore_eos=True)


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    made = {
        name: new_token(name, role)
        for name, role in {"ann": "user", "bob": "user", "root": "operator"}.items()
    }
    (tmp_path / "tokens").write_text("".join(line for _, line in made.values()))
    return {name: token for name, (token, _) in made.items()}


def cached(client: Client, salt: str = "") -> int:
    done = client.generate_once(PROMPT, stop=ONE, kv=Kv(cache_salt=salt))
    return done.summary.usage.cached_prompt_tokens


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_a_prefix_is_its_tenants(
    sample_model: Path, tmp_path: Path, tokens: dict[str, str], shared: bool
) -> None:
    flags = (
        "--threads=1",
        "--prefill_chunk_tokens=64",
        f"--auth_tokens_file={tmp_path / 'tokens'}",
        f"--shared_prefixes={'true' if shared else 'false'}",
    )
    with Daemon(sample_model, *flags, token=tokens["ann"]) as daemon, ExitStack() as stack:
        ann, bob, root = (
            stack.enter_context(Client(daemon.grpc, token=tokens[name])) for name in tokens
        )
        assert cached(ann) == 0
        assert cached(ann) > 0
        assert bool(cached(bob)) is shared
        assert bool(cached(root)) is shared
        # Nor by a salt that looks like another's.
        assert cached(bob, salt="3:ann") == 0


def test_a_request_id_is_its_tenants(
    sample_model: Path, tmp_path: Path, tokens: dict[str, str]
) -> None:
    """Nobody keeps another's out by it, or learns that it is there."""
    flags = ("--threads=1", f"--auth_tokens_file={tmp_path / 'tokens'}", "--outbox_messages=2")
    with Daemon(sample_model, *flags, token=tokens["ann"]) as daemon, ExitStack() as stack:
        ann, bob, root = (
            stack.enter_context(Client(daemon.grpc, token=tokens[name])) for name in tokens
        )
        long = Stop(1000, ignore_eos=True)
        with ann.generate("7", stop=long, request_id="mine") as first:
            next(iter(first))
            with bob.generate("7", stop=long, request_id="mine") as second:
                next(iter(second))
                with pytest.raises(RpcError) as caught:
                    ann.generate_once("7", stop=ONE, request_id="mine")
                assert caught.value.reason == "DUPLICATE_ID"
                bob.cancel("mine")
                with pytest.raises(RpcError, match="CANCELLED"):
                    list(second)
            with pytest.raises(RpcError) as caught:
                bob.cancel("mine")
            assert caught.value.reason == "NOT_FOUND"
            root.cancel("mine")
            with pytest.raises(RpcError, match="CANCELLED"):
                list(first)
