"""Writes recall.jsonl, beside this file: what the sample model answers after it has thought, right and wrong."""

import json
import random
from pathlib import Path

from epikv.sample import problem

PROBLEMS = 16


def main() -> None:
    draw = random.Random(0)
    lines = []
    for number in range(PROBLEMS):
        one = problem(f"lm-eval/{number}", "passcode")
        thought, _, answer = one.trace.partition(" answer ")
        right = answer.removesuffix(" <eos>")
        wrong = [
            " ".join(f"{name} {(value + off) % 10}" for name, value in one.answers.items())
            for off in (1, 2, 3)
        ]
        choices = [right, *wrong]
        draw.shuffle(choices)
        lines.append(
            {
                "context": f"{one.prompt} {thought} answer",
                "prompt": one.prompt,
                "choices": choices,
                "label": choices.index(right),
                "answer": right,
            }
        )
    path = Path(__file__).with_name("recall.jsonl")
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
