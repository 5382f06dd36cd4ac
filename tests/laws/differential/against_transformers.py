"""Holds answers of the differential fuzzer against transformers.

    python tests/laws/differential/against_transformers.py ANSWERS [--most N]

ANSWERS is what `differential --answers` wrote. Each text is run through transformers in float64, in
whose attention each query is hidden what had been evicted from its layer and head when it came; the
log-probabilities of the output have to be the same. Exit status 1: some are not.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import repeat_kv

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "fixtures" / "python")]

import make_models  # noqa: E402
from epikv.export import parity  # noqa: E402

LIMIT = 2e-4  # of a log-probability: twice what logits may differ by (law 1)

_gone: list[Tensor] = []  # of the text that runs, by layer: [query heads, tokens, tokens]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """As the models' own eager attention, but for what is gone."""
    groups = module.num_key_value_groups
    logits = query @ repeat_kv(key, groups).transpose(2, 3) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = (logits + attention_mask).masked_fill(_gone[module.layer_idx], -torch.inf)
    out = logits.softmax(-1) @ repeat_kv(value, groups)
    return out.transpose(1, 2).contiguous(), None


def _gone_of(answer: dict[str, Any], model: PreTrainedModel, length: int) -> list[Tensor]:
    config = model.config.get_text_config()
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    gone = torch.zeros(layers, kv_heads, length, length, dtype=torch.bool)
    for victims in answer["evictions"]:
        layer = slice(None) if victims["layer"] < 0 else victims["layer"]
        head = slice(None) if victims["head"] < 0 else victims["head"]
        for index in victims["index"]:
            gone[layer, head, victims["at"] + 1 :, index] = True
    return list(gone.repeat_interleave(config.num_attention_heads // kv_heads, dim=1))


def error_of(answer: dict[str, Any], model: PreTrainedModel) -> float:
    """The largest difference of a log-probability of the output."""
    prompt, tokens = answer["prompt"], answer["tokens"]
    text = prompt + tokens
    _gone[:] = _gone_of(answer, model, len(text))
    with torch.inference_mode():
        logits = model(torch.tensor([text])).logits[0]
    places = logits[len(prompt) - 1 : -1].log_softmax(-1)
    wanted = places.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (torch.tensor(answer["logprobs"]) - wanted).abs().max().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--most", type=int, default=2000, help="answers, from the whole file")
    arguments = parser.parse_args()
    AttentionInterface.register("epikv_gone", _attend)
    AttentionMaskInterface.register("epikv_gone", eager_mask)
    lines = arguments.answers.read_text().splitlines()
    by_model = defaultdict(list)
    for line in lines[:: max(1, len(lines) // arguments.most)]:
        answer = json.loads(line)
        by_model[answer["model"]].append(answer)
    wrong = 0
    for name, answers in sorted(by_model.items()):
        with tempfile.TemporaryDirectory() as folder:
            directory, dtype = make_models.source_of(name, Path(folder))
            model = parity.load_reference(directory, dtype).double()
        model.set_attn_implementation("epikv_gone")
        errors = [error_of(answer, model) for answer in answers]
        for answer, error in zip(answers, errors, strict=True):
            if error > LIMIT:
                wrong += 1
                print(
                    f"{name}: a log-probability differs by {error:.1e}: {json.dumps(answer)[:600]}"
                )
        evicted = sum(bool(answer["evictions"]) for answer in answers)
        print(
            f"{name}: {len(answers)} answers, {evicted} of them evicted from; at most {max(errors):.1e}"
        )
    if not by_model:
        print("no answers")
    return 1 if wrong or not by_model else 0


if __name__ == "__main__":
    sys.exit(main())
