"""The real daemon over the shipped sample model, for end-to-end tests.

The binary is found as `epikv.testing.find_binary` says; tests/run.sh builds it first.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv.cli import main
from epikv.client import Client
from epikv.sample import problem
from epikv.testing import Daemon

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tools" / "sample_model"


@pytest.fixture(scope="session")
def sample_directory() -> Path:
    """The shipped model, in the Hugging Face layout."""
    return SAMPLES / (SAMPLES / "SHIPPED").read_text().strip()


@pytest.fixture(scope="session")
def sample_model(sample_directory: Path) -> Path:
    """The shipped model as the quickstart exports it, once for all sessions."""
    from epikv.export import export

    digest = hashlib.sha256()
    for source in sorted(
        [*sample_directory.glob("*.*"), *(ROOT / "tools/epikv/export").glob("*.py")]
    ):
        digest.update(source.read_bytes())
    path = ROOT / "build" / "e2e" / f"sample-{digest.hexdigest()[:12]}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        # Whoever comes second would put another file in the place of one that a daemon loads.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            export(sample_directory, path, dtype="float32", name="sample")
    return path


@pytest.fixture(scope="session")
def artefact_dir(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `epikv calibrate` finds out about the sample model from its own solutions, once for all
    processes of a session."""
    # Each process of pytest-xdist has a folder of its own in the session's.
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / "artefacts"
    with (shared / "artefacts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            made = tmp_path_factory.mktemp("artefacts")
            _calibrate(sample_model, made, tmp_path_factory.mktemp("texts"))
            made.rename(directory)
    return directory


def _calibrate(sample_model: Path, directory: Path, text_folder: Path) -> None:
    texts = []
    for index in range(8):  # as few as epikv_probe takes
        task = problem(f"calibrate/{index}")
        texts.append(text_folder / f"{index}.txt")
        texts[-1].write_text(f"{task.prompt} {task.trace}")
    for policy, more in (
        ("epikv_probe", ["--after", "<think>"]),
        ("thinkv_tbe", []),
        ("triattention", []),
    ):
        out = f"{directory / policy}.json"
        command = ["calibrate", policy, str(sample_model), "-o", out, *more]
        for text in texts:
            command += ["--text", str(text)]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    few = ["--task", "sample:programs", "--problems", "10"]
    quick = ["--steps", "3"]
    for policy, more in (
        ("dbtrimkv", [*quick, "--width", "8"]),
        ("dms", [*quick, "--window", "64"]),
        ("duo_attention", []),
        ("epicache", []),
        ("epikv_forecast", []),
        ("headkv", []),
        ("kvzap", ["--instruction", ""]),
        ("trimkv", [*quick, "--width", "8"]),
    ):
        out = f"{directory / policy}.json"
        command = ["calibrate", policy, str(sample_model), "-o", out, *few, *more]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output


@pytest.fixture(scope="session")
def daemon(sample_model: Path, artefact_dir: Path) -> Iterator[Daemon]:
    """A daemon that all tests share; those that stop or overload one start their own."""
    with Daemon(sample_model, "--threads=1", f"--artefact_dir={artefact_dir}") as running:
        yield running


@pytest.fixture(scope="session")
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected
