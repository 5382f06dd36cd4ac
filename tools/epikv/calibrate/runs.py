"""Many requests at once, with a bar that says how long it will take."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from epikv.client import Client, patiently
from epikv.eval.plan import FULL
from epikv.eval.progress import progress
from epikv.messages import GenerateResult, Model, ScoreResponse
from epikv.options import GREEDY, Kv, Output, Stop

Work = TypeVar("Work")

WHOLE = Kv(FULL)


@dataclass(frozen=True)
class Runner:
    """A connection to the daemon, which of its models answers, and how many requests run together."""

    client: Client
    served: Model
    at_once: int = 64

    def each(
        self, what: str, work: Callable[[Work], None], over: Sequence[Work], done: int = 0
    ) -> None:
        """Calls `work` on all, `at_once` at a time. The first failure ends it: what runs is
        cancelled, nothing more is started, and it is raised. done: how many there were before."""
        if not over:
            return
        pool = ThreadPoolExecutor(self.at_once)
        try:
            futures = [pool.submit(work, one) for one in over]
            with progress(done + len(over), done, what) as tell:
                for number, future in enumerate(as_completed(futures), done + 1):
                    future.result()
                    tell(number)
        except BaseException:
            self.client.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def complete(
        self, prompt: Sequence[int], stop: Stop, output: Output = Output()
    ) -> GenerateResult:
        """A greedy completion under the whole cache, which ends where the context does at the latest."""
        if stop.max_output_tokens is not None:
            most = min(stop.max_output_tokens, self.served.context_length - len(prompt))
            stop = replace(stop, max_output_tokens=most)
        return patiently(
            lambda: self.client.generate_once(
                prompt,
                kv=WHOLE,
                sampling=GREEDY,
                stop=stop,
                output=output,
                model=self.served.name,
            )
        )

    def logprobs(
        self, prompt: Sequence[int], continuation: Sequence[int], kv: Kv = WHOLE, seed: int = 0
    ) -> ScoreResponse:
        """Of each token of the continuation given those before it; with evictions as they happen."""
        return patiently(
            lambda: self.client.score(
                prompt,
                continuation,
                kv=kv,
                chunked=kv == WHOLE,
                kv_trace=kv != WHOLE,
                seed=seed,
                model=self.served.name,
            )
        )

    def ids(self, text: str) -> list[int]:
        return self.client.tokenize(text, model=self.served.name)

    def text(self, ids: Sequence[int], **options: Any) -> str:
        return self.client.detokenize(ids, model=self.served.name, **options)


def room(tokens: int) -> int:
    """How long a completion may become whose like had so many tokens."""
    return tokens + max(64, tokens // 2)
