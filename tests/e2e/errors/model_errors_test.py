"""What clients and operators are told of models that fail, are damaged or are not built, and of settings:
rows of the table in docs/errors.md."""

import hashlib
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import broken_models
import grpc
import pytest
from epikv.testing import Daemon
from epikv.v1 import admin_pb2, generation_pb2
from odd_model import save, unreadable
from told import ADMIN, GENERATION, Code, Generate, Row, Told, ask, check, read_error, refusal

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    model = save(tmp_path_factory.mktemp("odd") / "odd.pt")
    flags = ("--threads=1", "--kv_pool_bytes=1000000", "--deterministic=true")
    with Daemon(model, *flags) as daemon:
        yield daemon


@pytest.mark.parametrize(("token", "says"), [(8, "NaN"), (9, "index out of range")])
def test_a_forward_that_fails(odd: Daemon, token: int, says: str) -> None:
    """It fails its own request; those in its batch notice nothing."""
    good = Generate(token_ids={"ids": [1, 2, 3]}, stop={"max_output_tokens": 40})
    bad = Generate(token_ids={"ids": [1, token, 3]}, stop={"max_output_tokens": 40})
    good.output.token_ids = good.output.logprobs = True
    good.sampling.logit_bias.update({8: -100, 9: -100})

    def tokens(answer: list[bytes]) -> list[int]:
        result = generation_pb2.GenerateResult.FromString(answer[0])
        return [*result.token_ids, *result.logprobs]

    alone = tokens(ask(odd.grpc, f"{GENERATION}/GenerateOnce", good))
    with grpc.insecure_channel(odd.grpc) as channel:
        method = channel.unary_unary(f"/epikv.v1.{GENERATION}/GenerateOnce")
        requests = [good, good, bad, good]
        trace = [("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")]
        calls = [method.future(r.SerializeToString(), metadata=trace) for r in requests]
        with pytest.raises(grpc.RpcError) as caught:
            calls.pop(2).result()
        assert all(tokens([call.result()]) == alone for call in calls)
    failed = read_error(caught.value)
    assert failed.code is Code.INTERNAL and failed.info.reason == "INTERNAL"
    assert says in failed.message and "\n" not in failed.message
    assert failed.info.metadata["trace_id"] == TRACE


def test_a_conversation_with_a_model_that_has_no_format_for_it(odd: Daemon) -> None:
    row = Row(
        Generate(chat={"messages": [{"role": "CHAT_ROLE_USER", "content": "hello"}]}),
        {"chat": ["chat"]},
        code=Code.FAILED_PRECONDITION,
        reason="CHAT_FORMAT",
    )
    check(row, refusal(odd.grpc, row.method, row.request))


def load(path: Path, **more: Any) -> admin_pb2.LoadModelRequest:
    return admin_pb2.LoadModelRequest(source={"path": str(path), **more})


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    broken_models.write(folder)
    flip(folder / "valid.pt", folder / "flipped.pt")
    return folder


def flip(whole: Path, flipped: Path) -> str:
    """Writes `whole` with one bit of its largest weight flipped; returns that record's name."""
    with zipfile.ZipFile(whole) as archive:
        weight = max(
            (record for record in archive.infolist() if "/data/" in record.filename),
            key=lambda record: record.file_size,
        )
        data = archive.read(weight)
    content = whole.read_bytes()
    place = content.index(data, weight.header_offset) + len(data) // 2
    flipped.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
    return weight.filename.split("/", 1)[1]


@pytest.mark.parametrize("name", ["truncated", "empty", "not_a_model", "flipped"])
def test_a_model_file_that_is_damaged(odd: Daemon, broken: Path, name: str) -> None:
    told = refusal(odd.admin, f"{ADMIN}/LoadModel", load(broken / f"{name}.pt", name="new"))
    assert (told.code, told.info.reason) == (Code.DATA_LOSS, "DATA_LOSS"), told.message
    assert name in told.message


def test_a_damaged_weight_is_named(odd: Daemon, broken: Path, tmp_path: Path) -> None:
    record = flip(broken / "valid.pt", tmp_path / "flipped.pt")
    told = refusal(odd.admin, f"{ADMIN}/LoadModel", load(tmp_path / "flipped.pt", name="new"))
    assert told.code is Code.DATA_LOSS
    assert f"its record '{record}' has a wrong checksum" in told.message


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "no_tokenizer": "the file has no tokenizer.json",
        "no_manifest": "the file has no manifest.json",
        "manifest_later": "made by a later version of epikv",
    }.items(),
)
def test_a_model_that_is_not_what_its_manifest_says(
    odd: Daemon, broken: Path, name: str, reason: str
) -> None:
    told = refusal(odd.admin, f"{ADMIN}/LoadModel", load(broken / f"{name}.pt", name="new"))
    assert told.code is Code.FAILED_PRECONDITION and reason in told.message


@pytest.fixture
def fenced(broken: Path, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that may load one file, and any copy of it, from one folder."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(broken / "valid.pt", folder)
    digest = hashlib.sha256((broken / "valid.pt").read_bytes()).hexdigest()
    rules = (f"--model_root={folder}", f"--model_digests=sha256:{digest}")
    pool = "--kv_pool_bytes=1000000"
    with Daemon(folder / "valid.pt", "--threads=1", pool, *rules) as daemon:
        yield daemon


def test_models_from_elsewhere_and_others_are_not_loaded(
    fenced: Daemon, broken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"

    def refused(path: Path, **more: str) -> Told:
        request = load(path, name="new", kv_pool_bytes=1000000, **more)
        return refusal(fenced.admin, f"{ADMIN}/LoadModel", request)

    (folder / "link.pt").symlink_to(broken / "valid.pt")
    for path in (broken / "valid.pt", folder / "link.pt", folder / ".." / "models2" / "valid.pt"):
        (tmp_path / "models2").mkdir(exist_ok=True)
        shutil.copy(broken / "valid.pt", tmp_path / "models2")
        told = refused(path)
        assert told.code is Code.PERMISSION_DENIED and "model_root" in told.message
    told = refused(folder / "valid.pt", artefact_dir=str(tmp_path))
    assert told.code is Code.PERMISSION_DENIED and "model_root" in told.message
    shutil.copy(broken / "wrong_order.pt", folder)
    told = refused(folder / "wrong_order.pt")
    assert told.code is Code.FAILED_PRECONDITION and "not in model_digests" in told.message
    shutil.copy(broken / "valid.pt", folder / "copy.pt")
    copy = load(folder / "copy.pt", name="copy", kv_pool_bytes=1000000)
    ask(fenced.admin, f"{ADMIN}/LoadModel", copy)


@pytest.mark.parametrize("name", ["saves", "sets_state", "default_runs", "reads_file"])
def test_code_in_a_model_file_is_not_run(odd: Daemon, broken: Path, name: str) -> None:
    told = refusal(odd.admin, f"{ADMIN}/LoadModel", load(broken / f"{name}.pt", name="new"))
    assert told.code is Code.FAILED_PRECONDITION, told.message
    assert not Path(f"/proc/{odd.pid}/cwd/ran").exists()


def test_other_models_that_are_not_loaded(odd: Daemon, broken: Path, tmp_path: Path) -> None:
    def refused(request: admin_pb2.LoadModelRequest) -> Told:
        return refusal(odd.admin, f"{ADMIN}/LoadModel", request)

    missing = refused(load(tmp_path / "none.pt", name="new"))
    assert missing.code is Code.NOT_FOUND and "none.pt" in missing.message

    contract = refused(load(broken / "missing_attention.pt", name="new"))
    assert contract.code is Code.FAILED_PRECONDITION and "contract" in contract.message

    taken = refused(load(broken / "valid.pt", name="tiny"))
    assert (taken.code, taken.info.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_ID")
    assert taken.details["ResourceInfo"].resource_name == "tiny"

    nothing = refused(admin_pb2.LoadModelRequest())
    assert nothing.code is Code.INVALID_ARGUMENT and set(nothing.fields) == {"source.path"}

    unread = unreadable(tmp_path / "unreadable.pt")
    not_built = refused(load(unread, name="new", kv_pool_bytes=1000000))
    assert (not_built.code, not_built.info.reason) == (Code.UNIMPLEMENTED, "UNIMPLEMENTED")
    assert "StripAccents" in not_built.message


def test_settings_that_are_wrong(odd: Daemon) -> None:
    request = admin_pb2.UpdateConfigRequest(
        config={"drain_seconds": -1, "log_level": "loud"},
        update_mask={"paths": ["drain_seconds", "log_level", "threads"]},
    )
    told = refusal(odd.admin, f"{ADMIN}/UpdateConfig", request)
    assert (told.code, told.info.reason) == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert set(told.fields) == {"update_mask", "config.drain_seconds", "config.log_level"}
    grace = admin_pb2.UnloadModelRequest(name="tiny", grace={"seconds": -1})
    told = refusal(odd.admin, f"{ADMIN}/UnloadModel", grace)
    assert set(told.fields) == {"grace"}


def test_several_models_and_none_named(odd: Daemon, broken: Path) -> None:
    second = load(broken / "valid.pt", name="second", kv_pool_bytes=1000000)
    ask(odd.admin, f"{ADMIN}/LoadModel", second)
    told = refusal(odd.grpc, f"{GENERATION}/Generate", Generate(token_ids={"ids": [1]}))
    assert told.code is Code.INVALID_ARGUMENT and set(told.fields) == {"model"}
    assert "'second'" in told.message and "'tiny'" in told.message
    ask(odd.admin, f"{ADMIN}/UnloadModel", admin_pb2.UnloadModelRequest(name="second"))
