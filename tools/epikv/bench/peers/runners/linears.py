"""No peer but a bound: the weight matrices alone, packed for oneDNN beforehand.

A step runs the matrices of all layers over its rows, and the output head over those that are
wanted. Prompts run in chunks, and no nonlinearity, norm or attention is computed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from serve import Run, Streams, serve
from torch import Tensor

CHUNK = 512  # rows of prompts that run at once


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: threads, precision (float32 or bfloat16), layers, linears [(in, out)], head."""
    torch.set_num_threads(config["threads"])
    dtype = getattr(torch, config["precision"])
    layers = [
        [_packed(*sizes, dtype) for sizes in config["linears"]] for _ in range(config["layers"])
    ]
    head = _packed(*config["head"], dtype)
    inputs = {
        width: torch.randn(CHUNK, width).to(dtype)
        for width in {sizes[0] for sizes in [*config["linears"], config["head"]]}
    }

    def step(rows: int, wanted: int) -> None:
        for matrices in layers:
            for (width, _), matrix in zip(config["linears"], matrices, strict=True):
                _linear(inputs[width][:rows], matrix)
        if wanted:
            _linear(inputs[config["head"][0]][:wanted], head)

    def run(prompts: list[list[int]], new: int) -> Streams:
        streams = Streams(len(prompts))
        with torch.inference_mode():
            rows = sum(len(ids) for ids in prompts)
            for begin in range(0, rows, CHUNK):
                last = begin + CHUNK >= rows
                step(min(CHUNK, rows - begin), len(prompts) if last else 0)
            _told(streams, len(prompts))
            for _ in range(new - 1):
                step(len(prompts), len(prompts))
                _told(streams, len(prompts))
        return streams

    return run, {"torch": torch.__version__, "threads": torch.get_num_threads()}


def _told(streams: Streams, count: int) -> None:
    for stream in range(count):
        streams.add(stream, -1)


def _packed(inputs: int, outputs: int, dtype: torch.dtype) -> Tensor:
    weight = torch.randn(outputs, inputs).to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(weight, 16)


def _linear(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


serve(load)
