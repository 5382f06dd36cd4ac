"""One sample problem, solved by a running daemon under a KV budget: what the quickstart shows."""

import sys
import time

from epikv import Accepted, Client, Delta, Kv, Summary
from epikv.sample.families import problem
from epikv.sample.problem import parse_answers


def demo(server: str, seed: int, policy: str, budget: int, beside: str = "") -> bool:
    """Streams the completion to stdout, then answers and summary; and the answers under another
    policy at the same budget. True if the first is as promised: every answer right, and at least
    40 % of the generated tokens dropped."""
    task = problem(seed)
    print(f"prompt\n  {task.prompt}\n\ncompletion", flush=True)
    text, tokens = "", 0
    accepted: Accepted | None = None
    summary: Summary | None = None
    other = ""
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
        if beside:
            other = client.generate_once(task.prompt, kv=Kv(beside, budget)).text
    assert accepted is not None and summary is not None
    assert accepted.kv is not None and summary.usage is not None and summary.kv is not None
    tokens = summary.usage.output_tokens
    answers = parse_answers(text)
    dropped = summary.kv.evicted_tokens / max(tokens, 1)
    timings = summary.timings
    ttft = timings.time_to_first_token if timings is not None else None

    def told(values: dict[str, int]) -> str:
        return ", ".join(f"{name} = {value}" for name, value in values.items()) or "none"

    def judged(values: dict[str, int]) -> str:
        return f"{told(values)}  ({'right' if values == task.answers else 'WRONG'})"

    print(
        f"\n\nexpected   {told(task.answers)}\n"
        f"answer     {judged(answers)}\n\n"
        f"policy     {summary.kv.policy}, {accepted.kv.policy_params}\n"
        f"budget     {summary.kv.budget_tokens} tokens, prompt of {summary.usage.prompt_tokens} included\n"
        f"peak       {summary.kv.peak_tokens} tokens\n"
        f"evicted    {summary.kv.evicted_tokens} of {tokens} generated tokens ({dropped:.0%}) "
        f"in {summary.kv.rounds} rounds\n"
        f"first token after {1e3 * (ttft or 0):.1f} ms, {tokens / elapsed:.0f} tokens/s",
        flush=True,
    )
    if beside:
        print(
            f"\nthe same problem and budget under {beside}\nanswer     {judged(parse_answers(other))}"
        )
    return answers == task.answers and dropped >= 0.4
