"""What Hugging Face's logits processors leave of random rows, as data.

    python tests/golden/make_sampling.py

Writes sampling.json beside this script, with the transformers it is run with (a dependency of
epikv[export]). The processors stand in the order of `generate`; the frequency and presence
penalties, which it has not, are vLLM's two lines (vllm/model_executor/layers/utils.py,
apply_penalties). Of each row: settings, logits, and the probabilities of the tokens that can be
drawn. Rows in which a cut falls between two tokens nearer than 1e-5 are left out.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import logits_process as hf

VOCAB, ROWS = 40, 240
CUTS = ("top_p", "min_p", "typical_p")


def setting(rng: random.Random) -> dict[str, Any]:
    """Each stage is on in about half of the rows."""

    def maybe(name: str, value: Any) -> None:
        if rng.random() < 0.5:
            chosen[name] = value

    chosen: dict[str, Any] = {"temperature": round(rng.uniform(0.3, 2.5), 3)}
    maybe("top_k", rng.randint(1, VOCAB))
    maybe("top_p", round(rng.uniform(0.1, 0.99), 3))
    maybe("min_p", round(rng.uniform(0.01, 0.5), 3))
    maybe("typical_p", round(rng.uniform(0.1, 0.99), 3))
    maybe("repetition_penalty", round(rng.uniform(0.5, 2), 3))
    maybe("frequency_penalty", round(rng.uniform(-2, 2), 3))
    maybe("presence_penalty", round(rng.uniform(-2, 2), 3))
    tokens = rng.sample(range(VOCAB), 5)
    maybe("logit_bias", {token: round(rng.uniform(-10, 10), 3) for token in tokens})
    maybe("masked", rng.sample(range(VOCAB), 3))
    return chosen


def drawn_from(
    logits: Tensor, prompt: list[int], outputs: list[int], chosen: dict[str, Any]
) -> Tensor:
    """Probabilities. [vocab]"""
    tokens = torch.tensor([prompt + outputs])
    scores = logits[None].clone()
    if bias := chosen.get("logit_bias"):
        pairs = [[[token], value] for token, value in bias.items()]
        scores = hf.SequenceBiasLogitsProcessor(pairs)(tokens, scores)
    if penalty := chosen.get("repetition_penalty"):
        scores = hf.RepetitionPenaltyLogitsProcessor(penalty)(tokens, scores)
    counts = torch.bincount(torch.tensor(outputs, dtype=torch.long), minlength=VOCAB)[None]
    scores = scores - chosen.get("frequency_penalty", 0) * counts
    scores = scores - chosen.get("presence_penalty", 0) * (counts > 0)
    if masked := chosen.get("masked"):
        early = hf.MinNewTokensLengthLogitsProcessor(len(prompt), len(outputs) + 1, masked)
        scores = early(tokens, scores)
    stages = [
        ("temperature", hf.TemperatureLogitsWarper),
        ("top_k", hf.TopKLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
        ("min_p", hf.MinPLogitsWarper),
        ("typical_p", hf.TypicalLogitsWarper),
    ]
    for name, warper in stages:
        if name in chosen:
            scores = warper(chosen[name])(tokens, scores)
    return scores[0].softmax(-1)


def is_clear(logits: Tensor, prompt: list[int], outputs: list[int], chosen: dict[str, Any]) -> bool:
    """Whether no cut is so near that rounding could move it."""
    support = drawn_from(logits, prompt, outputs, chosen) > 0
    for cut in CUTS:
        for factor in (1 - 1e-5, 1 + 1e-5):
            moved = dict(chosen)
            if cut in chosen:
                moved[cut] = chosen[cut] * factor
            if not torch.equal(support, drawn_from(logits, prompt, outputs, moved) > 0):
                return False
    return True


def main() -> None:
    rng = random.Random(5)
    torch.manual_seed(5)
    rows = []
    while len(rows) < ROWS:
        chosen = setting(rng)
        logits = torch.randn(VOCAB, dtype=torch.float64).mul(rng.uniform(0.5, 4)).round(decimals=3)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        outputs = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 12))]
        if not is_clear(logits, prompt, outputs, chosen):
            continue
        probabilities = drawn_from(logits, prompt, outputs, chosen)
        row = {
            **chosen,
            "prompt": prompt,
            "outputs": outputs,
            "logits": logits.tolist(),
            "tokens": probabilities.nonzero()[:, 0].tolist(),
            "probabilities": [round(p, 7) for p in probabilities[probabilities > 0].tolist()],
        }
        rows.append(json.dumps(row, separators=(",", ":")))
    head = {
        "command": "python tests/golden/make_sampling.py",
        "reference": f"transformers {transformers.__version__}",
    }
    path = Path(__file__).with_name("sampling.json")
    path.write_text(json.dumps(head)[:-1] + ',"rows":[\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    main()
