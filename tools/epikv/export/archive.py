"""What is said in a model file beside its weights, read and replaced without loading them."""

import os
import shutil
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epikv.export import chat
from epikv.export.errors import ExportError
from epikv.export.manifest import Manifest

_MANIFEST, _TOKENIZER = "extra/manifest.json", "extra/tokenizer.json"
_CHAT = "extra/chat.json"  # which older files lack
_ALIGNMENT = 64  # at which torch begins each record's bytes


def read_manifest(path: Path) -> Manifest:
    """Raises ExportError if it is no file that `export` wrote."""
    return Manifest.from_json(_read(path, _MANIFEST))


def read_tokenizer(path: Path) -> str:
    """The text of tokenizer.json. Raises ExportError as above."""
    return _read(path, _TOKENIZER)


def read_chat(path: Path) -> chat.ChatFormats | chat.Refusal:
    """The chat formats, or why there are none. Raises ExportError as above."""
    with _opened(path) as archive:
        if _find(archive, _CHAT) is None:
            return chat.Refusal("the model file is from before chat formats; export it again")
        return chat.from_json(archive.read(_name(archive, _CHAT)).decode())


def replace_manifest(path: Path, manifest: Manifest) -> None:
    """Gives a model file another manifest; every other record keeps its bytes.

    The file is replaced whole or not at all: who has it open goes on with the old one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _opened(path) as old, zipfile.ZipFile(temporary, "w") as new:
            replaced = _name(old, _MANIFEST)
            for record in old.infolist():
                copy = zipfile.ZipInfo(record.filename, record.date_time)
                if record.filename == replaced:
                    new.writestr(_aligned(new, copy), manifest.to_json())
                    continue
                copy.file_size = record.file_size
                with old.open(record) as source, new.open(_aligned(new, copy), "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, record: str) -> str:
    with _opened(path) as archive:
        return archive.read(_name(archive, record)).decode()


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise ExportError(f"{path}: not a model file: {error}") from error


def _name(archive: zipfile.ZipFile, record: str) -> str:
    name = _find(archive, record)
    if name is None:
        raise ExportError(f"{archive.filename}: not a model file: it has no {record}")
    return name


def _find(archive: zipfile.ZipFile, record: str) -> str | None:
    """torch puts all records into one folder, which is called as the file was when written."""
    return next((n for n in archive.namelist() if n.partition("/")[2] == record), None)


def _aligned(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """With an extra field so long that the bytes begin at the alignment, as torch does it."""
    assert archive.fp is not None  # it is open
    header = archive.fp.tell() + 30 + len(record.filename.encode()) + 4
    record.extra = struct.pack("<2sH", b"FB", -header % _ALIGNMENT) + b"Z" * (-header % _ALIGNMENT)
    return record
