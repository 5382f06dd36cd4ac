"""No peer but a bound: the weight matrices alone, packed beforehand, by oneDNN or as the daemon does.

A step runs the matrices of all layers over its rows, and the output head over those that are
wanted. Prompts run in chunks, and no nonlinearity, norm or attention is computed.
"""

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from serve import Run, Streams, serve

CHUNK = 512  # rows of prompts that run at once

Step = Callable[[int, int], None]  # of so many rows, and so many of the output head


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: threads, precision (float32 or bfloat16), layers, linears [(in, out)], head,
    program (that runs them as the daemon does) or None, cpu (what the program may use)."""
    step, settings = _program(config) if config["program"] else _one_dnn(config)

    def run(prompts: list[list[int]], new: int) -> Streams:
        streams = Streams(len(prompts))
        rows = sum(len(ids) for ids in prompts)
        for begin in range(0, rows, CHUNK):
            last = begin + CHUNK >= rows
            step(min(CHUNK, rows - begin), len(prompts) if last else 0)
        _told(streams, len(prompts))
        for _ in range(new - 1):
            step(len(prompts), len(prompts))
            _told(streams, len(prompts))
        return streams

    return run, {"threads": config["threads"], **settings}


def _told(streams: Streams, count: int) -> None:
    for stream in range(count):
        streams.add(stream, -1)


def _program(config: Mapping[str, Any]) -> tuple[Step, Mapping[str, Any]]:
    sizes = [f"{inputs},{outputs}" for inputs, outputs in [*config["linears"], config["head"]]]
    process = subprocess.Popen(
        [config["program"], f"--cpu={config['cpu']}",
         *map(str, (config["threads"], config["precision"], config["layers"])), *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None  # pipes
    stdin, stdout = process.stdin, process.stdout

    def answer() -> str:
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{config['program']} ended with status {process.wait()}")
        return line.strip()

    def step(rows: int, wanted: int) -> None:
        stdin.write(f"{rows} {wanted}\n")
        answer()

    return step, {"kernels": answer()}


def _one_dnn(config: Mapping[str, Any]) -> tuple[Step, Mapping[str, Any]]:
    import torch

    torch.set_num_threads(config["threads"])
    dtype = getattr(torch, config["precision"])

    def packed(inputs: int, outputs: int) -> torch.Tensor:
        weight = torch.randn(outputs, inputs).to(dtype)
        return torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    layers = [[packed(*sizes) for sizes in config["linears"]] for _ in range(config["layers"])]
    head = packed(*config["head"])
    of_rows = {
        width: torch.randn(CHUNK, width).to(dtype)
        for width in {sizes[0] for sizes in [*config["linears"], config["head"]]}
    }

    def linear(rows: int, width: int, matrix: torch.Tensor) -> None:
        x = of_rows[width][:rows]
        torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")

    @torch.inference_mode()
    def step(rows: int, wanted: int) -> None:
        for matrices in layers:
            for (width, _), matrix in zip(config["linears"], matrices, strict=True):
                linear(rows, width, matrix)
        if wanted:
            linear(wanted, config["head"][0], head)

    return step, {"torch": torch.__version__}


serve(load)
