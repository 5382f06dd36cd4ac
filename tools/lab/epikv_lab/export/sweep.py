"""`python -m epikv_lab.export.sweep`: random models of every family, served, against transformers.

Each is written as a Hugging Face directory, exported, and served by one daemon; what comes back
over gRPC is compared with transformers on the same tokens: the log-probabilities of the likeliest
tokens at every place of prompts of unequal lengths, cached in chunks, of their greedy
continuations, which run together, and of a text under a budget, where transformers is given the
same evictions as a mask. Log-probabilities differ by no more than twice what logits differ by.
"""

import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from epikv import processes
from epikv.client import Client
from epikv.export import parity
from epikv.export.exporter import DTYPES, export
from epikv.export.families import FAMILIES
from epikv.export.synthetic import write_directory
from epikv.messages import EvictionEvent, TopLogprobs
from epikv.options import Kv, Output, Stop
from epikv.testing import Daemon
from torch import Tensor
from transformers import PreTrainedModel

from epikv_lab.export import zoo

PROMPTS = (1, 23, 50)  # tokens
OUTPUTS = 64
BUDGET = 40  # tokens: less than the longest prompt, more than any window
CHUNK = 16
TOP = 20  # likeliest tokens whose log-probabilities are compared


@dataclass(frozen=True)
class Model:
    """A random model, as transformers reads it and as the daemon does."""

    name: str
    architecture: str
    dtype: str
    directory: Path
    path: Path


@dataclass
class Outcome:
    """How far a served model is from transformers. `places`: rows of logits compared."""

    limit: float
    places: int = 0
    squares: float = 0.0  # sum over places of the mean square difference
    largest: float = 0.0
    clear: int = 0  # greedy tokens whose lead is over CLEAR limits
    equal: int = 0  # of those, the same as ours
    evicted: int = 0  # tokens
    measure: str = "max"  # that is limited; or "rms"
    places_by: dict[str, int] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return self.largest if self.measure == "max" else (self.squares / self.places) ** 0.5

    def passed(self) -> bool:
        return self.error <= self.limit and self.equal == self.clear and self.evicted > 0

    def compare(self, kind: str, got: Sequence[TopLogprobs], wanted: Tensor) -> None:
        """Of the likeliest tokens at each place with log-probabilities wanted [places, vocabulary]."""
        if len(got) != len(wanted):
            raise AssertionError(f"{len(got)} places came back, not {len(wanted)}")
        for top, row in zip(got, wanted, strict=True):
            difference = torch.tensor(top.logprobs) - row[top.token_ids]
            self.largest = max(self.largest, difference.abs().max().item())
            self.squares += difference.square().mean().item()
        self.places += len(got)
        self.places_by[kind] = self.places_by.get(kind, 0) + len(got)

    def greedy(self, tokens: Sequence[int], wanted: Tensor) -> None:
        """Tokens chosen where `wanted` are the log-probabilities, [len(tokens), vocabulary]."""
        best = wanted.topk(2).values
        clear = best[:, 0] - best[:, 1] > parity.CLEAR * self.limit
        self.clear += int(clear.sum())
        self.equal += int((clear & (wanted.argmax(-1) == torch.tensor(tokens))).sum())

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} of {kind}" for kind, n in self.places_by.items())
        return (
            f"{self.measure} error {self.error:.1e} (limit {self.limit:.1e}) over {kinds};"
            f" greedy tokens equal on {self.equal} of {self.clear} clear places;"
            f" {self.evicted} tokens evicted"
        )


def name_of(architecture: str, seed: int, dtype: str) -> str:
    return f"{architecture.replace('For', '-').lower()}-{seed}-{dtype}"


def make(architecture: str, seed: int, dtype: str, folder: Path) -> Model:
    """Writes and exports one random model."""
    name = name_of(architecture, seed, dtype)
    directory, path = folder / name, folder / f"{name}.pt"
    write_directory(
        zoo.configuration(architecture, seed), directory, dtype, seed, architecture=architecture
    )
    export(directory, path, dtype=dtype, name=name, check=False)
    return Model(name, architecture, dtype, directory, path)


def fits_gpus(model: Model) -> bool:
    """Whether `--device=cuda` serves it: no soft caps, no windows, heads of 8, 16, .. 256 channels."""
    with zipfile.ZipFile(model.path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/extra/manifest.json"))
        layers = json.loads(archive.read(name))["layers"]
    return not any(
        layer.get("soft_cap") or layer.get("window") or layer["key_width"] not in range(8, 257, 8)
        for layer in layers
    )


@contextmanager
def serving(models: Sequence[Model], folder: Path, device: str = "cpu") -> Iterator[Client]:
    """A client of one daemon that serves them all, in chunks of CHUNK tokens."""
    config = folder / "epikvd.textproto"
    config.write_text(
        f"prefill_chunk_tokens: {CHUNK} threads: 1 metrics_max_series: 1000000\n"
        + "".join(
            f'models {{ path: "{model.path}" name: "{model.name}" kv_pool_bytes: 16777216 }}\n'
            for model in models[1:]
        )
    )
    flags = (
        f"--config={config}",
        f"--device={device}",
        "--kv_pool_bytes=16777216",
        f"--model_name={models[0].name}",
    )
    with Daemon(models[0].path, *flags) as daemon, daemon.client() as client:
        yield client


def check(client: Client, model: Model) -> Outcome:
    """Holds what the daemon says against transformers."""
    reference = parity.load_reference(model.directory, model.dtype)
    if model.dtype == "float32":
        reference = reference.double()  # in float32 it rounds as much as the limit allows us to
    vocab_size = reference.config.get_text_config().vocab_size
    prompts = parity.random_prompts(vocab_size, zoo.CONTEXT, PROMPTS)
    outcome = _outcome(reference, model, prompts[-1])

    def complete(prompt: list[int]) -> tuple[list[int], list[TopLogprobs], list[TopLogprobs]]:
        result = client.generate_once(
            prompt,
            model=model.name,
            stop=Stop(max_output_tokens=OUTPUTS, ignore_eos=True),
            output=Output(token_ids=True, top_logprobs=TOP, prompt_logprobs=True),
        )
        of_prompt = result.prompt_logprobs.top_logprobs if result.prompt_logprobs else []
        return result.token_ids, of_prompt, result.top_logprobs

    with ThreadPoolExecutor(len(prompts)) as threads:
        completed = list(threads.map(complete, prompts))
    for prompt, (tokens, of_prompt, of_output) in zip(prompts, completed, strict=True):
        wanted = parity.logits(reference, prompt + tokens).log_softmax(-1)[:-1]
        outcome.compare("prompts", of_prompt, wanted[: len(prompt) - 1])
        outcome.compare("outputs", of_output, wanted[len(prompt) - 1 :])
        outcome.greedy(tokens, wanted[len(prompt) - 1 :])

    prompt, continuation = prompts[-1], completed[-1][0]
    scored = client.score(
        prompt,
        continuation,
        model=model.name,
        kv=Kv("random", BUDGET, protect_prompt=False),
        kv_trace=True,
        top_logprobs=TOP,
        seed=1,
    )
    text = prompt + continuation
    masks = _masks(len(text), scored.evictions, reference)
    with torch.inference_mode():
        wanted = reference(torch.tensor([text]), attention_mask=masks).logits[0].log_softmax(-1)
    outcome.compare("evicted texts", scored.top_logprobs, wanted[len(prompt) - 1 : -1])
    outcome.evicted += sum(len(v.index) for event in scored.evictions for v in event.victims)
    return outcome


def _outcome(reference: PreTrainedModel, model: Model, prompt: list[int]) -> Outcome:
    """In float32 the limit is fixed; else what transformers in that dtype misses float32 by."""
    if model.dtype == "float32":
        return Outcome(parity.FLOAT32_TOLERANCE)
    rounded = parity.load(model.directory, getattr(torch, model.dtype))
    text = parity.extend(reference, prompt, OUTPUTS)
    theirs, wanted = (parity.logits(m, text).log_softmax(-1) for m in (rounded, reference))
    rms = (theirs - wanted).square().mean().sqrt().item()
    return Outcome(parity.NARROW_FACTOR * rms, measure="rms")


def _masks(
    length: int, evictions: Sequence[EvictionEvent], reference: PreTrainedModel
) -> Tensor | dict[str, Tensor]:
    """What hides from each query the keys to come, those evicted before it, and those that a
    window hides, as transformers takes it: one mask, or one by type of layer."""
    age = torch.arange(length)[:, None] - torch.arange(length)
    hidden = age < 0
    for event in evictions:
        for victims in event.victims:
            if victims.layer is not None or victims.head is not None:
                raise AssertionError("the reference knows victims of all layers only")
            hidden[event.at_token + 1 :, victims.index] = True

    def mask(unseen: Tensor) -> Tensor:
        return torch.zeros(1, 1, length, length).masked_fill(unseen, torch.finfo(torch.float).min)

    window = getattr(reference.config.get_text_config(), "sliding_window", None)
    windows = FAMILIES[type(reference).__name__].windows
    sliding = mask(hidden) if windows is None or not window else mask(hidden | (age >= window))
    if windows != "typed":
        return sliding
    return {"full_attention": mask(hidden), "sliding_attention": sliding}


@click.command()
@click.option("--family", multiple=True, type=click.Choice(list(FAMILIES)), help="Default: all.")
@click.option("--configurations", default=20, help="Of each family.")
@click.option("--first", default=0, help="Seed of the first; the others follow.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="The daemon's.")
@processes.ending_in_order()
def main(family: tuple[str, ...], configurations: int, first: int, dtype: str, device: str) -> None:
    """Compare random models of every FAMILY, served over gRPC, with transformers."""
    failed = 0
    for architecture in family or FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            models = [
                make(architecture, seed, DTYPES[dtype], folder)
                for seed in range(first, first + configurations)
            ]
            if device != "cpu":
                models = [model for model in models if fits_gpus(model)]
            if not models:
                click.echo(f"{architecture}: none for a GPU")
                continue
            outcomes = []
            with serving(models, folder, device) as client:
                for model in models:
                    outcome = check(client, model)
                    outcomes.append(outcome)
                    if not outcome.passed():
                        failed += 1
                        click.echo(f"{model.name}: {outcome}")
        worst = max(outcomes, key=lambda outcome: outcome.error / outcome.limit)
        click.echo(
            f"{architecture}: {sum(o.passed() for o in outcomes)} of {len(outcomes)} equal,"
            f" {sum(o.places for o in outcomes)} places, greedy tokens"
            f" {sum(o.equal for o in outcomes)} of {sum(o.clear for o in outcomes)};"
            f" worst {worst.measure} error {worst.error:.1e} of {worst.limit:.1e}"
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
