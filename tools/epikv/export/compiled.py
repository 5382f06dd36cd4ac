"""Writes and reads compiled models: what AOTInductor makes of a module, beside its weights.

A compiled model is an archive with the same extra files as a TorchScript file. Its code is a
library for one kind of processor, which calls the operators below. The weights stand beside the
code as they are, so that the daemon packs those of linears for the machine it runs on, as it does
with those of a TorchScript file.

The operators do what those of `epikv.export.operators` do. Each result is a tensor of its own, laid
out as its fake says: the compiler plans memory by that.
"""

import json
import operator
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.overrides import TorchFunctionMode

import epikv.export.operators  # noqa: F401  registers torch.ops.epikv

INDEX = "compiled.json"  # of the extra files: what no TorchScript file has
_CODE, _WEIGHTS = "data/aotinductor/model/", "weights/"
_MOST_ROWS = 1 << 24

_COMPILER = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "cpp.threads": 1,  # what is left to compile is small, and the daemon has threads of its own
    "emulate_precision_casts": True,  # rounds where torch's own operators do
}
# Code for every processor with AVX2, or of ARM's 64 bits. On others: for that of this machine.
_PROCESSORS = {
    "x86_64": {"cpp.march": "x86-64-v3", "cpp.simdlen": 256},
    "aarch64": {"cpp.march": "armv8-a", "cpp.simdlen": 128},
}

_library = torch.library.Library("epikv_compiled", "DEF")
_library.define("block(Tensor residual, int layer) -> Tensor")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor normed, int layer) -> Tensor")
_library.define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool wide=False, float offset=0.) -> Tensor"
)
_library.define("swiglu(Tensor gate, Tensor up) -> Tensor")
_library.define("linears(Tensor x, int index, int[] outputs) -> Tensor[]")


@dataclass(frozen=True)
class _Linear:
    """The names of its weights."""

    weight: str
    scale: str | None  # of integers
    bias: str | None


class CompiledModel:
    """A compiled model, to be called as a scripted module is."""

    def __init__(
        self,
        runner: Any,  # AOTInductor's
        linears: Sequence[Sequence[_Linear]],
        weights: Mapping[str, Tensor],
    ) -> None:
        self._runner = runner
        self._linears = [[_Weights.of(linear, weights) for linear in of] for of in linears]
        constants = {name: weights[name] for name in runner.get_constant_fqns()}
        runner.load_constants(constants, check_full_update=True, user_managed=True)
        self._constants = constants  # the runner only points to them

    def __call__(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        token = _current.set(self._linears)
        try:
            logits: Tensor = self._runner(token_ids, positions, last)
            return logits
        finally:
            _current.reset(token)


def write(module: nn.Module, extras: Mapping[str, str], path: Path) -> None:
    """Compiles a module that keeps the model contract, and writes it with `extras`.

    Raises RuntimeError where it cannot be compiled.
    """
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_contiguous():  # as it is stored
            tensor.data = tensor.data.contiguous()
    program = _exported(module)
    linears = _take_linears(program)
    weights: dict[str, Tensor] = {**program.state_dict, **_tensors(program.constants)}
    stored: dict[tuple[Any, ...], list[str]] = {}  # names of the same tensor
    for name, weight in weights.items():
        key = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        stored.setdefault(key, []).append(name)
    parameters = set(program.graph_signature.parameters)
    index = {
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "machine": platform.machine(),
        "weights": [
            {
                "names": names,
                "dtype": str(weights[names[0]].dtype).removeprefix("torch."),
                "shape": list(weights[names[0]].shape),
                "parameter": names[0] in parameters,  # else a buffer or a constant
            }
            for names in stored.values()
        ],
        "linears": [[asdict(linear) for linear in of] for of in linears],
    }
    code = _compiled(program)
    with PT2ArchiveWriter(str(path)) as archive:
        for name, text in {**extras, INDEX: json.dumps(index)}.items():
            archive.write_string(f"extra/{name}", text)
        for i, names in enumerate(stored.values()):
            storage: Any = weights[names[0]].contiguous().clone().untyped_storage()
            archive.archive_file.write_record(f"{_WEIGHTS}{i}", storage, storage.nbytes())
        for file in code:
            archive.write_file(_CODE + file.name, str(file))


def is_compiled(path: Path) -> bool:
    return _has_index(torch._C.PyTorchFileReader(str(path)))


def read(path: Path) -> CompiledModel:
    """The compiled model of a file. Runs code of the file."""
    from torch._inductor.package.package import AOTICompiledModel

    archive: Any = torch._C.PyTorchFileReader(str(path))
    index = json.loads(archive.get_record(f"extra/{INDEX}"))
    weights = {}
    for i, of in enumerate(index["weights"]):
        dtype = getattr(torch, of["dtype"])
        data = bytearray(archive.get_record(f"{_WEIGHTS}{i}"))
        weight = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        weights.update(dict.fromkeys(of["names"], weight.view(of["shape"])))
    runner = AOTICompiledModel(
        torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    )
    linears = [[_Linear(**one) for one in of] for of in index["linears"]]
    return CompiledModel(runner, linears, weights)


def _has_index(archive: Any) -> bool:
    return f"extra/{INDEX}" in archive.get_all_records()


class _OurOperators(TorchFunctionMode):
    """Calls the operators that are compiled in the place of those that models call."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(function).split(".")
        if name[0] == "epikv" and name[1] != "quantized_linear":
            function = getattr(torch.ops.epikv_compiled, name[1])
        return function(*args, **(kwargs or {}))


def _exported(module: nn.Module) -> ExportedProgram:
    """The program of a forward of any n >= 1 rows, of which any b >= 0 are wanted."""
    rows, wanted = Dim("n", min=1, max=_MOST_ROWS), Dim("b", min=0, max=_MOST_ROWS)
    example = torch.zeros(7, dtype=torch.int64), torch.arange(7), torch.arange(5)
    with _oblivious(), torch.no_grad(), _OurOperators():
        return torch.export.export(
            module, example, dynamic_shapes=({0: rows}, {0: rows}, {0: wanted}), strict=False
        )


def _oblivious() -> Any:
    """No code for n > 1 alone."""
    config: Any = torch.fx.experimental._config
    return config.patch(backed_size_oblivious=True)


def _compiled(program: ExportedProgram) -> list[Path]:
    """The files of the program's code."""
    arguments, named = program.example_inputs or ((), {})
    options = {**_COMPILER, **_PROCESSORS.get(platform.machine(), {})}
    with _oblivious(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module: Any = program.module(check_guards=False)
        files: Any = torch._inductor.aot_compile(module, arguments, named, options=options)
    return [Path(file) for file in files if isinstance(file, str)]


def _take_linears(program: ExportedProgram) -> list[list[_Linear]]:
    """Has epikv_compiled::linears compute the program's linears whose weights are its parameters.
    Those that share their input, as q, k and v do, become one."""
    names = {
        of.arg.name: of.target
        for of in program.graph_signature.input_specs
        if of.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    }
    graph = program.graph_module.graph
    groups: dict[tuple[Any, ...], list[tuple[Node, _Linear]]] = {}
    for node in graph.nodes:
        linear = _linear(node, names)
        if linear is None:
            continue
        weight: Any = node.args[1]
        alone = node if len(weight.users) > 1 else None  # a weight of several linears
        value = weight.meta["val"]
        key = (node.args[0], node.target, alone, value.shape[1], value.dtype)
        groups.setdefault(key, []).append((node, linear))
    for index, siblings in enumerate(groups.values()):
        nodes = [node for node, _ in siblings]
        outputs = [node.meta["val"].shape[-1] for node in nodes]
        with graph.inserting_before(nodes[0]):
            linears = torch.ops.epikv_compiled.linears.default
            every = graph.call_function(linears, (nodes[0].args[0], index, outputs))
            for i, node in enumerate(nodes):
                one = graph.call_function(operator.getitem, (every, i))
                one.meta = dict(node.meta)
                node.replace_all_uses_with(one)
            every.meta = {"val": [node.meta["val"] for node in nodes]}
        for node in nodes:
            graph.erase_node(node)
    program.graph_module.recompile()
    return [[linear for _, linear in siblings] for siblings in groups.values()]


def _linear(node: Node, names: Mapping[str, str | None]) -> _Linear | None:
    """What the node multiplies by, if it is a linear whose weights are named."""
    dense = node.target is torch.ops.aten.linear.default
    if not dense and node.target is not torch.ops.epikv.quantized_linear.default:
        return None
    weights: list[Any] = [of.name if isinstance(of, Node) else of for of in node.args[1:]]
    weights += [None] * ((2 if dense else 3) - len(weights))
    if any(of is not None and names.get(of) is None for of in weights):
        return None
    weight, *scale, bias = [None if of is None else names[of] for of in weights]
    return _Linear(str(weight), scale[0] if scale else None, bias)


def _tensors(constants: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: of for name, of in constants.items() if isinstance(of, Tensor)}


@dataclass(frozen=True)
class _Weights:
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, linear: _Linear, weights: Mapping[str, Tensor]) -> "_Weights":
        scale = None if linear.scale is None else weights[linear.scale]
        bias = None if linear.bias is None else weights[linear.bias]
        return cls(weights[linear.weight], scale, bias)

    def apply(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return torch.ops.epikv.quantized_linear(x, self.weight, self.scale, self.bias)


_current: ContextVar[Sequence[Sequence[_Weights]]] = ContextVar("epikv_linears")


def _linears(x: Tensor, index: int, outputs: Sequence[int]) -> list[Tensor]:
    """x [..., in] by the linears `index`, parts of one tensor: [..., outputs[i]] each."""
    every = torch.cat([linear.apply(x) for linear in _current.get()[index]], -1)
    return list(every.split(list(outputs), -1))


_library.impl("block", lambda *of: torch.ops.epikv.block(*of).clone(), "CompositeExplicitAutograd")
for _name in ("attention", "rms_norm", "swiglu"):
    _library.impl(_name, getattr(torch.ops.epikv, _name), "CompositeExplicitAutograd")
_library.impl("linears", _linears, "CompositeExplicitAutograd")


def _fake(name: str) -> Any:
    return torch.library.register_fake(f"epikv_compiled::{name}", lib=_library)


@_fake("block")
def _(residual: Tensor, layer: int) -> Tensor:
    return residual.new_empty(residual.shape)


@_fake("attention")
def _(q: Tensor, k: Tensor, v: Tensor, normed: Tensor, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@_fake("rms_norm")
def _(x: Tensor, weight: Tensor, eps: float, wide: bool = False, offset: float = 0.0) -> Tensor:
    return x.new_empty(x.shape)


@_fake("swiglu")
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@_fake("linears")
def _(x: Tensor, index: int, outputs: Sequence[int]) -> list[Tensor]:
    return list(x.new_empty(*x.shape[:-1], sum(outputs)).split(list(outputs), -1))


# While a module is exported, before its linears are taken out.
@torch.library.register_fake("epikv::quantized_linear")
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
