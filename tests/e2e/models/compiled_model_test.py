"""Compiled models, served: they say what the TorchScript file of the same model says."""

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import failed_start
import pytest
from epikv import Delta, Kv, Output, Stop
from epikv.export import ExportError, export, load
from epikv.sample import problem
from epikv.testing import Daemon

SAMPLES = Path(__file__).parents[3] / "tools" / "sample_model"
PROMPTS = [problem(seed).prompt for seed in (9, 10, 11)]
KVS = (Kv("full"), Kv("epikv_flat", budget=140), Kv("h2o", budget=140), Kv("snapkv", budget=60))
TRUST = "--trust_compiled_models=true"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The sample model in bfloat16, of TorchScript and compiled."""
    folder = tmp_path_factory.mktemp("models")
    shipped = SAMPLES / (SAMPLES / "SHIPPED").read_text().strip()
    script, compiled = folder / "script.pt", folder / "compiled.pt"
    export(shipped, script, dtype="bfloat16", name="sample", check=False)
    report = export(shipped, compiled, dtype="bfloat16", name="sample", compile=True)
    assert report is not None
    assert report.passed()
    yield script, compiled


def answers(
    model: Path, *flags: str, unpacked: Path | None = None
) -> list[list[tuple[list[int], list[float]]]]:
    """Tokens and their log-probabilities under each of KVS, of prompts that are read in chunks and
    decoded together."""
    output, stop = Output(token_ids=True, logprobs=True), Stop(max_output_tokens=40)
    told = []
    deterministic = ("--deterministic=true", "--prefill_chunk_tokens=16")
    with Daemon(model, *deterministic, *flags) as daemon, daemon.client() as client:
        if unpacked is not None:
            assert list(unpacked.rglob("*.so"))
        for kv in KVS:
            streams = [client.generate(p, kv=kv, output=output, stop=stop) for p in PROMPTS]
            of_each = []
            for stream in streams:
                deltas = [event for event in stream if isinstance(event, Delta)]
                tokens = [token for delta in deltas for token in delta.token_ids]
                of_each.append((tokens, [p for delta in deltas for p in delta.logprobs]))
            told.append(of_each)
    return told


def test_a_compiled_model_says_the_same_bit_for_bit(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, compiled = models
    expected = answers(script)
    assert all(len(tokens) > 10 for of_each in expected for tokens, _ in of_each)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert answers(compiled, TRUST, unpacked=tmp_path) == expected
    assert list(tmp_path.iterdir()) == []


def test_a_place_for_its_code_that_is_none_is_told(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    status, log = failed_start.start(f"--model={models[1]}", TRUST)
    assert status == 1
    assert "cannot be loaded" in log
    assert "below $TMPDIR" in log


def test_nobody_runs_its_code_who_was_not_told_to(models: tuple[Path, Path]) -> None:
    _, compiled = models
    status, log = failed_start.start(f"--model={compiled}")
    assert status == 1
    assert "whose code runs as the daemon does" in log
    assert "set trust_compiled_models" in log


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a compiled model whose index is changed."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
        for entry in archive.infolist():
            content = archive.read(entry)
            if entry.filename.endswith("extra/compiled.json"):
                index = json.loads(content)
                change(index)
                content = json.dumps(index).encode()
            copy.writestr(entry.filename, content)
    return target


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda index: index.update(torch="2.1"), "it was compiled by torch 2.1, and this is"),
        (lambda index: index.update(machine="vax"), "it was compiled for vax, and this is"),
        (lambda index: index.pop("linears"), "its compiled.json is not as `epikv export` writes"),
        (lambda index: index["weights"][3].update(dtype="float8"), "is of the type 'float8'"),
        (lambda index: index["weights"][3]["shape"].append(2), "bytes, not"),
        (lambda index: index["weights"][3]["shape"].append(-1), "has an impossible shape"),
        (lambda index: index["weights"][3]["shape"].append(2**62), "has an impossible shape"),
        (lambda index: index["linears"][0][0].update(weight="none"), "it has no weight 'none'"),
        (lambda index: index["linears"][0].clear(), "linears of one product are not of one kind"),
        (lambda index: index["linears"].reverse(), "outputs, not"),
        (lambda index: index["linears"].clear(), "the model has 0 products"),
    ],
)
def test_what_is_not_right_is_told(
    models: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    told: str,
) -> None:
    path = rewritten(models[1], tmp_path / "changed.pt", change)
    status, log = failed_start.start(f"--model={path}", TRUST)
    assert status == 1
    assert told in log
    assert "--compile" in log or "`epikv export`" in log


def test_a_damaged_file_is_not_loaded(models: tuple[Path, Path], tmp_path: Path) -> None:
    content = bytearray(models[1].read_bytes())
    content[content.index(b"\x7fELF") + 5000] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    status, log = failed_start.start(f"--model={tmp_path / 'damaged.pt'}", TRUST)
    assert status == 1
    assert "is damaged" in log


def test_it_is_no_module_to_train(models: tuple[Path, Path]) -> None:
    with pytest.raises(ExportError, match="is compiled: take the file that --no-compile writes"):
        load(models[1])
