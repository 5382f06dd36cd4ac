"""A model file's manifest, replaced in place."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from epikv.export import ExportError, archive, load, random_model
from epikv.export.manifest import Calibration
from tiny_model import TINY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random_model(TINY, tmp_path / "model.pt", check=False)
    return tmp_path / "model.pt"


CALIBRATION = Calibration("epikv_flat", 1, 0, -1, 32, True, {"recall": 0.9})


def test_only_the_manifest_is_replaced(model: Path) -> None:
    module, manifest, tokenizer = load(model)
    with zipfile.ZipFile(model) as file:
        before = {record: file.read(record) for record in file.namelist()}
    archive.replace_manifest(model, replace(manifest, calibration=CALIBRATION))
    with zipfile.ZipFile(model) as file:
        after = {record: file.read(record) for record in file.namelist()}
        offsets = [record.header_offset for record in file.infolist()]
        starts = []
        for offset in offsets:
            file.fp.seek(offset + 26)
            name, extra = (int.from_bytes(file.fp.read(2), "little") for _ in range(2))
            starts.append(offset + 30 + name + extra)
    assert list(after) == list(before)
    assert [n for n in before if before[n] != after[n]] == [
        n for n in before if n.endswith("extra/manifest.json")
    ]
    assert {start % 64 for start in starts} == {0}
    assert archive.read_manifest(model) == replace(manifest, calibration=CALIBRATION)
    assert archive.read_tokenizer(model) == tokenizer
    assert [*model.parent.iterdir()] == [model]
    again = load(model)[0]
    for (name, a), (_, b) in zip(module.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_it_is_replaced_whole_or_not_at_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model.read_bytes()
    manifest = archive.read_manifest(model)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("shutil.copyfileobj", fail)
    with pytest.raises(OSError, match="disk full"):
        archive.replace_manifest(model, manifest)
    assert model.read_bytes() == before
    assert [*model.parent.iterdir()] == [model]


def test_what_is_no_model_file_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ExportError, match="not a model file"):
        archive.read_manifest(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("a/b", "")
    with pytest.raises(ExportError, match="no extra/manifest.json"):
        archive.read_manifest(tmp_path / "other.zip")
