"""Compares two policies on one prompt, beside the whole cache.

    python tools/examples/compare.py cur sliding 300        # two policies, and the budget of both

One sees what each answered, and what its cache held. Of the sample model:

    full      answer $l 1 $y 8 $p 1    held 685
    cur       answer $l 1 $y 8 $p 1    held 364, dropped 384; the same text
    sliding   answer $l 2 $y 8 $p 9    held 301, dropped 369; another text
"""

import os
import sys

from epikv import Client, Kv, Stop
from epikv.sample import problem

SERVER = os.environ.get("EPIKV_SERVER", "127.0.0.1:50051")


def main(first: str, second: str, budget: str) -> None:
    whole = ""
    with Client(SERVER) as client:
        for kv in (Kv("full"), Kv(first, budget), Kv(second, budget)):
            prompt, stop = problem(0).prompt, Stop(max_output_tokens=999)
            answer = client.generate_once(prompt, kv=kv, stop=stop)
            assert answer.summary is not None and answer.summary.kv is not None
            held = answer.summary.kv
            told = f"{kv.policy:<8} {answer.text[-22:]:<25} held {held.peak_tokens}"
            whole = whole or answer.text
            if kv.policy != "full":
                where = "the same text" if answer.text == whole else "another text"
                told += f", dropped {held.evicted_tokens}; {where}"
            print(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
