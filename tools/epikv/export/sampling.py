"""What a checkpoint's authors sample with: generation_config.json, as the daemon's defaults."""

import math
from collections.abc import Callable
from typing import Any

from epikv.export.errors import ExportError

# By field of SamplingParams in proto/epikv/v1/generation.proto: its range there, the range in
# words, and the value at which it does nothing.
_FIELDS: dict[str, tuple[Callable[[float], bool], str, float]] = {
    "temperature": (lambda x: x >= 0, "at least 0", 0),
    "top_k": (lambda x: 0 <= x < 2**32 and x == int(x), "a whole number of 32 bits", 0),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]", 1),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]", 0),
    "typical_p": (lambda x: 0 < x <= 1, "in (0, 1]", 1),
    "repetition_penalty": (lambda x: 0.01 <= x <= 100, "in [0.01, 100]", 1),
}


def sampling_of(generation: dict[str, Any]) -> dict[str, float]:
    """The fields that it sets and that do something; where it does not sample (`do_sample`), of
    them only the penalty. Where it samples and sets no temperature, transformers' own, 1.

    Raises ExportError, naming a field that is outside its range.
    """
    said = {name: generation[name] for name in _FIELDS if generation.get(name) is not None}
    for name, value in said.items():
        within, range_, _ = _FIELDS[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not within(value):
            raise ExportError(f"generation_config.json: {name} is {value}; it must be {range_}")
    if "top_k" in said:
        said["top_k"] = int(said["top_k"])
    if generation.get("do_sample"):
        said.setdefault("temperature", 1.0)
    else:
        said = {name: said[name] for name in ("repetition_penalty",) if name in said}
    return {name: value for name, value in said.items() if value != _FIELDS[name][2]}
