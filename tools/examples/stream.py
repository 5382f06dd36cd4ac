"""Streams a completion while its KV cache is held to a budget.

    python tools/examples/stream.py cur 300          # a policy, and the tokens that it may keep

One sees the text as it comes, and at the end what the cache held. Of the sample model:

    #0 $b = 6 + 1 : 6 1 so $b 7 . check 6 + 1 = 7 ok good until here ... answer $l 1 $y 8 $p 1
    cur: 572 tokens after a prompt of 114; at most 364 were held at once, 384 were dropped
"""

import os
import sys

from epikv import Client, Delta, Kv, Stop, Summary
from epikv.sample import problem

SERVER = os.environ.get("EPIKV_SERVER", "127.0.0.1:50051")


def main(policy: str, budget: str) -> None:
    kv, stop = Kv(policy, budget), Stop(max_output_tokens=999)
    with (
        Client(SERVER) as client,
        client.generate(problem(0).prompt, kv=kv, stop=stop) as stream,
    ):
        for event in stream:
            match event:
                case Delta():
                    print(event.text, end="", flush=True)
                case Summary(usage=usage, kv=held) if usage and held:
                    print(
                        f"\n{held.policy}: {usage.output_tokens} tokens after a prompt of"
                        f" {usage.prompt_tokens}; at most {held.peak_tokens} were held at once,"
                        f" {held.evicted_tokens} were dropped"
                    )


if __name__ == "__main__":
    main(*sys.argv[1:])
