"""llama.cpp: multi-sequence llama_decode, through llama-cpp-python's bindings."""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import llama_cpp as ll
import numpy as np
from serve import Run, Streams, serve

BATCH = 2048  # tokens of a call, llama.cpp's default
_F32 = 0  # GGML_TYPE_F32
_OFF = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED: with it logits are off by 5e-3 even in float32


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: model, threads, precision (f32, bf16 or q8_0)."""
    ll.llama_backend_init()
    chosen = ll.llama_model_default_params()
    chosen.n_gpu_layers = 0
    model = ll.llama_model_load_from_file(config["model"].encode(), chosen)
    if not model:
        raise RuntimeError(f"llama.cpp does not load {config['model']}")
    contexts = _Contexts(model, config)
    vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))

    def run(prompts: list[list[int]], new: int) -> Streams:
        context = contexts.get(len(prompts), len(prompts[0]) + new)
        streams = Streams(len(prompts))
        batch = _Batch(context, vocabulary, streams.add)
        for stream, ids in enumerate(prompts):
            for position, token in enumerate(ids):
                batch.put(stream, token, position, position == len(ids) - 1)
        batch.decode()
        for step in range(new - 1):
            for stream, ids in enumerate(prompts):
                batch.put(stream, streams.tokens[stream][-1], len(ids) + step, True)
            batch.decode()
        return streams

    settings = {
        "version": ll.__version__,
        "kv": "f32" if config["precision"] == "f32" else "f16",
        "flash_attention": "off" if config["precision"] == "f32" else "auto",
        "kv_unified": False,
        "n_batch": BATCH,
        "system": ll.llama_print_system_info().decode().strip(),
    }
    return run, settings


class _Contexts:
    """One at a time, of as many sequences and tokens as a job needs."""

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        self._model, self._config = model, config
        self._made: tuple[int, int] | None = None
        self._context: Any = None

    def get(self, sequences: int, tokens: int) -> Any:
        if self._made != (sequences, tokens):
            if self._context is not None:
                ll.llama_free(self._context)
            chosen = ll.llama_context_default_params()
            chosen.n_seq_max = sequences
            chosen.n_ctx = sequences * -(-tokens // 256) * 256
            chosen.n_batch = BATCH
            chosen.n_threads = chosen.n_threads_batch = self._config["threads"]
            chosen.kv_unified = False
            chosen.no_perf = True
            if self._config["precision"] == "f32":
                chosen.type_k = chosen.type_v = _F32
                chosen.flash_attn_type = _OFF
            self._context = ll.llama_init_from_model(self._model, chosen)
            if not self._context:
                raise RuntimeError(f"no llama.cpp context of {chosen.n_ctx} tokens")
            self._made = (sequences, tokens)
        ll.llama_memory_clear(ll.llama_get_memory(self._context), True)
        return self._context


class _Batch:
    """Tokens that run together; the greedy token behind those that ask for it goes to `add`."""

    def __init__(self, context: Any, vocabulary: int, add: Callable[[int, int], None]) -> None:
        self._context, self._vocabulary, self._add = context, vocabulary, add
        self._batch = ll.llama_batch_init(BATCH, 0, 1)
        self._asking: list[tuple[int, int]] = []  # place in the batch, stream

    def __del__(self) -> None:
        ll.llama_batch_free(self._batch)

    def put(self, stream: int, token: int, position: int, asks: bool) -> None:
        if self._batch.n_tokens == BATCH:
            self.decode()
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, stream
        batch.logits[place] = asks
        if asks:
            self._asking.append((place, stream))
        batch.n_tokens = place + 1

    def decode(self) -> None:
        if status := ll.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode failed with {status}")
        for place, stream in self._asking:
            logits = ll.llama_get_logits_ith(self._context, place)
            pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
            self._add(stream, int(np.ctypeslib.as_array(pointer, (self._vocabulary,)).argmax()))
        self._asking.clear()
        self._batch.n_tokens = 0


serve(load)
