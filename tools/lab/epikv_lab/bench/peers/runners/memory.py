"""No peer but a bound: reading, once for every token, the bytes that it cannot do without."""

from collections.abc import Mapping
from typing import Any

import torch
from serve import Run, Streams, serve

_WORD = 8  # bytes that are summed up as one


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: threads, weight_bytes (of all weights), kv_bytes (of a cached token), budget
    (tokens that a stream caches at most, or None)."""
    torch.set_num_threads(config["threads"])
    weights = torch.ones(config["weight_bytes"] // _WORD, dtype=torch.int64)
    cached = torch.ones(0, dtype=torch.int64)

    def words(tokens: list[int]) -> int:
        """That so many cached tokens of each stream take."""
        most = config["budget"]
        held = sum(tokens if most is None else (min(count, most) for count in tokens))
        return held * config["kv_bytes"] // _WORD

    def run(prompts: list[list[int]], new: int) -> Streams:
        nonlocal cached
        most = words([len(ids) + new for ids in prompts])
        if len(cached) < most:
            cached = torch.ones(most, dtype=torch.int64)
        streams = Streams(len(prompts))
        for step in range(new):
            weights.sum()
            cached[: words([len(ids) + step for ids in prompts])].sum()
            for stream in range(len(prompts)):
                streams.add(stream, -1)
        return streams

    return run, {"torch": torch.__version__, "threads": torch.get_num_threads()}


serve(load)
