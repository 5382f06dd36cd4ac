"""Hugging Face transformers: generate(), static batches."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from serve import Run, Streams, serve
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class _Clock(StoppingCriteria):
    """Notes the newest tokens of each stream; stops nothing."""

    def __init__(self, streams: Streams, prompt: int) -> None:
        self._streams, self._noted = streams, prompt

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        for stream, tokens in enumerate(input_ids[:, self._noted :].tolist()):
            for token in tokens:
                self._streams.add(stream, token)
        self._noted = input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: model, threads, precision (float32 or bfloat16), guesses (of prompt lookup;
    none: None)."""
    torch.set_num_threads(config["threads"])
    dtype = getattr(torch, config["precision"])
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], new: int) -> Streams:
        ids = torch.tensor(prompts)
        streams = Streams(len(prompts))
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                prompt_lookup_num_tokens=config["guesses"],
                stopping_criteria=StoppingCriteriaList([_Clock(streams, ids.shape[1])]),
            )
        return streams

    settings = {
        "version": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "attention": model.config._attn_implementation,
    }
    return run, settings


serve(load)
