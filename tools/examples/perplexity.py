"""Scores a known answer under a policy: what eviction costs, with nothing generated.

    python tools/examples/perplexity.py cur 400 200        # a policy, and budgets

The answer is forced through token by token, and the policy evicts as it would while generating. The
perplexity is 1 where every token was certain. Of the sample model and its own solution:

    full                     perplexity    1.000   572 of 572 tokens were the likeliest
    cur, 200                 perplexity    1.061   567 of 572 tokens were the likeliest
"""

import os
import sys
from math import exp

from epikv import Client, Kv
from epikv.sample import problem

SERVER = os.environ.get("EPIKV_SERVER", "127.0.0.1:50051")


def main(policy: str, *budgets: str) -> None:
    task = problem(0)
    with Client(SERVER) as client:
        for kv in (Kv("full"), *(Kv(policy, budget) for budget in budgets)):
            scored = client.score(task.prompt, task.trace, kv=kv)
            perplexity = exp(-sum(scored.logprobs) / len(scored.logprobs))
            name = kv.policy if kv.budget is None else f"{kv.policy}, {kv.budget}"
            print(
                f"{name:<24} perplexity {perplexity:8.3f}   {sum(scored.greedy)} of"
                f" {len(scored.greedy)} tokens were the likeliest"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
