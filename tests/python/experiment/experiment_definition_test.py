"""Definitions of experiments in files."""

import re
from pathlib import Path

import pytest
from dealt_experiment import written
from epikv.experiment import definition
from epikv.v1 import experiment_pb2


@pytest.mark.parametrize("suffix", definition.SUFFIXES)
def test_a_definition_is_read_as_it_was_written(suffix: str, lean: Path, tmp_path: Path) -> None:
    sound = definition.read(lean)
    sound.hypothesis, sound.etag = 'Zoë says "so"', "7"
    sound.end_time.FromJsonString("2031-05-01T12:00:00.5Z")
    definition.write(sound, tmp_path / f"again{suffix}")
    assert definition.read(tmp_path / f"again{suffix}") == sound


def test_json_has_the_names_of_the_contract(lean: Path) -> None:
    shown = definition.as_json(definition.read(lean))
    assert shown["arms"][1]["kv"]["policy_params"] == {"slack": 16}
    assert isinstance(shown["arms"][1]["kv"]["policy_params"]["slack"], int)
    assert (shown["traffic_permille"], shown["outcome_window"]) == (100, "3600s")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('name: "a"\ntrafic_permille: 3', 2, 'no field named "trafic_permille"'),
        ('name: "a"\n\nname: "b"', 3, 'multiple "name" fields'),
        ('arms {\n  name: "a"\n  kv { max_tokens: 1\n keep_ratio: 0.5 } }', 4, "max_tokens"),
        ("metrics {\n kind: KIND_SHARE }", 2, "no value named KIND_SHARE"),
        ("arms {\n", 1, 'Expected "}"'),
    ],
)
def test_a_bad_text_is_told_by_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    file = written(tmp_path / "bad.textproto", text)
    with pytest.raises(definition.DefinitionError) as caught:
        definition.read(file)
    assert str(caught.value).startswith(f"{file}:{line}: ") and said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('{"name": "a",\n "arms": [{"name": "x"},\n {"weigth": 3}]}', 3, 'named "weigth"'),
        ('{"name": "a",\n\n "name": "b"}', 3, '"name" is given twice'),
        ('{"name":\n "a" "b"}', 2, "Expecting ',' delimiter"),
        ("[]", 1, "one JSON object"),
        ('{"hypothesis": "\\"name\\": {",\n "name": 3}', 2, "expected string"),
        ('{"arms": [{"kv": {\n"max_tokens": 3,\n"keep_ratio": 0.5}}]}', 3, '"budget" oneof'),
        ('{"metrics": [{"name": "m",\n"kind": "KIND_SHARE"}]}', 2, "KIND_SHARE"),
        ('{"outcome_window":\n "1d"}', 1, 'Duration must end with letter "s"'),
        ('{"end_time": "2031-01-01T00:00:00Z",\n"traffic_permille": -1}', 2, "out of range"),
        ('{"eligibility": {"labels": {"a": "b",\n"c": 3}}}', 2, "expected string"),
        ('{"layer": "l",\n"arms":\n{"name": "a"}}', 2, "must be in []"),
    ],
)
def test_bad_json_is_told_by_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    file = written(tmp_path / "bad.json", text)
    with pytest.raises(definition.DefinitionError) as caught:
        definition.read(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:{line}: ") and said in message and "\n" not in message


def test_a_definition_is_known_by_its_ending(tmp_path: Path) -> None:
    for use in (definition.read, lambda path: definition.write(experiment_pb2.Experiment(), path)):
        with pytest.raises(definition.DefinitionError, match=r"ends in \.textproto or \.json"):
            use(tmp_path / "lean.yaml")
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(definition.DefinitionError, match=r"latin\.json: .*utf-8"):
        definition.read(tmp_path / "latin.json")


def test_the_template_is_a_definition(tmp_path: Path) -> None:
    made = definition.read(written(tmp_path / "x.textproto", definition.template("lean-2")))
    assert made.name == "lean-2" and made.primary_metric in [m.name for m in made.metrics]
    assert sum(arm.weight_permille for arm in made.arms) == 1000
    assert [arm.control for arm in made.arms] == [True, False]
    with pytest.raises(ValueError, match="is 'Lean'"):
        definition.template("Lean")


def test_what_the_template_leaves_out_is_right_too(tmp_path: Path) -> None:
    """Its lines that hold a field behind a "#", taken in."""
    lines = definition.template("x").splitlines()
    bare = [re.sub(r"^( *)# (?= *\w+(:| \{)|\})", r"\1", line) for line in lines]
    full = definition.read(written(tmp_path / "x.textproto", "\n".join(bare)))
    told = {field.name for field, _ in full.ListFields()}
    made = {"salt", "state", "bucket_version", "first_bucket", "stop_reason", "etag"}
    made |= {"create_time", "start_time", "stop_time"}
    assert told == {field.name for field in full.DESCRIPTOR.fields} - made
