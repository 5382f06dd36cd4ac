"""Runs the EpiKV authors' classes in a decoding loop over the sample model and writes what they did.

    git clone https://github.com/stevenkolawole/epiphany-kv-cache /tmp/authors
    git -C /tmp/authors checkout d424208
    python tests/golden/make_epikv_runs.py /tmp/authors

The loop is their benchmark driver's: transformers with a batch of one, one token a step, the policy
called once after it, and no positions given, so that a token's is the retained length. The tokens
are those of a sample problem's solution instead of the model's own choice. Their code is imported
from the checkout given; laws_test.cc reads the files in epikv_authors/.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from epikv.sample import problem  # noqa: E402

MODEL = ROOT / "tools" / "sample_model" / (ROOT / "tools/sample_model/SHIPPED").read_text().strip()
OUT = Path(__file__).parent / "epikv_authors" / "runs.json"
STEPS, LOGITS_EVERY = 260, 20
# Of the scores at a cut: arithmetic of another order stays well below it.
MIN_GAP = 2e-5
# K and V rows by layer, the step's output, indexes of the rows -> kept rows, scores of what may go
Evict = Callable[[Any, Any, list[int]], tuple[Any, dict[int, float]]]


class Run:
    """One sequence in their loop."""

    def __init__(self, model: Any, prompt: list[int], **wanted: bool) -> None:
        self.model, self.wanted = model, wanted
        self.cache = DynamicCache(config=model.config)
        self.index = list(range(len(prompt)))  # of what is cached
        self.prefill = self._forward(prompt)

    def _forward(self, tokens: list[int]) -> Any:
        with torch.no_grad():
            ids = torch.tensor([tokens])
            return self.model(ids, past_key_values=self.cache, use_cache=True, **self.wanted)

    def decode(self, tokens: list[int], evict: Evict) -> dict[str, Any]:
        dropped, logits = [], {}
        for newest, token in enumerate(tokens, len(self.index)):
            output = self._forward([token])
            if len(dropped) % LOGITS_EVERY == 0:
                logits[newest] = [float(f"{x:.7g}") for x in output.logits[0, -1].tolist()]
            before = [*self.index, newest]
            # A last column of K names the token, so that what is kept can be read off it.
            marks = torch.tensor(before, dtype=torch.float32).reshape(1, 1, -1, 1)
            rows = tuple(
                (
                    torch.cat([layer.keys, marks.expand(1, layer.keys.shape[1], -1, 1)], -1),
                    layer.values,
                )
                for layer in self.cache.layers
            )
            kept, scores = evict(rows, output, before)
            self.index = kept[0][0][0, 0, :, -1].int().tolist()
            for layer, (keys, values) in zip(self.cache.layers, kept, strict=True):
                layer.keys, layer.values = keys[..., :-1].contiguous(), values
            dropped.append(sorted(set(before) - set(self.index)))
            check_gap(scores, dropped[-1], newest)
        return {"dropped": dropped, "logits": logits}


def check_gap(scores: dict[int, float], dropped: list[int], newest: int) -> None:
    """scores: of the tokens that may go."""
    for victim in dropped:
        for other, score in scores.items():
            gap = abs(scores[victim] - score) / max(abs(scores[victim]), abs(score), 1e-9)
            if other not in dropped and gap < MIN_GAP:
                sys.exit(f"at token {newest}: two scores at the cut are {gap:.1e} apart; new seed")


def flat(authors: Any, model: Any, prompt: list[int], tokens: list[int], budget: int) -> dict:
    depth_a, depth_b, window = 1, 3, 64
    policy = authors.DetrendendHSVarianceEviction(
        authors.EvictionConfig(cache_size=budget), depth_a, depth_b, window
    )
    run = Run(model, prompt, output_hidden_states=True)
    policy.reset(prefill_len=len(prompt))
    policy.set_prefill_end(run.prefill.hidden_states)
    recent = min(policy.config.keep_recent_k, budget // 4)
    born: dict[int, float] = {}

    def evict(rows: Any, output: Any, before: list[int]) -> tuple[Any, dict[int, float]]:
        kept = policy.evict_past_key_values(rows, output.hidden_states)
        born[before[-1]] = authors._rolling_z_score(
            policy._buf_a, window
        ) - authors._rolling_z_score(policy._buf_b, window)
        return kept, {i: born[i] for i in before[len(prompt) : -recent]}

    params = {"layer_a": depth_a, "layer_b": depth_b, "sign": 1, "window": window}
    return {"params": params, "recent": recent, "sinks": 0} | run.decode(tokens, evict)


def h2o(authors: Any, model: Any, prompt: list[int], tokens: list[int], budget: int) -> dict:
    recent = 64
    policy = authors.H2OEviction(authors.EvictionConfig(cache_size=budget, keep_recent_k=recent))
    policy.reset()

    def evict(rows: Any, output: Any, before: list[int]) -> tuple[Any, dict[int, float]]:
        row = torch.stack([a.mean(dim=(0, 1, 2)) for a in output.attentions]).mean(dim=0)
        mass = row.clone()
        if policy._cumulative_attn is not None:
            mass[: len(policy._cumulative_attn)] += policy._cumulative_attn
        kept = policy.evict_past_key_values(rows, output.attentions)
        scores = dict(zip(before, mass.tolist(), strict=True))
        return kept, {i: scores[i] for i in before[4:-recent]}

    run = Run(model, prompt, output_attentions=True)
    return {"params": {"scope": "model"}, "recent": recent, "sinks": 4} | run.decode(tokens, evict)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    checkout = sys.argv[1]
    sys.path.insert(0, checkout)
    from src import eviction as authors

    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    runs = []
    for policy, make, budget, seed in (
        ("epikv_flat", flat, 200, 1),
        ("epikv_flat", flat, 300, 2),
        ("h2o", h2o, 160, 7),
        ("h2o", h2o, 250, 4),
    ):
        task = problem(seed)
        prompt = tokenizer.encode(task.prompt, add_special_tokens=False)
        tokens = tokenizer.encode(task.trace, add_special_tokens=False)[:STEPS]
        run = {"policy": policy, "budget": budget, "prompt": prompt, "tokens": tokens}
        run |= make(authors, model, prompt, tokens, budget)
        assert sum(map(len, run["dropped"])) >= 50 and sum(map(bool, run["dropped"])) >= 5
        runs.append(run)
        print(f"{policy}, budget {budget}: {sum(map(len, run['dropped']))} dropped")
    text = json.dumps(
        {"authors_commit": commit, "model": MODEL.name, "runs": runs}, separators=(",", ":")
    )
    OUT.write_text(text.replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
