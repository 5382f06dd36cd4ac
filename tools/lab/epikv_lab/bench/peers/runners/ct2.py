"""CTranslate2: static batches."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ctranslate2
from serve import Run, Streams, serve


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: model, threads, precision (float32 or int8)."""
    generator = ctranslate2.Generator(
        config["model"],
        device="cpu",
        compute_type=config["precision"],
        inter_threads=1,
        intra_threads=config["threads"],
    )
    vocabulary = json.loads((Path(config["model"]) / "vocabulary.json").read_text())

    def run(prompts: list[list[int]], new: int) -> Streams:
        words = [[vocabulary[token] for token in ids] for ids in prompts]
        streams = Streams(len(prompts))

        def step(result: ctranslate2.GenerationStepResult) -> bool:
            streams.add(result.batch_id, result.token_id)
            return False

        generator.generate_batch(
            words,
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
            beam_size=1,
            sampling_topk=1,
            max_batch_size=0,
            callback=step,
        )
        return streams

    settings = {
        "version": ctranslate2.__version__,
        "compute_type": generator.compute_type,
        "intra_threads": config["threads"],
    }
    return run, settings


serve(load)
