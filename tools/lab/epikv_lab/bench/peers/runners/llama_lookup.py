"""llama.cpp through llama-cpp-python's own loop, which has prompt lookup."""

from collections.abc import Mapping
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from serve import Run, Streams, serve

CONTEXT = 1024  # tokens of prompt and output


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: model, threads, guesses."""
    model = llama_cpp.Llama(
        config["model"],
        n_ctx=CONTEXT,
        n_threads=config["threads"],
        n_threads_batch=config["threads"],
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=config["guesses"]),
        verbose=False,
    )

    def run(prompts: list[list[int]], new: int) -> Streams:
        streams = Streams(len(prompts))
        for stream, ids in enumerate(prompts):
            model.reset()
            tokens = model.generate(ids, temp=0.0, repeat_penalty=1.0)
            for _ in range(new):
                streams.add(stream, next(tokens))
            tokens.close()
        return streams

    return run, {"version": llama_cpp.__version__}


serve(load)
