"""Writes model files that break the contract, one rule each, for tests of loading.

    python tests/python/broken_models.py --out DIR

makes DIR/<name>.pt and DIR/broken.json, which says of each what is wrong with it. `valid.pt`, not
listed there, is the same model with nothing wrong.
"""

import argparse
import json
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from epikv.export.manifest import Layer, Manifest, Rope
from epikv.export.synthetic import word_tokenizer
from torch import Tensor, nn

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 11, 8, 2, 1, 4

_elsewhere = torch.library.Library("elsewhere", "DEF")
_elsewhere.define("same(Tensor x) -> Tensor", alias_analysis="CONSERVATIVE")
_elsewhere.impl("same", lambda x: x.clone(), "CPU")


class TinyLayer(nn.Module):
    """A layer that is its attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)

    def forward(self, x: Tensor, layer: int) -> Tensor:
        q = self.q_proj(x).view(-1, 2, 4)
        kv = self.k_proj(x).view(-1, 1, 4)
        return x + self.o_proj(torch.ops.epikv.attention(q, kv, kv, x, layer).reshape(-1, 8))


class Tiny(nn.Module):
    """Two layers, nothing wrong. The classes below override `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.first = TinyLayer()
        self.second = TinyLayer()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def finish(self, x: Tensor, last: Tensor) -> Tensor:
        return self.head(x.index_select(0, last)).float()

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = torch.ops.epikv.block(x, 1)
        x = self.second(x, 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


class MissingBlock(Tiny):
    """block(1) is not called"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.second(self.first(x, 0), 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


class MissingLastBlock(Tiny):
    """block(2), after the last layer, is not called"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.finish(x, last)


class MissingAttention(Tiny):
    """attention(1) is not called"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = torch.ops.epikv.block(x, 1)
        return self.finish(torch.ops.epikv.block(x * 2, 2), last)


class DuplicatedBlock(Tiny):
    """block(1) is called twice with the same argument, which freezing would merge"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = torch.ops.epikv.block(x, 1) + torch.ops.epikv.block(x, 1)
        x = self.second(x, 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


class DuplicatedAttention(Tiny):
    """attention(0) is called twice"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0) + self.first(x, 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


class UnusedAttention(Tiny):
    """the result of attention(1) is not used"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = torch.ops.epikv.block(x, 1)
        q = self.second.q_proj(x).view(-1, 2, 4)
        kv = self.second.k_proj(x).view(-1, 1, 4)
        torch.ops.epikv.attention(q, kv, kv, x, 1)
        return self.finish(torch.ops.epikv.block(x * 2, 2), last)


class WrongOrder(Tiny):
    """layer 1 runs before layer 0"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 1)
        x = self.second(x, 1)
        x = torch.ops.epikv.block(x, 0)
        x = self.first(x, 0)
        return self.finish(torch.ops.epikv.block(x, 2), last)


class LayerNotConstant(Tiny):
    """attention's layer depends on the input"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = torch.ops.epikv.block(x, 1)
        x = self.second(x, token_ids.dim())
        return self.finish(torch.ops.epikv.block(x, 2), last)


class Conditional(Tiny):
    """layer 1 runs under a condition"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = torch.ops.epikv.block(x, 1)
        if token_ids.size(0) > 1:
            x = self.second(x, 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


class Forked(Tiny):
    """layer 0 runs in a fork, on another thread"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = torch.jit.wait(torch.jit.fork(self.first, x, 0))
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


class WrongInputs(Tiny):
    """forward does not take `last`"""

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.finish(torch.ops.epikv.block(x, 2), positions)


class WrongOutput(Tiny):
    """forward returns a pair"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        x = torch.ops.epikv.block(x, 2)
        return self.finish(x, last), x


class WrongLogitsDtype(Tiny):
    """the logits are float64"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.finish(torch.ops.epikv.block(x, 2), last).double()


class WrongLogitsRows(Tiny):
    """the logits are of all rows, not of `last`"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.head(torch.ops.epikv.block(x, 2)).float()


class UnknownOperator(Tiny):
    """an operator that the daemon does not have"""

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(torch.ops.elsewhere.same(x), 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


MODULES: dict[str, type[Tiny]] = {
    "missing_block": MissingBlock,
    "missing_last_block": MissingLastBlock,
    "missing_attention": MissingAttention,
    "duplicated_block": DuplicatedBlock,
    "duplicated_attention": DuplicatedAttention,
    "unused_attention": UnusedAttention,
    "wrong_order": WrongOrder,
    "layer_not_constant": LayerNotConstant,
    "conditional": Conditional,
    "forked": Forked,
    "wrong_inputs": WrongInputs,
    "wrong_output": WrongOutput,
    "wrong_logits_dtype": WrongLogitsDtype,
    "wrong_logits_rows": WrongLogitsRows,
    "unknown_operator": UnknownOperator,
}


def _more_layers(manifest: dict[str, Any]) -> None:
    manifest["layers"].append(manifest["layers"][0])


# How a manifest is spoiled, by file name; the comment beside it goes to broken.json.
MANIFESTS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "manifest_format": (
        "the manifest's format is unknown",
        lambda m: m.update(format="other.model/1"),
    ),
    "manifest_later": (
        "the manifest's format is of a later version",
        lambda m: m.update(format="epikv.model/999"),
    ),
    "manifest_other_dtype": (
        "the weights are of another dtype than the manifest's",
        lambda m: m.update(dtype="bfloat16"),
    ),
    "manifest_field": ("the manifest lacks num_heads", lambda m: m.pop("num_heads")),
    "manifest_type": ("vocab_size is a string", lambda m: m.update(vocab_size="eleven")),
    "manifest_dtype": ("dtype is unknown", lambda m: m.update(dtype="float64")),
    "manifest_layers": ("the manifest has a layer too many", _more_layers),
    "manifest_rope": ("a layer's rope is not there", lambda m: m["layers"][0].update(rope=7)),
    "manifest_width": (
        "key_width is not the module's",
        lambda m: m["layers"][1].update(key_width=6),
    ),
    "manifest_vocab": ("vocab_size is not the module's", lambda m: m.update(vocab_size=12)),
    "manifest_projection": (
        "output_projection names no parameter",
        lambda m: m["layers"][0].update(output_projection="nowhere.weight"),
    ),
}


def manifest() -> Manifest:
    """What `Tiny` is."""
    return Manifest(
        name="tiny",
        architecture="Tiny",
        dtype="float32",
        vocab_size=VOCAB,
        context_length=64,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        bos_token_id=None,
        eos_token_ids=[],
        ropes=[Rope([1.0, 0.01])],
        layers=[
            Layer(HEAD_SIZE, HEAD_SIZE, HEAD_SIZE**-0.5, f"{name}.o_proj.weight")
            for name in ("first", "second")
        ],
    )


def save(module: nn.Module, path: Path, extra: dict[str, str]) -> None:
    """Scripts and writes `module` with its extra files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(module.eval().requires_grad_(False))
        scripted.save(str(path), _extra_files=extra)


def write(out: Path) -> dict[str, str]:
    """Writes all files; returns what is wrong with each, by file name without ending."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    facts = asdict(manifest())
    tokenizer = word_tokenizer(VOCAB).to_str()
    extra = {"manifest.json": json.dumps(facts), "tokenizer.json": tokenizer}
    save(Tiny(), out / "valid.pt", extra)
    wrong = {name: str(kind.__doc__) for name, kind in MODULES.items()}
    for name, kind in MODULES.items():
        save(kind(), out / f"{name}.pt", extra)
    for name, (text, spoil) in MANIFESTS.items():
        wrong[name] = text
        spoiled = json.loads(json.dumps(facts))
        spoil(spoiled)
        save(Tiny(), out / f"{name}.pt", {**extra, "manifest.json": json.dumps(spoiled)})
    wrong |= _write_files(out, extra)
    (out / "broken.json").write_text(json.dumps(wrong, indent=1))
    return wrong


def _write_files(out: Path, extra: dict[str, str]) -> dict[str, str]:
    """The files that are broken as files."""
    save(Tiny(), out / "no_manifest.pt", {"tokenizer.json": extra["tokenizer.json"]})
    save(Tiny(), out / "no_tokenizer.pt", {"manifest.json": extra["manifest.json"]})
    save(Tiny(), out / "manifest_not_json.pt", {**extra, "manifest.json": "{"})
    save(Tiny(), out / "tokenizer_not_json.pt", {**extra, "tokenizer.json": "{"})
    whole = (out / "valid.pt").read_bytes()
    (out / "truncated.pt").write_bytes(whole[: len(whole) * 2 // 3])
    (out / "empty.pt").write_bytes(b"")
    (out / "not_a_model.pt").write_bytes(b"not a model at all\n" * 64)
    _rewrite_code(
        out / "valid.pt", out / "wrong_schema.pt", ", kv, kv, x, layer)", ", kv, kv, layer)"
    )
    _rewrite_code(out / "valid.pt", out / "wrong_code.pt", "return", "retrun")
    return {
        "no_manifest": "there is no manifest.json",
        "no_tokenizer": "there is no tokenizer.json",
        "manifest_not_json": "manifest.json is not JSON",
        "tokenizer_not_json": "tokenizer.json is not JSON",
        "truncated": "the last third of the file is missing",
        "empty": "the file is empty",
        "not_a_model": "the file is no archive",
        "wrong_schema": "attention is called without `normed`",
        "wrong_code": "the module's code does not parse",
    }


def _rewrite_code(source: Path, target: Path, old: str, new: str) -> None:
    """Copies a model file with `old` replaced in its code, which must contain it."""
    found = False
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
        for entry in archive.infolist():
            content = archive.read(entry)
            if "/code/" in entry.filename and entry.filename.endswith(".py"):
                found = found or old.encode() in content
                content = content.replace(old.encode(), new.encode())
            copy.writestr(entry, content)
    if not found:
        raise ValueError(f"{source}: no code contains '{old}'")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out)
