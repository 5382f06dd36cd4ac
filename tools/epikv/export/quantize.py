"""Weights as integers of 8 or 4 bits: symmetric, in groups of neighbouring inputs with a scale each.

As llama.cpp's Q8_0 and Q4_0 have them: round to nearest, nothing learned. What a model is multiplied
by is weight = integer * scale; x is rounded to 8 bits in the same groups where it meets them
(runtime/kernels/quantized_matmul.h).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import epikv.export.operators  # noqa: F401  registers torch.ops.epikv

_GROUPS = {8: (128, 64, 32), 4: (32,)}  # inputs, the first that divides a weight's
_HEAD = "lm_head"  # whose errors nothing evens out: 8 bits always


@dataclass(frozen=True)
class Quantization:
    """How a model's linears are stored."""

    bits: int  # 8 or 4

    def of(self, linear: str, inputs: int) -> tuple[int, int] | None:
        """Bits and group of a linear, by its name in the module; None where no group divides its
        inputs: it stays as it is."""
        bits = 8 if linear == _HEAD else self.bits
        group = next((g for g in _GROUPS[bits] if inputs % g == 0), None)
        return None if group is None else (bits, group)


QUANTIZATIONS = {"int8": Quantization(8), "int4": Quantization(4)}


class QuantizedLinear(nn.Module):
    """x [..., in] -> [..., out]."""

    def __init__(self, weight: Tensor, bits: int, group: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        integers, scale = quantize(weight, bits, group)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.epikv.quantized_linear(x, self.weight, self.scale, self.bias)


def quantize(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """weight [out, in] as integers and scales, bfloat16 [out, in / group].

    Of 8 bits int8 [out, in]; of 4 bits uint8 [out, in / 2], two in a byte, the first in the lower
    half, 8 standing for 0.
    """
    largest = 2 ** (bits - 1) - 1
    grouped = weight.float().unflatten(1, (-1, group))  # [out, in / group, group]
    scale = (grouped.abs().amax(-1) / largest).bfloat16()
    by = scale.float().unsqueeze(-1)
    integers = torch.where(by > 0, grouped / by, 0).round().clamp(-largest, largest).flatten(1)
    if bits == 8:
        return integers.to(torch.int8), scale
    above = (integers + 8).to(torch.uint8)
    return above[:, 0::2] | above[:, 1::2] << 4, scale
