"""What kvpress's KVzip gives a prompt's tokens, as data.

    pip install kvpress==0.5.5
    python tests/golden/make_kvzip.py

kvpress (Apache-2.0) is imported and is no part of this repository. It is given a prompt's rows and
those of the repetition of each of its chunks; what is dropped of them all is ours.
"""

import json
from types import SimpleNamespace
from typing import Any

import torch
from kvpress import KVzipPress
from torch import Tensor
from world import OUT, Shape, World, short

SHAPE = Shape(layers=2, heads=4, kv_heads=2)
# Tokens of the phrases, and of the chunk before.
WHOLE, PART, SUFFIX, CUE = 3, 2, 1, 8


def segment_at(prompt: int, segment: int) -> int:
    """As FakeSequence::SegmentAt."""
    return prompt + 1000 * (segment + 1)


def scores(world: World, prompt: int, chunk: int) -> list[Tensor]:
    press = KVzipPress(compression_ratio=0.5)
    press.context_length = prompt
    press.score_val = torch.zeros(SHAPE.layers, 1, SHAPE.kv_heads, prompt)
    for segment, start in enumerate(range(0, prompt, chunk)):
        end = min(start + chunk, prompt)
        size = (WHOLE if segment == 0 else PART + CUE) + SUFFIX + end - start
        rows = range(segment_at(prompt, segment), segment_at(prompt, segment) + size)
        press.start_idx, press.end_idx = start, end
        for layer in range(SHAPE.layers):
            index = [[*range(prompt), *rows]] * SHAPE.kv_heads
            queries = world.queries(layer, rows)  # [heads, rows, width]
            module = SimpleNamespace(
                config=SimpleNamespace(
                    num_attention_heads=SHAPE.heads,
                    num_key_value_heads=SHAPE.kv_heads,
                    head_dim=SHAPE.width,
                ),
                head_dim=SHAPE.width,
                layer_idx=layer,
                q_proj=lambda _, q=queries: q.transpose(0, 1).reshape(1, q.shape[1], -1),
            )
            keys = world.lanes("key", layer, index)[None]
            turned = (torch.ones(1, size, SHAPE.width), torch.zeros(1, size, SHAPE.width))
            press.score_kvzip(
                module,
                torch.zeros(1, size, 1),
                keys,
                keys,
                None,
                {"position_embeddings": turned},
            )
    return [lane for layer in press.score_val[:, 0] for lane in layer]


def run(seed: int, prompt: int, chunk: int) -> dict[str, Any]:
    found = scores(World(seed, SHAPE), prompt, chunk)
    return {
        "reference": "kvpress 0.5.5 `KVzipPress.score_kvzip`",
        "seed": seed,
        "prompt_tokens": prompt,
        "chunk": chunk,
        "scores": [short(lane) for lane in found],
    }


def main() -> None:
    runs = [run(51, 60, 64), run(52, 90, 32), run(53, 47, 16)]
    text = json.dumps(
        {"command": "python tests/golden/make_kvzip.py", "runs": runs}, separators=(",", ":")
    )
    (OUT.parent / "kvzip.json").write_text(text.replace('{"reference"', '\n{"reference"') + "\n")


if __name__ == "__main__":
    main()
