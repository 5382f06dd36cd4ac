"""`python tests/bench/gpu_peer.py SHAPE CACHED STREAMS,..`: decode steps of transformers on a GPU.

Of random weights of a shape of epikv_lab.export.large; with what is installed: scaled dot-product
attention, and a cache that grows. One line a number of streams.
"""

import sys
import time

import torch
from epikv_lab.export.large import SHAPES
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

WARM, STEPS, PREFILL = 8, 32, 16


@torch.inference_mode()
def measure(model: LlamaForCausalLM, streams: int, cached: int) -> float:
    """Milliseconds a step, greedy."""
    ids = torch.randint(model.config.vocab_size, (streams, cached - 16), device="cuda")
    cache = DynamicCache()
    if streams > PREFILL:  # a prompt's activations of so many sequences at once
        caches = []
        for some in ids.split(PREFILL):
            caches.append(DynamicCache())
            model(some, past_key_values=caches[-1], logits_to_keep=1)
        for layer in range(model.config.num_hidden_layers):
            cache.update(
                torch.cat([c.layers[layer].keys for c in caches]),
                torch.cat([c.layers[layer].values for c in caches]),
                layer,
            )
        del caches
    else:
        model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, -1:]
    for step in range(WARM + STEPS):
        if step == WARM:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        token.cpu()
    return 1e3 * (time.perf_counter() - begin) / STEPS


def main(shape: str, cached: int, streams: list[int]) -> None:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape])).eval()
    for count in streams:
        step = measure(model, count, cached)
        print(
            f"transformers, {shape}: {count} streams of {cached}: {step:.2f} ms a step"
            f" = {1e3 * count / step:.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(count) for count in sys.argv[3].split(",")])
