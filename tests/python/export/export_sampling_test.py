"""Sampling defaults: what of generation_config.json the manifest says."""

import json
from pathlib import Path
from typing import Any

import pytest
from epikv.export import ExportError, archive, export
from epikv.export.manifest import Manifest
from epikv.export.sampling import sampling_of
from epikv.export.synthetic import write_directory
from tiny_model import TINY


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 50}, {}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05},
         {"repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05,
          "typical_p": 0.9, "repetition_penalty": 1.1},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9,
          "repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
          "typical_p": 1.0, "repetition_penalty": 1.0}, {"temperature": 1.0}),
        ({"do_sample": True, "top_p": 0.9, "top_k": None}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 0.0}, {}),
        ({"do_sample": True, "top_k": 40.0}, {"temperature": 1.0, "top_k": 40}),
        ({"do_sample": True, "temperature": 0.7, "num_beams": 4, "eos_token_id": [1, 2]},
         {"temperature": 0.7}),
    ],
)  # fmt: skip
def test_takes_what_the_authors_sample_with(
    said: dict[str, Any], expected: dict[str, float]
) -> None:
    assert sampling_of(said) == expected
    assert type(sampling_of(said).get("top_k", 1)) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", "hot"), ("temperature", float("inf")),
        ("top_k", -1), ("top_k", 2.5), ("top_k", True), ("top_k", 2**32), ("top_p", 0), ("top_p", 1.5),
        ("min_p", -0.5), ("min_p", 1.01), ("typical_p", 0.0), ("typical_p", 2),
        ("repetition_penalty", 0), ("repetition_penalty", 101), ("repetition_penalty", [1.1]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("do_sample", [True, False])
def test_names_what_is_out_of_range(name: str, value: Any, do_sample: bool) -> None:
    with pytest.raises(ExportError, match=f"generation_config.json: {name} is .* must be "):
        sampling_of({"do_sample": do_sample, name: value})


def test_they_are_in_the_manifest(tmp_path: Path) -> None:
    write_directory(TINY, tmp_path / "hf")
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(said))
    export(tmp_path / "hf", tmp_path / "model.pt", check=False)
    manifest = archive.read_manifest(tmp_path / "model.pt")
    assert manifest.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    fields = json.loads(manifest.to_json())
    assert fields["sampling"] == manifest.sampling
    del fields["sampling"]
    assert Manifest.from_json(json.dumps(fields)).sampling == {}  # of older files
