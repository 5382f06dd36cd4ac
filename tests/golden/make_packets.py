"""How the KV Packet authors move keys and mask their training, as data.

    git clone https://github.com/ChuangtaoChen-TUM/KVPacket /tmp/KVPacket    # a861034, MIT
    python tests/golden/make_packets.py /tmp/KVPacket

Their functions are read from the checkout given and are no part of this repository; the frequencies
are those of the transformers class that theirs runs with. Its attention scaling is 1: theirs refuses
any other.

"rotations": keys that stand rotated at `positions` (in halves: channel c turns with c + width / 2),
and the same keys as theirs puts them at `moved_to`. All fp32.
    inv_freq                [width / 2]
    positions, moved_to     [tokens]
    keys, moved             [heads, tokens, width], flat
An angle is the fp32 product of a difference of positions, which may be negative, and a frequency.

"assemblies": a prompt of a preamble that has no soft tokens (0: none is there), of documents with
`header` soft tokens before and `trailer` after each, and of a question that follows them all.
    documents               [documents]; tokens of each, its soft tokens apart
    parts                   [parts]; tokens of each part of the cache: the preamble, then the packets
    kept                    [parts]; those that its cache holds, where it was compressed before
    local, moved_to         [sum of kept]; a token's place within its part's cache, and the place that
                            theirs moves it to from there. Only their difference counts: it is the same
                            for a part's tokens, whichever were kept
    question_at             the position of the question's first token
    mask                    [sum of parts + question] rows of that many digits, row = who looks; of
                            the caches as they were before any compression
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from world import OUT, short

COMMIT = "ChuangtaoChen-TUM/KVPacket a861034"
PLAIN = {"rope_type": "default"}
# Other frequencies, and no scaling of attention.
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROTATIONS = (  # heads, width, theta, kind, positions, moved to
    (2, 8, 10000.0, PLAIN, range(9), range(17, 26)),
    (1, 32, 10000.0, PLAIN, range(12), range(12)),  # stay
    (2, 16, 500000.0, PLAIN, range(40, 50), range(10)),  # back
    (3, 16, 10000.0, PLAIN, [0, 3, 4, 9, 30, 31], [5, 100, 6, 2, 4000, 31]),  # each its own way
    (2, 32, 1000000.0, PLAIN, range(7), range(20000, 20007)),  # far
    (2, 16, 500000.0, STRETCHED, range(8), range(300, 308)),
)
ASSEMBLIES = (  # preamble, documents, header, trailer, question, dropped from the cache of each part
    (3, (4, 2), 1, 1, 3, ()),
    (0, (5,), 2, 1, 2, ()),
    (4, (3, 1, 6), 8, 8, 5, ()),
    (6, (), 8, 8, 4, ()),
    (2, (3, 3), 0, 0, 1, ()),
    (3, (5, 4), 2, 2, 3, (0, 4, 3)),
)


def functions(path: Path, *names: str) -> dict[str, Any]:
    """Functions of a file that this Python cannot read as a whole, or whose imports are not there."""
    known: dict[str, Any] = {
        "torch": torch,
        "warn": print,
        "SupportedRotaryEmbedding": object,
        "DeepseekV2RotaryEmbedding": type("DeepseekV2RotaryEmbedding", (), {}),
    }
    text = path.read_text() + "\n\n"
    for name in names:
        found = re.search(rf"^def {name}\(.*?(?=^def |^class |\Z)", text, re.DOTALL | re.MULTILINE)
        assert found, name
        exec(compile(found[0], str(path), "exec"), known)
    return known


def rotation(
    theirs: dict[str, Any],
    heads: int,
    width: int,
    theta: float,
    kind: dict[str, Any],
    positions: Any,
    moved_to: Any,
) -> dict[str, Any]:
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=width,
            num_attention_heads=1,
            head_dim=width,
            rope_parameters={**kind, "rope_theta": theta},
        )
    )
    assert rotary.attention_scaling == 1
    before, after = torch.tensor([list(positions)]), torch.tensor([list(moved_to)])
    plain = torch.randn(1, heads, before.shape[1], width)
    keys = theirs["apply_rotary_pos_emb"](plain, *rotary(plain, before))
    moved = theirs["rerotate_embeddings"](keys, rotary, before, after)
    return {
        "heads": heads,
        "width": width,
        "theta": theta,
        "rope": kind["rope_type"],
        "inv_freq": short(rotary.inv_freq),
        "positions": list(positions),
        "moved_to": list(moved_to),
        "keys": short(keys.flatten()),
        "moved": short(moved.flatten()),
    }


def digits(mask: Tensor) -> list[str]:
    return ["".join("1" if seen else "0" for seen in row) for row in mask.tolist()]


def assembly(
    theirs: dict[str, Any],
    preamble: int,
    documents: tuple[int, ...],
    header: int,
    trailer: int,
    question: int,
    dropped: tuple[int, ...],
) -> dict[str, Any]:
    parts = [preamble] * bool(preamble) + [header + size + trailer for size in documents]
    kept = [size - gone for size, gone in zip(parts, dropped or [0] * len(parts), strict=True)]
    return {
        "preamble": preamble,
        "documents": documents,
        "header": header,
        "trailer": trailer,
        "question": question,
        "parts": parts,
        "kept": kept,
        "local": theirs["get_cumsum_pos"](kept).tolist(),
        "moved_to": theirs["get_shifted_cumsum_pos"](kept, parts).tolist(),
        "question_at": sum(parts),
        "mask": digits(theirs["packet_4d_mask"](parts, question)[0, 0]),
    }


def main(checkout: Path) -> None:
    torch.manual_seed(1)
    source = checkout / "kv_packet"
    theirs = {
        **functions(
            source / "cache/rotate.py",
            "rotate_half",
            "apply_rotary_pos_emb",
            "rerotate_embeddings",
        ),
        **functions(
            source / "cache_comb/utils/__init__.py", "get_cumsum_pos", "get_shifted_cumsum_pos"
        ),
        **functions(source / "utils/train_filler.py", "packet_4d_mask"),
    }
    text = json.dumps(
        {
            "command": "python tests/golden/make_packets.py CHECKOUT",
            "reference": f"{COMMIT} `rerotate_embeddings`, `get_shifted_cumsum_pos`, `packet_4d_mask`",
            "rotations": [rotation(theirs, *case) for case in ROTATIONS],
            "assemblies": [assembly(theirs, *case) for case in ASSEMBLIES],
        },
        separators=(",", ":"),
    )
    for first in ("heads", "preamble"):
        text = text.replace(f'{{"{first}"', f'\n{{"{first}"')
    (OUT.parent / "packets.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
