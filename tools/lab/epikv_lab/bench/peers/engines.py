"""Who is measured: peers, ourselves, and two bounds that the machine sets."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from epikv import processes
from epikv.options import Kv

from epikv_lab.bench.peers import convert, venvs
from epikv_lab.bench.peers.cells import BUDGET, Cell
from epikv_lab.bench.peers.checkpoint import Shape
from epikv_lab.bench.peers.process import GUESSES, HELD, Engine, Epikvd, Runner
from epikv_lab.bench.programs import measuring_program

FULL = Kv("full")
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
LOOKUP = ", prompt lookup"


@dataclass(frozen=True)
class Place:
    """Of which shape, with how many threads, and what is measured there."""

    shape: Shape
    checkpoint: Path
    threads: int
    pool_tokens: int  # that our daemon's pool holds
    binary: Path | None = None  # of the daemon; None: $EPIKVD or the checkout's
    cpu: str | None = None  # of process.HELD; None: engines use what the processor has


@dataclass(frozen=True)
class Arm:
    """A row of a table. Arms with the same `start` share a process."""

    name: str
    kind: Literal["ours", "peer", "memory", "linears"]  # the last two: bounds
    precision: str
    start: Callable[[Place], Engine]
    kv: Kv = FULL
    budget: int | None = None
    lookup: bool = False  # guesses by prompt lookup

    @property
    def is_bound(self) -> bool:
        return self.kind in ("memory", "linears")

    def takes_part(self, cell: Cell) -> bool:
        if self.budget is not None and not cell.evicts:
            return False
        if self.lookup and cell.kind != "lookup":
            return False
        if self.kind == "linears" and cell.kind in ("decode", "generated"):
            return cell.name == "decode1"  # no context changes them
        match cell.kind:
            case "memory":
                return not self.is_bound and self.budget is None
            case "prefill":
                return self.kind != "memory"
            case "lookup":  # beside what they do without
                return not self.is_bound and self.budget is None and self.precision == "bf16"
            case "generated" | "16x":
                if self.precision != "bf16":
                    return False
                evicting = self.kind != "peer" or self.name.startswith("OpenVINO")
                return evicting and (self.kv.policy != "epikv_flat" or cell.kind == "generated")
        # It ranks no prompt, so that it can only generate its way past a budget.
        return self.kv.policy != "epikv_flat"


def arms() -> list[Arm]:
    """All, in the order of tables."""
    return [
        *_ours("fp32", "float32"),
        *_ours("bf16", "bfloat16", budgets=True),
        *_ours("int8", "bfloat16", "int8"),
        *_ours("int4", "bfloat16", "int4"),
        _openvino("fp32", "fp32", "f32"),
        _openvino("bf16", "fp32", "bf16"),
        _openvino("bf16", "fp32", "bf16", BUDGET),
        _openvino("bf16", "fp32", "bf16", lookup=True),
        _openvino("int8", "int8", "bf16"),
        _ctranslate2("fp32", "float32"),
        _ctranslate2("int8", "int8"),
        _llama("fp32", "f32"),
        _llama("bf16", "bf16"),
        _llama("int8", "q8_0"),
        _llama_lookup("bf16", "bf16"),
        _llama_server("bf16", "bf16"),
        _llama_server("int8", "q8_0"),
        *(_onnx(weights) for weights in ("fp32", "int8", "int4")),
        _transformers("fp32", "float32"),
        _transformers("bf16", "bfloat16"),
        _transformers("bf16", "bfloat16", lookup=True),
        _memory("fp32"),
        _memory("bf16"),
        _memory("bf16", BUDGET),
        _memory("int8"),
        *(
            _linears(precision, dtype, whose)
            for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
            for whose in ("our", "oneDNN's")
        ),
    ]


def _ours(
    precision: str, dtype: str, quantization: str | None = None, *, budgets: bool = False
) -> list[Arm]:
    def start(place: Place) -> Engine:
        of_kv = 4 if dtype == "float32" else 2
        pool = place.pool_tokens * place.shape.kv_bytes(of_kv)
        model = convert.epikv(place.checkpoint, dtype, quantization)
        return Epikvd(model, place.threads, pool, place.binary, place.cpu)

    name = f"epikv {precision}"
    found = [Arm(name, "ours", precision, start)]
    for policy in ("sliding", "epikv_flat") if budgets else ():
        kv = Kv(policy, BUDGET)
        found.append(Arm(f"{name}, {policy} {BUDGET}", "ours", precision, start, kv, BUDGET))
    if budgets:
        found.append(Arm(f"{name}{LOOKUP}", "ours", precision, start, lookup=True))
    return found


def _runner(
    file: str,
    configuration: dict[str, Any],
    place: Place,
    python: Path,
    environment: dict[str, str] | None = None,
) -> Engine:
    command = [str(python), str(convert.RUNNERS / file)]
    held = HELD[place.cpu] if place.cpu else {}
    return Runner(command, configuration, place.threads, {**held, **(environment or {})})


def _openvino(
    precision: str, weights: str, hint: str, budget: int | None = None, *, lookup: bool = False
) -> Arm:
    def start(place: Place) -> Engine:
        python = venvs.python("peers", "openvino")
        model = str(convert.openvino(place.checkpoint, weights))
        configuration = {
            "model": model,
            "precision": hint,
            "budget": budget or 0,
            "guesses": GUESSES if lookup else 0,
        }
        return _runner("genai.py", configuration, place, python)

    name = f"OpenVINO GenAI {precision}" + (f", evicts at {budget}" if budget else "")
    name += LOOKUP if lookup else ""
    return Arm(name, "peer", precision, start, budget=budget, lookup=lookup)


def _ctranslate2(precision: str, weights: str) -> Arm:
    def start(place: Place) -> Engine:
        python = venvs.python("peers", "ctranslate2")
        model = str(convert.ctranslate2(place.checkpoint, weights))
        return _runner("ct2.py", {"model": model, "precision": weights}, place, python)

    return Arm(f"CTranslate2 {precision}", "peer", precision, start)


def _llama(precision: str, weights: str) -> Arm:
    def start(place: Place) -> Engine:
        root, python = venvs.llama(place.cpu), venvs.python("peers", "llama")
        model = str(convert.gguf(place.checkpoint, weights))
        configuration = {"model": model, "precision": weights}
        return _runner("llama.py", configuration, place, python, _llama_bindings(root))

    return Arm(f"llama.cpp {weights}", "peer", precision, start)


def _llama_lookup(precision: str, weights: str) -> Arm:
    def start(place: Place) -> Engine:
        root, python = venvs.llama(place.cpu), venvs.python("peers", "llama")
        model = str(convert.gguf(place.checkpoint, weights))
        configuration = {"model": model, "guesses": GUESSES}
        return _runner("llama_lookup.py", configuration, place, python, _llama_bindings(root))

    return Arm(f"llama.cpp {weights}{LOOKUP}", "peer", precision, start, lookup=True)


def _llama_bindings(root: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(root / "sources"),
        "LLAMA_CPP_LIB_PATH": str(root / "build" / "bin"),
    }


def _llama_server(precision: str, weights: str) -> Arm:
    def start(place: Place) -> Engine:
        root, python = venvs.llama(place.cpu), venvs.python("peers", "llama")
        model = str(convert.gguf(place.checkpoint, weights))
        binary = str(root / "build" / "bin" / "llama-server")
        configuration = {"model": model, "binary": binary, "tether": processes.tether()}
        return _runner("llama_server.py", configuration, place, python)

    return Arm(f"llama.cpp server {weights}", "peer", precision, start)


def _onnx(precision: str) -> Arm:
    def start(place: Place) -> Engine:
        if place.cpu is not None:
            raise venvs.Refused("nothing holds it to less than the processor has")
        python = venvs.python("peers", "onnxruntime")
        model = str(convert.onnx(place.checkpoint, precision))
        return _runner("ort.py", {"model": model}, place, python)

    return Arm(f"ONNX Runtime GenAI {precision}", "peer", precision, start)


def _transformers(precision: str, dtype: str, *, lookup: bool = False) -> Arm:
    def start(place: Place) -> Engine:
        python = venvs.python("peers", "transformers")
        guesses = GUESSES if lookup else None
        configuration = {"model": str(place.checkpoint), "precision": dtype, "guesses": guesses}
        return _runner("hf.py", configuration, place, python)

    name = f"transformers {precision}{LOOKUP if lookup else ''}"
    return Arm(name, "peer", precision, start, lookup=lookup)


def _memory(precision: str, budget: int | None = None) -> Arm:
    def start(place: Place) -> Engine:
        size = BYTES[precision]
        configuration = {
            "weight_bytes": size * place.shape.matrix_weights,
            "kv_bytes": place.shape.kv_bytes(max(size, 2)),
            "budget": budget,
        }
        return _runner("memory.py", configuration, place, _own_python())

    name = f"memory read {precision}" + (f", {budget} tokens" if budget else "")
    return Arm(name, "memory", precision, start, budget=budget)


def _linears(precision: str, dtype: str, whose: Literal["our", "oneDNN's"]) -> Arm:
    def start(place: Place) -> Engine:
        shape = place.shape
        program = None
        if whose == "our":
            program = measuring_program("linears_alone", place.binary)
            if program is None:
                raise venvs.Refused("linears_alone is not there: it is of a build with tests")
        configuration = {
            "program": program and str(program),
            "cpu": place.cpu or "auto",
            "precision": dtype,
            "layers": shape.layers,
            "linears": shape.linears,
            "head": (shape.hidden, shape.vocabulary),
        }
        return _runner("linears.py", configuration, place, _own_python())

    return Arm(f"{whose} linears alone {precision}", "linears", precision, start)


def _own_python() -> Path:
    """It has torch, and no peer."""
    return Path(sys.executable)
