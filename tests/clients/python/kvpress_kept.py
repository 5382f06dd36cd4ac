"""What kvpress keeps of a prompt, by its own run of a checkpoint, as JSON on stdout.

    python kvpress_kept.py DIRECTORY PROMPT BUDGET PRESSES

PRESSES: in JSON, the arguments of classes of kvpress by their names. Tokens are found by their keys, of each
layer and KV head, in the cache of a run in which all are kept.
"""

import json
import sys

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def main(directory: str, prompt: str, budget: str, presses: str) -> None:
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory).encode(prompt)])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    whole = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=whole)
    kept = {}
    for name, params in json.loads(presses).items():
        press = getattr(kvpress, name)(compression_ratio=1 - int(budget) / ids.shape[1], **params)
        left = DynamicCache()
        with torch.no_grad(), press(model):
            model(ids, past_key_values=left)
        kept[name] = [
            [
                sorted(torch.cdist(some, every).argmin(-1).tolist())
                for some, every in zip(of_left.keys[0], of_whole.keys[0], strict=True)
            ]
            for of_left, of_whole in zip(left.layers, whole.layers, strict=True)
        ]
    print(json.dumps({"tokens": ids.shape[1], "kept": kept}))


if __name__ == "__main__":
    main(*sys.argv[1:])
