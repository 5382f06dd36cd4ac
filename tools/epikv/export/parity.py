"""Compares an exported file with `transformers`, before it ships."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Module, forward

FLOAT32_TOLERANCE = 1e-4  # largest absolute difference of a logit
NARROW_FACTOR = (
    1.5  # of narrow dtypes: error against float32, in units of the error transformers makes itself
)
# Of quantized linears, in units of the logits' standard deviation: far above what rounding makes of
# random weights, which no training has made robust, and far below what a wrong model would.
QUANTIZED_FACTOR = {"int8": 0.1, "int4": 0.7}
PROMPT_LENGTHS = (1, 7, 33)  # tokens, fed packed in one forward
CLEAR = 4  # limits: a gap that errors within the limit do not turn round
STEPS = 8  # decode steps, one token a sequence each

logging.disable_progress_bar()


@dataclass(frozen=True)
class Report:
    """How far the exported logits are from the reference, over all rows compared."""

    measure: str  # of `error`: "max" of float32; "rms" of others
    rows: int
    spread: float  # standard deviation of the reference's logits
    max_error: float  # largest absolute difference from transformers in float32
    error: float  # that is limited
    limit: float
    greedy_rows: int  # rows whose two best logits are further apart than CLEAR limits
    greedy_equal: int  # of those, rows with the same greedy token

    def passed(self) -> bool:
        return self.error <= self.limit and self.greedy_equal == self.greedy_rows

    def __str__(self) -> str:
        return (
            f"against transformers, {self.rows} rows of prefill and decode:"
            f" {self.measure} logit error {self.error:.2e} (limit {self.limit:.2e}; the logits'"
            f" standard deviation is {self.spread:.2e}),"
            f" greedy tokens equal on {self.greedy_equal} of {self.greedy_rows} clear rows"
        )


@dataclass(frozen=True)
class Expected:
    """What transformers says of some texts."""

    texts: list[list[int]]  # token ids
    prompts: list[int]  # tokens of each that are its prompt
    logits: Tensor  # float32, at all places of all texts: [rows, vocabulary]
    limit: float


def expect(manifest: Manifest, directory: Path) -> Expected:
    """Random prompts and their greedy continuations, in transformers: float32 on weights rounded to
    the model's dtype, not quantized. The limit of a narrow one is what transformers misses that by
    in it; of a quantized one, QUANTIZED_FACTOR more.

    One model is in memory, in the model's dtype.
    """
    prompts = random_prompts(manifest.vocab_size, manifest.context_length - STEPS, PROMPT_LENGTHS)
    model = load(directory, getattr(torch, manifest.dtype))
    texts = [extend(model, prompt, STEPS) for prompt in prompts]
    theirs = torch.cat([logits(model, text) for text in texts])
    limit, wanted = FLOAT32_TOLERANCE, theirs
    if manifest.dtype != "float32":
        widen(model)
        wanted = torch.cat([logits(model, text) for text in texts])
        limit = NARROW_FACTOR * _rms(theirs - wanted)
    if manifest.quantization is not None:
        limit += QUANTIZED_FACTOR[manifest.quantization] * wanted.std().item()
    return Expected(texts, [len(prompt) for prompt in prompts], wanted, limit)


def compare(module: Module, manifest: Manifest, expected: Expected) -> Report:
    """Runs the module on the same texts: packed prompts, then packed decode steps."""
    wanted, limit = expected.logits, expected.limit
    ours = _packed_logits(module, manifest, expected.texts, expected.prompts)
    max_error = (ours - wanted).abs().max().item()
    best = wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR * limit
    equal = ours.argmax(-1) == wanted.argmax(-1)
    exact = manifest.dtype == "float32" and manifest.quantization is None
    return Report(
        measure="max" if exact else "rms",
        rows=len(wanted),
        spread=wanted.std().item(),
        max_error=max_error,
        error=max_error if exact else _rms(ours - wanted),
        limit=limit,
        greedy_rows=int(clear.sum()),
        greedy_equal=int((clear & equal).sum()),
    )


def load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The directory's model in transformers, stored and computing in `dtype`."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()


def load_reference(directory: Path, dtype: str) -> PreTrainedModel:
    """The directory's model in transformers, computing in float32 with weights of `dtype`."""
    model = load(directory, getattr(torch, dtype))
    if dtype != "float32":
        widen(model)
    return model


def widen(model: PreTrainedModel) -> None:
    """Makes a model of a narrow dtype compute in float32: each module has its weights in float32
    while it runs, so that no more than one module's are in memory twice."""

    def before(module: nn.Module, _: object) -> None:
        narrow = dict(module.named_parameters(recurse=False))
        held[module] = narrow
        for name, weight in narrow.items():
            setattr(module, name, nn.Parameter(weight.float(), requires_grad=False))

    def after(module: nn.Module, *_: object) -> None:
        for name, weight in held.pop(module).items():
            setattr(module, name, weight)

    held: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after, always_call=True)


def random_prompts(vocab_size: int, longest: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids that are the same on every run, each at most `longest`."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(vocab_size, (max(1, min(n, longest)),), generator=generator).tolist()
        for n in lengths
    ]


@torch.inference_mode()
def extend(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> list[int]:
    """The prompt and its greedy continuation of exactly `steps` tokens, end tokens or not."""
    text = list(prompt)
    fed, cache = text, None
    for _ in range(steps):
        output = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        fed = [int(output.logits[0, -1].argmax())]
        text.extend(fed)
    return text


@torch.inference_mode()
def logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Float32 logits at every position of one sequence, [len(text), vocabulary]."""
    return model(torch.tensor([text])).logits[0].float()


def _packed_logits(
    module: Module,
    manifest: Manifest,
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
) -> Tensor:
    """Logits of all texts, one after the other, fed packed: the prompts, then a token each."""
    caches = [KvCache.empty(manifest) for _ in texts]
    batch = [(c, text[:n]) for c, text, n in zip(caches, texts, prompt_lengths, strict=True)]
    rows = [list(forward(module, manifest, batch).split(list(prompt_lengths)))]
    for step in range(len(texts[0]) - prompt_lengths[0]):
        at = [n + step for n in prompt_lengths]
        batch = [(c, text[i : i + 1]) for c, text, i in zip(caches, texts, at, strict=True)]
        rows.append(list(forward(module, manifest, batch).split(1)))
    return torch.cat([torch.cat(of_text) for of_text in zip(*rows, strict=True)])


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
