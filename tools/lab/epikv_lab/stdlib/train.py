"""Training of the model: transformers' Llama of 10 million parameters, windows of 2048 tokens.

A step's data depend only on (seed, step), so a run that was stopped goes on exactly.
"""

import json
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from epikv_lab.stdlib import corpus

REVIEW_STEPS = 50
CHECKPOINT_STEPS = 100
VALIDATION_WINDOWS = 16
# Where a window's validation loss is looked at by itself: whether it falls says whether the model uses what is far.
POSITIONS = (0, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Recipe:
    """Everything a training run depends on, beside the texts."""

    seed: int = 0
    tokens: int = 80_000_000  # 160 million are too many: the validation loss rises
    window: int = 2048
    windows: int = 16  # of a step
    width: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    ffn_width: int = 896
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    decay_fraction: float = 0.4
    clip: float = 1.0

    @property
    def steps(self) -> int:
        return self.tokens // (self.window * self.windows)


class Run:
    """A training run and its state on disk: `state.pt` to resume from, `log.jsonl` to read.

    compiled: steps go through torch.compile, which makes them a third faster on a CPU, from their second minute on.
    at_once: windows of a step that run together, which a GPU wants.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        sources: Path,
        *,
        compiled: bool = False,
        device: str = "cpu",
        at_once: int = 1,
    ) -> None:
        if recipe.windows % at_once != 0:
            raise ValueError(f"{recipe.windows} windows do not split into parts of {at_once}")
        self.recipe, self.folder, self.step = recipe, folder, 0
        self.device, self.at_once = torch.device(device), at_once
        folder.mkdir(parents=True, exist_ok=True)
        read = corpus.texts(corpus.fetch(sources))
        self.digest = corpus.digest(read)
        self.tokenizer = corpus.make_tokenizer(read)
        encoded = {
            part: corpus.encode(self.tokenizer, read, part) for part in ("train", "validation")
        }
        self.train_ids, self.validation_ids = encoded["train"], encoded["validation"]
        torch.manual_seed(recipe.seed)
        self.model = LlamaForCausalLM(self._config())
        torch.nn.Module.to(self.model, self.device)
        self._losses = torch.compile(self._losses_of) if compiled else self._losses_of
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimizers = [
            torch.optim.Muon(
                matrices,
                momentum=0.95,
                weight_decay=recipe.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=recipe.weight_decay),
        ]
        if (folder / "state.pt").exists():
            self._restore()

    def train(self) -> None:
        """To its end, from where the saved state left off; then the files of a model."""
        started, before = time.monotonic(), self.step
        losses: list[float] = []
        while self.step < self.recipe.steps:
            losses.append(self._take_step())
            if self.step % REVIEW_STEPS == 0:
                seconds = time.monotonic() - started
                tokens = (self.step - before) * self.recipe.window * self.recipe.windows
                self._log(float(np.mean(losses)), tokens / seconds)
                losses.clear()
            if self.step % CHECKPOINT_STEPS == 0:
                self._checkpoint()
        self._checkpoint()
        self.save()

    def save(self) -> None:
        """config.json, weights in bfloat16, and the tokenizer."""
        self.model.bfloat16().cpu().save_pretrained(self.folder)
        PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer,
            eos_token=corpus.END,
            model_max_length=self.recipe.window,
        ).save_pretrained(self.folder)

    def _config(self) -> LlamaConfig:
        recipe = self.recipe
        end = self.tokenizer.token_to_id(corpus.END)
        return LlamaConfig(
            vocab_size=self.tokenizer.get_vocab_size(),
            hidden_size=recipe.width,
            intermediate_size=recipe.ffn_width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            max_position_embeddings=recipe.window,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=None,
        )

    def _take_step(self) -> float:
        recipe = self.recipe
        inputs = self._windows(self.train_ids, np.random.default_rng((recipe.seed, self.step)))
        for group in self.optimizers:
            for parameters in group.param_groups:
                parameters["lr"] = recipe.learning_rate * self._schedule()
        total = torch.zeros((), device=self.device)
        for some in inputs.split(self.at_once):  # what is kept for the gradient stays small
            loss = self._losses(some).mean() * (len(some) / len(inputs))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(total)

    def _losses_of(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [windows, window + 1] -> nats [windows, window]"""
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.float().transpose(1, 2), ids[:, 1:], reduction="none"
        )

    def _windows(self, ids: np.ndarray, dice: np.random.Generator) -> torch.Tensor:
        length = self.recipe.window + 1
        starts = dice.integers(0, len(ids) - length, self.recipe.windows)
        return self._of(ids, starts)

    def _of(self, ids: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        length = self.recipe.window + 1
        windows = np.stack([ids[s : s + length] for s in starts]).astype(np.int64)
        return torch.from_numpy(windows).to(self.device)

    def _schedule(self) -> float:
        warm = min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        left = 1 - self.step / self.recipe.steps
        return warm * min(1.0, left / self.recipe.decay_fraction)

    def _log(self, loss: float, speed: float) -> None:
        length = self.recipe.window + 1
        spread = np.linspace(0, len(self.validation_ids) - length, VALIDATION_WINDOWS).astype(int)
        windows = self._of(self.validation_ids, spread)
        with torch.no_grad():
            held_out = torch.cat([self._losses(some) for some in windows.split(self.at_once)])
        by_position = held_out.mean(0).tolist()
        parts = [(a, b) for a, b in pairwise(POSITIONS) if b <= self.recipe.window]
        record = {
            "step": self.step,
            "tokens": self.step * self.recipe.window * self.recipe.windows,
            "tokens_per_second": round(speed),
            "loss": round(loss, 4),
            "validation": round(float(held_out.mean()), 4),
            "by_position": {
                f"{a}-{b}": round(float(np.mean(by_position[a:b])), 4) for a, b in parts
            },
        }
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def _checkpoint(self) -> None:
        state = {
            "recipe": asdict(self.recipe),
            "texts": self.digest,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        partial = self.folder / "state.pt.partial"
        torch.save(state, partial)
        partial.rename(self.folder / "state.pt")

    def _restore(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device)
        if state["recipe"] != asdict(self.recipe) or state["texts"] != self.digest:
            raise ValueError(f"{self.folder} holds a run of another recipe or of other texts")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
