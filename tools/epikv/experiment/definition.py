"""Definitions of experiments as files: epikv.v1.Experiment in text format or in JSON.

A definition is the message itself, so that what was read from a server and is written, changed and
read again is the same, its etag and what this version does not know of included.
"""

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from epikv.messages import whole
from epikv.v1.experiment_pb2 import Experiment

SUFFIXES = (".textproto", ".json")
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")


class DefinitionError(ValueError):
    """A file that holds no definition; the message names the file and the line."""


def is_file_name(text: str) -> bool:
    """No experiment is called so."""
    return text.endswith(SUFFIXES)


def read(path: Path) -> Experiment:
    """Raises DefinitionError, and OSError."""
    parse = {".textproto": _parse_text, ".json": _parse_json}.get(path.suffix)
    if parse is None:
        raise DefinitionError(f"{path}: {_SUFFIX}")
    try:
        return parse(path.read_text("utf-8"))
    except _Fault as fault:
        raise DefinitionError(f"{path}:{fault.line}: {fault}") from None
    except UnicodeDecodeError as error:
        raise DefinitionError(f"{path}: {error}") from None


def write(definition: Experiment, path: Path) -> None:
    """Raises DefinitionError for another ending, and OSError."""
    if path.suffix not in SUFFIXES:
        raise DefinitionError(f"{path}: {_SUFFIX}")
    if path.suffix == ".json":
        text = json.dumps(as_json(definition), indent=2) + "\n"
    else:
        text = text_format.MessageToString(definition, as_utf8=True)
    path.write_text(text, "utf-8")


def as_json(definition: Experiment) -> dict[str, Any]:
    """What `read` takes from a .json file."""
    return whole(json_format.MessageToDict(definition, preserving_proto_field_name=True))


def template(name: str) -> str:
    """A sound definition to start from, with a comment on every field. A .textproto file."""
    if not NAME.fullmatch(name):
        raise ValueError(
            "an experiment's name must be a lower-case letter, then letters, digits or '-', at most"
            f" 63 in all; is '{name}'"
        )
    text = resources.files(__package__).joinpath("template.textproto").read_text("utf-8")
    return text.replace('"my-experiment"', f'"{name}"')


_SUFFIX = f"a definition is a file that ends in {' or '.join(SUFFIXES)}"


class _Fault(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def _parse_text(text: str) -> Experiment:
    try:
        return text_format.Parse(text, Experiment())
    except text_format.ParseError as error:
        message = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise _Fault(error.GetLine() or 1, message) from None


def _parse_json(text: str) -> Experiment:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Fault(error.lineno, error.msg) from None
    if not isinstance(content, dict):
        raise _Fault(1, "a definition is one JSON object")
    lines = list(_key_lines(text))
    try:
        return json_format.ParseDict(content, Experiment())
    except json_format.ParseError:
        pass
    # The parser says no line. The first key without which all before it parses is at fault.
    for count, line in enumerate(lines, 1):
        try:
            json_format.ParseDict(_first_keys(content, [count]), Experiment())
        except json_format.ParseError as error:
            raise _Fault(line, _plain(error)) from None
    raise AssertionError("a whole that its parts are not")


# A string, a key if a colon follows, or a brace outside strings.
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]')


def _key_lines(text: str) -> Iterator[int]:
    """The line of every key, in the order of the text. Precondition: it is JSON."""
    objects: list[set[str]] = []
    for token in _TOKEN.finditer(text):
        line = text.count("\n", 0, token.start()) + 1
        if token[0] == "{":
            objects.append(set())
        elif token[0] == "}":
            objects.pop()
        elif token[2]:
            if token[1] in objects[-1]:
                raise _Fault(line, f"{token[1]} is given twice")
            objects[-1].add(token[1])
            yield line


def _first_keys(value: Any, left: list[int]) -> Any:
    """`value` with so many of its keys, in the order of its text; `left` counts them down."""
    if isinstance(value, list):
        return [_first_keys(item, left) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        if left[0] == 0:
            break
        left[0] -= 1
        kept[key] = _first_keys(item, left)
    return kept


def _plain(error: json_format.ParseError) -> str:
    """Without the way to it, and without a list of all fields."""
    first = str(error).strip().splitlines()[0]
    return re.sub(r"^(Failed to parse \w+ field: )+", "", first).rstrip(".")
