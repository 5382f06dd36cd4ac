"""OpenVINO GenAI: its continuous batching."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai
from openvino_genai import (
    AggregationMode,
    CacheEvictionConfig,
    ContinuousBatchingPipeline,
    GenerationConfig,
    SchedulerConfig,
)
from serve import Run, Streams, serve


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: model, threads, precision (f32 or bf16), budget (evict to so many; none: 0),
    guesses (of prompt lookup; none: 0)."""
    properties = {
        "INFERENCE_NUM_THREADS": config["threads"],
        "INFERENCE_PRECISION_HINT": config["precision"],
    }
    scheduler = SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 64
    if budget := config["budget"]:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = CacheEvictionConfig(
            start_size=32,
            recent_size=128,
            max_cache_size=budget,
            aggregation_mode=AggregationMode.NORM_SUM,
        )
    if config["guesses"]:
        properties["prompt_lookup"] = True
    # A processor without products of bfloat16 takes no KV cache of it.
    takes = [config["precision"], *(["f16", "u8"] if config["precision"] == "bf16" else [])]
    for precision in takes:
        properties["KV_CACHE_PRECISION"] = precision
        try:
            pipeline = ContinuousBatchingPipeline(config["model"], scheduler, "CPU", properties)
            break
        except RuntimeError:
            if precision == takes[-1]:
                raise
    number = 0

    def run(prompts: list[list[int]], new: int) -> Streams:
        nonlocal number
        asked = GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        if config["guesses"]:
            asked.num_assistant_tokens = config["guesses"]
            asked.max_ngram_size = 3
        streams = Streams(len(prompts))
        handles = []
        for ids in prompts:
            number += 1
            tensor = ov.Tensor(np.array([ids], np.int64))
            handles.append(pipeline.add_request(number, tensor, asked))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for stream, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            streams.add(stream, token)
        return streams

    settings = {
        "version": openvino_genai.__version__,
        **properties,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "dynamic_split_fuse": scheduler.dynamic_split_fuse,
        "cache_size": scheduler.cache_size,
    }
    if budget:
        settings["eviction"] = "start 32, recent 128, NORM_SUM"
    return run, settings


serve(load)
