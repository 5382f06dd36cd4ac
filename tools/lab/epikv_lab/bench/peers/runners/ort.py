"""ONNX Runtime GenAI: static batches."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime_genai as og
from serve import Run, Streams, serve


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: model, threads."""
    session = {
        "intra_op_num_threads": config["threads"],
        "inter_op_num_threads": 1,
        "session.intra_op.allow_spinning": "0",
    }
    chosen = og.Config(config["model"])
    chosen.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(chosen)

    def run(prompts: list[list[int]], new: int) -> Streams:
        asked = og.GeneratorParams(model)
        length = len(prompts[0]) + new
        asked.set_search_options(
            do_sample=False, max_length=length, min_length=length, batch_size=len(prompts)
        )
        streams = Streams(len(prompts))
        generator = og.Generator(model, asked)
        generator.append_tokens(np.array(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            for stream, token in enumerate(generator.get_next_tokens()):
                streams.add(stream, token)
        return streams

    return run, {"version": og.__version__, **session}


serve(load)
