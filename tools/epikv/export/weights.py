"""The tensors of a Hugging Face directory, read one at a time, with one shard open at a time."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from epikv.export.errors import ExportError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Rows = tuple[int, int]  # begin, end


class Stored:
    """The tensors of a directory by their names there. Raises ExportError, naming the file."""

    def __init__(self, files: list[Path], progress: Callable[[int], object] | None = None) -> None:
        """`progress` is told the bytes of each read."""
        self._file: dict[str, Path] = {}
        self._facts: dict[str, tuple[torch.dtype, list[int]]] = {}
        self._opened: tuple[Path, safe_open] | None = None
        self._progress = progress
        for file in files:
            self._list(file)

    def _list(self, file: Path) -> None:
        shard = self._open(file)
        for name in shard.keys():  # noqa: SIM118  it is no mapping
            part = shard.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise ExportError(
                    f"{file}: tensor {name} is {part.get_dtype()}; export wants floats"
                )
            self._file[name] = file
            self._facts[name] = (_DTYPES[part.get_dtype()], part.get_shape())

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Forgets the other tensors."""
        for name in [name for name in self._file if not wanted(name)]:
            del self._file[name], self._facts[name]

    def names(self) -> list[str]:
        """In the order in which they lie in the shards."""
        return list(self._file)

    def nbytes(self) -> int:
        return sum(d.itemsize * torch.Size(s).numel() for d, s in self._facts.values())

    def dtype(self) -> torch.dtype:
        """That of most elements."""
        counts: dict[torch.dtype, int] = {}
        for dtype, shape in self._facts.values():
            counts[dtype] = counts.get(dtype, 0) + torch.Size(shape).numel()
        return max(counts, key=counts.__getitem__, default=torch.float32)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """A tensor, or some of its rows: mapped, to be copied by who keeps it."""
        try:
            shard = self._open(self._file[name])
            if rows is None:
                tensor = shard.get_tensor(name)
            else:
                tensor = shard.get_slice(name)[rows[0] : rows[1]]
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{self._file[name]}: {error}") from error
        if self._progress is not None:
            self._progress(tensor.nbytes)
        return tensor

    def digest(self) -> str:
        """Of the tensors in whichever files and order: what was measured on one export of a
        checkpoint holds for all of them, and for no other checkpoint."""
        digest = hashlib.sha256()
        for name in sorted(self._file):
            dtype, shape = self._facts[name]
            digest.update(f"{name} {dtype} {shape}\n".encode())
            digest.update(self.read(name).contiguous().view(torch.uint8).numpy().data)
        return f"sha256:{digest.hexdigest()}"

    def _open(self, file: Path) -> safe_open:
        if self._opened is None or self._opened[0] != file:
            self._opened = None  # unmapped before the next is mapped
            try:
                self._opened = (file, safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ExportError(f"{file}: {error}") from error
        return self._opened[1]


class Weights(Mapping[str, Tensor]):
    """A module's parameters, read from where they are stored when asked for."""

    def __init__(self, stored: Stored, sources: dict[str, tuple[str, Rows | None]]) -> None:
        """`sources`: by parameter, which rows of which tensor."""
        self._stored = stored
        self._sources = sources

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.read(*self._sources[name])

    def __iter__(self) -> Iterator[str]:
        """In the order in which they are stored."""
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
