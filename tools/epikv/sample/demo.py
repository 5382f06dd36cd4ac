"""One sample problem, solved by a running daemon under a KV budget: what the quickstart shows."""

import sys
import time

from epikv import Accepted, Client, Delta, Kv, Summary
from epikv.sample.families import problem
from epikv.sample.problem import parse_answers


def demo(server: str, seed: int, policy: str, budget: int) -> bool:
    """Streams the completion to stdout, then answers and summary. True if it is as promised: every
    answer right, and at least 40 % of the generated tokens dropped."""
    task = problem(seed)
    print(f"prompt\n  {task.prompt}\n\ncompletion", flush=True)
    text, tokens = "", 0
    accepted: Accepted | None = None
    summary: Summary | None = None
    started = time.monotonic()
    with Client(server) as client:
        kv = Kv(policy=policy, budget=budget)
        for event in client.generate(task.prompt, kv=kv):
            if isinstance(event, Accepted):
                accepted = event
            elif isinstance(event, Delta):
                text += event.text
                sys.stdout.write(event.text)
                sys.stdout.flush()
            elif isinstance(event, Summary):
                summary = event
    elapsed = time.monotonic() - started
    assert accepted is not None and summary is not None
    assert accepted.kv is not None and summary.usage is not None and summary.kv is not None
    tokens = summary.usage.output_tokens
    answers = parse_answers(text)
    dropped = summary.kv.evicted_tokens / max(tokens, 1)
    timings = summary.timings
    ttft = timings.time_to_first_token if timings is not None else None

    def told(values: dict[str, int]) -> str:
        return ", ".join(f"{name} = {value}" for name, value in values.items())

    right = answers == task.answers
    print(
        f"\n\nanswer     {told(answers)}\n"
        f"expected   {told(task.answers)}  ({'right' if right else 'WRONG'})\n\n"
        f"policy     {summary.kv.policy}, {accepted.kv.policy_params}\n"
        f"budget     {summary.kv.budget_tokens} tokens, prompt of {summary.usage.prompt_tokens} included\n"
        f"peak       {summary.kv.peak_tokens} tokens\n"
        f"evicted    {summary.kv.evicted_tokens} of {tokens} generated tokens ({dropped:.0%}) "
        f"in {summary.kv.rounds} rounds\n"
        f"first token after {1e3 * (ttft or 0):.1f} ms, {tokens / elapsed:.0f} tokens/s",
        flush=True,
    )
    return right and dropped >= 0.4
