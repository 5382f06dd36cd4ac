"""The protos against their rules and against the last release, by buf (tests/wire): proto/README.md."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROTO = ROOT / "proto"
BUF = ROOT / "tests" / "wire" / "node_modules" / ".bin" / "buf"


def last_release() -> Path:
    releases = (PROTO / "released").glob("*.binpb")
    return max(releases, key=lambda path: [int(part) for part in path.stem.split(".")])


def faults(tmp_path: Path, *command: str) -> set[str]:
    """The rules that buf finds broken; empty where it exits with 0."""
    assert BUF.exists(), f"buf is not installed: npm --prefix {BUF.parents[2]} ci --ignore-scripts"
    done = subprocess.run(
        [BUF, *command, "--error-format=json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "BUF_CACHE_DIR": str(tmp_path / "cache")},
    )
    found = {json.loads(line)["type"] for line in done.stdout.splitlines()}
    assert bool(found) == (done.returncode != 0), done.stdout + done.stderr
    return found


def lint(tmp_path: Path, protos: Path) -> set[str]:
    return faults(tmp_path, "lint", str(protos))


def breaking(tmp_path: Path, protos: Path) -> set[str]:
    return faults(tmp_path, "breaking", str(protos), "--against", str(last_release()))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROTO, tmp_path / "proto"))


def edit(protos: Path, file: str, before: str, after: str) -> None:
    path = protos / "epikv" / "v1" / file
    text = path.read_text()
    assert text.count(before) == 1, f"{file} has changed: find another place"
    path.write_text(text.replace(before, after))


def test_the_protos_keep_their_rules(tmp_path: Path) -> None:
    assert lint(tmp_path, PROTO) == set()


def test_clients_of_the_last_release_are_understood(tmp_path: Path) -> None:
    assert breaking(tmp_path, PROTO) == set()


@pytest.mark.parametrize(
    ("file", "before", "after", "rule"),
    [
        ("kv.proto", "string cache_salt = 11;", "string cacheSalt = 11;", "FIELD_LOWER_SNAKE_CASE"),
        (
            "generation.proto",
            "  CHAT_ROLE_UNSPECIFIED = 0;",
            "  CHAT_ROLE_NONE = 0;",
            "ENUM_ZERO_VALUE_SUFFIX",
        ),
        ("tokenization.proto", "  // Token ids of a text.\n", "", "COMMENT_RPC"),
        (
            # An exception goes into buf.yaml, with its reason.
            "tokenization.proto",
            "  // Token ids of a text.\n",
            "  // buf:lint:ignore COMMENT_RPC\n",
            "COMMENT_RPC",
        ),
        (
            # Only the files that buf.yaml lists may name an answer otherwise.
            "tokenization.proto",
            "returns (DetokenizeResponse)",
            "returns (ApplyChatTemplateResponse)",
            "RPC_RESPONSE_STANDARD_NAME",
        ),
    ],
)
def test_a_broken_rule_is_found(
    tmp_path: Path, copied: Path, file: str, before: str, after: str, rule: str
) -> None:
    edit(copied, file, before, after)
    assert rule in lint(tmp_path, copied)


@pytest.mark.parametrize(
    ("file", "before", "after", "rule"),
    [
        ("kv.proto", "string cache_salt = 11;", "string cache_salt = 99;", "FIELD_NO_DELETE"),
        ("kv.proto", "string cache_salt = 11;", "string salt = 11;", "FIELD_SAME_NAME"),
        ("kv.proto", "string cache_salt = 11;", "bytes cache_salt = 11;", "FIELD_SAME_TYPE"),
        (
            # Not even so, within epikv.v1.
            "kv.proto",
            "string cache_salt = 11;",
            'reserved 11;\n  reserved "cache_salt";',
            "FIELD_NO_DELETE",
        ),
        ("policy.proto", "  reserved 8;\n", "", "RESERVED_MESSAGE_NO_DELETE"),
        ("generation.proto", "CHAT_ROLE_USER = 2;", "CHAT_ROLE_USER = 9;", "ENUM_VALUE_NO_DELETE"),
        (
            "generation.proto",
            "  rpc CancelRequest(CancelRequestRequest) returns (CancelRequestResponse);\n",
            "",
            "RPC_NO_DELETE",
        ),
        (
            "generation.proto",
            "returns (stream GenerateResponse)",
            "returns (GenerateResponse)",
            "RPC_SAME_SERVER_STREAMING",
        ),
    ],
)
def test_what_would_break_clients_is_found(
    tmp_path: Path, copied: Path, file: str, before: str, after: str, rule: str
) -> None:
    edit(copied, file, before, after)
    assert rule in breaking(tmp_path, copied)


def test_what_is_added_breaks_nobody(tmp_path: Path, copied: Path) -> None:
    edit(
        copied,
        "generation.proto",
        "message CancelRequestResponse {}",
        "message CancelRequestResponse {\n  string note = 1;\n}",
    )
    edit(
        copied,
        "tokenization.proto",
        "  // The text of token ids.\n",
        "  // Made up.\n  rpc Count(CountRequest) returns (CountResponse);\n"
        "  // The text of token ids.\n",
    )
    with (copied / "epikv" / "v1" / "tokenization.proto").open("a") as file:
        file.write("message CountRequest {}\nmessage CountResponse {}\n")
    assert lint(tmp_path, copied) == set()
    assert breaking(tmp_path, copied) == set()
