"""Whether engines generate what transformers in float32 would.

A token is right if transformers rates none higher, behind what the engine itself has generated so
far; or higher by less than 1e-3, where rounding decides. At equal precision all are to be right, and
the streams then are the same up to such a tie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from epikv_lab.bench.peers.cells import Cell
from epikv_lab.bench.peers.process import Reply

TIE = 1e-3
CELL = Cell("agreement", 4, 128, 96)


@dataclass(frozen=True)
class Agreement:
    """Of one engine's tokens."""

    tokens: int
    wrong: int
    worst: float  # by how much, in logits, the one that transformers rates highest was missed


def agreements(
    checkpoint: Path, prompts: Sequence[Sequence[int]], replies: Mapping[str, Reply]
) -> dict[str, Agreement]:
    """By engine. Those that do not say their tokens are left out."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = {}
    for name, reply in replies.items():
        if any(token < 0 for tokens in reply.tokens for token in tokens):
            continue
        ids = torch.tensor([[*p, *t] for p, t in zip(prompts, reply.tokens, strict=True)])
        new = len(reply.tokens[0])
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=new + 1).logits[:, :-1]
        chosen = logits.gather(2, ids[:, -new:, None])[..., 0]
        missed = logits.amax(2) - chosen
        found[name] = Agreement(missed.numel(), int((missed >= TIE).sum()), float(missed.max()))
    return found
